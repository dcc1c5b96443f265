"""Lazy Attention as Triton kernels: forward, the two backward sweeps, and decoding.

Words and geometry shared by all of them:

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

STRIP_PAD = tl.constexpr(256)
"""At least BLOCK_M + BLOCK_N of every configuration: how far a tile can reach past either end of the bias table."""
EDGE, PLAIN, NEAR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LISTED_TOGETHER = tl.constexpr(16)
ROUNDING = tl.constexpr(2.0**-18)
"""A score computed twice may differ by its last bits: this close to the threshold a tile counts as alive."""


@triton.jit
def _blocks(length, cu_seqlens, documents, BLOCK: tl.constexpr):
    """How many indices `_block` takes; with documents some of them are empty blocks."""
    if cu_seqlens is not None:
        return length // BLOCK + documents
    return tl.cdiv(length, BLOCK)


@triton.jit
def _block(index, batch, rows, keys, kv_lengths, cu_seqlens, documents, OF_KEYS: tl.constexpr, BLOCK: tl.constexpr):
    """First row (key) of a block, their end, the document's first key, and own - row.

    Block floor(start / BLOCK) + d is the first of document d, which leaves each document blocks enough.
    """
    if cu_seqlens is not None:
        low = index * 0
        high = low + documents - 1
        while low < high:
            middle = (low + high + 1) // 2
            if tl.load(cu_seqlens + middle) // BLOCK + middle <= index:
                low = middle
            else:
                high = middle - 1
        start = tl.load(cu_seqlens + low)
        end = tl.load(cu_seqlens + low + 1)
        first = start + (index - start // BLOCK - low) * BLOCK
        shift = low * 0
    else:
        start = index * 0
        length = start + keys
        if kv_lengths is not None:
            length = tl.load(kv_lengths + batch).to(tl.int32)
        shift = length - rows
        end = length if OF_KEYS else start + rows
        first = index * BLOCK
    return first, end, start, shift


@triton.jit
def _theta(tau, head, own, start, window, context_length, entries, THRESHOLD: tl.constexpr):
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
def _rows_of(
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
):
    """`[BLOCK, BLOCK_D]` from row `first` on, 0 beyond `end` (asked for by MASKED) and beyond WIDTH."""
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
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
def _store_rows(base, x, first, end, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes `[BLOCK, BLOCK_D]` from row `first` on, up to `end` and WIDTH; columns are contiguous."""
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    pointers = base + first.to(tl.int64) * stride + row * stride + column
    mask = first + row < end
    if WIDTH < BLOCK_D:
        mask &= column < WIDTH
    tl.store(pointers, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _scores(a, b, own, key, scale, strip, reach, slope, window, KIND: tl.constexpr):
    """Scores of a tile; -inf where hidden. `own` and `key` are shaped to be broadcast against a @ b."""
    s = tl.dot(a, b, input_precision="ieee") * scale
    if slope is not None:
        s -= slope * (own - key).to(tl.float32)
    if KIND == NEAR:
        if strip is not None:
            s += tl.load(strip + (own - key))
        else:
            s = tl.where(own >= key, s, -float("inf"))
    elif KIND == EDGE:
        distance = own - key
        if strip is not None:
            s += tl.load(strip + tl.minimum(distance, reach))
        s = tl.where((distance >= 0) & (distance < window), s, -float("inf"))
    return s


@triton.jit
def _survives(s, p, theta, KIND: tl.constexpr):
    """Which weights are positive. Below a negative threshold a hidden key's 0 would be."""
    if KIND == PLAIN:
        return p > theta
    return (p > theta) & (s > -float("inf"))


@triton.jit
def _softmax(softmax, second, at_row, kept_row):
    """Maximum, sum and 1 / sum of rows; infinity, 1 and 0 for those that are not there or see nothing."""
    top = tl.load(softmax + at_row, mask=kept_row, other=float("inf"))
    total = tl.load(softmax + second + at_row, mask=kept_row, other=0.0)
    sees = total > 0
    total = tl.where(sees, total, 1.0)
    return tl.where(sees, top, float("inf")), total, tl.where(sees, 1.0 / total, 0.0)


@triton.jit
def _any_alive(p, theta):
    """Whether a weight of a tile survives: in each row the largest, if any, so that only p lives on into the branch."""
    # Kept two-dimensional: for sm_100 triton 3.7 fails on a second reduction of one dimension.
    return tl.max((tl.max(p, 1, keep_dims=True) > theta[:, None]).to(tl.int32)) > 0


@triton.jit
def _key_tiles(
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


@triton.jit(do_not_specialize=["size"])
def forward_kernel(
    q,
    k,
    v,
    tau,
    strip,
    slopes,
    kv_lengths,
    cu_seqlens,
    out,
    softmax,
    mass,
    first_weight,
    zeros,
    maxima,
    alive_tiles,
    stride_qb,
    stride_qh,
    stride_ql,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vl,
    stride_vd,
    stride_ob,
    stride_oh,
    stride_ol,
    batches,
    heads,
    group,
    rows,
    keys,
    documents,
    second,
    maxima_row,
    alive_row,
    scale,
    strip_row,
    reach,
    window,
    context_length,
    entries,
    size,  # noqa: ARG001 - what the autotuner tells calls apart by
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    THRESHOLD: tl.constexpr,
    RENORMALISE: tl.constexpr,
    STATS: tl.constexpr,
    UPCAST: tl.constexpr,
    SKIP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Output of all rows, the longest first. Each resident program keeps the row maxima of its block's tiles.

    Products per tile: q.k for maximum and sum; q.k and w.v again only where a weight survives.
    """
    line = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    maxima += tl.program_id(0).to(tl.int64) * maxima_row
    alive_tiles += tl.program_id(0).to(tl.int64) * alive_row
    blocks = _blocks(rows, cu_seqlens, documents, BLOCK_M)
    for item in tl.range(tl.program_id(0), blocks * batches * heads, tl.num_programs(0), disable_licm=True):
        head = item % heads
        batch = item // heads % batches
        index = blocks - 1 - item // heads // batches
        first, end, start, shift = _block(index, batch, rows, keys, kv_lengths, cu_seqlens, documents, False, BLOCK_M)
        low, high, edge, near, tiles = _key_tiles(first, end, start, shift, window, reach, BLOCK_M, BLOCK_N)
        row = first + line
        own = row + shift

        q_base = q + batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
        k_base = k + batch.to(tl.int64) * stride_kb + (head // group).to(tl.int64) * stride_kh
        v_base = v + batch.to(tl.int64) * stride_vb + (head // group).to(tl.int64) * stride_vh
        head_strip = None if strip is None else strip + head.to(tl.int64) * strip_row + STRIP_PAD
        slope = None if slopes is None else tl.load(slopes + head)
        query = _rows_of(q_base, first, end, stride_ql, stride_qd, WIDTH, BLOCK_M, BLOCK_D, True, UPCAST)
        query = tl.where(own[:, None] >= start, query, 0.0).to(query.dtype)  # a row that sees no key may hold NaN

        top = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        for KIND in tl.static_range(3):
            if KIND != EDGE or window is not None:
                for tile in tl.range(
                    0 if KIND == EDGE else (edge if KIND == PLAIN else near),
                    edge if KIND == EDGE else (near if KIND == PLAIN else tiles),
                    disable_licm=True,
                ):
                    at = low + tile * BLOCK_N
                    key = _rows_of(
                        k_base, at, high, stride_kl, stride_kd, WIDTH, BLOCK_N, BLOCK_D, KIND != PLAIN, UPCAST
                    )
                    s = _scores(
                        query,
                        tl.trans(key),
                        own[:, None],
                        (at + column)[None, :],
                        scale,
                        head_strip,
                        reach,
                        slope,
                        window,
                        KIND,
                    )
                    tile_top = tl.max(s, 1)
                    if SKIP:
                        tl.store(maxima + tile * BLOCK_M + line, tile_top)
                    new_top = tl.maximum(top, tile_top)
                    safe = tl.where(new_top > -float("inf"), new_top, 0.0)
                    total = total * tl.exp2(top - safe) + tl.sum(tl.exp2(s - safe[:, None]), 1)
                    top = new_top

        sees = total > 0
        total = tl.where(sees, total, 1.0)
        safe = tl.where(sees, top, 0.0)
        theta = _theta(tau, head, own, start, window, context_length, entries, THRESHOLD)
        cut = theta * total
        limit = safe + tl.log2(tl.where(cut > 0, cut, 1.0))
        limit = tl.where(cut > 0, limit - ROUNDING * (tl.abs(limit) + 16.0), -float("inf"))
        limit = tl.where(row < end, limit, float("inf"))

        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        row_mass = tl.zeros([BLOCK_M], tl.float32)
        row_first = tl.zeros([BLOCK_M], tl.float32)
        survivors = tl.zeros([BLOCK_M], tl.float32)
        tl.debug_barrier()
        listed = tiles * 0
        for KIND in tl.static_range(3):
            if KIND != EDGE or window is not None:
                begin = 0 if KIND == EDGE else (edge if KIND == PLAIN else near)
                stop = edge if KIND == EDGE else (near if KIND == PLAIN else tiles)
                count = stop - begin
                if SKIP:
                    count = listed * 0
                    for some in range(begin, stop, LISTED_TOGETHER):
                        several = some + tl.arange(0, LISTED_TOGETHER)
                        kept = tl.load(
                            maxima + several[None, :] * BLOCK_M + line[:, None],
                            mask=(several < stop)[None, :],
                            other=-float("inf"),
                        )
                        alive = tl.max((kept > limit[:, None]).to(tl.int32), 0)
                        place = listed + count + tl.cumsum(alive, 0) - 1
                        tl.store(alive_tiles + place, several, mask=alive > 0)
                        count += tl.sum(alive)
                    tl.debug_barrier()
                for turn in tl.range(count, disable_licm=True):
                    tile = begin + turn
                    if SKIP:
                        tile = tl.load(alive_tiles + listed + turn)
                    at = low + tile * BLOCK_N
                    key = _rows_of(
                        k_base, at, high, stride_kl, stride_kd, WIDTH, BLOCK_N, BLOCK_D, KIND != PLAIN, UPCAST
                    )
                    value = _rows_of(
                        v_base, at, high, stride_vl, stride_vd, WIDTH, BLOCK_N, BLOCK_D, KIND != PLAIN, UPCAST
                    )
                    s = _scores(
                        query,
                        tl.trans(key),
                        own[:, None],
                        (at + column)[None, :],
                        scale,
                        head_strip,
                        reach,
                        slope,
                        window,
                        KIND,
                    )
                    e = tl.exp2(s - safe[:, None])
                    survives = _survives(s, e, cut[:, None], KIND)
                    w = tl.where(survives, e - cut[:, None], 0.0)
                    acc = tl.dot(w.to(value.dtype), value, acc, input_precision="ieee")
                    if RENORMALISE or STATS:
                        row_mass += tl.sum(w, 1)
                    if STATS:
                        survivors += tl.sum(survives.to(tl.float32), 1)
                        row_first += tl.sum(tl.where((at + column)[None, :] == start, w, 0.0), 1)
                listed += count

        kept_row = row < end
        at_row = (batch.to(tl.int64) * heads + head) * rows + row
        # Weights so far are times the row's sum, like the exponentials: large enough for float16, exact as a softmax.
        divisor = total
        if RENORMALISE:
            divisor = tl.where(row_mass > 0, row_mass, 1.0)
        acc = acc / divisor[:, None]
        out_base = out + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
        _store_rows(out_base, acc, first, end, stride_ol, WIDTH, BLOCK_M, BLOCK_D)
        if softmax is not None:
            tl.store(softmax + at_row, top, mask=kept_row)
            tl.store(softmax + second + at_row, tl.where(sees, total, 0.0), mask=kept_row)
        if mass is not None:
            tl.store(mass + at_row, row_mass, mask=kept_row)
        if STATS:
            seen = tl.maximum(own - start + 1, 0)
            if window is not None:
                seen = tl.minimum(seen, window)
            tl.store(first_weight + at_row, row_first / divisor, mask=kept_row)
            tl.store(zeros + at_row, seen.to(tl.float32) - survivors, mask=kept_row)


@triton.jit(do_not_specialize=["size"])
def query_gradient_kernel(
    q,
    k,
    v,
    tau,
    strip,
    slopes,
    kv_lengths,
    cu_seqlens,
    out,
    grad,
    softmax,
    mass,
    dq,
    delta,
    survivors,
    correction,
    stride_qb,
    stride_qh,
    stride_ql,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vl,
    stride_vd,
    stride_ob,
    stride_oh,
    stride_ol,
    stride_gb,
    stride_gh,
    stride_gl,
    stride_gd,
    stride_dqb,
    stride_dqh,
    stride_dql,
    batches,
    heads,
    group,
    rows,
    keys,
    documents,
    second,
    scale,
    natural_scale,
    strip_row,
    reach,
    window,
    context_length,
    entries,
    size,  # noqa: ARG001 - what the autotuner tells calls apart by
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    THRESHOLD: tl.constexpr,
    RENORMALISE: tl.constexpr,
    UPCAST: tl.constexpr,
    SKIP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dq of one block of rows, and per row delta = sum p m dp and survivors = sum m dp (d tau but for its factor).

    dq = scale (sum p m dp k - delta sum p k) is linear in delta, so one sweep yields both sums and delta itself.
    Products per tile: q.k and p.k; dO.v and (p m dp).k only where a weight survives, and to renormalise (p m).k.
    """
    item = tl.program_id(0)
    head = item % heads
    batch = item // heads % batches
    blocks = _blocks(rows, cu_seqlens, documents, BLOCK_M)
    index = blocks - 1 - item // heads // batches
    first, end, start, shift = _block(index, batch, rows, keys, kv_lengths, cu_seqlens, documents, False, BLOCK_M)
    low, high, edge, near, tiles = _key_tiles(first, end, start, shift, window, reach, BLOCK_M, BLOCK_N)
    line = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    row = first + line
    own = row + shift
    kept_row = row < end
    at_row = (batch.to(tl.int64) * heads + head) * rows + row

    q_base = q + batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    k_base = k + batch.to(tl.int64) * stride_kb + (head // group).to(tl.int64) * stride_kh
    v_base = v + batch.to(tl.int64) * stride_vb + (head // group).to(tl.int64) * stride_vh
    grad_base = grad + batch.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh
    head_strip = None if strip is None else strip + head.to(tl.int64) * strip_row + STRIP_PAD
    slope = None if slopes is None else tl.load(slopes + head)
    query = _rows_of(q_base, first, end, stride_ql, stride_qd, WIDTH, BLOCK_M, BLOCK_D, True, UPCAST)
    query = tl.where(own[:, None] >= start, query, 0.0).to(query.dtype)
    gradient = _rows_of(grad_base, first, end, stride_gl, stride_gd, WIDTH, BLOCK_M, BLOCK_D, True, UPCAST)
    top, total, share = _softmax(softmax, second, at_row, kept_row)
    theta = _theta(tau, head, own, start, window, context_length, entries, THRESHOLD)
    # Exponentials, and so the threshold, are p times the row's sum until the end.
    cut = tl.where(kept_row, theta * total, float("inf"))
    row_mass = tl.zeros([BLOCK_M], tl.float32)
    about_mean = row_mass
    if RENORMALISE:
        row_mass = tl.load(mass + at_row, mask=kept_row, other=0.0)
        out_base = out + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
        output = _rows_of(out_base, first, end, stride_ol, 1, WIDTH, BLOCK_M, BLOCK_D, True, UPCAST)
        about_mean = tl.sum(output.to(tl.float32) * gradient.to(tl.float32), 1)

    surviving = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    attended = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_delta = tl.zeros([BLOCK_M], tl.float32)
    row_survivors = tl.zeros([BLOCK_M], tl.float32)
    row_count = tl.zeros([BLOCK_M], tl.float32)
    row_left = tl.zeros([BLOCK_M], tl.float32)
    kept = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for KIND in tl.static_range(3):
        if KIND != EDGE or window is not None:
            for tile in tl.range(
                0 if KIND == EDGE else (edge if KIND == PLAIN else near),
                edge if KIND == EDGE else (near if KIND == PLAIN else tiles),
                disable_licm=True,
            ):
                at = low + tile * BLOCK_N
                key = _rows_of(k_base, at, high, stride_kl, stride_kd, WIDTH, BLOCK_N, BLOCK_D, KIND != PLAIN, UPCAST)
                value = _rows_of(v_base, at, high, stride_vl, stride_vd, WIDTH, BLOCK_N, BLOCK_D, KIND != PLAIN, UPCAST)
                s = _scores(
                    query,
                    tl.trans(key),
                    own[:, None],
                    (at + column)[None, :],
                    scale,
                    head_strip,
                    reach,
                    slope,
                    window,
                    KIND,
                )
                e = tl.exp2(s - top[:, None])
                if not SKIP or _any_alive(e, cut):
                    survives = _survives(s, e, cut[:, None], KIND)
                    dp = tl.dot(gradient, tl.trans(value), input_precision="ieee")
                    if RENORMALISE:
                        dp -= about_mean[:, None]
                    dp = tl.where(survives, dp, 0.0)
                    row_survivors += tl.sum(dp, 1)
                    row_delta += tl.sum(e * dp, 1)
                    if RENORMALISE:
                        kept = tl.dot(tl.where(survives, e, 0.0).to(key.dtype), key, kept, input_precision="ieee")
                        row_left += tl.sum(tl.where(survives, e - cut[:, None], 0.0) * dp, 1)
                        row_count += tl.sum(survives.to(tl.float32), 1)
                    surviving = tl.dot((e * dp).to(key.dtype), key, surviving, input_precision="ieee")
                attended = tl.dot(e.to(key.dtype), key, attended, input_precision="ieee")

    row_delta *= share
    result = (surviving - row_delta[:, None] * attended) * share[:, None]
    if RENORMALISE:
        # dp stands for (dp - mean) / mass. So far it was centred by `about_mean`, from the rounded output; what that is
        # off, the mean that is `left`, is taken off here.
        inverse = tl.where(row_mass > 0, total / tl.where(row_mass > 0, row_mass, 1.0), 0.0)
        left = row_left * share * inverse
        kept_mass = row_mass * share + tl.where(row_count > 0, theta, 0.0) * row_count
        result -= (kept - kept_mass[:, None] * attended) * (left * share)[:, None]
        result *= inverse[:, None]
        row_delta = (row_delta - left * kept_mass) * inverse
        row_survivors = (row_survivors - left * row_count) * inverse
        tl.store(correction + at_row, about_mean + left, mask=kept_row)
    dq_base = dq + batch.to(tl.int64) * stride_dqb + head.to(tl.int64) * stride_dqh
    _store_rows(dq_base, result * natural_scale, first, end, stride_dql, WIDTH, BLOCK_M, BLOCK_D)
    tl.store(delta + at_row, row_delta, mask=kept_row)
    tl.store(survivors + at_row, row_survivors, mask=kept_row)


@triton.jit
def _add_diagonals(partial, ds, first_distance, reach, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Adds the sums of ds `[BLOCK_M, BLOCK_N]` at equal distance to `partial[distance]`.

    Each row of the tile is turned until column c holds a distance whose remainder by BLOCK_N is c. A program adds to
    its own partial sums only, and always in the same order.
    """
    row = tl.arange(0, BLOCK_M)[:, None]
    remainder = tl.arange(0, BLOCK_N)
    column = (first_distance + row - remainder[None, :]) & (BLOCK_N - 1)
    turned = tl.gather(ds, column, 1)
    distance = first_distance + row - column
    # No tile reaches further than STRIP_PAD below distance 0, so the dividend is positive.
    lowest = (first_distance - BLOCK_N + 1 + STRIP_PAD) // BLOCK_N - STRIP_PAD // BLOCK_N
    for step in tl.static_range((BLOCK_M + BLOCK_N - 2) // BLOCK_N + 2):
        at = (lowest + step) * BLOCK_N + remainder
        sums = tl.sum(tl.where(distance == at[None, :], turned, 0.0), 0)
        within = (at >= 0) & (at < reach)
        tl.store(partial + at, tl.load(partial + at, mask=within, other=0.0) + sums, mask=within)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["size"])
def key_gradient_kernel(
    q,
    k,
    v,
    tau,
    strip,
    slopes,
    kv_lengths,
    cu_seqlens,
    grad,
    softmax,
    mass,
    delta,
    correction,
    dk,
    dv,
    dbias,
    dslopes,
    stride_qb,
    stride_qh,
    stride_ql,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vl,
    stride_vd,
    stride_gb,
    stride_gh,
    stride_gl,
    stride_gd,
    stride_dkb,
    stride_dkh,
    stride_dkl,
    stride_dvb,
    stride_dvh,
    stride_dvl,
    batches,
    kv_heads,
    group,
    rows,
    keys,
    documents,
    second,
    scale,
    natural_scale,
    strip_row,
    reach,
    window,
    context_length,
    entries,
    size,  # noqa: ARG001 - what the autotuner tells calls apart by
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    THRESHOLD: tl.constexpr,
    RENORMALISE: tl.constexpr,
    UPCAST: tl.constexpr,
    SKIP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dk and dv of blocks of keys, those with the most rows first, over all query heads of the group.

    A program keeps to one kv head, so one partial `[W]` of dbias per program and query head is enough. Products per
    tile: k.q and ds.q; v.dO and w.dO only where a weight survives.
    """
    kv_head = tl.program_id(1)
    line = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    heads = kv_heads * group
    if dbias is not None:
        dbias += tl.program_id(0).to(tl.int64) * heads * reach
        for at in range(kv_head * group * reach, (kv_head + 1) * group * reach, BLOCK_M):
            tl.store(dbias + at + line, 0.0, mask=at + line < (kv_head + 1) * group * reach)
        tl.debug_barrier()
    if dslopes is not None:
        dslopes += tl.program_id(0) * heads
        for member in tl.range(group, disable_licm=True):
            tl.store(dslopes + kv_head * group + member, 0.0)
        tl.debug_barrier()
    blocks = _blocks(keys, cu_seqlens, documents, BLOCK_N)
    for item in tl.range(tl.program_id(0), blocks * batches, tl.num_programs(0), disable_licm=True):
        batch = item % batches
        index = item // batches
        first, end, start, shift = _block(index, batch, rows, keys, kv_lengths, cu_seqlens, documents, True, BLOCK_N)
        key_index = first + column
        # Rows that see some of these keys. Keys past the end are past every row's own: NEAR tiles mask them.
        low = tl.maximum(first - shift, 0)
        last_own = end - 1
        if window is not None:
            last_own = tl.minimum(last_own, tl.minimum(first + BLOCK_N, end) - 1 + window - 1)
        high = tl.where(first < end, tl.maximum(last_own + 1 - shift, low), low)
        tiles = tl.cdiv(high - low, BLOCK_M)
        edge = tiles
        if window is not None:
            edge = tl.minimum(tl.maximum(first + window - (low + shift), 0) // BLOCK_M, tiles)
        near = tl.minimum(tl.cdiv(tl.maximum(first + BLOCK_N - 1 + reach - (low + shift), 0), BLOCK_M), edge)

        k_base = k + batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
        v_base = v + batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
        key = _rows_of(k_base, first, end, stride_kl, stride_kd, WIDTH, BLOCK_N, BLOCK_D, True, UPCAST)
        value = _rows_of(v_base, first, end, stride_vl, stride_vd, WIDTH, BLOCK_N, BLOCK_D, True, UPCAST)
        key_gradient = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        value_gradient = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        for member in tl.range(group, disable_licm=True):
            head = kv_head * group + member
            q_base = q + batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
            grad_base = grad + batch.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh
            head_rows = (batch.to(tl.int64) * heads + head) * rows
            head_strip = None if strip is None else strip + head.to(tl.int64) * strip_row + STRIP_PAD
            slope = None if slopes is None else tl.load(slopes + head)
            slope_gradient = tl.zeros([BLOCK_M], tl.float32)
            for KIND in tl.static_range(3):
                if KIND != EDGE or window is not None:
                    for tile in tl.range(
                        edge if KIND == EDGE else (near if KIND == PLAIN else 0),
                        tiles if KIND == EDGE else (edge if KIND == PLAIN else near),
                        disable_licm=True,
                    ):
                        at = low + tile * BLOCK_M
                        row = at + line
                        own = row + shift
                        kept_row = row < high
                        query = _rows_of(q_base, at, high, stride_ql, stride_qd, WIDTH, BLOCK_M, BLOCK_D, True, UPCAST)
                        gradient = _rows_of(
                            grad_base, at, high, stride_gl, stride_gd, WIDTH, BLOCK_M, BLOCK_D, True, UPCAST
                        )
                        top, total, share = _softmax(softmax, second, head_rows + row, kept_row)
                        row_delta = tl.load(delta + head_rows + row, mask=kept_row, other=0.0)
                        theta = _theta(tau, head, own, start, window, context_length, entries, THRESHOLD)
                        cut = tl.where(kept_row, theta * total, float("inf"))
                        s = _scores(
                            query,
                            tl.trans(key),
                            own[:, None],
                            key_index[None, :],
                            scale,
                            head_strip,
                            reach,
                            slope,
                            window,
                            KIND,
                        )
                        e = tl.exp2(s - top[:, None])
                        dp = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                        if not SKIP or _any_alive(e, cut):
                            survives = _survives(s, e, cut[:, None], KIND)
                            w = tl.where(survives, e - cut[:, None], 0.0)
                            dp = tl.dot(gradient, tl.trans(value), input_precision="ieee")
                            divided = share
                            if RENORMALISE:
                                row_mass = tl.load(mass + head_rows + row, mask=kept_row, other=0.0)
                                mean = tl.load(correction + head_rows + row, mask=kept_row, other=0.0)
                                divided = tl.where(row_mass > 0, 1.0 / tl.where(row_mass > 0, row_mass, 1.0), 0.0)
                                dp = (dp - mean[:, None]) * (total * divided)[:, None]
                            w = w * divided[:, None]
                            dp = tl.where(survives, dp, 0.0)
                            value_gradient = tl.dot(
                                tl.trans(w.to(gradient.dtype)), gradient, value_gradient, input_precision="ieee"
                            )
                        ds = e * (share[:, None] * (dp - row_delta[:, None]))
                        key_gradient = tl.dot(tl.trans(ds.to(query.dtype)), query, key_gradient, input_precision="ieee")
                        if dbias is not None and KIND != PLAIN:
                            _add_diagonals(dbias + head * reach, ds, at + shift - first, reach, BLOCK_M, BLOCK_N)
                        if dslopes is not None:
                            slope_gradient += tl.sum(ds * (own[:, None] - key_index[None, :]).to(tl.float32), 1)
            if dslopes is not None:
                tl.store(dslopes + head, tl.load(dslopes + head) - tl.sum(slope_gradient))
                tl.debug_barrier()
        dk_base = dk + batch.to(tl.int64) * stride_dkb + kv_head.to(tl.int64) * stride_dkh
        dv_base = dv + batch.to(tl.int64) * stride_dvb + kv_head.to(tl.int64) * stride_dvh
        last = end if cu_seqlens is not None else keys  # keys past kv_lengths get zeros
        _store_rows(dk_base, key_gradient * natural_scale, first, last, stride_dkl, WIDTH, BLOCK_N, BLOCK_D)
        _store_rows(dv_base, value_gradient, first, last, stride_dvl, WIDTH, BLOCK_N, BLOCK_D)


@triton.jit
def _decode_rows(split, batch, rows, keys, kv_lengths, window, SPAN: tl.constexpr):
    """Keys of a split: first and end, and own - row. Splits are counted from the first key that any row sees."""
    length = split * 0 + keys
    if kv_lengths is not None:
        length = tl.load(kv_lengths + batch).to(tl.int32)
    low = length * 0
    if window is not None:
        low = tl.maximum(length - rows - window + 1, 0)
    first = low + split * SPAN
    return first, tl.minimum(first + SPAN, length), length - rows


@triton.jit
def decode_scores_kernel(
    q,
    k,
    strip,
    slopes,
    kv_lengths,
    scores,
    tops,
    totals,
    stride_qb,
    stride_qh,
    stride_ql,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_kd,
    heads,
    group,
    rows,
    keys,
    splits,
    scale,
    strip_row,
    reach,
    window,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Scores of all queries of a kv head against one split of its keys, which are read once, and their partial sums.

    The block's lines are the rows of every query head of the group.
    """
    split, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end, shift = _decode_rows(split, batch, rows, keys, kv_lengths, window, SPAN)
    line = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    there = line < group * rows
    head = kv_head * group + tl.minimum(line // rows, group - 1)
    row = line % rows
    own = (row + shift)[:, None]
    lane = tl.arange(0, BLOCK_D)[None, :]
    q_rows = q + batch.to(tl.int64) * stride_qb + head.to(tl.int64)[:, None] * stride_qh
    q_rows += row.to(tl.int64)[:, None] * stride_ql + lane.to(tl.int64) * stride_qd
    query = tl.load(q_rows, mask=there[:, None] & (lane < WIDTH), other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    k_base = k + batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    at_row = (batch.to(tl.int64) * heads + head) * rows + row
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for tile in range(tl.cdiv(tl.maximum(end - first, 0), BLOCK_N)):
        at = first + tile * BLOCK_N
        key = _rows_of(k_base, at, end, stride_kl, stride_kd, WIDTH, BLOCK_N, BLOCK_D, True, UPCAST)
        index = (at + column)[None, :]
        distance = own - index
        s = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if slopes is not None:
            s -= tl.load(slopes + head)[:, None] * distance.to(tl.float32)
        visible = there[:, None] & (distance >= 0) & (index < end)
        if window is not None:
            visible &= distance < window
        if strip is not None:
            table = strip + head.to(tl.int64)[:, None] * strip_row + STRIP_PAD
            s += tl.load(table + tl.minimum(distance, reach), mask=visible, other=0.0)
        s = tl.where(visible, s, -float("inf"))
        tl.store(scores + at_row[:, None] * keys + index, s, mask=there[:, None] & (index < end))
        new_top = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new_top > -float("inf"), new_top, 0.0)
        total = total * tl.exp2(top - safe) + tl.sum(tl.exp2(s - safe[:, None]), 1)
        top = new_top
    tl.store(tops + at_row * splits + split, top, mask=there)
    tl.store(totals + at_row * splits + split, total, mask=there)


@triton.jit
def decode_values_kernel(
    v,
    tau,
    kv_lengths,
    scores,
    tops,
    totals,
    parts,
    masses,
    stride_vb,
    stride_vh,
    stride_vl,
    stride_vd,
    heads,
    group,
    rows,
    keys,
    splits,
    window,
    context_length,
    entries,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    THRESHOLD: tl.constexpr,
    UPCAST: tl.constexpr,
    SKIP: tl.constexpr,
    SPLITS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One split's share of the outputs and of the row masses. Values in whose tile no weight survives are not read."""
    split, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end, shift = _decode_rows(split, batch, rows, keys, kv_lengths, window, SPAN)
    line = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    there = line < group * rows
    head = kv_head * group + tl.minimum(line // rows, group - 1)
    row = line % rows
    at_row = (batch.to(tl.int64) * heads + head) * rows + row
    each = tl.arange(0, SPLITS)[None, :]
    known = there[:, None] & (each < splits)
    top = tl.load(tops + at_row[:, None] * splits + each, mask=known, other=-float("inf"))
    total = tl.load(totals + at_row[:, None] * splits + each, mask=known, other=0.0)
    most = tl.max(top, 1)
    most = tl.where(most > -float("inf"), most, 0.0)
    total = tl.sum(total * tl.exp2(top - most[:, None]), 1)
    total = tl.where(total > 0, total, 1.0)
    theta = _theta(tau, head, row + shift, 0, window, context_length, entries, THRESHOLD)
    cut = tl.where(there, theta * total, float("inf"))

    v_base = v + batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    for tile in range(tl.cdiv(tl.maximum(end - first, 0), BLOCK_N)):
        at = first + tile * BLOCK_N
        key = (at + column)[None, :]
        s = tl.load(scores + at_row[:, None] * keys + key, mask=there[:, None] & (key < end), other=-float("inf"))
        e = tl.exp2(s - most[:, None])
        if not SKIP or _any_alive(e, cut):
            survives = _survives(s, e, cut[:, None], NEAR)
            w = tl.where(survives, e - cut[:, None], 0.0)
            value = _rows_of(v_base, at, end, stride_vl, stride_vd, WIDTH, BLOCK_N, BLOCK_D, True, UPCAST)
            acc = tl.dot(w.to(value.dtype), value, acc, input_precision="ieee")
            mass += tl.sum(w, 1)
    acc = acc / total[:, None]
    mass = mass / total
    lane = tl.arange(0, BLOCK_D)[None, :]
    tl.store(parts + (at_row[:, None] * splits + split) * WIDTH + lane, acc, mask=there[:, None] & (lane < WIDTH))
    tl.store(masses + at_row * splits + split, mass, mask=there)
