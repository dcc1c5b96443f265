"""The blocks that the linear-memory backends work through: rectangles of queries and the keys they can see.

A block is a rectangle (some sequences, some kv heads, consecutive queries, the keys they can see); only its scores
exist at a time, and a backward pass computes them again from the inputs.

Geometry: queries end where the keys end, and a block never spans two documents, so query and key distances depend on
(row, column) counted from the block's lower right corner alone. One strip `[H, R, C]` of bias and causal mask, cut at
that corner, therefore serves every block, and its gradient is collected in one strip too. Ragged `kv_lengths` are
brought to this shape by moving each sequence's keys to the end.
"""

import math
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from flash_lazy.call import Call, compute_dtype, rows_in_documents, slice_documents

# Scores of one block, B * H * R * C. Small enough for a CPU's cache, large enough on a GPU that launching kernels does
# not dominate.
BLOCK_ELEMENTS_CPU = 2**18
BLOCK_ELEMENTS_GPU = 2**25
# Fewer rows than this waste matrix products: sequences and heads are split first.
FULL_ROWS = 64


@dataclass(frozen=True)
class Part:
    """Sequences and kv heads that are worked on together."""

    batch: slice
    heads: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.batch.stop - self.batch.start, self.heads.stop - self.heads.start

    def select(self, x: Tensor) -> Tensor:
        """A part of `[B or 1, Hkv or 1, ...]` as `[b * h, ...]`: a view where the strides allow it."""
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
    """The inputs of a call brought to one geometry, and its blocks.

    Tensors are `[B, Hkv, G, L, ...]` with G query heads to a kv head, float32 or float64; those of one block of a part
    are `[b * h, ...]`.

    Args:
        unit: what a nat of a score is worth.
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
        if self.hidden is not None:  # what nobody sees may hold NaN, and 0 * NaN is NaN
            self.k, self.v = (x.masked_fill(self.hidden[:, None, :, None], 0) for x in (self.k, self.v))
        if self.blind is not None:
            self.q = self.q.masked_fill(self.blind, 0)
        self._build_strip()

    def group_heads(self, x: Tensor) -> Tensor:
        """`[B, H, Lq, D]` as a view `[B, Hkv, G, Lq, D]`."""
        return x.unflatten(1, (self.kv_heads, self.group))

    def _place_rows_and_keys(self) -> None:
        """Positions and visible keys per row.

        Sets shift `[B]` (how far each sequence's keys move to the end), hidden `[B, Lk]` (keys no query may see, after
        moving), blind `[B, 1, 1, Lq, 1]` (queries without a key), position `[B or 1, Lq]` (0-based, within its
        document) and n `[B or 1, 1, 1, Lq]` (keys seen).
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
            own, start = rows_in_documents(call, call.cu_seqlens)
        if call.key_mask is not None:
            mask = call.key_mask
            if self.shift is not None:
                mask = roll(mask, self.shift)
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

    def _build_strip(self) -> None:
        """The additive strip `[Hkv or 1, G or 1, R, C]` of bias and mask, cut at the lower right corner (distance 0).

        Without a window or slopes it is 0 left of the columns stored. `visible` `[R, C']`, bool, is False on its hidden
        entries; left of its columns nothing is hidden.
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
        # Row r of the strip is the window of `value` that starts r places before the end of its slack. flip alone would
        # keep the strides of the windows, which make neighbours of rows.
        strip = value.unfold(-1, columns, 1).flip(1).contiguous()
        self.strip = strip.view(1 if heads == 1 else self.kv_heads, -1, rows, columns)
        edge = columns if window is not None else rows
        self.visible = (~outside).unfold(-1, columns, 1)[:, columns - edge :].flip(0)
        self.distance = distance

    def scratch(self, matrices: int) -> Tensor:
        """Memory that all blocks share: `[matrices, scores of the largest block]`."""
        size = math.prod(self.parts[0].shape) * self.group * self.block_rows * self.block_columns
        return torch.empty(matrices, size, dtype=self.dtype, device=self.device)

    def matrices(self, scratch: Tensor, part: Part, block: RowBlock) -> Tensor:
        """The scratch memory as matrices of scores of a block, `[matrices, b * h, G, R, C]`."""
        shape = math.prod(part.shape), self.group, *block.shape
        return scratch[:, : math.prod(shape)].view(-1, *shape)

    def fill_scores(self, s: Tensor, q: Tensor, k: Tensor, part: Part, block: RowBlock) -> None:
        """Writes the scores of a block into s `[b * h, G, R, C]`; q `[b * h, G * R, D]`, k `[b * h, C, D]`."""
        strip = self._cut_strip(self.strip, part, block)
        left = s.shape[-1] - strip.shape[-1]
        flat, k = s.flatten(1, 2), k.transpose(1, 2)
        # Scaling q instead would be as cheap and round D times as often.
        scale = self.call.factor * self.unit
        if left:
            flat[..., :left].baddbmm_(q, k[..., :left], beta=0, alpha=scale)
        s[..., left:].unflatten(0, part.shape).copy_(strip)
        flat[..., left:].baddbmm_(q, k[..., left:], alpha=scale)
        self.fill_hidden(s, part, block, self.hidden_score)

    def fill_hidden(self, x: Tensor, part: Part, block: RowBlock, value: float) -> None:
        """Writes a value where `key_mask` or `kv_lengths` hide a key; x `[b * h, G, R, C]`."""
        if self.hidden is not None:
            x.unflatten(0, part.shape).masked_fill_(self.hidden[part.batch, None, None, None, block.keys], value)

    def read_first_weight(self, w: Tensor, part: Part, block: RowBlock) -> Tensor:
        """The weight on the document's first key, `[b, h, G, R]`, of w `[b, h, G, R, C]`; 0 where it is not in C."""
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
        """Adds the gradient of a block's scores `[b * h, G, R, C]` to that of the strip."""
        strip = self._cut_strip(dstrip, part, block)
        band = ds[..., ds.shape[-1] - strip.shape[-1] :].unflatten(0, part.shape)
        strip.add_(band[0] if len(band) == 1 else band.sum(0))  # sum would copy the one sequence

    def strip_gradients(self, dstrip: Tensor) -> tuple[Tensor | None, Tensor | None]:
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


