"""Statistics of the rows of a layer's attention, computed by blocks of rows: `[B, H, T, T]` is never stored."""

from collections import defaultdict
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d, pad

from flash_lazy import RuleWeights
from flash_lazy.call import prepare
from flash_lazy.cpu.ops import find_obstacle
from flash_lazy.cpu.summary import summarise_attention
from lit_lazy.attention import AttentionCall, NormaliserModule
from lit_lazy.attention.normaliser import LazyThreshold, find_lazy_threshold

FIRST_KEYS = 8
"""First keys of a sequence whose weights are stored individually."""
SMALL_WEIGHT = 1e-5
"""Softpick (arXiv 2504.20966) counts weights up to this as 0."""
TILES = (64, 128)
"""Sizes of the square tiles that a block-sparse kernel could skip; each a multiple of the first."""
BLOCK_ROWS = 128
"""Rows per block, if memory allows; larger blocks compute more scores of hidden keys."""


class RowSummary(NamedTuple):
    """One layer on a batch of full sequences; float32, or float64 for float64 queries. Uncounted rows are 0.

    first: `[B, H, T, K]`, weight on each of the first K = min(`FIRST_KEYS`, T) keys, as it multiplies the value.
    mass: `[B, H, T]`, sum of the weights before renormalising.
    total: `[B, H, T]`, sum of the weights as they multiply the values; equals the mass unless renormalised.
    visible: `[T]`, number of visible keys.
    theta: `[B, H, T]`, the threshold; 0 if the normaliser has none.
    zeros: `[B, H, T]`, number of visible keys with a weight of 0 (p <= theta).
    small: `[B, H, T]`, number of visible keys with a weight of at most `SMALL_WEIGHT`.
    entropy: `[B, H, T]`, of the weights / total, nats; 0 where total is 0.
    squares: `[B, H, T]`, sum of the squares of the weights / total; 0 where total is 0.
    score_variance: `[B, H, T]`, of the visible scores (sum of squares / (n - 1)), nats squared, mean over the score
        maps; 0 where n = 1.
    columns: `[B, H, T]`, sum over the rows of the weight on each key.
    alive_tiles: tile size -> `[B, H]`, number of tiles with a weight; 0 for a sequence shorter than the tile.
    tiles: tile size -> `[B]`, number of tiles with a visible key; 0 for a sequence shorter than the tile.
    counted: bool `[B, T]`, the counted rows.
    thresholded: whether the normaliser has a threshold, of any value.
    can_zero: whether weights can be exactly 0, as declared by the normaliser.
    signed: whether weights can be negative.
    renormalised: whether each row's weights were divided by their sum.
    """

    first: Tensor
    mass: Tensor
    total: Tensor
    visible: Tensor
    theta: Tensor
    zeros: Tensor
    small: Tensor
    entropy: Tensor
    squares: Tensor
    score_variance: Tensor
    columns: Tensor
    alive_tiles: dict[int, Tensor]
    tiles: dict[int, Tensor]
    counted: Tensor
    thresholded: bool
    can_zero: bool
    signed: bool
    renormalised: bool


