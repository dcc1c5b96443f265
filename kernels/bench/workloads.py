"""Workloads of the benchmark, the most informative first, and the correctness cases that each depends on."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

HEADS, TOKENS, CONTEXT = 16, 16384, 32768
FORWARD, TRAINING, DECODE = "forward", "forward+backward", "decode"
OPERATIONS = (FORWARD, TRAINING, DECODE)
STAGES_SECONDS, WORKLOAD_SECONDS, SHAPE_SECONDS = 110, 7, 13
"""Estimated seconds: gate, compilation and ceilings together; one workload; FlexAttention's compilation of a shape."""
TRAINED, LARGEST = 0.04, 0.18
"""Empty tiles of ten models trained on 2,048 bytes of text (q_sparsity, docs/results/first-round.md): mean, maximum."""
CLAIMED = 0.6
"""Empty tiles if the zeros of the paper's headline, 59.58 % of all weights, filled complete tiles."""


class Workload(NamedTuple):
    """One measurement of all peers; bfloat16, tau = 1."""

    operation: str
    """forward, forward+backward (L queries against L keys), or decode (one query against L keys)."""
    batch: int
    length: int
    """Keys, L."""
    heads: int
    kv_heads: int
    width: int
    """Head width, D."""
    reach: int
    """Biases per head, W."""
    share: float
    """Requested share of empty tiles; the share of the actual inputs is measured."""

    @property
    def rows(self) -> int:
        """Queries per sequence."""
        return 1 if self.operation == DECODE else self.length

    @property
    def shape(self) -> "Workload":
        """The workload without its share, which affects no shape."""
        return self._replace(share=0.0)

    @property
    def title(self) -> str:
        heads = f"H {self.heads}" + (f" on {self.kv_heads}" if self.kv_heads < self.heads else "")
        return f"{self.operation}, B {self.batch}, L {self.length}, {heads}, D {self.width}, W {self.reach}"

    def __str__(self) -> str:
        return f"{self.title}, {self.share:.0%} requested"


def _make_prefill_workloads(
    length: int, width: int, shares: Iterable[float], kv_heads: int = HEADS, reach: int = 512
) -> list[Workload]:
    """Forward and training at every share, with TOKENS tokens per batch."""
    shape = (TOKENS // length, length, HEADS, kv_heads, width, reach)
    return [Workload(operation, *shape, share) for operation in (FORWARD, TRAINING) for share in shares]


def _make_decode_workloads(batch: int, width: int, shares: Iterable[float], kv_heads: int = HEADS) -> list[Workload]:
    return [Workload(DECODE, batch, CONTEXT, HEADS, kv_heads, width, 512, share) for share in shares]


QUICK: tuple[Workload, ...] = (
    *_make_prefill_workloads(4096, 128, (0.0, TRAINED, CLAIMED)),
    *_make_prefill_workloads(4096, 64, (0.0, CLAIMED)),
    *_make_decode_workloads(8, 128, (0.0, CLAIMED)),
    *_make_prefill_workloads(4096, 128, (LARGEST, 0.9)),
    *_make_decode_workloads(8, 128, (CLAIMED,), kv_heads=4),
    *_make_decode_workloads(1, 128, (CLAIMED,)),
    *_make_prefill_workloads(4096, 128, (CLAIMED,), kv_heads=4),
    *_make_prefill_workloads(16384, 128, (CLAIMED,)),
)
FULL: tuple[Workload, ...] = tuple(dict.fromkeys([
    *QUICK,
    *_make_prefill_workloads(4096, 64, (LARGEST, 0.9)),
    *(w for batch in (1, 64) for w in _make_decode_workloads(batch, 128, (0.0, CLAIMED))),
    *_make_decode_workloads(8, 128, (0.0,), kv_heads=4),
    *(w for length in (1024, 16384, 2048, 8192) for w in _make_prefill_workloads(length, 128, (0.0, CLAIMED))),
    *(w for length in (4096, 1024, 16384) for w in _make_prefill_workloads(length, 128, (0.0, CLAIMED), kv_heads=4)),
    *_make_prefill_workloads(8192, 128, (0.0, CLAIMED), reach=4096),
    *(w for length in (1024, 16384, 2048, 8192) for w in _make_prefill_workloads(length, 64, (0.0, CLAIMED))),
    *_make_decode_workloads(8, 64, (0.0, CLAIMED)),
]))  # fmt: skip


def plan_seconds(workloads: Sequence[Workload]) -> float:
    """Estimated time of the workloads, including the stages before them."""
    return STAGES_SECONDS + WORKLOAD_SECONDS * len(workloads) + SHAPE_SECONDS * len({w.shape for w in workloads})


def _has_width(width: int) -> Callable[[Workload], bool]:
    return lambda workload: workload.rows > 1 and workload.width == width


def _decodes_width(width: int) -> Callable[[Workload], bool]:
    return lambda workload: workload.rows == 1 and workload.width == width


GUARDS: dict[str, Callable[[Workload], bool]] = {
    **{f"bf16, D = {width}": _has_width(width) for width in (64, 128)},
    **{f"decode, D = {width}": _decodes_width(width) for width in (64, 128)},
    "more blocks than programs": lambda workload: workload.rows > 1,
    "most tiles empty": lambda workload: workload.rows > 1 and workload.share > 0,
    "two kv heads": lambda workload: workload.rows > 1 and workload.kv_heads < workload.heads,
    "one kv head": lambda workload: workload.rows > 1 and workload.kv_heads < workload.heads,
    "decode, two kv heads": lambda workload: workload.rows == 1 and workload.kv_heads < workload.heads,
}
"""Workloads that depend on a case of the gate. The other cases check options that no workload uses."""


def find_gate_failures(workload: Workload, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Failed rows of the gate on which a workload depends; gradients count only in training."""
    return [
        ": ".join(filter(None, (row["case"], row.get("result"))))
        for row in rows
        if not row["passed"]
        and GUARDS.get(row["case"], lambda _: False)(workload)
        and (workload.operation == TRAINING or row.get("result") in (None, "out"))
    ]