def make_blocks(
    shape: tuple[int, int, int],
    documents: list[tuple[slice, slice]],
    window: int | None,
    device_type: str,
    whole_heads: bool,
) -> tuple[int, list[Part], list[RowBlock]]:
    """The largest number of rows of a block, the parts, the first of them the largest, and the blocks of each.

    shape is (B, Hkv, G); documents are rows and keys. Rows are halved down to FULL_ROWS, then sequences, kv heads (but
    for whole_heads) and once more rows, until a block's scores fit the device's budget.
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
    for own, keys in documents:
        offset = keys.stop - own.stop
        for top in range(own.start, own.stop, rows):
            bottom = min(top + rows, own.stop)
            seen_from = keys.start if window is None else max(keys.start, top + offset - window + 1)
            blocks.append(RowBlock(slice(top, bottom), slice(seen_from, bottom + offset), keys.start))
    parts = [
        Part(slice(b, min(b + batch, shape[0])), slice(h, min(h + kv_heads, shape[1])))
        for b, h in product(range(0, shape[0], batch), range(0, shape[1], kv_heads))
    ]
    return rows, parts, blocks


def roll(x: Tensor, shift: Tensor) -> Tensor:
    """Rolls `[B, ..., L, D]` or `[B, L]` along L by `shift` `[B]` places, each sequence by its own."""
    length = x.shape[1] if x.dim() == 2 else x.shape[2]
    index = (torch.arange(length, device=x.device) - shift[:, None]) % length
    return x.gather(1, index) if x.dim() == 2 else x.gather(2, index[:, None, :, None].expand_as(x))
