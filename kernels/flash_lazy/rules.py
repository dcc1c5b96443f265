"""Attention with any rule that maps scores to weights, in memory linear in the length.

A rule is a function of scores and row positions. This module adds causality, windows, masks, packed documents, ragged
lengths, grouped heads, biases, decoding, renormalising, statistics, and gradients, which recompute blocks of rows in
the backward pass (`flash_lazy.tiling`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from typing_extensions import TypedDict, Unpack

from .call import (
    TENSORS,
    Call,
    Stats,
    differentiate_once,
    prepare,
    refuse_forward_mode,
    require_values,
    show,
    type_name,
)
from .scores import attend_documents, eager_scores, locate_queries, weigh_values
from .tiling import Part, RowBlock, Sweep
from .vmap import is_transformed

HIDDEN = -1e30
"""Score of a hidden key: finite, because -inf times 0 is NaN, and so low that its exponential is 0."""


@dataclass(frozen=True)
class Rows:
    """Positions and visible keys of a block of R rows over C keys; several score maps add an axis of 1 after the heads.

    visible: bool `[B or 1, 1, R, C]`, the keys that a row sees.
    n: `[B or 1, 1, R, 1]`, total number of keys that a row sees, at least 1, in the scores' dtype.
    position: int64 `[B or 1, 1, R, 1]`, 1-based, within the row's document.
    """

    visible: Tensor
    n: Tensor
    position: Tensor

    def with_maps(self) -> "Rows":
        """Add the axis of several maps."""
        return Rows(self.visible.unsqueeze(2), self.n.unsqueeze(2), self.position.unsqueeze(2))


Rule = Callable[[Tensor, Rows], Tensor]
"""Maps scores `[B, H, R, C]` (`[B, H, maps, R, C]` with several maps), float32 or float64, to weights `[B, H, R, C]`.