@torch.no_grad()
def summarise(
    normaliser: NormaliserModule, call: AttentionCall, most_scores: int = 2**22, counted: Tensor | None = None
) -> RowSummary:
    """Summary of the rows of a layer's call on full sequences of T tokens.

    counted: bool `[B, T]`, False at padding, which is at the end of a sequence; None counts every row.
    most_scores: maximum number of scores in memory (at least one row of all heads), with about ten numbers for each.
    """
    q, k = call.q, call.k
    batch, heads, length, _ = q.shape
    counted = torch.ones(batch, length, dtype=torch.bool, device=q.device) if counted is None else counted
    compiles = call.backend in ("auto", "cpu") and find_obstacle(q) is None
    if compiles and (threshold := find_lazy_threshold(normaliser)) is not None:
        return _summarise_compiled(normaliser, call, threshold, counted)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    size, n_tiles = TILES[0], -(-length // TILES[0])
    columns = torch.zeros(batch, heads, length, dtype=dtype, device=q.device)
    touched = torch.zeros(batch, heads + 1, n_tiles, n_tiles, dtype=torch.int32, device=q.device)
    by_row: dict[str, Tensor] = defaultdict(lambda: torch.zeros_like(columns))
    first = torch.zeros(batch, heads, length, min(FIRST_KEYS, length), dtype=dtype, device=q.device)
    theta = None
    for sequences, rows in _split_into_blocks(batch, heads * normaliser.maps, length, most_scores):
        keys = k[sequences, :, : rows.stop]
        x = None if call.x is None else call.x[sequences, rows]
        block = normaliser.compute_weights(call._replace(q=q[sequences, :, rows], k=keys, v=keys, x=x))
        theta = normaliser.theta(block.rows)
        counts = counted[sequences, None, rows]
        block = block._replace(w=block.w.masked_fill(~counts[..., None], 0))
        seen = block.rows.visible & counts[..., None]

        for name, values in _summarise_rows(block, theta, seen, counts).items():
            by_row[name][sequences, :, rows] = values
        first[sequences, :, rows, : rows.stop] = block.w[..., : first.shape[-1]]
        columns[sequences, :, : rows.stop] += block.w.sum(2)
        used = torch.cat([block.w != 0, seen], 1)
        used = pad(used, (0, -rows.stop % size)).unflatten(-1, (-1, size)).any(-1).to(touched.dtype)
        tile_rows = torch.arange(rows.start, rows.stop, device=q.device) // size
        touched[sequences, :, :, : used.shape[-1]].index_add_(2, tile_rows, used)

    by_row |= {"first": first, "columns": columns}
    return _join(normaliser, call, by_row, touched, counted, theta is not None)


def _summarise_compiled(
    normaliser: NormaliserModule, call: AttentionCall, threshold: LazyThreshold, counted: Tensor
) -> RowSummary:
    length, size = call.q.shape[2], TILES[0]
    kernel_call = prepare(call._replace(v=call.k).to_kernel(*threshold))
    found = summarise_attention(kernel_call, counted, min(FIRST_KEYS, length), size, SMALL_WEIGHT)._asdict()
    # Counted rows of each square tile that see one of its keys: int32 `[B, 1, n_tiles, n_tiles]`.
    row, tile = torch.arange(length)[:, None], torch.arange(-(-length // size)) * size
    oldest = 0 if call.window is None else row - call.window + 1
    seen = (tile <= row) & (tile + size > oldest) & counted[..., None]
    seen_tiles = pad(seen, (0, 0, 0, -length % size)).unflatten(1, (-1, size)).sum(2, dtype=torch.int32)[:, None]
    touched = torch.cat((found.pop("touched"), seen_tiles), 1)
    found["columns"] = found["columns"].to(call.q.dtype)
    return _join(normaliser, call, found, touched, counted, threshold.tau is not None)


def _join(
    normaliser: NormaliserModule,
    call: AttentionCall,
    found: dict[str, Tensor],
    touched: Tensor,
    counted: Tensor,
    thresholded: bool,
) -> RowSummary:
    """touched: rows of each tile with a nonzero weight; at the last index of the head axis, with a visible key."""
    length = call.q.shape[2]
    alive = {tile: _count_touched(touched, tile, counted) for tile in TILES}
    return RowSummary(
        **found,
        visible=torch.arange(1, length + 1, device=call.q.device).clamp(max=call.window or length),
        alive_tiles={tile: number[:, :-1] for tile, number in alive.items()},
        tiles={tile: number[:, -1] for tile, number in alive.items()},
        counted=counted,
        thresholded=thresholded,
        can_zero=normaliser.can_zero,
        signed=normaliser.signed,
        renormalised=call.renormalise,
    )


def _summarise_rows(block: RuleWeights, theta: Tensor | None, seen: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """The `[B, H, Lq]` fields of `RowSummary` except columns.

    seen: bool `[B, 1, Lq, Lk]`, visible keys of counted rows; counts: bool `[B, 1, Lq]`.
    """
    w, n = block.w, seen.sum(-1)
    total = w.sum(-1)
    share = w / torch.where(total > 0, total, 1)[..., None]
    by_map = block.scores if block.scores.dim() == 5 else block.scores[:, :, None]  # [B, H, maps, Lq, Lk]
    scores = by_map.masked_fill(~seen[:, :, None], 0)
    mean = scores.sum(-1, keepdim=True) / n.clamp(min=1)[:, :, None, :, None]
    deviation = (scores - mean).masked_fill_(~seen[:, :, None], 0)
    variance = deviation.square_().sum(-1) / (n - 1).clamp(min=1)[:, :, None]
    flat = torch.zeros_like(total)
    return {
        "mass": torch.where(counts, block.mass, 0),
        "total": total,
        "theta": flat if theta is None else torch.where(counts, theta.squeeze(-1), 0).expand_as(flat),
        "zeros": ((w == 0) & seen).sum(-1),
        "small": ((w <= SMALL_WEIGHT) & seen).sum(-1),
        "entropy": torch.special.entr(share).sum(-1),
        "squares": share.square().sum(-1),
        "score_variance": variance.mean(2),
    }


def _split_into_blocks(batch: int, heads: int, length: int, most_scores: int) -> list[tuple[slice, slice]]:
    """Slices of sequences and of rows. Heads are not split, as a normaliser has one offset tensor for all heads.

    The last rows come first: their matrices are the largest, so the others fit into the freed memory.
    """
    n_rows = min(BLOCK_ROWS, max(1, most_scores // (heads * length)))
    n_sequences = max(1, most_scores // (heads * length * n_rows))
    sizes = (batch, n_sequences), (length, n_rows)
    sequences, rows = ([slice(i, min(i + step, end)) for i in range(0, end, step)] for end, step in sizes)
    return list(product(sequences, reversed(rows)))


def _count_touched(touched: Tensor, tile: int, counted: Tensor) -> Tensor:
    """`[B, H + 1]`, in sequences of at least one tile."""
    merged = max_pool2d(touched.float(), tile // TILES[0], ceil_mode=True) > 0
    return merged.sum((2, 3)) * (counted.sum(1) >= tile)[:, None]
