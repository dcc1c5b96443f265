"""What every normaliser has to keep, in one call: `check_normaliser`. Needs torch alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from flash_lazy import rule_attention, tiling
from flash_lazy.rules import RuleSettings
from lit_lazy.attention import AttentionCall, BiasTerms, LayerShape, Normaliser, NormaliserModule
from lit_lazy.attention.mixer import SelfInitialised

HEADS, KV_HEADS, WIDTH, LENGTH = 4, 2, 8, 13
SHAPE = LayerShape(HEADS, KV_HEADS, WIDTH, HEADS * WIDTH, context_length=16, layer=1, n_layers=2)
SEED = 5

Formula = Callable[[Tensor], Tensor]
"""The weights `[n]` of a row from the float64 scores `[n]` (`[maps, n]`) of the keys that it sees."""


def check_normaliser(normaliser: Normaliser, formula: Formula | None = None) -> None:
    """Raise AssertionError, naming what is broken, where a normaliser does not keep what users of one rely on.

    Its promises (`NormaliserModule.probe`); its formula, where given; blocks of rows equal to whole matrices, the fused
    path to the rule, decoding to a full pass; causality bit for bit; gradients; rows without keys; NaN that stays; and
    errors in bfloat16 of at most twice eager's. A second or two. Prints what held.
    """
    checks: tuple[Callable[[Normaliser], None], ...] = (
        *(_keeps_its_promises, partial(_has_its_formula, formula), _is_causal, _blocks_equal_the_whole),
        *(_matches_the_rule_when_fused, _decodes, _passes_gradcheck, _leaves_rows_without_keys_zero, _lets_nan_through),
        _rounds_as_eager_does,
    )
    if not isinstance(normaliser, Normaliser):
        raise AssertionError(f"{normaliser!r} is no Normaliser; give one with its settings, such as Softpick()")
    for check in checks:
        try:
            check(normaliser)
        except Exception as error:
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise AssertionError(f"{type(normaliser).__name__}: {_get_name(check)} fails: {message}") from error
    held = [_get_name(check).replace("_", " ") for check in checks]
    if formula is None:
        held.remove("has its formula")
    print(f"{type(normaliser).__name__}: {len(held)} checks held: {', '.join(held)}")


def _get_name(check: Callable[[Normaliser], None]) -> str:
    return (check.func if isinstance(check, partial) else check).__name__.strip("_")


def _build_module(normaliser: Normaliser, dtype: torch.dtype = torch.float64) -> NormaliserModule:
    """Parameters that were drawn, and moved off their initial value: some formulas are degenerate there."""
    module = normaliser.build(SHAPE)
    if isinstance(module, SelfInitialised):
        module.init_parameters(lambda _: torch.Generator().manual_seed(SEED))
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return module.to(dtype)


def _make_call(
    normaliser: Normaliser, dtype: torch.dtype = torch.float64, rows: int = LENGTH, batch: int = 2, **changes: Any
) -> AttentionCall:
    """A call with a table and slopes, the same in every dtype but for rounding."""
    generator = torch.Generator().manual_seed(SEED)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    q, k, v = (draw(batch, heads, LENGTH, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
    q = 2 * q[:, :, LENGTH - rows :]
    own = torch.float64 if dtype == torch.float64 else torch.float32
    bias = BiasTerms(draw(HEADS, 5).to(own), 0.1 * draw(HEADS).abs().to(own))
    q, k, v, x = (part.to(dtype) for part in (q, k, v, draw(batch, LENGTH, SHAPE.d_model)[:, LENGTH - rows :]))
    return AttentionCall(q, k, v, bias, renormalise=normaliser.renormalise, x=x, **changes)


def _make_leaves(call: AttentionCall, module: NormaliserModule) -> tuple[AttentionCall, dict[str, Tensor]]:
    """The call with leaves in it, and these and the trained parameters by name."""
    q, k, v = (x.detach().requires_grad_() for x in call[:3])
    bias = BiasTerms(*(None if x is None else x.detach().requires_grad_() for x in call.bias))
    found = {"q": q, "k": k, "v": v, "table": bias.table, "slopes": bias.slopes}
    found |= {name: p for name, p in module.named_parameters() if p.requires_grad}
    return call._replace(q=q, k=k, v=v, bias=bias), {name: x for name, x in found.items() if x is not None}


def _run_with_gradients(module: NormaliserModule, call: AttentionCall, by_rule: bool = False) -> dict[str, Tensor]:
    """Output and gradients for a gradient of the output that is always the same."""
    call, leaves = _make_leaves(call, module)
    out = _run(module, call, by_rule)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(SEED + 1)).to(out.dtype)
    found = torch.autograd.grad(out, list(leaves.values()), grad)
    return {"output": out.detach()} | {f"gradient of {name}": x for name, x in zip(leaves, found, strict=True)}


def _run(module: NormaliserModule, call: AttentionCall, by_rule: bool) -> Tensor:
    """The module's output, by its fused path if it has one, or without it."""
    if not by_rule:
        return module(call)[0]
    asked = call._replace(q=module.queries(call))
    return module.output(module.attend_by_rule(asked)[0])


