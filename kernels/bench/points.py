"""What is measured: a list of points, the most telling first, and which of them the gate's cases stand for."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

HEADS, TOKENS, CONTEXT = 16, 16384, 32768
FORWARD, TRAINING, DECODE = "forward", "forward+backward", "decode"
OPERATIONS = (FORWARD, TRAINING, DECODE)
STAGES_SECONDS, POINT_SECONDS, SHAPE_SECONDS = 110, 7, 13
"""The plan, a guess: gate, compilation and ceilings; a point; FlexAttention's compilation of a shape."""
TRAINED, LARGEST = 0.04, 0.18
"""Empty tiles of ten models trained on 2,048 bytes of text (docs/results/q_sparsity-stdlib_long): mean and most."""
CLAIMED = 0.6
"""If the zeros of the paper's headline, 59.58 % of all weights, lay in whole tiles."""


class BenchPoint(NamedTuple):
    """One measurement of all peers; bfloat16, tau = 1."""

    operation: str
    """forward, forward+backward (L queries against L keys), or decode (one query against L keys)."""
    batch: int
    length: int
    """Keys, L."""
    heads: int
    kv_heads: int
    width: int
    """Of a head, D."""
    reach: int
    """Biases of a head, W."""
    share: float
    """Of empty tiles, asked; which share the inputs have is measured."""

    @property
    def rows(self) -> int:
        """Queries of a sequence."""
        return 1 if self.operation == DECODE else self.length

    @property
    def shape(self) -> "BenchPoint":
        """The point without its share, which changes no shape."""
        return self._replace(share=0.0)

    @property
    def title(self) -> str:
        heads = f"H {self.heads}" + (f" on {self.kv_heads}" if self.kv_heads < self.heads else "")
        return f"{self.operation}, B {self.batch}, L {self.length}, {heads}, D {self.width}, W {self.reach}"

    def __str__(self) -> str:
        return f"{self.title}, {self.share:.0%} asked"


def _make_prefill_points(
    length: int, width: int, shares: Iterable[float], kv_heads: int = HEADS, reach: int = 512
) -> list[BenchPoint]:
    """Both operations at every share; TOKENS tokens to a batch."""
    shape = (TOKENS // length, length, HEADS, kv_heads, width, reach)
    return [BenchPoint(operation, *shape, share) for operation in (FORWARD, TRAINING) for share in shares]


def _make_decode_points(batch: int, width: int, shares: Iterable[float], kv_heads: int = HEADS) -> list[BenchPoint]:
    return [BenchPoint(DECODE, batch, CONTEXT, HEADS, kv_heads, width, 512, share) for share in shares]


QUICK: tuple[BenchPoint, ...] = (
    *_make_prefill_points(4096, 128, (0.0, TRAINED, CLAIMED)),
    *_make_prefill_points(4096, 64, (0.0, CLAIMED)),
    *_make_decode_points(8, 128, (0.0, CLAIMED)),
    *_make_prefill_points(4096, 128, (LARGEST, 0.9)),
    *_make_decode_points(8, 128, (CLAIMED,), kv_heads=4),
    *_make_decode_points(1, 128, (CLAIMED,)),
    *_make_prefill_points(4096, 128, (CLAIMED,), kv_heads=4),
    *_make_prefill_points(16384, 128, (CLAIMED,)),
)
FULL: tuple[BenchPoint, ...] = tuple(dict.fromkeys([
    *QUICK,
    *_make_prefill_points(4096, 64, (LARGEST, 0.9)),
    *(point for batch in (1, 64) for point in _make_decode_points(batch, 128, (0.0, CLAIMED))),
    *_make_decode_points(8, 128, (0.0,), kv_heads=4),
    *(point for length in (1024, 16384, 2048, 8192) for point in _make_prefill_points(length, 128, (0.0, CLAIMED))),
    *(
        point
        for length in (4096, 1024, 16384)
        for point in _make_prefill_points(length, 128, (0.0, CLAIMED), kv_heads=4)
    ),
    *_make_prefill_points(8192, 128, (0.0, CLAIMED), reach=4096),
    *(point for length in (1024, 16384, 2048, 8192) for point in _make_prefill_points(length, 64, (0.0, CLAIMED))),
    *_make_decode_points(8, 64, (0.0, CLAIMED)),
]))  # fmt: skip


def plan_seconds(points: Sequence[BenchPoint]) -> float:
    """What measuring the points should take, the stages before them included."""
    return STAGES_SECONDS + POINT_SECONDS * len(points) + SHAPE_SECONDS * len({point.shape for point in points})


def _has_width(width: int) -> Callable[[BenchPoint], bool]:
    return lambda point: point.rows > 1 and point.width == width


def _decodes_width(width: int) -> Callable[[BenchPoint], bool]:
    return lambda point: point.rows == 1 and point.width == width


GUARDS: dict[str, Callable[[BenchPoint], bool]] = {
    **{f"bf16, D = {width}": _has_width(width) for width in (64, 128)},
    **{f"decode, D = {width}": _decodes_width(width) for width in (64, 128)},
    "more blocks than programs": lambda point: point.rows > 1,
    "most tiles empty": lambda point: point.rows > 1 and point.share > 0,
    "two kv heads": lambda point: point.rows > 1 and point.kv_heads < point.heads,
    "one kv head": lambda point: point.rows > 1 and point.kv_heads < point.heads,
    "decode, two kv heads": lambda point: point.rows == 1 and point.kv_heads < point.heads,
}
"""Which points a case of the gate stands for. A case that is not named is about an option that no point uses."""


def find_gate_failures(point: BenchPoint, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The failed rows of the gate that concern a point: of a case that stands for it, gradients in training alone."""
    return [
        ": ".join(filter(None, (row["case"], row.get("result"))))
        for row in rows
        if not row["passed"]
        and GUARDS.get(row["case"], lambda _: False)(point)
        and (point.operation == TRAINING or row.get("result") in (None, "out"))
    ]
