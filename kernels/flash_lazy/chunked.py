"""Lazy Attention over blocks of queries with a custom backward pass: memory linear in the length.

Only one block's scores exist at a time (`flash_lazy.tiling`). The forward pass saves only its inputs; the backward pass
recomputes the scores. Both passes see full rows, so they need no running maximum, and the gradients follow the method's
formulas term by term. The softmax of a block is never divided out: with e = exp(score - row maximum) and its row sum,
weights are max(e - theta * sum, 0), and the rows of the output, or of its gradient, are divided instead.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .call import (
    CALL_SCHEMA,
    LEAVES,
    OPERATORS,
    TENSORS,
    Call,
    Stats,
    compute_dtype,
    differentiate_once,
    is_traced,
    refuse_forward_mode,
    tau_divisor,
    tau_gradient,
)
from .tiling import Part, RowBlock, Sweep
from .vmap import HEAD_AXES, fold, fold_into_heads, is_transformed, unfold_heads

# Columns of weights that are skipped together if none survives. Narrower tiles are skipped more often, but cost time if
# none can be.
TILE_COLUMNS = 256
LOG2E = math.log2(math.e)


def chunked_attention(call: Call, with_stats: bool) -> tuple[Tensor, Stats | None]:
    """Output `[B, H, Lq, D]` in q's dtype, and `Stats` if requested. Shapes as in `lazy_attention`."""
    # Tracers do not look into operators, and meta tensors have no values. In eager mode their dispatch would slow a
    # training step of 128 tokens by a tenth; torch.func transforms the function.
    recorded = is_traced(call[:TENSORS]) and not is_transformed()
    attend = _forward if recorded or call.q.is_meta else _ChunkedFunction.apply
    out, *stats = attend(*call, with_stats)
    if not with_stats:
        return out, None
    lse, *others = stats
    return out, Stats(lse, *(x.detach() for x in others))


def _outputs(*arguments: Any) -> tuple[Tensor, ...]:
    """Output and, if requested, the fields of `Stats`."""
    *call, with_stats = arguments
    return _LazySweep(Call(*call)).forward(with_stats)


def _gradients(*arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, tau, bias and slopes; the last two are empty if absent or not requested."""
    *call, grad, dlse, with_bias = arguments
    # The engine runs this under the caller's autocast, which would round the matrix products.
    with torch.autocast(grad.device.type, enabled=False):
        return _LazySweep(Call(*call)).backward(grad, dlse, with_bias)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG001 - torch's signature
    ctx.save_for_backward(*inputs[:TENSORS])
    ctx.settings = inputs[TENSORS:-1]
    ctx.set_materialize_grads(False)


def _leaf_gradients(
    gradients: Callable[..., tuple[Tensor, ...]],
    ctx: Any,
    saved: Sequence[Any],
    grad: Tensor | None,
    dlse: Tensor | None = None,
    *_: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """One gradient for each argument of the forward pass; None where none is needed."""
    call, needed = Call(*saved, *ctx.settings), ctx.needs_input_grad
    grad = torch.zeros_like(call.q) if grad is None else grad
    found = gradients(*call, grad, dlse, needed[4] or needed[5])
    leaves = (x if is_needed else None for x, is_needed in zip(found, needed[:LEAVES], strict=True))
    return *leaves, *[None] * (len(needed) - LEAVES)


class _ChunkedFunction(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return _outputs(*args)

    setup_context = staticmethod(_setup_context)
    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    @differentiate_once
    def backward(ctx: Any, saved: Sequence[Any], *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _leaf_gradients(_ChunkedGradients.apply, ctx, saved, *grads)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, ...]:
        call = fold_into_heads(args[: len(Call._fields)], in_dims, info.batch_size)
        found = _ChunkedFunction.apply(*call, args[-1])
        return tuple(zip(*(unfold_heads(x, info.batch_size, axis=1) for x in found), strict=True))


class _ChunkedGradients(torch.autograd.Function):
    """The backward pass as a function of its own, so that vmap can batch it."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return _gradients(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing to keep: gradients have none."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, ...]:
        *_, with_bias = args
        fields, size = len(Call._fields), info.batch_size
        call = fold_into_heads(args[:fields], in_dims, size)
        grad, dlse = (
            None if x is None else fold(x, dim, size, axis=1)
            for x, dim in zip(args[fields:-1], in_dims[fields:-1], strict=True)
        )
        found = _ChunkedGradients.apply(*call, grad, dlse, with_bias)
        apart = (unfold_heads(x, size, axis) for x, axis in zip(found, HEAD_AXES, strict=True))
        return tuple(zip(*apart, strict=True))


