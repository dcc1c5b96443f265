"""Tiling of the linear-memory backends: blocks of queries and the keys they can see.

A block is a rectangle (some sequences, some kv heads, consecutive queries, the keys they can see). Only one block's
scores exist at a time; a backward pass recomputes them from the inputs.

Geometry: queries are aligned to the end of the keys and a block never spans two documents, so distances depend only on
(row, column) relative to the block's lower right corner. One strip `[H, R, C]` of bias and causal mask, sliced at that
corner, therefore serves all blocks, and one strip accumulates its gradient. Ragged `kv_lengths` are reduced to this
case by moving each sequence's keys to the end.
"""

import math
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from .call import Call, compute_dtype, rows_in_documents, slice_documents

# Scores of one block, B * H * R * C: small enough for a CPU's cache, large enough that kernel launches do not dominate
# on a GPU.
BLOCK_ELEMENTS_CPU = 2**18
BLOCK_ELEMENTS_GPU = 2**25
# Fewer rows make matrix products inefficient: sequences and heads are split first.
FULL_ROWS = 64


@dataclass(frozen=True)
class Part:
    """Sequences and kv heads that are processed together."""

    batch: slice
    heads: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.batch.stop - self.batch.start, self.heads.stop - self.heads.start

    def select(self, x: Tensor) -> Tensor:
        """This part of `[B or 1, Hkv or 1, ...]` as `[b * h, ...]`: a view if the strides allow it."""
        x = x[self.batch if x.shape[0] > 1 else slice(None), self.heads if x.shape[1] > 1 else slice(None)]
        return x.expand(*self.shape, *x.shape[2:]).flatten(0, 1)


@dataclass(frozen=True)
class RowBlock:
    rows: slice
    keys: slice
    first: int  # index of the document's first key

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.keys.stop - self.keys.start


