"""What the Triton kernels share: words, geometry, and the pieces that they are made of.

- A program works on one block of rows (queries) of one head, or on one block of keys of one kv head; it walks along the
  other side in tiles. Blocks never span two documents, and a tile starts at the first key (or row) that counts, so that
  nothing of a neighbour is ever read.
- `own` is the index of the key at a row's own position, `distance = own - key`; a key is visible where
  `0 <= distance < window` and it belongs to the row's document.
- Tiles come in three kinds, in the order of the keys: EDGE (the window ends in it), PLAIN (every key visible to every
  row, and beyond the bias table: neither mask nor bias costs anything), NEAR (the diagonal, and what the bias reaches).
- `strip` holds a head's biases times log2(e) by distance, contiguous, from -STRIP_PAD to W + STRIP_PAD: -inf where the
  distance is negative and 0 from W on. It is the causal mask of a NEAR tile as well as its bias.
- Scores are to the base 2. Of a row's softmax its maximum and its sum are kept (`softmax`, `[2, B, H, Lq]`: the sums
  begin `second` numbers after the maxima), not their log-sum-exp: a float32 of the size of the scores would round all
  weights of a row alike, by more than eager does.

UPCAST widens tiles to float32 as they are read: the interpreter's bfloat16 arithmetic is wrong (triton issue 4972).
"""

import triton
import triton.language as tl

from flash_lazy.fused import configurations

STRIP_PAD = tl.constexpr(256)
"""At least BLOCK_M + BLOCK_N of every configuration: how far a tile can reach past either end of the bias table."""
INTERPRETED = tl.constexpr(configurations.INTERPRETED)
EDGE, PLAIN, NEAR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def count_blocks(length, cu_seqlens, documents, BLOCK: tl.constexpr):
    """How many indices `locate_block` takes; with documents some of them are empty blocks."""
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

    Block floor(start / BLOCK) + d is the first of document d, which leaves each document blocks enough.
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
def thresholds(tau, head, own, start, window, context_length, entries, THRESHOLD: tl.constexpr):
    """Thresholds of rows, float32; rows without a key get one that nothing uses."""
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
    AFRESH: tl.constexpr = tl.constexpr(False),  # noqa: B008 - immutable
):
    """`[BLOCK, BLOCK_D]` from row `first` on, 0 beyond `end` (asked for by MASKED) and beyond WIDTH.

    AFRESH: multiplies each row's offset out here, so that no loop keeps it in registers, of which it may have too few.
    """
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    if AFRESH:
        pointers = base + (first + row).to(tl.int64) * stride + column * stride_d
    else:
        pointers = base + first.to(tl.int64) * stride + row * stride + column * stride_d
    if MASKED and WIDTH < BLOCK_D:
        x = tl.load(pointers, mask=(first + row < end) & (column < WIDTH), other=0.0)
    elif MASKED:
        x = tl.load(pointers, mask=first + row < end, other=0.0)
    elif WIDTH < BLOCK_D:
        x = tl.load(pointers, mask=column < WIDTH, other=0.0)
    else:
        x = tl.load(pointers)
    if UPCAST:
        x = x.to(tl.float32)
    return x


@triton.jit
def store_rows(base, x, first, end, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes `[BLOCK, BLOCK_D]` from row `first` on, up to `end` and WIDTH; columns are contiguous."""
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    pointers = base + first.to(tl.int64) * stride + row * stride + column
    mask = first + row < end
    if WIDTH < BLOCK_D:
        mask &= column < WIDTH
    tl.store(pointers, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def distances(own, first, BLOCK_N: tl.constexpr):
    """How far each key of a tile, `first` the first of them, lies before the rows' own `[M]`; float32 `[M, N]`.

    Exact below 2**24, with a conversion for each row and column instead of one for each score.
    """
    return (own - first).to(tl.float32)[:, None] - tl.arange(0, BLOCK_N).to(tl.float32)[None, :]


@triton.jit
def _read_each(pointers):
    """What the pointers of a tile, float32, point to, read where the compiler holds the scores it is added to.

    A plain load of a tile is spread over the threads along the rows of memory, and brought there by way of shared
    memory, with barriers.
    """
    if INTERPRETED:
        return tl.load(pointers)
    addresses = pointers.to(tl.int64)
    return tl.inline_asm_elementwise("ld.global.nc.f32 $0, [$1];", "=f,l", [addresses], tl.float32, True, 1)


@triton.jit
def tile_scores(a, b, own, first, scale, strip, reach, slope, window, KIND: tl.constexpr, BLOCK_N: tl.constexpr):
    """Scores a @ b of rows whose own keys are `own` and of the keys from `first` on; -inf where hidden."""
    s = tl.dot(a, b, input_precision="ieee") * scale
    column = tl.arange(0, BLOCK_N)[None, :]
    before = (own - first)[:, None]
    distance = before - column
    if slope is not None:
        s -= slope * distances(own, first, BLOCK_N)
    if KIND == NEAR:
        if strip is not None:
            # Summed in 64 bits, so that all of a thread's addresses are one of its rows' plus a constant.
            s += _read_each(strip + before.to(tl.int64) - column.to(tl.int64))
        else:
            s = tl.where(distance >= 0, s, -float("inf"))
    elif KIND == EDGE:
        if strip is not None:
            s += _read_each(strip + tl.minimum(distance, reach))
        s = tl.where((distance >= 0) & (distance < window), s, -float("inf"))
    return s


@triton.jit
def is_positive(s, p, theta, KIND: tl.constexpr):
    """Which weights are positive, or NaN. Below a negative threshold a hidden key's 0 would be."""
    alive = (p <= theta) == 0  # true of NaN, which a negated comparison would be rewritten to swallow
    if KIND == PLAIN:
        return alive
    return alive & (s != -float("inf"))


@triton.jit
def load_softmax(softmax, second, at_row, kept_row):
    """Maximum, sum and 1 / sum of rows; infinity, 1 and 0 for those that are not there or see nothing."""
    top = tl.load(softmax + at_row, mask=kept_row, other=float("inf"))
    total = tl.load(softmax + second + at_row, mask=kept_row, other=0.0)
    sees = total != 0  # a sum that is NaN is one of a row that sees keys
    total = tl.where(sees, total, 1.0)
    return tl.where(sees, top, float("inf")), total, tl.where(sees, 1.0 / total, 0.0)


@triton.jit
def exponentials(s, top):
    """exp2(s - top), at most 1: a row's largest score may come out a rounding above what it was where top was found.

    A row of one key, whose threshold is 1 at tau = 1, would then survive in one kernel and not in another.
    """
    return tl.exp2(tl.minimum(s - top[:, None], 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def any_alive(p, theta):
    """Whether a weight of a tile survives: in each row the largest, if any, so that only p lives on into the branch.

    A NaN in a threshold counts as one that does. One in a score makes the row's sum NaN, and all that it divides.
    """
    # Kept two-dimensional: for sm_100 triton 3.7 fails on a second reduction of one dimension.
    return tl.max(((tl.max(p, 1, keep_dims=True) <= theta[:, None]) == 0).to(tl.int32)) > 0


@triton.jit
def key_tiles(
    first,
    end,
    start,
    shift,
    window,
    reach,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The keys that a block of rows sees: first and end, and where its EDGE, PLAIN and NEAR tiles end."""
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
