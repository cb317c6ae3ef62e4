"""Compiled draws of tokens from logits: bias, penalties, temperature, cuts and noise in a few sweeps over a row.

The token drawn is the argmax of scores / T + noise in double precision over tokens that no cut removes. No vocabulary
is sorted and no noise is stored. A sweep bounds every token's noisy score from above, in single precision and without
a logarithm; the few whose bound reaches the best so far are computed exactly. For `top_p`, only membership of the drawn
token matters: the sum of likelier tokens' weights decides it. A cut token cuts all below it, and the draw is repeated
among those above.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coppice.kernels.cpu.compiler import compiled, compiled_exactly
from coppice.kernels.cpu.exponentials import exponentials
from coppice.kernels.cpu.noise_words import fill_words
from verifier_svc.kernels.cpu.shared_work import CounterArray, done, take, wait_for

FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# Results in place of a token: the parameters forbid every token; rounding decides whether `top_p` keeps one; no draw
# leads to the row.
NOTHING_ALLOWED, UNDECIDED, NOT_REACHED = -1, -2, -3
# Columns of `rows`.
ROW, SEQUENCE, POSITION, PATH_START, PATH_STOP, FORBIDS_END, PARENT, TOKEN = range(8)
# Columns of `whole`: seed and top_k; then starts of lists in `tokens`, each ending at the next start.
SEED, TOP_K, HISTORY, BIAS, ALLOWED, BAD, ENDS, LISTS_END = range(8)
# Columns of `real`.
TEMPERATURE, TOP_P, LOG_MIN_P, REPETITION, PRESENCE, FREQUENCY, NEAR_TIE_GAP = range(7)

# Tokens whose bounds are computed together: their scratch stays in the L1 cache.
_BLOCK = 512
_LN_2 = 0.6931471805599453
# The largest noise, -log(-log(1 - 2^-33)).
_MOST_NOISE = np.float32(22.9)
# Margin for rounding of bounds.
_MARGIN = 1e-3
# Relative error of sums of weights in single precision.
_WEIGHT_ERROR = 1e-5
_LOWEST = np.float32(-np.inf)
# Slope and offset of an upper bound of the noise in a number's bits: -log x is at most that of its exponent and, by
# linear interpolation between powers of two, of its fraction.
_BITS_SLOPE = np.float32(_LN_2 / 2**23)
_BITS_OFFSET = np.float32(_LN_2 * (32 + 127))
_LARGEST_INVERSE = 1e30


class DrawWork(NamedTuple):
    """Scratch of one thread: maxima of blocks [blocks], and words, numbers and bounds of one block [_BLOCK]."""

    maxima: FloatArray
    words: npt.NDArray[np.uint32]
    numbers: FloatArray
    bounds: FloatArray


class DrawRow(NamedTuple):
    """Scores [vocab] with their maximum, temperature, and the position's noise; `low` is the least kept score.

    `floor` is the least score kept by `min_p`, over the temperature.
    """

    scores: FloatArray
    peak: np.float32
    temperature: float
    inverse: np.float32
    seed: np.uint64
    position: np.uint64
    low: np.float32
    floor: float


@compiled_exactly
def draw_rows(
    logits: FloatArray,
    rows: IntArray,
    whole: IntArray,
    real: DoubleArray,
    tokens: IntArray,
    values: DoubleArray,
    mask: npt.NDArray[np.bool_],
    draws: IntArray,
    starts: IntArray,
    first: int,
    counters: CounterArray,
) -> None:
    """Draw a token from each row that acceptance can reach, shared by all threads that run this.

    Args:
        logits: [K, vocab]; the first is row `first` of the pass.
        rows: [R, 8]: indices into the pass's logits, and into `whole` and `real`; absolute position; range of `tokens`
            with the path from the root to the row's node; whether end tokens are forbidden; the parent's index in
            `rows`, -1 for a root; the node's token, which the parent's draw has to be.
        whole: [sequences, 8], and `real` [sequences, 7]: parameters, by the columns above.
        real: see there.
        tokens: [N]: lists of tokens, and
        values: [N]: counts in the output of the history's tokens and, before it, of the path's; or biases.
        mask: [vocab], tokens allowed by the grammar; [0] without one.
        draws: [R, 2], written for the rows that `logits` has: the token, and whether it was a near-tie.
        starts: [sequences + 1]: index of each sequence's first row, and R.
        first: see `logits`.
        counters: one phase.
    """
    vocab = logits.shape[1]
    work = new_work(vocab)
    scratch = np.empty(0, np.float32)
    sequence = take(counters, 0)
    while sequence < len(whole):
        lists, numbers = whole[sequence], real[sequence]
        for index in range(starts[sequence], starts[sequence + 1]):
            row = rows[index]
            place = row[ROW] - first
            if place < 0 or place >= len(logits):
                continue
            if not _is_reached(row, draws):
                draws[index, 0], draws[index, 1] = NOT_REACHED, 0
                continue
            scores = logits[place]
            if is_edited(row, lists, mask):
                if len(scratch) == 0:
                    scratch = np.empty(vocab, np.float32)
                edit(scores, row, lists, numbers, tokens, values, mask, scratch)
                scores = scratch
            token, is_near_tie = _draw(scores, row[POSITION], lists, numbers, work)
            draws[index, 0], draws[index, 1] = token, is_near_tie
        done(counters, 0)
        sequence = take(counters, 0)
    wait_for(counters, 0, len(whole))


@compiled_exactly
def _is_reached(row: IntArray, draws: IntArray) -> bool:
    """Whether the row's parent has drawn the row's token, as far as that is known."""
    if row[PARENT] < 0:
        return True
    drawn = draws[row[PARENT], 0]
    return drawn in (row[TOKEN], UNDECIDED) or (drawn == NOTHING_ALLOWED and row[TOKEN] == 0)


@compiled_exactly
def new_work(vocab: int) -> DrawWork:
    """Scratch for rows of a vocabulary."""
    return DrawWork(
        np.empty((vocab + _BLOCK - 1) // _BLOCK, np.float32),
        np.empty(_BLOCK, np.uint32),
        np.empty(_BLOCK, np.float32),
        np.empty(_BLOCK, np.float32),
    )


@compiled_exactly
def is_edited(row: IntArray, lists: IntArray, mask: npt.NDArray[np.bool_]) -> bool:
    """Whether scores differ from logits."""
    has_lists = lists[HISTORY] < lists[ENDS] or row[PATH_START] < row[PATH_STOP]
    return has_lists or len(mask) > 0 or (row[FORBIDS_END] != 0 and lists[ENDS] < lists[LISTS_END])


@compiled_exactly
def edit(
    logits: FloatArray,
    row: IntArray,
    lists: IntArray,
    numbers: DoubleArray,
    tokens: IntArray,
    values: DoubleArray,
    mask: npt.NDArray[np.bool_],
    scores: FloatArray,
) -> None:
    """Scores [vocab] of a row of logits: penalties with the row's own history, bias, then forbidden tokens."""
    scores[:] = logits
    _penalise(logits, row, lists, numbers, tokens, values, scores)
    for at in range(lists[BIAS], lists[ALLOWED]):
        scores[tokens[at]] += np.float32(values[at])
    if lists[ALLOWED] < lists[BAD]:
        kept = np.empty(lists[BAD] - lists[ALLOWED], np.float32)
        for at in range(len(kept)):
            kept[at] = scores[tokens[lists[ALLOWED] + at]]
        scores[:] = _LOWEST
        for at in range(len(kept)):
            scores[tokens[lists[ALLOWED] + at]] = kept[at]
    for at in range(lists[BAD], lists[ENDS]):
        scores[tokens[at]] = _LOWEST
    for token in range(len(mask)):
        scores[token] = scores[token] if mask[token] else _LOWEST
    if row[FORBIDS_END] != 0:
        for at in range(lists[ENDS], lists[LISTS_END]):
            scores[tokens[at]] = _LOWEST


