"""Attention with any rule that maps scores to weights, in memory linear in the length.

A rule is a function of scores and row positions. This module adds causality, windows, masks, packed documents, ragged
lengths, grouped heads, biases, decoding, renormalising, statistics, and gradients, which recompute blocks of rows in
the backward pass (`flash_lazy.tiling`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
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
from .scores import attend_documents, count_tokens, eager_scores, locate_queries, weigh_values
from .tiling import Part, RowBlock, Sweep
from .vmap import is_transformed

HIDDEN = -1e30
"""Score of a hidden key: finite, because -inf times 0 is NaN, and so low that its exponential is 0."""
_NO_TAU = torch.zeros(1)
"""Stands for the tau of a rule's call, until the number of heads is known."""


@dataclass(frozen=True)
class Rows:
    """Positions and visible keys of a block of R rows over C keys; several score maps add an axis of 1 after the heads.

    A block has some sequences of the batch and some of their keys, so a column's index tells nothing of its key.

    visible: bool `[B or 1, 1, R, C]`, the keys that a row sees.
    n: `[B or 1, 1, R, 1]`, total number of keys that a row sees, at least 1, in the scores' dtype.
    position: int64 `[B or 1, 1, R, 1]`, 1-based, within the row's document; tokens that `key_mask` hides do not count.
    offset: column of the first row's own key, a number or int64 `[B, 1, 1, 1]`.
    sequences: the block's part of the batch.
    """

    visible: Tensor
    n: Tensor
    position: Tensor
    offset: Tensor | int = 0
    sequences: slice = field(default_factory=lambda: slice(None))

    @property
    def distance(self) -> Tensor:
        """Tokens from each key to the row, int64 `[R, C]` or `[B, 1, R, C]`; below 0 for keys after the row."""
        row, column = (torch.arange(size, device=self.visible.device) for size in self.visible.shape[-2:])
        return self.offset + row[:, None] - column

    def with_maps(self) -> "Rows":
        """Add the axis of several maps."""
        offset = self.offset.unsqueeze(2) if isinstance(self.offset, Tensor) else self.offset
        fields = {name: getattr(self, name).unsqueeze(2) for name in ("visible", "n", "position")}
        return replace(self, offset=offset, **fields)


Rule = Callable[[Tensor, Rows], Tensor]
"""Maps scores `[B, H, R, C]` (`[B, H, maps, R, C]` with several maps), float32 or float64, to weights `[B, H, R, C]`.

Scores of hidden keys are finite, and their weight must be 0. They are also cleared afterwards, so that a trained factor
that turns negative cannot leak the future. A row that sees no key is passed as a row that sees all keys with score 0;
its weights are cleared too. A rule must not change the scores in place. The backward pass calls it again and needs the
same weights: random numbers are drawn alike, but nothing else that the rule reads may have changed.
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

    parameters: Iterable[Tensor]
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
    parameters: Iterable[Tensor] = (),
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
    tensors = q, k, v, _NO_TAU, bias, slopes, cu_seqlens, kv_lengths, key_mask
    call = Call(*tensors, renormalise=renormalise, scale=scale, window=window)
    out, stats = run_rule(rule, call, return_stats, parameters, maps, backend)
    return out if stats is None else (out, stats)


def run_rule(
    rule: Rule, call: Call, with_stats: bool, parameters: Iterable[Tensor], maps: int, backend: str
) -> tuple[Tensor, Stats | None]:
    """`rule_attention` of a `Call`, whose tau is ignored."""
    call = _prepare(call, maps)
    if not callable(rule):
        raise TypeError(f"rule is {show(rule)}; give a function of scores and Rows that returns weights")
    if isinstance(parameters, Tensor) or not isinstance(parameters, Iterable):
        raise TypeError(f"parameters is a {type_name(parameters)}; give a list of tensors")
    parameters = tuple(parameters)
    if wrong := [x for x in parameters if not isinstance(x, Tensor)]:
        raise TypeError(f"parameters has a {type_name(wrong[0])}; give tensors")
    if backend not in ("reference", "chunked"):
        raise ValueError(f"backend is {show(backend)}; choose reference or chunked for a rule")
    if backend == "chunked" and is_transformed():
        raise ValueError("backend is 'chunked', which torch.func cannot transform for a rule; choose 'reference'")
    attend = _attend_reference if backend == "reference" else _attend_chunked
    with torch.autocast(call.q.device.type, enabled=False):
        return attend(rule, call, maps, tuple(dict.fromkeys(parameters)), with_stats)


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
    tensors = q, k, k, _NO_TAU, bias, slopes, None, kv_lengths, key_mask
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
        call = call._replace(tau=torch.zeros(q.shape[1], dtype=torch.float32, device=q.device), scale=scale)
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
        passed = replace(rows, visible=rows.visible | blind)
    w = call_rule(rule, scores, passed if scores.dim() == 4 else passed.with_maps()).masked_fill(~rows.visible, 0)
    mass = w.sum(-1, keepdim=True)
    return (w / torch.where(mass > 0, mass, 1) if renormalise else w), mass


def _apply_and_check(
    rule: Rule, scores: Tensor, rows: Rows, blind: Tensor | None, renormalise: bool, listed: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """`_apply`, without gradients. Raises a one-line ValueError if a tensor's gradient would be lost or count twice."""
    with torch.enable_grad():
        begun = _get_number(torch.ones((), requires_grad=True).neg())
        w, mass = _apply(rule, scores, rows, blind, renormalise)
    known = {get_gradient_edge(x).node for x in listed if x.requires_grad}
    for node in _iter_graph([w.grad_fn], known):
        if (leaf := getattr(node, "variable", None)) is not None:
            raise ValueError(
                f"{rule_name(rule)} uses a tensor {list(leaf.shape)} that requires a gradient and would get none: list "
                "it in `parameters` (a module's is an nn.Parameter), or detach it"
            )
        if node._sequence_nr() < begun:
            raise ValueError(
                f"{rule_name(rule)} uses a tensor that was computed before it, by {node.name()}, from one that "
                "requires a gradient: list the computed one in `parameters`, or compute it in the rule"
            )
    made = [x.grad_fn for x in listed if x.grad_fn is not None] if len(listed) > 1 else []
    if any(known.intersection(_iter_graph([before for before, _ in node.next_functions], ())) for node in made):
        raise ValueError("parameters has a tensor and another one that was computed from it; list only the latter")
    return w.detach(), mass.detach()