Scores of hidden keys are finite, and their weight must be 0. They are also cleared afterwards, so that a trained factor
that turns negative cannot leak the future. A row that sees no key is passed as a row that sees all keys with score 0;
its weights are cleared too. A rule must not change the scores in place.
"""


class RuleWeights(NamedTuple):
    """The weight matrix of some rows, in `compute_dtype`.

    scores: `[B, H, Lq, Lk]` (`[B, H, maps, Lq, Lk]`), bias included, `HIDDEN` at hidden keys.
    w: weights of the values, `[B, H, Lq, Lk]`.
    mass: sum of a row's weights before renormalising, `[B, H, Lq]`.
    rows: positions and visible keys; `rows.visible` is all False for a row that sees no key.
    """

    scores: Tensor
    w: Tensor
    mass: Tensor
    rows: Rows


class RuleSettings(TypedDict, total=False, closed=True):
    """Static types of the keyword arguments of `rule_attention`."""

    parameters: Sequence[Tensor]
    maps: int
    slopes: Tensor | None
    renormalise: bool
    scale: float | None
    cu_seqlens: Tensor | None
    kv_lengths: Tensor | None
    key_mask: Tensor | None
    window: int | None
    backend: Literal["reference", "chunked"]


@overload
def rule_attention(
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    return_stats: Literal[False] = False,
    **settings: Unpack[RuleSettings],
) -> Tensor: ...
@overload
def rule_attention(
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    return_stats: Literal[True],
    **settings: Unpack[RuleSettings],
) -> tuple[Tensor, Stats]: ...


def rule_attention(
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    parameters: Sequence[Tensor] = (),
    maps: int = 1,
    slopes: Tensor | None = None,
    renormalise: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    key_mask: Tensor | None = None,
    window: int | None = None,
    backend: Literal["reference", "chunked"] = "chunked",
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Stats]:
    """Causal attention with the weights of a rule.

    Arguments not listed here are as in `flash_lazy.lazy_attention`. Only "reference" supports higher-order gradients.

    Args:
        rule: computes the weights of a block of rows.
        parameters: the tensors used by the rule that receive gradients; "chunked" refuses others that require one.
        maps: score maps per head. q and k are split into this many parts along D, one per map; the rule combines the
            maps into one weight matrix. scale is 1 / sqrt(D / maps) by default.
        renormalise: divides a row's weights by their sum if it is above 0.
        backend: "chunked" (linear memory) or "reference" (full matrices, gradients by autograd).
        return_stats: also return `Stats` without gradients; `zeros` counts the visible keys of weight 0, and `lse`
            runs over all maps.

    Returns:
        The output `[B, H, Lq, D]` in q's dtype, or `(output, Stats)`.

    Raises:
        TypeError, ValueError: an argument, or the rule's result, is invalid.
    """
    tensors = q, k, v, torch.zeros(1), bias, slopes, cu_seqlens, kv_lengths, key_mask
    call = Call(*tensors, renormalise=renormalise, scale=scale, window=window)
    out, stats = run_rule(rule, call, return_stats, parameters, maps, backend)
    return out if stats is None else (out, stats)


def run_rule(
    rule: Rule, call: Call, with_stats: bool, parameters: Sequence[Tensor], maps: int, backend: str
) -> tuple[Tensor, Stats | None]:
    """`rule_attention` of a `Call`, whose tau is ignored."""
    call = _prepare(call, maps)
    if not callable(rule):
        raise TypeError(f"rule is {show(rule)}; give a function of scores and Rows that returns weights")
    if wrong := [x for x in parameters if not isinstance(x, Tensor)]:
        raise TypeError(f"parameters has a {type_name(wrong[0])}; give tensors")
    if backend not in ("reference", "chunked"):
        raise ValueError(f"backend is {show(backend)}; choose reference or chunked for a rule")
    if backend == "chunked" and is_transformed():
        raise ValueError("backend is 'chunked', which torch.func cannot transform for a rule; choose 'reference'")
    attend = _attend_reference if backend == "reference" else _attend_chunked
    with torch.autocast(call.q.device.type, enabled=False):
        return attend(rule, call, maps, tuple(parameters), with_stats)


def rule_weights(
    rule: Rule,
    q: Tensor,
    k: Tensor,
    bias: Tensor | None = None,
    *,
    maps: int = 1,
    slopes: Tensor | None = None,
    renormalise: bool = False,
    scale: float | None = None,
    kv_lengths: Tensor | None = None,
    key_mask: Tensor | None = None,
    window: int | None = None,
) -> RuleWeights:
    """The weight matrix, for inspection: eager, `[B, H, Lq, Lk]` in memory.

    Arguments and errors as in `rule_attention`. Pass `q[:, :, a:b]` and `k[:, :, :b]` for rows `a .. b - 1` of a long
    sequence.
    """
    tensors = q, k, k, torch.zeros(1), bias, slopes, None, kv_lengths, key_mask
    return compute_rule_weights(rule, Call(*tensors, renormalise=renormalise, scale=scale, window=window), maps)


def compute_rule_weights(rule: Rule, call: Call, maps: int) -> RuleWeights:
    """`rule_weights` of a `Call`, whose tau is ignored."""
    call = _prepare(call, maps)
    with torch.autocast(call.q.device.type, enabled=False):
        return _eager_weights(rule, call, maps)


def _prepare(call: Call, maps: int) -> Call:
    """Check a call, cast it for autocast, and set tau = 0 and the default scale of its maps."""
    q = call.q
    require_values(q)
    if not isinstance(maps, int) or maps < 1:
        raise ValueError(f"maps is {show(maps)}; give a whole number, at least 1")
    if isinstance(q, Tensor) and q.dim() == 4:
        if q.shape[-1] % maps:
            raise ValueError(f"maps is {maps} and q has width D = {q.shape[-1]}; give a D that is divisible by maps")
        scale = (q.shape[-1] // maps) ** -0.5 if call.scale is None else call.scale
        call = call._replace(tau=torch.zeros(q.shape[1], device=q.device), scale=scale)
    return prepare(call)


def rule_name(rule: Rule) -> str:
    """Name of a rule in messages: its class and method, or its function."""
    owner = getattr(rule, "__self__", None)
    name = getattr(rule, "__name__", type(rule).__name__)
    return name if owner is None else f"{type(owner).__name__}.{name}"


def call_rule(rule: Rule, scores: Tensor, rows: Rows) -> Tensor:
    """Weights `[B, H, R, C]` of a rule. Raises ValueError, with the fix, if the rule returns anything else."""
    version = None if scores.is_inference() else scores._version
    w = rule(scores, rows)
    if version is not None and scores._version != version:
        raise ValueError(f"{rule_name(rule)} changes its scores in place; use an operation that returns a new tensor")
    expected = (*scores.shape[:2], *scores.shape[-2:])
    if not isinstance(w, Tensor) or w.shape != expected or w.dtype != scores.dtype:
        got = f"{w.dtype} {list(w.shape)}" if isinstance(w, Tensor) else f"a {type(w).__name__}"
        several = "; with several maps, the fields of rows have one more axis: use rows.visible.squeeze(2)"
        raise ValueError(
            f"{rule_name(rule)} returns {got} for scores {scores.dtype} {list(scores.shape)}; return {scores.dtype} "
            f"{list(expected)}" + (several if scores.dim() == 5 else "")
        )
    return w


def _apply(rule: Rule, scores: Tensor, rows: Rows, blind: Tensor | None, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Weights `[B, H, R, C]` and their sum before renormalising `[B, H, R, 1]`.

    blind `[B, 1, R, 1]`: rows that see no key; the rule gets them as rows that see all keys with score 0.
    """
    passed = rows
    if blind is not None:
        scores = scores.masked_fill(blind if scores.dim() == 4 else blind.unsqueeze(2), 0)
        passed = Rows(rows.visible | blind, rows.n, rows.position)
    w = call_rule(rule, scores, passed if scores.dim() == 4 else passed.with_maps()).masked_fill(~rows.visible, 0)
    mass = w.sum(-1, keepdim=True)
    return (w / torch.where(mass > 0, mass, 1) if renormalise else w), mass