class Sweep:
    """The inputs of a call in the common geometry, and its blocks.

    Tensors are `[B, Hkv, G, L, ...]` with G query heads per kv head, float32 or float64; those of one block of a part
    are `[b * h, ...]`.

    Args:
        unit: factor from nats to the unit of the scores.
        hidden_score: the score of a hidden key, in that unit.
        whole_heads: whether a block has all heads.
    """

    def __init__(self, call: Call, unit: float, hidden_score: float, whole_heads: bool = False) -> None:
        q, k, v = call.q, call.k, call.v
        self.call, self.unit, self.hidden_score = call, unit, hidden_score
        self.dtype = compute_dtype(q)
        self.batch, self.query_heads, self.rows, self.width = q.shape
        self.kv_heads, self.keys = k.shape[1:3]
        self.group = self.query_heads // self.kv_heads
        self.device = q.device

        shape = self.batch, self.kv_heads, self.group
        self.block_rows, self.parts, self.blocks = make_blocks(
            shape, slice_documents(call), call.window, self.device.type, whole_heads
        )
        self.block_columns = max(block.shape[1] for block in self.blocks)
        self._place_rows_and_keys()

        self.q, self.k, self.v = self.group_heads(q.to(self.dtype)), k.to(self.dtype), v.to(self.dtype)
        if self.shift is not None:
            self.k, self.v = (roll(x, self.shift) for x in (self.k, self.v))
        if self.hidden is not None:  # hidden keys may hold NaN, and 0 * NaN is NaN
            self.k, self.v = (x.masked_fill(self.hidden[:, None, :, None], 0) for x in (self.k, self.v))
        if self.blind is not None:
            self.q = self.q.masked_fill(self.blind, 0)
        self._build_strip()

    def group_heads(self, x: Tensor) -> Tensor:
        """View `[B, H, Lq, D]` as `[B, Hkv, G, Lq, D]`."""
        return x.unflatten(1, (self.kv_heads, self.group))

    def _place_rows_and_keys(self) -> None:
        """Set the positions and visible keys of the rows.

        shift `[B]`: how far each sequence's keys move to the end. hidden `[B, Lk]`: keys hidden from all queries, after
        the move. blind `[B, 1, 1, Lq, 1]`: queries that see no key. position `[B or 1, Lq]`: 0-based, among the
        document's tokens that are not hidden. n `[B or 1, 1, 1, Lq]`: number of visible keys.
        """
        call = self.call
        column = torch.arange(self.keys, device=self.device)
        own = column[self.keys - self.rows :][None]  # index of the key at each query's position
        self.shift = self.hidden = self.blind = None
        start = own.new_zeros(())
        if call.kv_lengths is not None:
            self.shift = self.keys - call.kv_lengths.long()
            start = self.shift[:, None]
            self.hidden = column < start
        if call.cu_seqlens is not None:
            own, start = rows_in_documents(call, call.cu_seqlens)
        if call.key_mask is not None:
            mask = call.key_mask
            if self.shift is not None:
                mask = roll(mask, self.shift)
            self.hidden = ~mask if self.hidden is None else self.hidden | ~mask

        seen_from = start if call.window is None else torch.maximum(start, own - call.window + 1)
        if self.hidden is None:
            n, self.position = own + 1 - seen_from, own - start
        else:
            counts = torch.nn.functional.pad((~self.hidden).cumsum(-1), (1, 0))
            upper = (own + 1).expand(self.batch, -1)
            n, before = (
                counts.gather(1, upper) - counts.gather(1, torch.minimum(first, upper).expand_as(upper))
                for first in (seen_from, start)
            )
            self.position = before - 1
            self.blind = (n == 0)[:, None, None, :, None]
        self.n = n[:, None, None, :].to(self.dtype)

    def _build_strip(self) -> None:
        """Set the additive strip `[Hkv or 1, G or 1, R, C]` of bias and mask, whose lower right corner is distance 0.

        Without a window or slopes it is 0 left of the stored columns. Also sets `visible` `[R, C']`, bool, False on the
        strip's hidden entries; left of its columns nothing is hidden.
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
        value.mul_(self.unit).masked_fill_(outside, self.hidden_score)
        # Row r of the strip is the window of `value` that starts r entries before the end of its slack. flip keeps the
        # windows' strides, in which rows are adjacent in memory, so make it contiguous.
        strip = value.unfold(-1, columns, 1).flip(1).contiguous()
        self.strip = strip.view(1 if heads == 1 else self.kv_heads, -1, rows, columns)
        edge = columns if window is not None else rows
        self.visible = (~outside).unfold(-1, columns, 1)[:, columns - edge :].flip(0)
        self.distance = distance

    def scratch(self, matrices: int) -> Tensor:
        """Buffer shared by all blocks: `[matrices, scores of the largest block]`."""
        size = math.prod(self.parts[0].shape) * self.group * self.block_rows * self.block_columns
        return torch.empty(matrices, size, dtype=self.dtype, device=self.device)

    def matrices(self, scratch: Tensor, part: Part, block: RowBlock) -> Tensor:
        """View the scratch buffer as score matrices of a block, `[matrices, b * h, G, R, C]`."""
        shape = math.prod(part.shape), self.group, *block.shape
        return scratch[:, : math.prod(shape)].view(-1, *shape)

    def fill_scores(self, s: Tensor, q: Tensor, k: Tensor, part: Part, block: RowBlock) -> None:
        """Write the scores of a block to s `[b * h, G, R, C]`; q `[b * h, G * R, D]`, k `[b * h, C, D]`."""
        strip = self._cut_strip(self.strip, part, block)
        left = s.shape[-1] - strip.shape[-1]
        flat, k = s.flatten(1, 2), k.transpose(1, 2)
        # Scaling q instead would cost the same and round D times as often.
        scale = self.call.factor * self.unit
        if left:
            flat[..., :left].baddbmm_(q, k[..., :left], beta=0, alpha=scale)
        s[..., left:].unflatten(0, part.shape).copy_(strip)
        flat[..., left:].baddbmm_(q, k[..., left:], alpha=scale)
        self.fill_hidden(s, part, block, self.hidden_score)

    def fill_hidden(self, x: Tensor, part: Part, block: RowBlock, value: float) -> None:
        """Write a value where `key_mask` or `kv_lengths` hides a key; x `[b * h, G, R, C]`."""
        if self.hidden is not None:
            x.unflatten(0, part.shape).masked_fill_(self.hidden[part.batch, None, None, None, block.keys], value)

    def read_first_weight(self, w: Tensor, part: Part, block: RowBlock) -> Tensor:
        """Weight of the document's first key, `[b, h, G, R]`, in w `[b, h, G, R, C]`; 0 if that key is not in C."""
        if self.shift is None:
            first = block.first - block.keys.start
            return w[..., first] if first >= 0 else torch.zeros_like(w[..., 0])
        first = self.shift[part.batch, None, None, None, None] - block.keys.start
        inside = (first >= 0) & (first < w.shape[-1])
        index = first.clamp(0, w.shape[-1] - 1).expand(*w.shape[:-1], 1)
        return w.gather(-1, index).masked_fill(~inside, 0).squeeze(-1)

    def _cut_strip(self, strip: Tensor, part: Part, block: RowBlock) -> Tensor:
        rows, columns = block.shape
        heads = part.heads if strip.shape[0] > 1 else slice(None)
        return strip[heads, :, -rows:, -min(columns, strip.shape[-1]) :]

    def add_to_strip(self, dstrip: Tensor, ds: Tensor, part: Part, block: RowBlock) -> None:
        """Add the gradient of a block's scores `[b * h, G, R, C]` to the strip's."""
        strip = self._cut_strip(dstrip, part, block)
        band = ds[..., ds.shape[-1] - strip.shape[-1] :].unflatten(0, part.shape)
        strip.add_(band[0] if len(band) == 1 else band.sum(0))  # sum would copy a single sequence

    def input_gradients(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dstrip: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Gradients of q, k, v, bias and slopes in their layouts and dtypes, from those of the sweep's tensors."""
        if self.shift is not None:
            dk, dv = (roll(x, -self.shift) for x in (dk, dv))
        dq, dk, dv = (x.to(self.call.q.dtype) for x in (dq.flatten(1, 2), dk, dv))
        dbias, dslopes = (None, None) if dstrip is None else self._strip_gradients(dstrip)
        return dq, dk, dv, dbias, dslopes

    def _strip_gradients(self, dstrip: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of bias and slopes, from the sums of the strip's gradient along its diagonals."""
        rows, columns = dstrip.shape[-2:]
        length = columns + rows - 1
        # Each row is written one entry further left than the one above, which turns diagonals into columns.
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


def make_blocks(
    shape: tuple[int, int, int],
    documents: list[tuple[slice, slice]],
    window: int | None,
    device_type: str,
    whole_heads: bool,
) -> tuple[int, list[Part], list[RowBlock]]:
    """Split a call into blocks: the most rows of a block, the parts (largest first), and the blocks of each part.

    shape is (B, Hkv, G); documents holds the slices of rows and keys. Until a block's scores fit the device's budget,
    rows are halved down to FULL_ROWS, then sequences, then kv heads (unless whole_heads), then rows again.
    """
    batch, kv_heads, group = shape
    budget = BLOCK_ELEMENTS_CPU if device_type == "cpu" else BLOCK_ELEMENTS_GPU
    rows, longest = (max(part.stop - part.start for part in side) for side in zip(*documents, strict=True))

    def too_big() -> bool:
        columns = longest if window is None else min(longest, window - 1 + rows)
        return batch * kv_heads * group * rows * columns > budget

    while too_big() and rows > FULL_ROWS:
        rows = (rows + 1) // 2
    while too_big() and batch > 1:
        batch = (batch + 1) // 2
    while too_big() and kv_heads > 1 and not whole_heads:
        kv_heads = (kv_heads + 1) // 2
    while too_big() and rows > 1:
        rows = (rows + 1) // 2

    blocks = []
    for queries, keys in documents:
        offset = keys.stop - queries.stop
        for top in range(queries.start, queries.stop, rows):
            bottom = min(top + rows, queries.stop)
            seen_from = keys.start if window is None else max(keys.start, top + offset - window + 1)
            blocks.append(RowBlock(slice(top, bottom), slice(seen_from, bottom + offset), keys.start))
    parts = [
        Part(slice(b, min(b + batch, shape[0])), slice(h, min(h + kv_heads, shape[1])))
        for b, h in product(range(0, shape[0], batch), range(0, shape[1], kv_heads))
    ]
    return rows, parts, blocks


def roll(x: Tensor, shift: Tensor) -> Tensor:
    """Roll `[B, ..., L, D]` or `[B, L]` along L by `shift` `[B]` entries per sequence."""
    length = x.shape[1] if x.dim() == 2 else x.shape[2]
    index = (torch.arange(length, device=x.device) - shift[:, None]) % length
    return x.gather(1, index) if x.dim() == 2 else x.gather(2, index[:, None, :, None].expand_as(x))