def _get_number(x: Tensor) -> int:
    """The number of the node that made a tensor; later ones in this thread have larger numbers."""
    assert x.grad_fn is not None
    return x.grad_fn._sequence_nr()


def _iter_graph(starts: Iterable[Node | None], ends: Iterable[Node]) -> Iterator[Node]:
    """The nodes of autograd's graph from `starts` on up to `ends`, without these."""
    seen, ahead = set(ends), list(starts)
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            ahead += (before for before, _ in node.next_functions)


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
    own, visible = locate_queries(call)
    scores = torch.stack([eager_scores(part, own, visible) for part in _split_maps(call, maps)], 2)
    seen = visible[:, None]
    scores = scores.masked_fill(~seen[:, :, None], HIDDEN)
    scores = scores if maps > 1 else scores.squeeze(2)
    blind = ~seen.any(3, keepdim=True)
    n = seen.sum(-1, keepdim=True).clamp(min=1).to(scores.dtype)
    position = (count_tokens(call, own) + 1).clamp(min=1)[:, None, :, None]
    rows = Rows(seen, n, position, own[:, :1, None, None])
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
    checked = torch.is_grad_enabled()  # Functions disable gradients
    out, *stats = _RuleFunction.apply(rule, maps, with_stats, checked, len(call), *call, *parameters)
    return out, Stats(*stats) if with_stats else None


class _RuleFunction(torch.autograd.Function):
    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        rule, maps, with_stats, checked, size, *rest = args
        call, parameters = Call(*rest[:size]), rest[size:]
        ctx.save_for_backward(*call[:TENSORS], *parameters)
        ctx.rule, ctx.maps, ctx.settings = rule, maps, call[TENSORS:]
        before = _read_random_states(call.q.device) if checked else []
        outputs = _RuleSweep(rule, maps, call).forward(with_stats, parameters if checked else None)
        after = _read_random_states(call.q.device) if checked else []
        ctx.random = [] if all(map(torch.equal, before, after)) else before
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @differentiate_once
    def backward(ctx: Any, saved: Sequence[Any], *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        parameters, call = saved[TENSORS:], Call(*saved[:TENSORS], *ctx.settings)
        needed = ctx.needs_input_grad[5:]
        with torch.autocast(call.q.device.type, enabled=False), _draw_again(ctx.random, call.q.device):
            found = _RuleSweep(ctx.rule, ctx.maps, call).backward(grad_outputs[0], parameters, needed)
        dq, dk, dv, dbias, dslopes, *dparameters = found
        leaves = dq, dk, dv, None, dbias, dslopes
        return (*[None] * 5, *leaves, *[None] * (len(call) - len(leaves)), *dparameters)


def _read_random_states(device: torch.device) -> list[Tensor]:
    """States of the generators that a rule may draw from."""
    states = [torch.get_rng_state()]
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():  # a capture forbids it
        states.append(torch.cuda.get_rng_state(device))
    return states


@contextmanager
def _draw_again(states: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    """Let generators draw from these states on, and go on afterwards as if they had not; without states, do nothing."""
    of_cpu, of_device = states[:1], states[1:]
    with torch.random.fork_rng([device] if of_device else [], enabled=bool(states)):
        for state in of_cpu:
            torch.set_rng_state(state)
        for state in of_device:
            torch.cuda.set_rng_state(state, device)
        yield


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
        return Rows(visible, n.clamp(min=1), (position + 1).clamp(min=1), columns - rows, part.batch), blind

    def _scores(self, s: Tensor, q: Tensor, k: Tensor, part: Part, block: RowBlock) -> Tensor:
        """Fill s; returns it in the rule's layout, `[b, H, R, C]` or `[b, H, maps, R, C]`."""
        self.fill_scores(s, q[:, :, block.rows].flatten(1, 2), k[:, block.keys], part, block)
        by_map = s.view(part.shape[0], -1, self.maps, *s.shape[1:])  # [b, Hkv, maps, G, R, C]
        return by_map.transpose(2, 3).flatten(1, 2) if self.maps > 1 else by_map.flatten(1, 3)

    def _flatten_heads(self, w: Tensor) -> Tensor:
        """`[b, H, R, C]` as `[b * Hkv, G * R, C]`, for products with values."""
        return w.reshape(w.shape[0] * self.value_heads, -1, w.shape[-1])

    def forward(self, with_stats: bool, listed: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """Output, and `Stats` if requested. listed: the rule's parameters, if it is to be checked for others."""
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
                is_first = part is self.parts[0] and block is self.blocks[0]
                apply = partial(_apply_and_check, listed=listed) if is_first and listed is not None else _apply
                w, mass = apply(self.rule, scores, rows, blind, self.call.renormalise)
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