@compiled_exactly
def _penalise(
    logits: FloatArray,
    row: IntArray,
    lists: IntArray,
    numbers: DoubleArray,
    tokens: IntArray,
    values: DoubleArray,
    scores: FloatArray,
) -> None:
    """Penalise tokens of the prompt, the output and the path."""
    for at in range(lists[HISTORY], lists[BIAS]):
        token = tokens[at]
        scores[token] = _penalised(logits[token], values[at], numbers)
    for at in range(row[PATH_START], row[PATH_STOP]):
        token, count = tokens[at], values[at]
        for other in range(row[PATH_START], row[PATH_STOP]):
            count += tokens[other] == token
        scores[token] = _penalised(logits[token], count, numbers)


@compiled_exactly
def _penalised(score: np.float32, count: float, numbers: DoubleArray) -> np.float32:
    """Penalised score of a token with this count in the output."""
    penalty = np.float32(numbers[REPETITION])
    if penalty != np.float32(1):
        score = score / penalty if score > 0 else score * penalty
    if count > 0:
        score = np.float32(score - np.float32(numbers[PRESENCE]))
        score = np.float32(np.float64(score) - np.float64(np.float32(numbers[FREQUENCY])) * count)
    return score


@compiled_exactly
def _draw(scores: FloatArray, position: int, lists: IntArray, numbers: DoubleArray, work: DrawWork) -> tuple[int, bool]:
    """Token of a row, and whether it was a near-tie."""
    peak = _fill_maxima(scores, work.maxima)
    if peak == _LOWEST:
        return NOTHING_ALLOWED, False
    first = _first_peak(scores, peak, work.maxima)
    temperature, gap = numbers[TEMPERATURE], numbers[NEAR_TIE_GAP]
    if temperature == 0:
        return first, gap > 0 and np.float64(peak) - np.float64(_kth_largest(scores, 2, work.maxima)) < gap
    top_k, top_p = lists[TOP_K], numbers[TOP_P]
    low = _kth_largest(scores, top_k, work.maxima) if 0 < top_k < len(scores) else _LOWEST
    row = DrawRow(
        scores,
        peak,
        temperature,
        np.float32(min(1 / temperature, _LARGEST_INVERSE)),
        np.uint64(lists[SEED]),
        np.uint64(position),
        low,
        peak / temperature + numbers[LOG_MIN_P],
    )
    slack = gap / temperature
    has_cuts = low > _LOWEST or top_p < 1 or row.floor > -np.inf
    at, token = low, len(scores)
    if row.floor > -np.inf:
        # A bit lower: what `min_p` leaves is decided in double precision.
        floor = row.floor * temperature
        at = max(low, np.float32(floor - 1e-6 * (abs(floor) + abs(peak))))
    while True:
        token, value, second = _noisiest(row, at, token, first, 0.0 if has_cuts else slack, work)
        if top_p == 1 or token == first:
            break
        at = scores[token]
        above, total = _weights(row, at, token, work)
        if above * (1 + _WEIGHT_ERROR) < top_p * total * (1 - _WEIGHT_ERROR):
            break
        if above * (1 - _WEIGHT_ERROR) < top_p * total * (1 + _WEIGHT_ERROR):
            return UNDECIDED, gap > 0
    if gap == 0:
        return token, False
    if not has_cuts:
        return token, value - second < slack
    rival = _best_rival(row, token, value - slack, work)
    is_near_tie = rival > _LOWEST and _may_stay(row, rival, slack, top_k, top_p, numbers[LOG_MIN_P], work)
    return token, is_near_tie or _may_leave(row, token, slack, top_k, top_p, numbers[LOG_MIN_P], work)


