"""Lazy Attention over blocks of queries with a backward pass of its own: memory linear in the length.

A block is a rectangle (some sequences, some kv heads, consecutive queries, the keys they can see); only its scores
exist at a time, and the backward pass computes them again from the inputs, which are all that is kept. Whole rows are
at hand in both passes, so no running maximum is needed and the gradients are the formulas of the method term by term.
Softmax is never divided out over a block: with e = exp(score - row maximum) and its row sum, weights are
max(e - theta * sum, 0), and the division falls on the rows of the output, or of its gradient.

Geometry: queries end where the keys end, and a block never spans two documents, so query and key distances depend on
(row, column) counted from the block's lower right corner alone. One strip `[H, R, C]` of bias and causal mask, cut at
that corner, therefore serves every block, and its gradient is collected in one strip too. Ragged `kv_lengths` are
brought to this shape by moving each sequence's keys to the end.
"""

import math
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_lazy.inputs import LEAVES, TENSORS, Call, Stats, compute_dtype, tau_divisor, tau_gradient

# Scores of one block, B * H * R * C. The backward pass keeps three such matrices (four to renormalise). Small enough
# for a CPU's cache, large enough on a GPU that launching kernels does not dominate.
BLOCK_ELEMENTS_CPU = 2**18
BLOCK_ELEMENTS_GPU = 2**25
# Fewer rows than this waste matrix products: sequences and heads are split first.
FULL_ROWS = 64
# Columns of weights that are skipped together where none survives. Narrower ones would be skipped more often, and cost
# where nothing can be.
TILE_COLUMNS = 256
LOG2E = math.log2(math.e)


def chunked_attention(call: Call, with_stats: bool) -> tuple[Tensor, Stats | None]:
    """Output `[B, H, Lq, D]` in q's dtype, and the row statistics where asked for. Shapes as in `lazy_attention`."""
    out, *stats = _Chunked.apply(*call, with_stats)
    return out, Stats(*stats) if with_stats else None


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        call, with_stats = Call(*args[:-1]), args[-1]
        ctx.save_for_backward(*call[:TENSORS])
        ctx.settings = call[TENSORS:]
        outputs = _Sweep(call).forward(with_stats)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable  # its stub drops the parameters' names
    # pyrefly: ignore [bad-override]
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        grad = grad_outputs[0]
        needed = ctx.needs_input_grad
        # The engine calls back under the caller's autocast, which would round the matrix products.
        with torch.autocast(grad.device.type, enabled=False):
            gradients = _Sweep(Call(*ctx.saved_tensors, *ctx.settings)).backward(grad, needed)
        return *gradients, *[None] * (len(needed) - LEAVES)


@dataclass(frozen=True)
class _Part:
    """Sequences and kv heads that are worked on together."""

    batch: slice
    heads: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.batch.stop - self.batch.start, self.heads.stop - self.heads.start

    def of(self, x: Tensor) -> Tensor:
        """A part of `[B or 1, Hkv or 1, ...]` as `[b * h, ...]`: a view where the strides allow it."""
        x = x[self.batch if x.shape[0] > 1 else slice(None), self.heads if x.shape[1] > 1 else slice(None)]
        return x.expand(*self.shape, *x.shape[2:]).flatten(0, 1)


@dataclass(frozen=True)
class _Block:
    rows: slice
    keys: slice
    first: int  # index of the document's first key


