"""`lazy_attention_varlen` against single calls: documents with a cached prefix, for every backend."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from kernel_cases import (
    KINK_MARGIN,
    assert_refused,
    assert_same_bits,
    device_for,
    draw,
    kink_margin,
    max_errors,
    measure_errors,
    require_library,
    run_named,
    use_small_blocks,
)

from flash_lazy import Stats, lazy_attention, lazy_attention_varlen, tiling

# Prompt chunks: a full prompt, the end of one, no queries, an empty document, one query, one token.
ROWS = [0, 5, 12, 12, 12, 13, 14]
KEYS = [0, 5, 26, 29, 29, 48, 49]

SETTINGS = {
    "plain": {"bias_width": 6, "group": 3},
    "window": {"window": 4, "slopes": True, "kv_heads": 2, "sign": -1},
    "everything": {"window": 9, "bias_width": 30, "group": 2, "threshold": "per_token", "renormalise": True},
    "seq_len": {"threshold": "seq_len", "renormalise": True, "slopes": True},
}


def boundaries(device="cpu"):
    return (torch.tensor(cuts, dtype=torch.int32, device=device) for cuts in (ROWS, KEYS))


def drawn(setting, dtype, width=8):
    """Keys and queries of all documents, away from the kink in each row with more than one key."""
    for seed in range(300):
        case = draw(seed, length=KEYS[-1], batch=1, width=width, **setting)
        case = replace(case, q=case.q[:, :, : ROWS[-1]])
        if kink_margin(case, documents()) > KINK_MARGIN:
            return case.to(dtype)
    raise RuntimeError("no draw keeps off the kink")


def documents():
    """Rows and keys of the documents that have rows."""
    pairs = zip(pairwise(ROWS), pairwise(KEYS), strict=True)
    return [(slice(*rows), slice(*keys)) for rows, keys in pairs if rows[0] < rows[1]]


def attend_together(q, k, v, tau, bias, **options):
    """One varlen call; results in the layout of `attend_alone`."""
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    out, stats = lazy_attention_varlen(q, k, v, tau, bias, *boundaries(q.device), **options)
    assert out.shape == q.shape
    return out.transpose(0, 1)[None], Stats(*(x[None] for x in stats))


def attend_alone(q, k, v, tau, bias, **options):
    """One call per document."""
    parts = ((q[:, :, rows], k[:, :, keys], v[:, :, keys]) for rows, keys in documents())
    outs, stats = zip(*(lazy_attention(*part, tau, bias, **options) for part in parts), strict=True)
    return torch.cat(outs, 2), Stats(*(torch.cat(field, 2) for field in zip(*stats, strict=True)))


def results(attend, case, backend):
    """With gradients of the output and of the log-sum-exp."""
    dlse = torch.randn(case.q.shape[:3], generator=torch.Generator().manual_seed(7))
    return run_named(case, backend, dlse=dlse, attend=attend)


together, alone = partial(results, attend_together), partial(results, attend_alone)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_equals_single_calls(backend, setting, monkeypatch):
    monkeypatch.setattr(tiling, "BLOCK_ELEMENTS_CPU", 100)
    monkeypatch.setattr(tiling, "FULL_ROWS", 4)
    case = drawn(setting, torch.float64)
    found = together(case, backend)
    for name, x in alone(case, "reference").items():
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-11, msg=lambda t, name=name: f"{name}: {t}")


@pytest.mark.parametrize(
    ("name", "dtype", "block"),
    [
        *((name, torch.float32, None) for name in SETTINGS),
        ("everything", torch.bfloat16, (16, 32)),
    ],
)
def test_kernels_give_the_bits_of_single_calls(name, dtype, block, monkeypatch):
    """Of `cpu`, and in blocks of `triton`: but for sums over documents, of at most twice the error of single calls."""
    if block is None:
        require_library()
    else:
        use_small_blocks(monkeypatch, *block)
    case, backend = drawn(SETTINGS[name], dtype, width=16), "triton" if block else "cpu"
    found, single = together(case, backend), alone(case, backend)
    sums = [name for name in found if name in ("dtau", "dbias", "dslopes")]
    exact = alone(case.to(torch.float64), "reference")
    assert not measure_errors({name: found[name] for name in sums}, exact, max_errors(single, exact)).too_large()
    assert_same_bits(*({name: x for name, x in each.items() if name not in sums} for each in (found, single)))


def test_documents_are_apart(backend):
    """NaN in a document, or in keys without queries, does not spread."""
    case = drawn({"sign": -1}, torch.float32)
    poisoned = replace(case, **{name: getattr(case, name).clone() for name in "qkv"})
    for x, part in ((poisoned.q, slice(5, 12)), (poisoned.k, slice(5, 29)), (poisoned.v, slice(5, 29))):
        x[:, :, part] = torch.nan
    clean, found = together(case, backend), together(poisoned, backend)
    for name, others in {"out": ROWS, "lse": ROWS, "mass": ROWS, "dq": ROWS, "dk": KEYS, "dv": KEYS}.items():
        kept = [*range(others[1]), *range(others[3], others[-1])]
        assert torch.equal(clean[name][:, :, kept], found[name][:, :, kept]), name
    assert not any(clean[name][:, :, 26:29].any() for name in ("dk", "dv"))


def test_equal_boundaries_are_packed_documents(backend):
    case = draw(52, layout="packed", length=30, bias_width=5, group=2).to(torch.float32).to_device(device_for(backend))
    cuts = case.options.pop("cu_seqlens")
    packed = lazy_attention(case.q, case.k, case.v, case.tau, case.bias, cu_seqlens=cuts, backend=backend)
    q, k, v = (x[0].transpose(0, 1) for x in (case.q, case.k, case.v))
    out = lazy_attention_varlen(q, k, v, case.tau, case.bias, cuts, cuts, backend=backend)
    assert torch.equal(out.transpose(0, 1)[None], packed)


def test_it_compiles_without_a_break():
    case = drawn({"bias_width": 6}, torch.float32)
    q, k, v = (x[0].transpose(0, 1) for x in (case.q, case.k, case.v))

    def attend(q):
        return lazy_attention_varlen(q, k, v, case.tau, case.bias, *boundaries(), backend="chunked")

    torch.compiler.reset()
    assert torch.equal(torch.compile(attend, fullgraph=True, backend="aot_eager")(q), attend(q))


Q, K = torch.zeros(5, 4, 8), torch.zeros(9, 2, 8)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


WRONG = {
    "a batch": ({"q": Q[None]}, ["q has shape [1, 5, 4, 8]", "[total, heads, D]"]),
    "more queries": ({"cu_seqlens_k": ints(0, 1, 9)}, ["document 0 2 queries", "1 keys", "at least as many"]),
    "one document more": ({"cu_seqlens_k": ints(0, 4, 5, 9)}, ["cu_seqlens_k has 3 documents", "cu_seqlens_q 2"]),
    "too many keys": ({"cu_seqlens_k": ints(0, 4, 10)}, ["cu_seqlens_k is [0, 4, 10]", "0 to total_k = 9"]),
    "long": ({"cu_seqlens_q": ints(0, 2, 5).long()}, ["cu_seqlens_q is torch.int64", "int32 [n + 1]"]),
    "a list": ({"cu_seqlens_q": [0, 5]}, ["cu_seqlens_q is a list; give a tensor"]),
    "table": ({"cu_seqlens_k": ints(0, 9)[None]}, ["cu_seqlens_k is torch.int32 of shape [1, 2]", "[n + 1]"]),
}


def call(**changes):
    valid = {"q": Q, "k": K, "v": K, "tau": torch.ones(4), "bias": None}
    return lazy_attention_varlen(**valid | {"cu_seqlens_q": ints(0, 2, 5), "cu_seqlens_k": ints(0, 4, 9)} | changes)


@pytest.mark.parametrize("name", WRONG)
def test_error_names_argument_value_and_fix(name):
    changes, expected = WRONG[name]
    assert_refused(lambda: call(**changes), expected)