@compiled_exactly
def _fill_maxima(scores: FloatArray, maxima: FloatArray) -> np.float32:
    """Largest score of each block [blocks] and of all."""
    bits, largest_bits = scores.view(np.int32), maxima.view(np.int32)
    peak = _LOWEST
    for block in range(len(maxima)):
        part = bits[block * _BLOCK : min((block + 1) * _BLOCK, len(scores))]
        largest = np.int32(-(2**31))
        for index in range(len(part)):
            key = _key(part[index])
            largest = key if key > largest else largest
        largest_bits[block] = _key(largest)
        if maxima[block] > peak:
            peak = maxima[block]
    return peak


@compiled_exactly
def _first_peak(scores: FloatArray, peak: np.float32, maxima: FloatArray) -> int:
    """First token with the largest score."""
    for block in range(len(maxima)):
        if maxima[block] == peak:
            for token in range(block * _BLOCK, min((block + 1) * _BLOCK, len(scores))):
                if scores[token] == peak:
                    return token
    return 0


@compiled_exactly
def _kth_largest(scores: FloatArray, k: int, maxima: FloatArray) -> np.float32:
    """The k-th largest score; -inf if there are fewer."""
    if k > len(scores):
        return _LOWEST
    if k > len(maxima):
        return _selected(scores, k)
    # k blocks have a score at least as large, so the k-th largest of all is too.
    low = _selected(maxima, k)
    count, found = 0, np.empty(np.count_nonzero(maxima >= low) * _BLOCK, np.float32)
    for block in range(len(maxima)):
        if maxima[block] >= low:
            for token in range(block * _BLOCK, min((block + 1) * _BLOCK, len(scores))):
                if scores[token] >= low:
                    found[count] = scores[token]
                    count += 1
    return _selected(found[:count], k)