def _assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@contextmanager
def use_small_blocks() -> Iterator[None]:
    """Blocks of a few rows, so that short sequences have several."""
    with patch.multiple(tiling, BLOCK_ELEMENTS_CPU=200, FULL_ROWS=3):
        yield


@contextmanager
def _use_default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _keeps_its_promises(normaliser: Normaliser) -> None:
    module = _build_module(normaliser, torch.float32)
    module.probe(HEADS, WIDTH, SHAPE.d_model, torch.device("cpu"))
    assert not (module.signed and normaliser.renormalise), "signed weights cannot be renormalised"


def _has_its_formula(formula: Formula | None, normaliser: Normaliser) -> None:
    if formula is None:
        return
    with _use_default_dtype(torch.float64):
        module = normaliser.build(SHAPE)
    # A parameter that is float32 all the same is off by its rounding.
    close = 1e-6 if any(p.dtype == torch.float32 for p in module.parameters()) else 1e-10
    module = module.double()
    weights = module.compute_weights(_make_call(normaliser, window=6))
    for row, seen in enumerate(weights.rows.visible[0, 0]):
        for scores, found in zip(weights.scores[:, 0], weights.w[:, 0], strict=True):
            expected = formula(scores[..., row, seen])
            torch.testing.assert_close(found[row, seen], expected, rtol=close, atol=close / 100)
            assert not found[row, ~seen].any(), "a hidden key has weight"


def _blocks_equal_the_whole(normaliser: Normaliser) -> None:
    """Whatever hides keys; also what no layer asks for: packed documents and ragged lengths."""
    module = _build_module(normaliser)
    hidden = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(SEED)) < 0.6
    whole, one, few = _make_call(normaliser), _make_call(normaliser, batch=1), _make_call(normaliser, rows=5)
    cases: list[tuple[AttentionCall, RuleSettings]] = [
        (whole, {}),
        (whole, {"window": 4}),
        (whole, {"key_mask": hidden}),
        (whole, {"renormalise": not module.signed}),
        (one, {"cu_seqlens": torch.tensor([0, 4, 4, 5, LENGTH], dtype=torch.int32)}),
        (few, {"kv_lengths": torch.tensor([3, 0])}),
    ]
    for call, settings in cases:
        expected = _run_blocks(module, call, {**settings, "backend": "reference"})
        with use_small_blocks():
            found = _run_blocks(module, call, settings)
        assert expected.keys() == found.keys(), f"gradients differ: {expected.keys() ^ found.keys()}"
        _assert_close(found, expected)


def _run_blocks(module: NormaliserModule, call: AttentionCall, settings: RuleSettings) -> dict[str, Tensor]:
    """Output, stats, and the gradients of what the rule's attention depends on."""
    call, leaves = _make_leaves(call, module)
    given: RuleSettings = {
        "slopes": call.bias.slopes,
        "maps": module.maps,
        "parameters": [p for p in module.parameters() if p.requires_grad],
        "renormalise": call.renormalise,
    }
    arguments = module.weights, call.q, call.k, call.v, call.bias.table
    out, stats = rule_attention(*arguments, return_stats=True, **(given | settings))
    gradients = torch.autograd.grad(out.square().sum(), list(leaves.values()), allow_unused=True)
    named = zip(leaves, gradients, strict=True)
    return {"output": out.detach(), **stats._asdict()} | {
        f"gradient of {name}": x for name, x in named if x is not None
    }