class _Sweep:
    """The inputs brought to one geometry, and the two passes over its blocks.

    Tensors are `[B, Hkv, G, L, ...]` with G query heads to a kv head, float32 or float64; those of one block of a part
    are `[b * h, ...]`.
    """

    def __init__(self, call: Call) -> None:
        q, k, v = call.q, call.k, call.v
        self.call = call
        self.dtype = compute_dtype(q)
        self.batch, self.query_heads, self.rows, self.width = q.shape
        self.kv_heads, self.keys = k.shape[1:3]
        self.group = self.query_heads // self.kv_heads
        self.device = q.device

        cuts = [0, self.keys] if call.cu_seqlens is None else call.cu_seqlens.tolist()
        self.block_rows, self.parts, self.blocks = _blocks(
            (self.batch, self.kv_heads, self.group, self.rows, self.keys), cuts, call.window, self.device.type
        )
        self.block_columns = max(block.keys.stop - block.keys.start for block in self.blocks)
        self._place_rows_and_keys()

        self.q, self.k, self.v = self._by_group(q.to(self.dtype)), k.to(self.dtype), v.to(self.dtype)
        if self.shift is not None:
            self.k, self.v = (_roll(x, self.shift) for x in (self.k, self.v))
        if self.hidden is not None:  # what nobody sees may hold NaN, and 0 * NaN is NaN
            self.k, self.v = (x.masked_fill(self.hidden[:, None, :, None], 0) for x in (self.k, self.v))
        if self.blind is not None:
            self.q = self.q.masked_fill(self.blind, 0)
        self._build_strip()

    def _by_group(self, x: Tensor) -> Tensor:
        """`[B, H, Lq, D]` as a view `[B, Hkv, G, Lq, D]`."""
        return x.unflatten(1, (self.kv_heads, self.group))

    def _place_rows_and_keys(self) -> None:
        """Positions, visible keys per row and thresholds.

        Sets shift `[B]` (how far each sequence's keys move to the end), hidden `[B, Lk]` (keys no query may see, after
        moving), blind `[B, 1, 1, Lq, 1]` (queries without a key), position `[B or 1, Lq]` (0-based, within its
        document), n and divisor `[B or 1, 1, 1, Lq]` (keys seen, what divides tau) and theta `[B or 1, Hkv, G, Lq, 1]`.
        """
        call = self.call
        column = torch.arange(self.keys, device=self.device)
        own = column[self.keys - self.rows :][None]  # the key at each query's own position
        self.shift = self.hidden = self.blind = None
        start = own.new_zeros(())
        if call.kv_lengths is not None:
            self.shift = self.keys - call.kv_lengths.long()
            start = self.shift[:, None]
            self.hidden = column < start
        if call.cu_seqlens is not None:
            cuts = call.cu_seqlens.long()
            start = cuts[torch.searchsorted(cuts, own, right=True) - 1]
        if call.key_mask is not None:
            mask = call.key_mask
            if self.shift is not None:
                mask = _roll(mask, self.shift)
            self.hidden = ~mask if self.hidden is None else self.hidden | ~mask
        self.position = own - start

        seen_from = start if call.window is None else torch.maximum(start, own - call.window + 1)
        if self.hidden is None:
            n = own + 1 - seen_from
        else:
            counts = torch.nn.functional.pad((~self.hidden).cumsum(-1), (1, 0))
            upper = (own + 1).expand(self.batch, -1)
            n = counts.gather(1, upper) - counts.gather(1, torch.minimum(seen_from, upper).expand_as(upper))
            self.blind = (n == 0)[:, None, None, :, None]
        self.n = n[:, None, None, :].to(self.dtype)

        self.divisor = tau_divisor(call, self.n)
        tau = call.tau.to(self.dtype).unflatten(0, (self.kv_heads, self.group))
        if call.threshold == "per_token":
            self.entry = self.position.clamp(0, tau.shape[-1] - 1)
            tau_rows = tau[..., self.entry].movedim(2, 0)
        else:
            tau_rows = tau[None, ..., None]
        self.theta = (tau_rows / self.divisor)[..., None]
        # Below a negative threshold the ReLU alone gives hidden keys weight. Only the CPU can tell without waiting.
        self.lifts_hidden = self.device.type != "cpu" or bool((self.theta < 0).any())

    def _build_strip(self) -> None:
        """The additive strip `[H or 1, R, C]` of bias and mask in base 2, cut at the lower right corner (distance 0).

        Without a window or slopes it is 0 left of the columns stored. `triangle` `[R, C']` is 0 on its hidden entries
        and 1 elsewhere; left of its columns nothing is hidden.
        """
        rows, call, window = self.block_rows, self.call, self.call.window
        widest = self.block_columns
        reach = 0 if call.bias is None else call.bias.shape[1]
        columns = widest if call.slopes is not None or window is not None else min(widest, rows + max(reach - 1, 0))
        # Value at distance d, for d from columns - 1 down to -(rows - 1).
        distance = torch.arange(columns - 1, -rows, -1, device=self.device)
        heads = 1 if call.bias is None and call.slopes is None else self.query_heads
        value = torch.zeros(heads, columns + rows - 1, dtype=self.dtype, device=self.device)
        if call.bias is not None:
            reach = min(reach, columns)
            value[:, columns - reach : columns] = call.bias[:, :reach].flip(-1)
        if call.slopes is not None:
            value -= call.slopes.to(self.dtype)[:, None] * distance
        outside = distance < 0
        if window is not None:
            outside |= distance >= window
        value.mul_(LOG2E).masked_fill_(outside, -torch.inf)
        # Row r of the strip is the window of `value` that starts r places before the end of its slack. flip alone would
        # keep the strides of the windows, which make neighbours of rows.
        strip = value.unfold(-1, columns, 1).flip(1).contiguous()
        self.strip = strip.view(1 if heads == 1 else self.kv_heads, -1, rows, columns)
        edge = columns if window is not None else rows
        self.triangle = (~outside).to(self.dtype).unfold(-1, columns, 1)[:, columns - edge :].flip(0)
        self.distance = distance

    def _scratch(self, matrices: int) -> Tensor:
        """Memory that all blocks share: `[matrices, scores of the largest block]`."""
        size = math.prod(self.parts[0].shape) * self.group * self.block_rows * self.block_columns
        return torch.empty(matrices, size, dtype=self.dtype, device=self.device)

    def _matrices(self, scratch: Tensor, part: _Part, block: _Block) -> Tensor:
        """The scratch memory as matrices of scores of a block, `[matrices, b * h, G, R, C]`."""
        rows, columns = block.rows.stop - block.rows.start, block.keys.stop - block.keys.start
        shape = math.prod(part.shape), self.group, rows, columns
        return scratch[:, : math.prod(shape)].view(-1, *shape)

    def _exponentials(self, q: Tensor, k: Tensor, part: _Part, block: _Block, e: Tensor) -> tuple[Tensor, Tensor]:
        """Fills e with exp(score - row maximum); the maxima in base 2, and the row sums: e / sum is the softmax.

        The base is 2 because its power is the cheaper one. A row that sees no key has e = 0 and the sum 1.
        """
        strip = self._strip_of(self.strip, part, block)
        left = e.shape[-1] - strip.shape[-1]
        flat, k = e.flatten(1, 2), k.transpose(1, 2)
        # Scaling q instead would be as cheap and round D times as often.
        scale = self.call.factor * LOG2E
        if left:
            flat[..., :left].baddbmm_(q, k[..., :left], beta=0, alpha=scale)
        e[..., left:].unflatten(0, part.shape).copy_(strip)
        flat[..., left:].baddbmm_(q, k[..., left:], alpha=scale)
        if self.hidden is not None:
            self._fill_hidden(e, self.hidden, part, block, -torch.inf)
        top = e.amax(-1, keepdim=True)
        e.sub_(top.clamp(min=torch.finfo(self.dtype).min)).exp2_()
        return top, e.sum(-1, keepdim=True).clamp_(min=1)

    def _strip_of(self, strip: Tensor, part: _Part, block: _Block) -> Tensor:
        rows, columns = block.rows.stop - block.rows.start, block.keys.stop - block.keys.start
        heads = part.heads if strip.shape[0] > 1 else slice(None)
        return strip[heads, :, -rows:, -min(columns, strip.shape[-1]) :]

    @staticmethod
    def _fill_hidden(x: Tensor, hidden: Tensor, part: _Part, block: _Block, value: float) -> None:
        x.unflatten(0, part.shape).masked_fill_(hidden[part.batch, None, None, None, block.keys], value)

    def _threshold(self, e: Tensor, theta: Tensor, part: _Part, block: _Block, out: Tensor) -> Tensor:
        """max(e - theta, 0) in `out`, which may be e; exactly 0 where the key is hidden."""
        w = torch.sub(e, theta, out=out).relu_()
        if self.lifts_hidden:
            rows, columns = w.shape[-2:]
            edge = min(columns, self.triangle.shape[-1])
            w[..., columns - edge :].mul_(self.triangle[-rows:, -edge:])
            if self.hidden is not None:
                self._fill_hidden(w, self.hidden, part, block, 0)
        return w

    def forward(self, with_stats: bool) -> tuple[Tensor, ...]:
        shape = (self.batch, self.kv_heads, self.group, self.rows)
        # In the layout of q, in which the model will go on.
        result = torch.empty_like(self.q, dtype=self.call.q.dtype)
        stats = Stats(*(torch.empty(shape, device=self.device) for _ in Stats._fields)) if with_stats else None
        scratch = self._scratch(1)
        for part in self.parts:
            q, k, v, theta = (part.of(x) for x in (self.q, self.k, self.v, self.theta))
            for block in self.blocks:
                (e,) = self._matrices(scratch, part, block)
                q_rows, k_keys, v_keys = q[:, :, block.rows].flatten(1, 2), k[:, block.keys], v[:, block.keys]
                top, total = self._exponentials(q_rows, k_keys, part, block, e)
                w = self._threshold(e, theta[:, :, block.rows] * total, part, block, out=e)
                divisor = _or_one(w.sum(-1, keepdim=True)) if self.call.renormalise else total
                out = _value_product(w.flatten(1, 2), v_keys).view(*w.shape[:-1], self.width).div_(divisor)
                place = part.batch, part.heads, slice(None), block.rows
                result[place] = out.unflatten(0, part.shape)
                if stats is not None:
                    self._describe(Stats(*(x[place] for x in stats)), w, top, total, divisor, part, block)
        return tuple(x.flatten(1, 2) for x in (result, *(stats or ())))

    def _describe(
        self, stats: Stats, w: Tensor, top: Tensor, total: Tensor, divisor: Tensor, part: _Part, block: _Block
    ) -> None:
        """Writes the stats of a block's rows, each `[b, h, G, R]`."""
        w, top, total, divisor = (x.unflatten(0, part.shape) for x in (w, top, total, divisor))
        n = self.n[part.batch if len(self.n) > 1 else slice(None), :, :, block.rows]
        stats.lse[:] = (top / LOG2E + total.log()).squeeze(-1)
        stats.mass[:] = (w.sum(-1, keepdim=True) / total).squeeze(-1)
        stats.first_weight[:] = self._first_weight(w, part, block) / divisor.squeeze(-1)
        stats.zeros[:] = n - (w > 0).sum(-1)

    def _first_weight(self, w: Tensor, part: _Part, block: _Block) -> Tensor:
        if self.shift is None:
            first = block.first - block.keys.start
            return w[..., first] if first >= 0 else torch.zeros_like(w[..., 0])
        first = self.shift[part.batch, None, None, None, None] - block.keys.start
        inside = (first >= 0) & (first < w.shape[-1])
        index = first.clamp(0, w.shape[-1] - 1).expand(*w.shape[:-1], 1)
        return w.gather(-1, index).masked_fill(~inside, 0).squeeze(-1)

    def backward(self, grad: Tensor, needed: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, tau, bias, slopes for the output's gradient `[B, H, Lq, D]`; None where not needed."""
        grad = self._by_group(grad.to(self.dtype))
        if self.blind is not None:
            grad = grad.masked_fill(self.blind, 0)
        dq = torch.empty_like(self.q)
        # Contiguous, so that a part of them is a view to add to: sequences are split before heads.
        dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (self.k, self.v))
        survivors = torch.empty(self.q.shape[:-1], dtype=self.dtype, device=self.device)  # sum_j m_ij dp_ij
        dstrip = torch.zeros_like(self.strip) if needed[4] or needed[5] else None
        scratch, scale = self._scratch(3), self.call.factor
        for part in self.parts:
            q, k, v, do, theta = (part.of(x) for x in (self.q, self.k, self.v, grad, self.theta))
            dk_part, dv_part = part.of(dk), part.of(dv)
            for block in self.blocks:
                e, w, dp = self._matrices(scratch, part, block)
                q_rows, k_keys, v_keys = q[:, :, block.rows].flatten(1, 2), k[:, block.keys], v[:, block.keys]
                _, total = self._exponentials(q_rows, k_keys, part, block, e)
                self._threshold(e, theta[:, :, block.rows] * total, part, block, out=w)
                divisor = _or_one(w.sum(-1, keepdim=True)) if self.call.renormalise else total
                # w, e and dp stand for weights, softmax and gradient times, times and over `total` (`divisor`).
                do_rows = (do[:, :, block.rows] / divisor).flatten(1, 2)
                _value_gradients(w.flatten(1, 2), do_rows, v_keys, dp.flatten(1, 2), dv_part[:, block.keys])
                if self.call.renormalise:
                    dp.sub_((w * dp).sum(-1, keepdim=True).div_(divisor))
                dp.mul_(w.sign_())  # m_ij dp_ij
                place = part.batch, part.heads, slice(None), block.rows
                survivors[place] = (dp.sum(-1, keepdim=True) * total).squeeze(-1).unflatten(0, part.shape)
                delta = torch.mul(e, dp, out=w).sum(-1, keepdim=True).div_(total)
                ds = torch.mul(e, dp.sub_(delta), out=w)  # p_ij (m_ij dp_ij - delta_i)
                if dstrip is not None:
                    self._add_to_strip(dstrip, ds, part, block)
                ds = ds.flatten(1, 2)
                dq_rows = torch.bmm(ds, k_keys).mul_(scale)
                dq[place] = dq_rows.view(*part.shape, self.group, -1, self.width)
                dk_part[:, block.keys].baddbmm_(ds.transpose(1, 2), q_rows, alpha=scale)
        if self.shift is not None:
            dk, dv = (_roll(x, -self.shift) for x in (dk, dv))
        dbias, dslopes = self._strip_gradients(dstrip) if dstrip is not None else (None, None)
        entry = self.entry if self.call.threshold == "per_token" else None
        dtau = tau_gradient((survivors / self.divisor).flatten(1, 2), entry, self.call.tau) if needed[3] else None
        dq, dk, dv = (x.to(self.call.q.dtype) for x in (dq.flatten(1, 2), dk, dv))
        return dq, dk, dv, dtau, dbias, dslopes

    def _add_to_strip(self, dstrip: Tensor, ds: Tensor, part: _Part, block: _Block) -> None:
        strip = self._strip_of(dstrip, part, block)
        band = ds[..., ds.shape[-1] - strip.shape[-1] :].unflatten(0, part.shape)
        strip.add_(band[0] if len(band) == 1 else band.sum(0))  # sum would copy the one sequence

    def _strip_gradients(self, dstrip: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Sums the strip's gradient along its diagonals, and from there to bias and slopes."""
        rows, columns = dstrip.shape[-2:]
        length = columns + rows - 1
        # Each row is written one place further left than the one above, which turns diagonals into columns.
        skewed = dstrip.new_zeros(self.query_heads, rows * length)
        target = skewed.as_strided((self.query_heads, rows, columns), (rows * length, length - 1, 1), rows - 1)
        target.copy_(dstrip.flatten(0, 1))
        dvalue = skewed.view(self.query_heads, rows, length).sum(1)  # by distance, in the order of self.distance
        dbias = dslopes = None
        if self.call.bias is not None:
            reach = min(self.call.bias.shape[1], columns)
            dbias = torch.zeros_like(self.call.bias)
            dbias[:, :reach] = dvalue[:, columns - reach : columns].flip(-1)
        if self.call.slopes is not None:
            dslopes = -(dvalue * self.distance).sum(-1).to(self.call.slopes.dtype)
        return dbias, dslopes


def _blocks(
    shape: tuple[int, int, int, int, int], cuts: list[int], window: int | None, device_type: str
) -> tuple[int, list[_Part], list[_Block]]:
    """The largest number of rows of a block, the parts, the first of them the largest, and the blocks of each.

    shape is (B, Hkv, G, Lq, Lk); cuts are the documents' boundaries among the keys. Rows are halved down to FULL_ROWS,
    then sequences, kv heads and once more rows, until a block's scores fit the device's budget.
    """
    batch, kv_heads, group, queries, keys = shape
    budget = BLOCK_ELEMENTS_CPU if device_type == "cpu" else BLOCK_ELEMENTS_GPU
    longest = max(end - start for start, end in pairwise(cuts))
    rows = min(queries, longest)

    def too_big() -> bool:
        columns = longest if window is None else min(longest, window - 1 + rows)
        return batch * kv_heads * group * rows * columns > budget

    while too_big() and rows > FULL_ROWS:
        rows = (rows + 1) // 2
    while too_big() and batch > 1:
        batch = (batch + 1) // 2
    while too_big() and kv_heads > 1:
        kv_heads = (kv_heads + 1) // 2
    while too_big() and rows > 1:
        rows = (rows + 1) // 2

    offset = keys - queries
    blocks = []
    for start, end in pairwise(cuts):
        for top in range(max(start - offset, 0), end - offset, rows):
            bottom = min(top + rows, end - offset)
            seen_from = start if window is None else max(start, top + offset - window + 1)
            blocks.append(_Block(slice(top, bottom), slice(seen_from, bottom + offset), start))
    parts = [
        _Part(slice(b, min(b + batch, shape[0])), slice(h, min(h + kv_heads, shape[1])))
        for b, h in product(range(0, shape[0], batch), range(0, shape[1], kv_heads))
    ]
    return rows, parts, blocks


def _tiles(w: Tensor) -> list[tuple[slice, bool]]:
    """The columns of weights `[b * h, G * R, C]` in tiles, and whether any weight of the tile survives.

    The last tile is taken to be alive: it holds the queries' own keys. Devices other than the CPU have one tile and are
    not asked, since the answer would have to be waited for.
    """
    columns = w.shape[-1]
    if columns <= TILE_COLUMNS or w.device.type != "cpu":
        return [(slice(0, columns), True)]
    last = (columns - 1) // TILE_COLUMNS * TILE_COLUMNS
    largest = w[..., :last].unflatten(-1, (-1, TILE_COLUMNS)).amax((0, 1, 3))
    tiles = [slice(start, start + TILE_COLUMNS) for start in range(0, last, TILE_COLUMNS)]
    return [*zip(tiles, largest.tolist(), strict=True), (slice(last, columns), True)]


def _value_product(w: Tensor, v: Tensor) -> Tensor:
    """`w @ v` for w `[b * h, G * R, C]`; tiles without a surviving weight are left out, which changes no bit."""
    tiles = _tiles(w)
    if len(tiles) == 1:
        return torch.bmm(w, v)
    out = v.new_zeros(*w.shape[:2], v.shape[2])
    for tile, alive in tiles:
        if alive:
            out.baddbmm_(w[..., tile], v[:, tile])
    return out


def _value_gradients(w: Tensor, do: Tensor, v: Tensor, dp: Tensor, dv: Tensor) -> None:
    """Adds `w.T @ do` to dv and writes `do @ v.T` into dp, 0 in tiles without a surviving weight."""
    for tile, alive in _tiles(w):
        if alive:
            torch.bmm(do, v[:, tile].transpose(1, 2), out=dp[..., tile])
            dv[:, tile].baddbmm_(w[..., tile].transpose(1, 2), do)
        else:
            dp[..., tile] = 0


def _or_one(mass: Tensor) -> Tensor:
    """Row sums, and 1 for a row whose weights are all zero, so that it stays zero when divided."""
    return torch.where(mass > 0, mass, 1)


def _roll(x: Tensor, shift: Tensor) -> Tensor:
    """Rolls `[B, ..., L, D]` or `[B, L]` along L by `shift` `[B]` places, each sequence by its own."""
    length = x.shape[1] if x.dim() == 2 else x.shape[2]
    index = (torch.arange(length, device=x.device) - shift[:, None]) % length
    return x.gather(1, index) if x.dim() == 2 else x.gather(2, index[:, None, :, None].expand_as(x))
