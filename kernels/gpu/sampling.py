"""Choosing tokens on a device, without sorting the vocabulary and without waiting for a result.

A truncated row is walked best first, so every question about it is one of a threshold: above which logit lies this much
of the weight, or this many tokens? A float's bits, read as an ordered integer, are found four at a time, by sums over
all tokens at or above sixteen candidates. Equal logits are counted and taken by token id. Before that the best few
thousand tokens are copied out, in order of their ids, where they are sure to hold the answer; a histogram says how deep
to go. One program has one row, all of it, so a row's token is the same in every batch.

Weights are float32 and sums float64: a token can differ from the reference's where `uniform` lies within about 1e-6 of
a border.

    program of           computes
    _all_finite          whether one row is finite
    _argmax              one row's best token
    _sample              one row's token
    _count, _penalise    a stretch of one row's known tokens
    _uniform             some rows' random numbers
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 4096  # logits that a pass reads at once
_SEARCH_TILE = 512  # the same where each is compared with sixteen candidates
_MAX_COPIED = 4096  # tokens that are copied out
_TOKENS = 1024  # known tokens of a program that penalises
_LOG2_E = tl.constexpr(1.4426950408889634)
_IN_PROMPT = tl.constexpr(1 << 30)  # a count's mark that the token is in the prompt
_BINS = tl.constexpr(1024)  # of the histogram of distances from the best logit,
_BINS_PER_UNIT = tl.constexpr(16.0)  # this many per unit: the last one holds what is 64 and more below
_LOWEST = tl.constexpr(0x007FFFFF)  # the key of -inf
_MAX_LOGIT = tl.constexpr(1e30)


@triton.jit(do_not_specialize=["size"])
def _all_finite(out, logits, stride_row, size, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    num_bad = tl.zeros((TILE,), tl.int32)
    for start in tl.range(0, size, TILE):
        ids = start + tl.arange(0, TILE)
        x = tl.load(logits + row * stride_row + ids, mask=ids < size, other=0.0)
        num_bad += tl.where(tl.abs(x) < float("inf"), 0, 1)  # a comparison with NaN is false
    tl.store(out + row, tl.sum(num_bad, 0) == 0)


def all_finite(logits: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.sampling.all_finite`."""
    out = torch.empty(logits.shape[0], dtype=torch.bool, device=logits.device)
    if out.numel():
        _all_finite[(out.numel(),)](out, _rows(logits), logits.stride(0), logits.shape[1], TILE=_TILE, num_warps=8)
    return out