@compiled_exactly
def _selected(numbers: FloatArray, k: int) -> np.float32:
    """The k-th largest number, by bisection of its bits."""
    bits, answer = numbers.view(np.int32), np.empty(1, np.float32)
    least, most = np.int64(-(2**31)), np.int64(2**31 - 1)
    while least < most:
        middle = np.int32((least + most + 1) >> 1)
        count = 0
        for index in range(len(bits)):
            count += int(_key(bits[index]) >= middle)
        if count >= k:
            least = np.int64(middle)
        else:
            most = np.int64(middle) - 1
    answer.view(np.int32)[0] = _key(np.int32(least))
    return np.float32(answer[0])


@compiled_exactly
def _key(bits: np.int32) -> np.int32:
    """A float's bits as an order-preserving integer, and back: negative ones have all but the sign inverted."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@compiled_exactly
def _noisiest(
    row: DrawRow, at: np.float32, before: int, first: int, slack: float, work: DrawWork
) -> tuple[int, float, float]:
    """Token of the highest noisy score among candidates, that score, and the second highest.

    Candidates are scores above `at`, tokens before `before` with this score, as far as `min_p` keeps them; and `first`,
    which has the largest score of all. The second is exact if within `slack`.
    """
    scores, temperature = row.scores, row.temperature
    base = np.float64(row.peak) / temperature
    margin = _MARGIN + abs(base) * 1e-15
    best, value, second = first, base + _token_noise(row, first, work), -np.inf
    for block in range(len(work.maxima)):
        start, stop = block * _BLOCK, min((block + 1) * _BLOCK, len(scores))
        threshold = np.float32(value - slack - base - margin)
        largest = work.maxima[block]
        if largest < at or (largest - row.peak) * row.inverse + _MOST_NOISE < threshold:
            continue
        fill_words(row.seed, row.position, np.uint64(start // 4), work.words)
        if not _fill_bounds(scores[start:stop], row.peak, row.inverse, at, threshold, work):
            continue
        for token in range(start, stop):
            score = scores[token]
            if work.bounds[token - start] < threshold or score < at or (score == at and token >= before):
                continue
            scaled = np.float64(score) / temperature
            if token == first or scaled < row.floor:
                continue
            noisy = scaled + _noise(work.words[token - start])
            if noisy > value or (noisy == value and token < best):
                best, value, second = token, noisy, value
                threshold = np.float32(value - slack - base - margin)
            elif noisy > second:
                second = noisy
    return best, value, second


@compiled_exactly
def _fill_bounds(
    scores: FloatArray, peak: np.float32, inverse: np.float32, at: np.float32, threshold: np.float32, work: DrawWork
) -> int:
    """Bounds of a block's noisy scores relative to the peak's score; returns the number that reach `threshold`."""
    words, numbers, bounds = work.words, work.numbers, work.bounds
    for index in range(len(scores)):
        # 2^32 (1 - u), a lower bound of 2^32 (-log u).
        numbers[index] = np.float32(~words[index]) + np.float32(0.5)
    bits = numbers.view(np.int32)
    count = 0
    for index in range(len(scores)):
        bound = (scores[index] - peak) * inverse + (_BITS_OFFSET - _BITS_SLOPE * np.float32(bits[index]))
        bounds[index] = bound
        count += (bound >= threshold) & (scores[index] >= at)
    return count


@compiled_exactly
def _token_noise(row: DrawRow, token: int, work: DrawWork) -> float:
    fill_words(row.seed, row.position, np.uint64(token // 4), work.words[:4])
    return _noise(work.words[token % 4])


@compiled_exactly
def _noise(word: np.uint32) -> float:
    """Gumbel noise of a word, as defined in `coppice.core.noise`."""
    return -_logarithm(-_logarithm((np.float64(word) + 0.5) / 4294967296.0))


@compiled_exactly
def _logarithm(number: float) -> float:
    """Logarithm with the same bits on every processor: log(m 2^n) by the series of 2 artanh((m-1)/(m+1))."""
    fraction, exponent = math.frexp(number)
    if fraction < 0.7071067811865476:
        fraction *= 2.0
        exponent -= 1
    ratio = (fraction - 1.0) / (fraction + 1.0)
    square = ratio * ratio
    series = 0.0
    for power in range(23, 0, -2):
        series = series * square + 1.0 / power
    return exponent * _LN_2 + 2.0 * ratio * series


@compiled
def _weights(row: DrawRow, at: np.float32, before: int, work: DrawWork) -> tuple[float, float]:
    """Weights of all tokens kept by `top_k`, relative to the largest: of those above a token, and of all.

    Above are scores higher than `at`, and tokens before `before` with this score.
    """
    scores, powers = row.scores, work.bounds
    above, total, equal = 0.0, 0.0, 0
    for block in range(len(work.maxima)):
        if work.maxima[block] < row.low:
            continue
        start, stop = block * _BLOCK, min((block + 1) * _BLOCK, len(scores))
        part = scores[start:stop]
        for index in range(len(part)):
            powers[index] = (part[index] - row.peak) * row.inverse
        exponentials(powers[: len(part)])
        some_above, some = np.float32(0), np.float32(0)
        for index in range(len(part)):
            power = powers[index] if part[index] >= row.low else np.float32(0)
            some += power
            some_above += power if part[index] > at else np.float32(0)
        above += float(some_above)
        total += float(some)
        if work.maxima[block] >= at:
            for index in range(min(before - start, len(part))):
                equal += part[index] == at
    return above + equal * math.exp((at - row.peak) * row.inverse), total


@compiled_exactly
def _best_rival(row: DrawRow, chosen: int, least: float, work: DrawWork) -> np.float32:
    """Largest score of another token with a noisy score above `least`, ignoring cuts; -inf without one."""
    scores, temperature = row.scores, row.temperature
    base = np.float64(row.peak) / temperature
    threshold = np.float32(least - base - _MARGIN - abs(base) * 1e-15)
    rival = _LOWEST
    for block in range(len(work.maxima)):
        start, stop = block * _BLOCK, min((block + 1) * _BLOCK, len(scores))
        if not work.maxima[block] > rival:
            continue
        fill_words(row.seed, row.position, np.uint64(start // 4), work.words)
        if not _fill_bounds(scores[start:stop], row.peak, row.inverse, rival, threshold, work):
            continue
        for token in range(start, stop):
            score = scores[token]
            if score <= rival or token == chosen or work.bounds[token - start] < threshold:
                continue
            if np.float64(score) / temperature + _noise(work.words[token - start]) > least:
                rival = score
    return rival


@compiled_exactly
def _may_leave(
    row: DrawRow, token: int, slack: float, top_k: int, top_p: float, log_min_p: float, work: DrawWork
) -> bool:
    """Whether rounding could cut a kept token: its own score falls, and those above it rise."""
    score = row.scores[token]
    near = np.float32(score - slack * row.temperature)
    if row.low > _LOWEST and _kth_largest(row.scores, top_k + 1, work.maxima) > near:
        # The best cut token would take its place.
        return True
    if top_p < 1:
        above, total = _weights(row, near, 0, work)
        own = math.exp((score - row.peak) * row.inverse)
        above, rest = above - own, total - above + own
        if row.low > _LOWEST:
            # Of several equal ones at the edge of `top_k` rounding may leave as few as there is room for.
            equal = np.count_nonzero(row.scores >= row.low) - top_k
            rest -= equal * math.exp((row.low - row.peak) * row.inverse)
        if above * math.exp(min(slack, 500.0)) * (1 - top_p) > top_p * rest:
            return True
    others = row.peak if score < row.peak else _kth_largest(row.scores, 2, work.maxima)
    if row.low > _LOWEST and top_k == 1:
        others = _LOWEST
    return bool(others / row.temperature + log_min_p > score / row.temperature - slack)


@compiled_exactly
def _may_stay(
    row: DrawRow, score: np.float32, slack: float, top_k: int, top_p: float, log_min_p: float, work: DrawWork
) -> bool:
    """Whether a token of this score could be kept: it rises, and those well above it fall."""
    reach = np.float32(slack * row.temperature)
    low = np.float32(row.low - reach)
    if row.low > _LOWEST and score <= low:
        return False
    if top_p < 1:
        wider = DrawRow(row.scores, row.peak, row.temperature, row.inverse, row.seed, row.position, low, row.floor)
        above, total = _weights(wider, score + reach, 0, work)
        if above * math.exp(-slack) * (1 - top_p) >= top_p * (total - above):
            return False
    return bool(log_min_p == -np.inf or row.peak / row.temperature + log_min_p < score / row.temperature + slack)
