"""Terms, geometry and shared device functions of the Triton kernels.

- A program processes one block of rows (queries) of one head, or one block of keys of one kv head, and iterates over
  the other dimension in tiles. Blocks never span two documents, and the first tile starts at the first relevant key (or
  row), so nothing of a neighbouring document is read.
- `own` is the index of the key at a row's position, `distance = own - key`; a key is visible if
  `0 <= distance < window` and it belongs to the row's document.
- Tiles have three kinds, in the order of the keys: EDGE (contains the end of the window), PLAIN (every key visible to
  every row and beyond the bias table, so without mask and bias), NEAR (the diagonal and the reach of the bias).
- `strip` holds a head's biases times log2(e) by distance, contiguous, from -STRIP_PAD to W + STRIP_PAD: -inf at
  negative distances and 0 from W on. In a NEAR tile it serves as both causal mask and bias.
- Scores are to the base 2. A row's softmax is saved as its maximum and sum (`softmax`, `[2, B, H, Lq]`: the sums start
  `second` numbers after the maxima), not as log-sum-exp: a float32 of the magnitude of the scores would scale all
  weights of a row by a rounding error larger than that of eager.

UPCAST widens tiles to float32 when they are loaded: the interpreter's bfloat16 arithmetic is wrong (triton issue 4972).
"""

import triton
import triton.language as tl

from . import configurations

STRIP_PAD = tl.constexpr(256)
"""At least BLOCK_M + BLOCK_N of every configuration, and 3 BLOCK_N of the bias gradient's: the extent of tiles past
either end of the bias table."""
INTERPRETED = tl.constexpr(configurations.INTERPRETED)
EDGE, PLAIN, NEAR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def count_blocks(length, cu_seqlens, documents, BLOCK: tl.constexpr):
    """Number of block indices for `locate_block`; with documents, some of the blocks are empty."""
    if cu_seqlens is not None:
        return length // BLOCK + documents
    return tl.cdiv(length, BLOCK)