def _require_listed(rule: Rule, w: Tensor, listed: Sequence[Tensor]) -> None:
    """Raise a one-line ValueError if weights depend on a tensor that requires a gradient and would receive none."""
    known = {get_gradient_edge(x).node for x in listed if x.requires_grad}
    ahead = [] if w.grad_fn is None else [w.grad_fn]
    seen = {*known, *ahead}
    while ahead:
        node = ahead.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            raise ValueError(
                f"{rule_name(rule)} uses a tensor {list(leaf.shape)} that requires a gradient and would get none: list "
                "it in `parameters` (a module's is an nn.Parameter), or detach it"
            )
        new = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= new
        ahead += new


def _attend_reference(
    rule: Rule, call: Call, maps: int, _: tuple[Tensor, ...], with_stats: bool
) -> tuple[Tensor, Stats | None]:
    """Full matrices, gradients by autograd: the specification of `_attend_chunked`."""
    if call.cu_seqlens is not None:
        return attend_documents(call, lambda document: _attend_reference(rule, document, maps, (), with_stats))
    found = _eager_weights(rule, call, maps)
    out = weigh_values(found.w, call, found.rows.visible[:, 0]).to(call.q.dtype)
    if not with_stats:
        return out, None
    seen = found.rows.visible
    zeros = ((found.w == 0) & seen).sum(-1).to(found.w.dtype)
    stats = Stats(_lse(found.scores, ~seen.any(3)), found.mass, found.w[..., 0], zeros)
    return out, Stats(*(x.detach() for x in stats))


def _eager_weights(rule: Rule, call: Call, maps: int) -> RuleWeights:
    position, visible = locate_queries(call)
    scores = torch.stack([eager_scores(part, position, visible) for part in _split_maps(call, maps)], 2)
    seen = visible[:, None]
    scores = scores.masked_fill(~seen[:, :, None], HIDDEN)
    scores = scores if maps > 1 else scores.squeeze(2)
    blind = ~seen.any(3, keepdim=True)
    n = seen.sum(-1, keepdim=True).clamp(min=1).to(scores.dtype)
    rows = Rows(seen, n, (position + 1).clamp(min=1)[:, None, :, None])
    w, mass = _apply(rule, scores, rows, blind, call.renormalise)
    return RuleWeights(scores, w, mass.squeeze(-1), rows)


def _split_maps(call: Call, maps: int) -> list[Call]:
    """One call per map, with its part of q and k along D."""
    pairs = zip(call.q.chunk(maps, -1), call.k.chunk(maps, -1), strict=True)
    return [call._replace(q=q, k=k) for q, k in pairs]


def _lse(scores: Tensor, blind: Tensor) -> Tensor:
    lse = scores.logsumexp(-1)
    return (lse.logsumexp(2) if lse.dim() == 4 else lse).masked_fill(blind, -torch.inf)