@torch.library.custom_op(
    f"{OPERATORS}chunked_forward",
    mutates_args=(),
    schema=f"({CALL_SCHEMA}, bool stats) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    return _pad_to_five(*_outputs(*arguments))


_backward = torch.library.custom_op(
    f"{OPERATORS}chunked_backward",
    _gradients,
    mutates_args=(),
    schema=f"({CALL_SCHEMA}, Tensor grad, Tensor? dlse, bool with_bias) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _operator_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return _leaf_gradients(_backward, ctx, ctx.saved_tensors, *grads)


_forward.register_autograd(_operator_gradients, setup_context=_setup_context)


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    *call, with_stats = arguments
    return _pad_to_five(*_forward_buffers(Call(*call), with_stats))


def _pad_to_five(out: Tensor, *stats: Tensor) -> tuple[Tensor, ...]:
    """Add empty stats if there are none: an operator has a fixed number of outputs."""
    return out, *(stats or [out.new_empty(0) for _ in Stats._fields])


@_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    *fields, _grad, _dlse, with_bias = arguments
    call = Call(*fields)
    others = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (call.k, call.v, call.tau))
    head = (
        call.q.new_empty(0) if x is None or not with_bias else torch.empty_like(x) for x in (call.bias, call.slopes)
    )
    return torch.empty_like(call.q), *others, *head


class _LazySweep(Sweep):
    """The two passes over the blocks, with scores in base 2, whose exponential is cheaper."""

    def __init__(self, call: Call) -> None:
        super().__init__(call, LOG2E, -torch.inf)
        # The divisor of tau is `[B or 1, 1, 1, Lq]`, the threshold `[B or 1, Hkv, G, Lq, 1]`.
        self.divisor = tau_divisor(call, self.n)
        tau = call.tau.to(self.dtype).unflatten(0, (self.kv_heads, self.group))
        if call.threshold == "per_token":
            self.entry = self.position.clamp(0, tau.shape[-1] - 1)
            tau_rows = tau[..., self.entry].movedim(2, 0)
        else:
            tau_rows = tau[None, ..., None]
        self.theta = (tau_rows / self.divisor)[..., None]
        # With a negative threshold the ReLU gives hidden keys weight. Only the CPU can check this without a sync.
        self.lifts_hidden = self.device.type != "cpu" or bool((self.theta < 0).any())
        self.triangle = self.visible.to(self.dtype)

    def _fill_exponentials(self, q: Tensor, k: Tensor, part: Part, block: RowBlock, e: Tensor) -> tuple[Tensor, Tensor]:
        """Fill e with exp(score - row maximum); returns the maxima in base 2 and the row sums (softmax is e / sum).

        A row that sees no key has e = 0 and sum 1.
        """
        self.fill_scores(e, q, k, part, block)
        top = e.amax(-1, keepdim=True)
        e.sub_(top.clamp(min=torch.finfo(self.dtype).min)).exp2_()
        return top, e.sum(-1, keepdim=True).clamp_(min=1)

    def _apply_threshold(self, e: Tensor, theta: Tensor, part: Part, block: RowBlock, out: Tensor) -> Tensor:
        """Write max(e - theta, 0) to `out`, which may be e; exactly 0 at hidden keys."""
        w = torch.sub(e, theta, out=out).relu_()
        if self.lifts_hidden:
            rows, columns = w.shape[-2:]
            edge = min(columns, self.triangle.shape[-1])
            w[..., columns - edge :].mul_(self.triangle[-rows:, -edge:])
            self.fill_hidden(w, part, block, 0)
        return w

    def forward(self, with_stats: bool) -> tuple[Tensor, ...]:
        buffers = _forward_buffers(self.call, with_stats)
        result = self.group_heads(buffers[0])
        stats = Stats(*map(self.group_heads, buffers[1:])) if with_stats else None
        scratch = self.scratch(1)
        for part in self.parts:
            q, k, v, theta = (part.select(x) for x in (self.q, self.k, self.v, self.theta))
            for block in self.blocks:
                (e,) = self.matrices(scratch, part, block)
                q_rows, k_keys, v_keys = q[:, :, block.rows].flatten(1, 2), k[:, block.keys], v[:, block.keys]
                top, total = self._fill_exponentials(q_rows, k_keys, part, block, e)
                w = self._apply_threshold(e, theta[:, :, block.rows] * total, part, block, out=e)
                divisor = _replace_zero_mass(w.sum(-1, keepdim=True)) if self.call.renormalise else total
                out = _value_product(w.flatten(1, 2), v_keys).view(*w.shape[:-1], self.width).div_(divisor)
                place = part.batch, part.heads, slice(None), block.rows
                result[place] = out.unflatten(0, part.shape)
                if stats is not None:
                    self._write_stats(Stats(*(x[place] for x in stats)), w, top, total, divisor, part, block)
        return buffers

    def _write_stats(
        self, stats: Stats, w: Tensor, top: Tensor, total: Tensor, divisor: Tensor, part: Part, block: RowBlock
    ) -> None:
        """Write the stats of a block's rows, each `[b, h, G, R]`."""
        w, top, total, divisor = (x.unflatten(0, part.shape) for x in (w, top, total, divisor))
        n = self.n[part.batch if len(self.n) > 1 else slice(None), :, :, block.rows]
        stats.lse[:] = (top / LOG2E + total.log()).squeeze(-1)
        stats.mass[:] = (w.sum(-1, keepdim=True) / total).squeeze(-1)
        stats.first_weight[:] = self.read_first_weight(w, part, block) / divisor.squeeze(-1)
        stats.zeros[:] = n - (w > 0).sum(-1)

    def backward(self, grad: Tensor, dlse: Tensor | None, with_bias: bool) -> tuple[Tensor, ...]:
        """Gradients of q, k, v, tau, bias and slopes; the last two are empty if absent or not requested.

        grad, dlse: gradients of the output `[B, H, Lq, D]` and the log-sum-exp `[B, H, Lq]`. The derivative of lse_i by
        score_ij is p_ij, so dlse enters through the row's delta.
        """
        grad = self.group_heads(grad.to(self.dtype))
        if self.blind is not None:
            grad = grad.masked_fill(self.blind, 0)
        dq = self.group_heads(torch.empty_like(self.call.q, dtype=self.dtype))
        # Contiguous, so that a part is a view that can be added to: sequences are split before heads.
        dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (self.k, self.v))
        survivors = torch.empty(self.q.shape[:-1], dtype=self.dtype, device=self.device)  # sum_j m_ij dp_ij
        dstrip = torch.zeros_like(self.strip) if with_bias else None
        scratch, scale = self.scratch(3), self.call.factor
        if dlse is not None:
            dlse = self.group_heads(dlse)[..., None]
            dlse = dlse if self.blind is None else dlse.masked_fill(self.blind, 0)
        for part in self.parts:
            q, k, v, do, theta = (part.select(x) for x in (self.q, self.k, self.v, grad, self.theta))
            dk_part, dv_part = part.select(dk), part.select(dv)
            for block in self.blocks:
                e, w, dp = self.matrices(scratch, part, block)
                q_rows, k_keys, v_keys = q[:, :, block.rows].flatten(1, 2), k[:, block.keys], v[:, block.keys]
                _, total = self._fill_exponentials(q_rows, k_keys, part, block, e)
                self._apply_threshold(e, theta[:, :, block.rows] * total, part, block, out=w)
                divisor = _replace_zero_mass(w.sum(-1, keepdim=True)) if self.call.renormalise else total
                # w is the weights times `divisor`, e the softmax times `total`, dp the gradient over `divisor`.
                do_rows = (do[:, :, block.rows] / divisor).flatten(1, 2)
                _value_gradients(w.flatten(1, 2), do_rows, v_keys, dp.flatten(1, 2), dv_part[:, block.keys])
                if self.call.renormalise:
                    dp.sub_((w * dp).sum(-1, keepdim=True).div_(divisor))
                dp.mul_(w.sign_())  # m_ij dp_ij
                place = part.batch, part.heads, slice(None), block.rows
                survivors[place] = (dp.sum(-1, keepdim=True) * total).squeeze(-1).unflatten(0, part.shape)
                delta = torch.mul(e, dp, out=w).sum(-1, keepdim=True)
                if dlse is not None:
                    delta.sub_(dlse[place].flatten(0, 1))
                ds = torch.mul(e, dp.sub_(delta.div_(total)), out=w)  # p_ij (m_ij dp_ij - delta_i)
                if dstrip is not None:
                    self.add_to_strip(dstrip, ds, part, block)
                ds = ds.flatten(1, 2)
                dq_rows = torch.bmm(ds, k_keys).mul_(scale)
                dq[place] = dq_rows.view(*part.shape, self.group, -1, self.width)
                dk_part[:, block.keys].baddbmm_(ds.transpose(1, 2), q_rows, alpha=scale)
        entry = self.entry if self.call.threshold == "per_token" else None
        dtau = tau_gradient((survivors / self.divisor).flatten(1, 2), entry, self.call.tau)
        dq, dk, dv, *others = self.input_gradients(dq, dk, dv, dstrip)
        return dq, dk, dv, dtau, *(self.call.q.new_empty(0) if x is None else x for x in others)