@triton.jit
def locate_block(
    index,
    batch,
    rows,
    keys,
    kv_lengths,
    cu_seqlens,
    cu_seqlens_k,
    documents,
    OF_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """First row (key) of a block, their end, the document's first key, own - row, and the document's first row.

    Block floor(start / BLOCK) + d is the first of document d, which leaves enough blocks for each document.
    """
    if cu_seqlens is not None:
        cuts = cu_seqlens
        if OF_KEYS and cu_seqlens_k is not None:
            cuts = cu_seqlens_k
        low = index * 0
        high = low + documents - 1
        while low < high:
            middle = (low + high + 1) // 2
            if tl.load(cuts + middle) // BLOCK + middle <= index:
                low = middle
            else:
                high = middle - 1
        start = tl.load(cuts + low)
        end = tl.load(cuts + low + 1)
        first = start + (index - start // BLOCK - low) * BLOCK
        shift = low * 0
        top_row = start
        if cu_seqlens_k is not None:
            start = tl.load(cu_seqlens_k + low)
            shift = tl.load(cu_seqlens_k + low + 1) - tl.load(cu_seqlens + low + 1)
            top_row = tl.load(cu_seqlens + low)
    else:
        start = index * 0
        length = start + keys
        if kv_lengths is not None:
            length = tl.load(kv_lengths + batch).to(tl.int32)
        shift = length - rows
        end = length if OF_KEYS else start + rows
        first = index * BLOCK
        top_row = start
    return first, end, start, shift, top_row


@triton.jit
def load_thresholds(tau, head, own, start, window, context_length, entries, THRESHOLD: tl.constexpr):
    """Thresholds of rows, float32; undefined but unused for rows without a key."""
    position = own - start
    seen = position + 1
    if window is not None:
        seen = tl.minimum(seen, window)
    seen = tl.maximum(seen, 1).to(tl.float32)
    if THRESHOLD == "per_token":
        entry = tl.minimum(tl.maximum(position, 0), entries - 1)
        return tl.load(tau + head * entries + entry) / seen
    offset = tl.load(tau + head)
    if THRESHOLD == "per_query":
        return offset / seen
    if THRESHOLD == "seq_len":
        return offset / context_length + 0 * seen
    return offset + 0 * seen


@triton.jit
def load_rows(
    base,
    first,
    end,
    stride,
    stride_d,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
    REMULTIPLY: tl.constexpr = tl.constexpr(False),  # noqa: B008 - immutable
    begin=None,
):
    """Load `[BLOCK, BLOCK_D]` from row `first` on, 0 beyond WIDTH and, with MASKED, beyond `end` and before `begin`.

    REMULTIPLY: multiply the row offsets here instead of keeping them in registers over a loop.
    """
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    if REMULTIPLY:
        pointers = base + (first + row).to(tl.int64) * stride + column * stride_d
    else:
        pointers = base + first.to(tl.int64) * stride + row * stride + column * stride_d
    valid = first + row < end
    if begin is not None:
        valid &= first + row >= begin
    if MASKED and WIDTH < BLOCK_D:
        x = tl.load(pointers, mask=valid & (column < WIDTH), other=0.0)
    elif MASKED:
        x = tl.load(pointers, mask=valid, other=0.0)
    elif WIDTH < BLOCK_D:
        x = tl.load(pointers, mask=column < WIDTH, other=0.0)
    else:
        x = tl.load(pointers)
    if UPCAST:
        x = x.to(tl.float32)
    return x


@triton.jit
def describe_rows(
    base, end, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, DESCRIBED: tl.constexpr
):
    """What `load_tile` reads rows of up to `end` from: a tensor descriptor with DESCRIBED, otherwise their address."""
    if DESCRIBED:
        base = tl.make_tensor_descriptor(base, shape=[end, WIDTH], strides=[stride, 1], block_shape=[BLOCK, BLOCK_D])  # pyrefly: ignore
    return base


@triton.jit
def load_tile(
    rows,
    first,
    end,
    stride,
    stride_d,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
    DESCRIBED: tl.constexpr,
    REMULTIPLY: tl.constexpr = tl.constexpr(False),  # noqa: B008 - immutable
):
    """`load_rows` in a loop, from the result of `describe_rows`, whose descriptor reads 0 beyond its end by itself."""
    if DESCRIBED:
        x = rows.load([first, 0])
        if UPCAST:
            x = x.to(tl.float32)
    else:
        x = load_rows(rows, first, end, stride, stride_d, WIDTH, BLOCK, BLOCK_D, MASKED, UPCAST, REMULTIPLY)
    return x


@triton.jit
def store_rows(base, x, first, end, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store `[BLOCK, BLOCK_D]` from row `first` on, up to `end` and WIDTH; columns are contiguous."""
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    pointers = base + first.to(tl.int64) * stride + row * stride + column
    mask = first + row < end
    if WIDTH < BLOCK_D:
        mask &= column < WIDTH
    tl.store(pointers, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def add_rows(base, x, first, end, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Add `[BLOCK, BLOCK_D]` atomically to contiguous rows of WIDTH from row `first` on, up to `end`."""
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = (first + row < end) & (column < WIDTH)
    tl.atomic_add(base + (first + row).to(tl.int64) * WIDTH + column, x, mask=mask, sem="relaxed")


@triton.jit
def _load_elementwise(pointers):
    """Load float32 values in the register layout of the scores to which they are added.

    A plain load uses a layout along the rows of memory and converts it through shared memory, with barriers.
    """
    if INTERPRETED:
        return tl.load(pointers)
    addresses = pointers.to(tl.int64)
    return tl.inline_asm_elementwise("ld.global.nc.f32 $0, [$1];", "=f,l", [addresses], tl.float32, True, 1)


@triton.jit
def compute_tile_scores(
    a, b, own, first, scale, strip, reach, slope, window, KIND: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Scores of the rows with own keys `own` and the keys from `first` on, and their factor: see `place_scores`."""
    s = tl.dot(a, b, input_precision="ieee")
    return place_scores(
        s, (own - first)[:, None], tl.arange(0, BLOCK_N)[None, :], scale, strip, reach, slope, window, KIND
    )


@triton.jit
def place_scores(s, offset, column, scale, strip, reach, slope, window, KIND: tl.constexpr):
    """Scores from products s of rows and keys at the distances offset - column; -inf where hidden.

    Also their factor: `scale` where nothing is added to a product, so that one instruction scales it and subtracts the
    row's maximum; otherwise 1. offset: own - first key of the tile, of each row; column: 0, 1, ... of each key; both
    with an axis of size 1.
    """
    factor = scale if KIND == PLAIN and slope is None else 1.0
    if KIND != PLAIN or slope is not None:
        s *= scale
    if slope is not None:
        s -= slope * compute_distances(offset, column)
    distance = offset - column
    if KIND == NEAR:
        if strip is not None:
            # Summed in 64 bits, so that each of a thread's addresses is that of its row plus a constant.
            s += _load_elementwise(strip + offset.to(tl.int64) - column.to(tl.int64))
        else:
            s = tl.where(distance >= 0, s, -float("inf"))
    elif KIND == EDGE:
        if strip is not None:
            s += _load_elementwise(strip + tl.minimum(distance, reach))
        s = tl.where((distance >= 0) & (distance < window), s, -float("inf"))
    return s, factor


@triton.jit
def compute_distances(offset, column):
    """offset - column in float32, exact below 2**24: one conversion per row and column instead of one per score."""
    return offset.to(tl.float32) - column.to(tl.float32)


@triton.jit
def is_positive(s, p, theta, KIND: tl.constexpr):
    """Mask of the weights that are positive or NaN, excluding hidden keys, whose 0 may exceed a negative threshold."""
    alive = (p <= theta) == 0  # true for NaN; the compiler would rewrite a negated comparison to be false
    if KIND == PLAIN:
        return alive
    return alive & (s != -float("inf"))


@triton.jit
def load_softmax(softmax, second, row_index, valid_row):
    """Maximum, sum and 1 / sum of rows; infinity, 1 and 0 for rows out of range or without a visible key."""
    top = tl.load(softmax + row_index, mask=valid_row, other=float("inf"))
    total = tl.load(softmax + second + row_index, mask=valid_row, other=0.0)
    has_key = total != 0  # also true for NaN
    total = tl.where(has_key, total, 1.0)
    return tl.where(has_key, top, float("inf")), total, tl.where(has_key, 1.0 / total, 0.0)


@triton.jit
def store_by_row(by_row, survivors, second, row_index, valid_row, top, cut, share, delta, row_survivors):
    """Store what the sweep over keys leaves of rows; `load_by_row` reads all but row_survivors."""
    by_row += row_index
    tl.store(by_row, top, mask=valid_row)
    tl.store(by_row + second, cut, mask=valid_row)
    tl.store(by_row + 2 * tl.cast(second, tl.int64), share, mask=valid_row)
    tl.store(by_row + 3 * tl.cast(second, tl.int64), share * delta, mask=valid_row)
    tl.store(survivors + row_index, row_survivors, mask=valid_row)


@triton.jit
def load_by_row(by_row, second, row_index, valid_row):
    """Of rows: maximum, threshold times sum, 1 / sum, delta / sum; of rows out of range those that leave no weight."""
    by_row += row_index
    top = tl.load(by_row, mask=valid_row, other=float("inf"))
    cut = tl.load(by_row + second, mask=valid_row, other=float("inf"))
    share = tl.load(by_row + 2 * tl.cast(second, tl.int64), mask=valid_row, other=0.0)
    mean = tl.load(by_row + 3 * tl.cast(second, tl.int64), mask=valid_row, other=0.0)
    return top, cut, share, mean


@triton.jit
def compute_exponentials(s, factor, top):
    """exp2(s factor - top), at most 1: the recomputed largest score of a row may exceed `top` by a rounding error.

    Otherwise a row of one key, with threshold 1 at tau = 1, could survive in one kernel and not in another.
    """
    return tl.exp2(tl.minimum(s * factor - top, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def has_survivor(p, theta):
    """Whether a weight of a tile survives, tested on the row maxima, so that only p stays live into the branch.

    A NaN threshold counts as a survivor. A NaN score makes the row's sum NaN, and so all of its results.
    """
    # Two-dimensional, because triton 3.7 for sm_100 fails on a second reduction to one dimension.
    return tl.max(((tl.max(p, 1, keep_dims=True) <= theta[:, None]) == 0).to(tl.int32)) > 0


@triton.jit
def locate_key_tiles(
    first,
    end,
    start,
    shift,
    window,
    reach,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Keys visible to a block of rows: first and end, and the ends of its EDGE, PLAIN and NEAR tiles."""
    own_first = first + shift
    own_last = tl.minimum(first + BLOCK_M, end) - 1 + shift
    low = start
    if window is not None:
        low = tl.maximum(start, own_first - window + 1)
    high = tl.where(first < end, tl.maximum(own_last + 1, low), low)
    tiles = tl.cdiv(high - low, BLOCK_N)
    edge = low * 0
    if window is not None:
        edge = tl.minimum(tl.cdiv(tl.maximum(own_last - window + 1 - low, 0), BLOCK_N), tiles)
    near = tl.maximum(own_first + 1 - reach - low, 0) // BLOCK_N
    return low, high, edge, tl.minimum(tl.maximum(near, edge), tiles), tiles