def _matches_the_rule_when_fused(normaliser: Normaliser) -> None:
    module, call = _build_module(normaliser), _make_call(normaliser)
    for each in (call, call._replace(window=4), call._replace(bias=BiasTerms())):
        if module.fused(each) is None:
            continue
        _assert_close(_run_with_gradients(module, each), _run_with_gradients(module, each, by_rule=True))
        asked = each._replace(q=module.queries(each), with_stats=True)
        with torch.no_grad():
            stats, expected = module(each._replace(with_stats=True))[1], module.attend_by_rule(asked)[1]
        assert stats is not None
        assert expected is not None
        wanted = {f"stats' {name}": x for name, x in expected._asdict().items() if name != "zeros" or module.can_zero}
        _assert_close({f"stats' {name}": x for name, x in stats._asdict().items()}, wanted)


def _decodes(normaliser: Normaliser) -> None:
    """The last rows alone, as with a cache; and with the statistics asked for."""
    module = _build_module(normaliser)
    whole = module(_make_call(normaliser))[0]
    for rows in (1, 3):
        for with_stats in (False, True):
            last = module(_make_call(normaliser, rows=rows, with_stats=with_stats))[0]
            torch.testing.assert_close(last, whole[:, :, -rows:], rtol=1e-9, atol=1e-10)


def _is_causal(normaliser: Normaliser) -> None:
    """Bit for bit: what stands later changes nothing before it."""
    module, call, token = _build_module(normaliser, torch.float32), _make_call(normaliser, torch.float32), 7
    changed = {name: getattr(call, name).clone() for name in "qkvx"}
    for name, value in changed.items():
        value.select(1 if name == "x" else 2, token).mul_(-3).add_(1)
    for by_rule in (False, True):
        before, after = (_run(module, each, by_rule) for each in (call, call._replace(**changed)))
        assert torch.equal(before[:, :, :token], after[:, :, :token]), "a later token changes an earlier row"
        assert not torch.equal(before[:, :, token:], after[:, :, token:]), "a token changes nothing"


def _passes_gradcheck(normaliser: Normaliser) -> None:
    module = _build_module(normaliser)
    small = _make_call(normaliser, rows=4, batch=1)
    call, leaves = _make_leaves(small._replace(k=small.k[:, :, -6:], v=small.v[:, :, -6:]), module)
    with use_small_blocks():
        assert torch.autograd.gradcheck(lambda *_: _run(module, call, by_rule=True), list(leaves.values()))


def _leaves_rows_without_keys_zero(normaliser: Normaliser) -> None:
    module = _build_module(normaliser)
    seen = torch.arange(LENGTH) >= torch.tensor([[4], [0]])
    call = _make_call(normaliser, key_mask=seen, with_stats=True)
    out, stats = module(call)
    assert not out[0, :, :4].any(), "a row that sees no key has an output"
    assert out[0, :, 4:].any(), "rows that see keys have no output"
    assert stats is not None
    assert not stats.mass[0, :, :4].any(), "a row that sees no key has mass"
    for name, x in _run_with_gradients(module, call._replace(with_stats=False)).items():
        assert x.isfinite().all(), f"{name} is not finite where a row sees no key"


def _lets_nan_through(normaliser: Normaliser) -> None:
    """A diverged model is not to look like one without attention."""
    module, call = _build_module(normaliser, torch.float32), _make_call(normaliser, torch.float32)
    for name, at in (("q", 6), ("k", LENGTH - 1), ("v", LENGTH - 1)):
        poisoned = getattr(call, name).clone()
        poisoned[0, :, at] = torch.nan
        for by_rule in (False, True):
            out = _run(module, call._replace(**{name: poisoned}), by_rule)
            assert out[0, :, at].isnan().all(), f"NaN in {name} gives a row without NaN"


def _rounds_as_eager_does(normaliser: Normaliser) -> None:
    exact = _build_module(normaliser)(_make_call(normaliser))[0]
    module, call = _build_module(normaliser, torch.float32), _make_call(normaliser, torch.bfloat16)
    mine = module(call)[0]
    # Whole matrices; of two maps on the fused path each is rounded, here as there.
    eager = module(call._replace(backend="reference"))[0]
    assert mine.dtype == torch.bfloat16, f"the output of bfloat16 inputs is {mine.dtype}"
    own, allowed = ((x.double() - exact).abs().max() for x in (mine, eager))
    assert own <= 2 * allowed, f"the largest error in bfloat16 is {own:.2g}, eager's {allowed:.2g}"