def _forward_buffers(call: Call, with_stats: bool) -> tuple[Tensor, ...]:
    """Uninitialised results of `forward`; the output has q's layout, which the model reads next."""
    q = call.q
    stats = [q.new_empty(q.shape[:3], dtype=compute_dtype(q)) for _ in Stats._fields] if with_stats else []
    return torch.empty_like(q), *stats


def _split_tiles(w: Tensor) -> list[tuple[slice, bool]]:
    """Tiles of the columns of weights `[b * h, G * R, C]`, each with whether any of its weights survives.

    The last tile always counts as alive: it holds the queries' own keys. Other devices than the CPU get a single tile,
    since the check would sync them.
    """
    columns = w.shape[-1]
    if columns <= TILE_COLUMNS or w.device.type != "cpu":
        return [(slice(0, columns), True)]
    last = (columns - 1) // TILE_COLUMNS * TILE_COLUMNS
    largest = w[..., :last].unflatten(-1, (-1, TILE_COLUMNS)).amax((0, 1, 3))
    tiles = [slice(start, start + TILE_COLUMNS) for start in range(0, last, TILE_COLUMNS)]
    return [*zip(tiles, largest.tolist(), strict=True), (slice(last, columns), True)]


def _value_product(w: Tensor, v: Tensor) -> Tensor:
    """`w @ v` for w `[b * h, G * R, C]`, without tiles that have no surviving weight; bit-identical."""
    tiles = _split_tiles(w)
    if len(tiles) == 1:
        return torch.bmm(w, v)
    out = v.new_zeros(*w.shape[:2], v.shape[2])
    for tile, alive in tiles:
        if alive:
            out.baddbmm_(w[..., tile], v[:, tile])
    return out


def _value_gradients(w: Tensor, do: Tensor, v: Tensor, dp: Tensor, dv: Tensor) -> None:
    """Add `w.T @ do` to dv and write `do @ v.T` to dp, 0 in tiles without a surviving weight."""
    for tile, alive in _split_tiles(w):
        if alive:
            torch.bmm(do, v[:, tile].transpose(1, 2), out=dp[..., tile])
            dv[:, tile].baddbmm_(w[..., tile].transpose(1, 2), do)
        else:
            dp[..., tile] = 0


def _replace_zero_mass(mass: Tensor) -> Tensor:
    """Row sums, with 1 for rows whose weights are all zero, so that division keeps them zero."""
    return torch.where(mass > 0, mass, 1)