@triton.jit(do_not_specialize=["size"])
def _argmax(out, logits, stride_row, size, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    where = tl.arange(0, TILE)
    for start in tl.range(0, size, TILE):
        ids = start + tl.arange(0, TILE)
        x = tl.load(logits + row * stride_row + ids, mask=ids < size, other=float("-inf"))
        is_better = x > best
        best = tl.where(is_better, x, best)
        where = tl.where(is_better, ids, where)
    is_best = best == tl.max(best, 0)
    tl.store(out + row, tl.min(tl.where(is_best, where, size), 0).to(tl.int64))


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.sampling.argmax`."""
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if out.numel():
        _argmax[(out.numel(),)](out, _rows(logits), logits.stride(0), logits.shape[1], TILE=_TILE, num_warps=8)
    return out


@triton.jit
def _scaled(row, ids, size, temperature):
    """Logits divided by the temperature as the reference does, to the last bit; ties there are ties here."""
    x = tl.load(row + ids, mask=ids < size, other=float("-inf"))
    return tl.div_rn(x, tl.zeros_like(x) + temperature) + 0.0  # -0 becomes +0, which is equal to it


@triton.jit
def _weight(scaled, best):
    return tl.exp2((scaled - best) * _LOG2_E)


@triton.jit
def _key(scaled):
    """The bits of a float as an unsigned integer in the same order."""
    bits = scaled.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _value(key):
    """The float of a `_key`."""
    bits = (key ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _threshold(
    row, size, temperature, best, wanted, IS_COUNT: tl.constexpr, IS_ABOVE: tl.constexpr, TILE: tl.constexpr
):
    """The largest key such that the tokens at or above it have the weight or number `wanted` (IS_ABOVE: more of it)."""
    found = tl.zeros((1,), tl.uint32)
    digits = tl.arange(0, 16)
    for step in tl.range(0, 8):
        shift = 28 - 4 * step
        candidates = found + (digits.to(tl.uint32) << shift.to(tl.uint32))  # [16]
        sums = tl.zeros((16, TILE), tl.float32)
        for start in tl.range(0, size, TILE):
            ids = start + tl.arange(0, TILE)
            scaled = _scaled(row, ids, size, temperature)
            keys = tl.where(ids < size, _key(scaled), 0)
            if tl.max((keys >= found).to(tl.int32), 0) > 0:  # later steps find nothing in most tiles
                weights = tl.where(ids < size, 1.0, 0.0) if IS_COUNT else _weight(scaled, best)
                sums += tl.where(keys[None, :] >= candidates[:, None], weights[None, :], 0.0)
        reached = tl.sum(sums.to(tl.float64), 1)  # [16], falling
        is_enough = (reached > wanted) if IS_ABOVE else (reached >= wanted)
        digit = tl.max(tl.where(is_enough, digits, 0), 0)
        found += digit.to(tl.uint32) << shift.to(tl.uint32)
    return found


@triton.jit
def _above(row, size, temperature, best, key, TILE: tl.constexpr):
    """Weight and number of the tokens above `key` [1], and number of those at it."""
    weights = tl.zeros((TILE,), tl.float32)
    num_above, num_equal = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int32)
    for start in tl.range(0, size, TILE):
        ids = start + tl.arange(0, TILE)
        scaled = _scaled(row, ids, size, temperature)
        keys = _key(scaled)
        is_above = (keys > key) & (ids < size)
        weights += tl.where(is_above, _weight(scaled, best), 0.0)
        num_above += is_above.to(tl.int32)
        num_equal += ((keys == key) & (ids < size)).to(tl.int32)
    return tl.sum(weights.to(tl.float64), 0), tl.sum(num_above, 0), tl.sum(num_equal, 0)


@triton.jit
def _nth_equal(row, size, temperature, key, n, TILE: tl.constexpr):
    """Id of the token at `key` [1] that has `n` such tokens before it."""
    chosen = n * 0
    num_before = n * 0
    for start in tl.range(0, size, TILE):
        ids = start + tl.arange(0, TILE)
        is_equal = ((_key(_scaled(row, ids, size, temperature)) == key) & (ids < size)).to(tl.int32)
        num_here = tl.sum(is_equal, 0)
        if (num_before <= n) & (n < num_before + num_here):
            order = num_before + tl.cumsum(is_equal, 0)  # of an equal token: how many until it, itself included
            chosen = tl.sum(tl.where((is_equal > 0) & (order == n + 1), ids, 0), 0)
        num_before += num_here
    return chosen


@triton.jit
def _by_id(row, size, temperature, best, share, TILE: tl.constexpr):
    """Inverse of the CDF over token ids."""
    total = tl.zeros((1,), tl.float64)
    for start in tl.range(0, size, TILE):
        scaled = _scaled(row, start + tl.arange(0, TILE), size, temperature)
        total += tl.sum(_weight(scaled, best).to(tl.float64), 0)
    target = share * total
    running = tl.zeros((1,), tl.float64)
    chosen = tl.zeros((1,), tl.int32) - 1
    last = tl.zeros((1,), tl.int32)  # with a weight: where rounding leads past the end
    for start in tl.range(0, size, TILE):
        ids = start + tl.arange(0, TILE)
        weights = _weight(_scaled(row, ids, size, temperature), best).to(tl.float64)
        reached = running + tl.sum(weights, 0)
        if tl.max(((chosen < 0) & (reached > target)).to(tl.int32), 0) > 0:
            is_before = running + tl.cumsum(weights, 0) <= target
            last_here = tl.max(tl.where(weights > 0, ids, 0), 0)
            chosen = tl.minimum(start + tl.sum(is_before.to(tl.int32), 0), last_here) + chosen * 0
        last = tl.maximum(last, tl.max(tl.where(weights > 0, ids, 0), 0))
        running = reached
    return tl.max(tl.where(chosen < 0, last, chosen), 0)


@triton.jit
def _bin(scaled, best):
    """How far below the best a logit is: 0 .. _BINS - 1."""
    return tl.minimum((best - scaled) * _BINS_PER_UNIT, _BINS - 1.0).to(tl.int32)


@triton.jit
def _copy_best(row, size, temperature, best, copied, copied_ids, MAX_COPIED: tl.constexpr, TILE: tl.constexpr):
    """Copies the best tokens, at most MAX_COPIED, in order of their ids.

    Returns their number, their weight, the weight of all, and what no weight that was left out is above.
    """
    counts = tl.zeros((_BINS,), tl.int32)
    weights = tl.zeros((TILE,), tl.float32)
    for start in tl.range(0, size, TILE):
        ids = start + tl.arange(0, TILE)
        scaled = _scaled(row, ids, size, temperature)
        counts += tl.histogram(_bin(scaled, best), _BINS, mask=ids < size)
        weights += _weight(scaled, best)
    total = tl.sum(weights.to(tl.float64), 0)
    depth = tl.sum((tl.cumsum(counts, 0) <= MAX_COPIED).to(tl.int32), 0)  # bins that are copied
    num_copied = depth * 0
    weights = tl.zeros((TILE,), tl.float32)
    for start in tl.range(0, size, TILE):
        ids = start + tl.arange(0, TILE)
        scaled = _scaled(row, ids, size, temperature)
        is_copied = (_bin(scaled, best) < depth) & (ids < size)
        num_here = tl.sum(is_copied.to(tl.int32), 0)
        if num_here > 0:
            places = num_copied + tl.cumsum(is_copied.to(tl.int32), 0) - 1
            tl.store(copied + places, scaled, mask=is_copied)
            tl.store(copied_ids + places, ids, mask=is_copied)
            weights += tl.where(is_copied, _weight(scaled, best), 0.0)
        num_copied += num_here
    tl.debug_barrier()  # other threads read what these wrote
    bound = tl.where(depth < _BINS, tl.exp2(-depth.to(tl.float32) / _BINS_PER_UNIT * _LOG2_E), 0.0)
    return num_copied, tl.sum(weights.to(tl.float64), 0), total, bound


@triton.jit
def _best_first(
    row, size, temperature, best, mass, k, p, least, share, TILE: tl.constexpr, SEARCH_TILE: tl.constexpr
):  # fmt: skip
    """Inverse of the CDF over the tokens that top_k, top_p and min_p leave, best first: an index into `row`.

    `mass` is what top_p is a share of where there is no top_k.
    """
    # What is left is all tokens above `cut`, and `num_cut` of those at it.
    cut = tl.zeros((1,), tl.uint32) + _LOWEST
    num_cut = size
    if (k > 0) & (k < size):
        cut = _threshold(row, size, temperature, best, k.to(tl.float64), True, False, SEARCH_TILE)
        above, num_above, _ = _above(row, size, temperature, best, cut, TILE)
        num_cut = (k - num_above).to(tl.int32)
        mass = above + num_cut * tl.max(_weight(_value(cut), best), 0).to(tl.float64)
    if p < 1:
        wanted = p * mass
        bound = _threshold(row, size, temperature, best, wanted, False, False, SEARCH_TILE)
        above, _, num_equal = _above(row, size, temperature, best, bound, TILE)
        weight = tl.max(_weight(_value(bound), best), 0).to(tl.float64)
        num = _first_reaching(above, weight, wanted, False)
        is_same = tl.max((bound == cut).to(tl.int32), 0) > 0
        num_cut = tl.minimum(num, tl.where(is_same, num_cut, num_equal))
        cut = tl.maximum(cut, bound)
        mass = above + num_cut * weight
    if least > 0:
        is_binding = tl.max(_weight(_value(cut), best).to(tl.float64), 0) < least
        if is_binding:
            kept = tl.zeros((TILE,), tl.float32)
            for start in tl.range(0, size, TILE):
                weights = _weight(_scaled(row, start + tl.arange(0, TILE), size, temperature), best)
                kept += tl.where(weights.to(tl.float64) >= least, weights, 0.0)
            mass = tl.sum(kept.to(tl.float64), 0)
            cut = tl.zeros((1,), tl.uint32) + _LOWEST  # the weight alone says where the end is
    target = share * mass
    key = _threshold(row, size, temperature, best, target, False, True, SEARCH_TILE)
    key = tl.maximum(key, cut)
    above, _, num_equal = _above(row, size, temperature, best, key, TILE)
    num = _first_reaching(above, tl.max(_weight(_value(key), best), 0).to(tl.float64), target, True)
    is_same = tl.max((key == cut).to(tl.int32), 0) > 0
    num = tl.minimum(num, tl.where(is_same, num_cut, num_equal))
    return _nth_equal(row, size, temperature, key, num - 1, TILE)


@triton.jit
def _first_reaching(above, weight, wanted, IS_ABOVE: tl.constexpr):
    """The least n >= 1 with above + n * weight >= wanted (IS_ABOVE: more than it); the division may be off by one."""
    n = tl.maximum(tl.minimum((wanted - above) / tl.maximum(weight, 1e-300), 1e9), 0.0).to(tl.int32)
    for _ in tl.static_range(2):
        reached = above + n * weight
        n += tl.where((reached <= wanted) if IS_ABOVE else (reached < wanted), 1, 0)
    one_less = above + (n - 1) * weight
    n -= tl.where((one_less > wanted) if IS_ABOVE else (one_less >= wanted), 1, 0)
    return tl.maximum(n, 1)


@triton.jit(do_not_specialize=["size"])
def _sample(
    out, copied, copied_ids, logits, temperatures, top_k, top_p, min_p, uniforms, stride_row, size,
    MAX_COPIED: tl.constexpr, TILE: tl.constexpr, SEARCH_TILE: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride_row
    temperature, share = tl.load(temperatures + number), tl.load(uniforms + number)
    k, p, least = tl.load(top_k + number), tl.load(top_p + number), tl.load(min_p + number)
    bests = tl.full((TILE,), float("-inf"), tl.float32)
    for start in tl.range(0, size, TILE):
        bests = tl.maximum(bests, _scaled(row, start + tl.arange(0, TILE), size, temperature))
    best = tl.max(bests, 0)
    if (k > 0) | (p < 1) | (least > 0):
        copied += number * MAX_COPIED
        copied_ids += number * MAX_COPIED
        num_copied, reached, total, bound = _copy_best(
            row, size, temperature, best, copied, copied_ids, MAX_COPIED, TILE
        )  # fmt: skip
        if k > 0:
            is_enough = num_copied >= k
        elif p < 1:
            is_enough = reached > p * total * (1 + 1e-6)  # a sum in another order differs by rounding
        else:
            is_enough = bound * (1 + 1e-4) < least
        # Else the whole row is searched, which is slow: a flat distribution, or a very large top_k.
        source, num, divisor = row, size, temperature
        if is_enough:
            source, num, divisor = copied, num_copied, temperature * 0 + 1
        chosen = _best_first(source, num, divisor, best, total, k, p, least, share, SEARCH_TILE, SEARCH_TILE)
        if is_enough:
            chosen = tl.load(copied_ids + chosen)
    else:
        chosen = _by_id(row, size, temperature, best, share, TILE)
    tl.store(out + number, chosen.to(tl.int64))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """See `kernels.reference.sampling.sample`; all parameters lie on the device of `logits`."""
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        copied = torch.empty((num_rows, _MAX_COPIED), dtype=torch.float32, device=logits.device)
        copied_ids = torch.empty((num_rows, _MAX_COPIED), dtype=torch.int32, device=logits.device)
        _sample[(num_rows,)](
            out, copied, copied_ids, _rows(logits), temperature, top_k, top_p, min_p, uniform, logits.stride(0),
            vocab_size, MAX_COPIED=_MAX_COPIED, TILE=_TILE, SEARCH_TILE=_SEARCH_TILE, num_warps=8,
        )  # fmt: skip
    return out


@triton.jit
def _mix(state):
    z = state + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit(do_not_specialize=["num_rows"])
def _uniform(out, seeds, positions, num_rows, TILE: tl.constexpr):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    seed = tl.load(seeds + rows, mask=rows < num_rows, other=0).to(tl.uint64, bitcast=True)
    position = tl.load(positions + rows, mask=rows < num_rows, other=0).to(tl.uint64, bitcast=True)
    bits = (_mix(_mix(seed) + position) >> 11).to(tl.int64, bitcast=True)
    tl.store(out + rows, bits.to(tl.float64) * 1.1102230246251565e-16, mask=rows < num_rows)  # 2^-53


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.sampling.uniform`."""
    out = torch.empty(seeds.shape[0], dtype=torch.float64, device=seeds.device)
    if out.numel():
        _uniform[(triton.cdiv(out.numel(), 128),)](out, seeds, positions, out.numel(), TILE=128, num_warps=4)
    return out


@triton.jit(do_not_specialize=["stride_tokens", "vocab_size"])
def _count(
    counts, token_ids, num_prompt_tokens, num_tokens, repetition, presence, frequency, stride_tokens, vocab_size,
    TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(repetition + row) == 1) & (tl.load(presence + row) == 0) & (tl.load(frequency + row) == 0):
        return
    places = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_known = places < tl.load(num_tokens + row)
    ids = tl.load(token_ids + row * stride_tokens + places, mask=is_known, other=0)
    is_output = places >= tl.load(num_prompt_tokens + row)
    entries = counts + row * vocab_size + ids
    tl.atomic_add(entries, 1, mask=is_known & is_output)
    tl.atomic_or(entries, _IN_PROMPT, mask=is_known & (places < tl.load(num_prompt_tokens + row)))


@triton.jit(do_not_specialize=["stride_tokens", "vocab_size"])
def _penalise(
    logits, counts, token_ids, num_tokens, repetition, presence, frequency, stride_row, stride_tokens, vocab_size,
    TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    repeat, present, frequent = tl.load(repetition + row), tl.load(presence + row), tl.load(frequency + row)
    if (repeat == 1) & (present == 0) & (frequent == 0):
        return
    places = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_known = places < tl.load(num_tokens + row)
    ids = tl.load(token_ids + row * stride_tokens + places, mask=is_known, other=0)
    # Whoever takes a token's count applies it; another place of the same token finds zero. So the scratch is clean.
    count = tl.atomic_xchg(counts + row * vocab_size + ids, 0, mask=is_known)
    is_mine = is_known & (count != 0)
    targets = logits + row * stride_row + ids
    x = tl.load(targets, mask=is_mine, other=0.0)
    if repeat != 1:
        x = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repeat), x * repeat)
        x = tl.minimum(tl.maximum(x, -_MAX_LOGIT), _MAX_LOGIT)
    num_output = (count & (_IN_PROMPT - 1)).to(tl.float32)
    x = tl.where(num_output > 0, x - (frequent * num_output + present), x)
    tl.store(targets, x, mask=is_mine)


def penalise(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_prompt_tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """See `kernels.reference.sampling.penalise`; costs what the tokens are, not what the vocabulary is."""
    if not logits.shape[0] or not token_ids.shape[1]:
        return
    if counts.shape != logits.shape or not counts.is_contiguous() or token_ids.stride(1) != 1:
        raise ValueError(f"counts {tuple(counts.shape)} must be a dense {tuple(logits.shape)}, token_ids' rows dense")
    grid = (logits.shape[0], triton.cdiv(token_ids.shape[1], _TOKENS))
    _count[grid](
        counts, token_ids, num_prompt_tokens, num_tokens, repetition, presence, frequency, token_ids.stride(0),
        logits.shape[1], TILE=_TOKENS, num_warps=4,
    )  # fmt: skip
    _penalise[grid](
        _rows(logits), counts, token_ids, num_tokens, repetition, presence, frequency, logits.stride(0),
        token_ids.stride(0), logits.shape[1], TILE=_TOKENS, num_warps=4,
    )  # fmt: skip


def add_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> None:
    """See `kernels.reference.sampling.add_bias`."""
    logits.view(-1).index_add_(0, rows * logits.shape[1] + token_ids, values)


def forbid(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    """See `kernels.reference.sampling.forbid`."""
    logits.view(-1).index_fill_(0, rows * logits.shape[1] + token_ids, -torch.inf)


def _rows(logits: torch.Tensor) -> torch.Tensor:
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits must be float32 with dense rows, got {logits.dtype}, strides {logits.stride()}")
    return logits