def _attend_chunked(
    rule: Rule, call: Call, maps: int, parameters: tuple[Tensor, ...], with_stats: bool
) -> tuple[Tensor, Stats | None]:
    """The blocks treat each map as a head; query head (kv head, g) and map m have the index (kv head, m, g)."""
    if maps > 1:
        kv_heads = call.k.shape[1]

        def by_map(x: Tensor) -> Tensor:  # [H, ...] -> [Hkv * maps * G, ...]
            return x.unflatten(0, (kv_heads, 1, -1)).expand(-1, maps, *[-1] * x.dim()).flatten(0, 2)

        q = call.q.unflatten(-1, (maps, -1)).unflatten(1, (kv_heads, -1))  # [B, Hkv, G, Lq, maps, D / maps]
        call = call._replace(
            q=q.permute(0, 1, 4, 2, 3, 5).flatten(1, 3),
            k=call.k.unflatten(-1, (maps, -1)).movedim(3, 2).flatten(1, 2),
            bias=None if call.bias is None else by_map(call.bias),
            slopes=None if call.slopes is None else by_map(call.slopes),
        )
    out, *stats = _RuleFunction.apply(rule, maps, with_stats, len(call), *call, *parameters)
    return out, Stats(*stats) if with_stats else None


class _RuleFunction(torch.autograd.Function):
    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        rule, maps, with_stats, size, *rest = args
        call, parameters = Call(*rest[:size]), rest[size:]
        ctx.save_for_backward(*call[:TENSORS], *parameters)
        ctx.rule, ctx.maps, ctx.settings = rule, maps, call[TENSORS:]
        outputs = _RuleSweep(rule, maps, call).forward(with_stats)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @differentiate_once
    def backward(ctx: Any, saved: Sequence[Any], *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        parameters, call = saved[TENSORS:], Call(*saved[:TENSORS], *ctx.settings)
        with torch.autocast(call.q.device.type, enabled=False):
            found = _RuleSweep(ctx.rule, ctx.maps, call).backward(grad_outputs[0], parameters, ctx.needs_input_grad[4:])
        dq, dk, dv, dbias, dslopes, *dparameters = found
        leaves = dq, dk, dv, None, dbias, dslopes
        return (*[None] * 4, *leaves, *[None] * (len(call) - len(leaves)), *dparameters)


class _RuleSweep(Sweep):
    """The two passes over the blocks. Each block has all heads, because a rule holds the parameters of all heads."""

    def __init__(self, rule: Rule, maps: int, call: Call) -> None:
        super().__init__(call, 1.0, HIDDEN, whole_heads=True)
        self.rule, self.maps = rule, maps
        self.value_heads, self.value_width = call.v.shape[1], call.v.shape[3]
        missing = self.block_columns - self.visible.shape[-1]
        self.visible = torch.nn.functional.pad(self.visible, (missing, 0), value=True)

    def _rows(self, part: Part, block: RowBlock) -> tuple[Rows, Tensor | None]:
        """Positions and visible keys of a block's rows, and which rows see no key `[b or 1, 1, R, 1]`."""
        rows, columns = block.shape
        visible = self.visible[None, None, -rows:, -columns:]
        if self.hidden is not None:
            visible = visible & ~self.hidden[part.batch, None, None, block.keys]
        n, position = (
            x[part.batch if len(x) > 1 else slice(None), ..., block.rows].reshape(-1, 1, rows, 1)
            for x in (self.n, self.position)
        )
        blind = None if self.blind is None else n == 0
        return Rows(visible, n.clamp(min=1), (position + 1).clamp(min=1)), blind

    def _scores(self, s: Tensor, q: Tensor, k: Tensor, part: Part, block: RowBlock) -> Tensor:
        """Fill s; returns it in the rule's layout, `[b, H, R, C]` or `[b, H, maps, R, C]`."""
        self.fill_scores(s, q[:, :, block.rows].flatten(1, 2), k[:, block.keys], part, block)
        by_map = s.view(part.shape[0], -1, self.maps, *s.shape[1:])  # [b, Hkv, maps, G, R, C]
        return by_map.transpose(2, 3).flatten(1, 2) if self.maps > 1 else by_map.flatten(1, 3)

    def _flatten_heads(self, w: Tensor) -> Tensor:
        """`[b, H, R, C]` as `[b * Hkv, G * R, C]`, for products with values."""
        return w.reshape(w.shape[0] * self.value_heads, -1, w.shape[-1])

    def forward(self, with_stats: bool) -> tuple[Tensor, ...]:
        heads = self.value_heads * self.group
        result = torch.empty(
            self.batch, heads, self.rows, self.value_width, dtype=self.call.q.dtype, device=self.device
        )
        empty = (torch.empty(self.batch, heads, self.rows, dtype=self.dtype, device=self.device) for _ in Stats._fields)
        stats = Stats(*empty) if with_stats else None
        scratch = self.scratch(1)
        for part in self.parts:
            q, k, v = part.select(self.q), part.select(self.k), self.v[part.batch].flatten(0, 1)
            for block in self.blocks:
                (s,) = self.matrices(scratch, part, block)
                rows, blind = self._rows(part, block)
                scores = self._scores(s, q, k, part, block)
                w, mass = _apply(self.rule, scores, rows, blind, self.call.renormalise)
                place = part.batch, slice(None), block.rows
                result[place] = torch.bmm(self._flatten_heads(w), v[:, block.keys]).view(*w.shape[:3], -1)
                if stats is not None:
                    n = torch.where(blind, 0, rows.n) if blind is not None else rows.n
                    none = torch.zeros((), dtype=torch.bool, device=self.device) if blind is None else blind[..., 0]
                    stats.lse[place] = _lse(scores, none)
                    stats.mass[place] = mass.squeeze(-1)
                    grouped = w.view(len(w), self.value_heads, self.group, *w.shape[2:])
                    stats.first_weight[place] = self.read_first_weight(grouped, part, block).flatten(1, 2)
                    stats.zeros[place] = n.squeeze(-1) - (w != 0).sum(-1)
        return result, *(stats or ())

    def backward(self, grad: Tensor, parameters: Sequence[Tensor], needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, bias, slopes and the parameters from the output's; None for those without one."""
        dq = torch.empty_like(self.q)
        dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (self.k, self.v))
        dstrip = torch.zeros_like(self.strip) if needed[4] or needed[5] else None
        wanted = [index for index, x in enumerate(parameters) if needed[len(self.call) + index]]
        dparameters: list[Tensor | None] = [None] * len(parameters)
        scratch, scale = self.scratch(1), self.call.factor
        for part in self.parts:
            q, k, v = part.select(self.q), part.select(self.k), self.v[part.batch].flatten(0, 1)
            dk_part, dv_part = part.select(dk), dv[part.batch].flatten(0, 1)
            for block in self.blocks:
                (s,) = self.matrices(scratch, part, block)
                rows, blind = self._rows(part, block)
                place = part.batch, slice(None), block.rows
                do = grad[place].to(self.dtype)
                if blind is not None:
                    do = do.masked_fill(blind, 0)
                do = do.reshape(len(v), -1, do.shape[-1])
                scores = self._scores(s, q, k, part, block).detach().requires_grad_()
                leaves = [scores, *(parameters[index] for index in wanted)]
                with torch.enable_grad():
                    w, _ = _apply(self.rule, scores, rows, blind, self.call.renormalise)
                if part is self.parts[0] and block is self.blocks[0]:
                    _require_listed(self.rule, w, [scores, *parameters])
                dw = torch.bmm(do, v[:, block.keys].transpose(1, 2)).view_as(w)
                dv_part[:, block.keys].baddbmm_(self._flatten_heads(w.detach()).transpose(1, 2), do)
                none = [None] * len(leaves)  # a rule may ignore its inputs
                ds, *found = torch.autograd.grad(w, leaves, dw, allow_unused=True) if w.requires_grad else none
                for index, gradient in zip(wanted, found, strict=True):
                    if gradient is not None:
                        before = dparameters[index]
                        dparameters[index] = gradient if before is None else before + gradient
                ds = s.new_zeros(s.shape) if ds is None else self._restore_map_layout(ds, s)
                if dstrip is not None:
                    self.add_to_strip(dstrip, ds, part, block)
                ds = ds.flatten(1, 2)
                dq[part.batch, part.heads, :, block.rows] = (
                    torch.bmm(ds, k[:, block.keys]).mul_(scale).view(*part.shape, self.group, -1, self.width)
                )
                rows_of_q = q[:, :, block.rows].flatten(1, 2)
                dk_part[:, block.keys].baddbmm_(ds.transpose(1, 2), rows_of_q, alpha=scale)
        return *self.input_gradients(dq, dk, dv, dstrip), *dparameters

    def _restore_map_layout(self, ds: Tensor, s: Tensor) -> Tensor:
        """The gradient of the result of `_scores` in the layout of s `[b * Hkv * maps, G, R, C]`."""
        if self.maps == 1:
            return ds.reshape(s.shape)
        return ds.unflatten(1, (self.value_heads, self.group)).transpose(2, 3).reshape(s.shape)
