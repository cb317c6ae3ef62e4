"""Figures of a window's answers. What is counted between two times are events: tokens, first tokens, ends.

Names as in AIPerf, save that all latencies count from when a request was to be sent: TTFT is the time to the first
token; ITL here are the gaps between deltas, however many tokens a delta carries (AIPerf's inter-chunk latency); TPOT is
(time of the last token - time of the first) / (tokens - 1) of a request (AIPerf's inter-token latency). Goodput are the
requests per second that meet targets of TTFT and TPOT, over the time in which they arrive: AIPerf divides by the time
until the last answer, which in a short window favours what ends sooner.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from coppice.lab.bench.client import Answer, Fate
from coppice.lab.bench.figures import nodes_per_round

BIN_S = 0.25
# Bins of a running mean: a second, in which the lumps of single rounds even out.
SMOOTHED_BINS = 4
# A level has settled when, for so many bins, every second is within this share of its lasting speed, or as far from it
# as seconds of a level are that has nothing to settle any more.
STEADY_BINS = 8
TOLERANCE = 0.15
# Bins over which the lowest speed of a level is looked for: two seconds.
COLLAPSE_BINS = 8


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a window, seconds of its clock: from `start_s` up to, and without, `end_s`."""

    start_s: float
    end_s: float

    def __contains__(self, at_s: float) -> bool:
        return self.start_s <= at_s < self.end_s

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request has to meet to be of use: limits of its TTFT and of its TPOT."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05

    def met_by(self, answer: Answer) -> bool:
        """Whether a request was completed within both; one of a single token has no TPOT to miss."""
        if answer.fate is not Fate.COMPLETED or answer.ttft_s is None or answer.ttft_s > self.ttft_s:
            return False
        return answer.tpot_s is None or answer.tpot_s <= self.tpot_s


def tokens_per_s(answers: Iterable[Answer], span: Span) -> float:
    """Tokens that came within the span, over its length; those of requests that did not end count too."""
    return sum(delta.num_tokens for answer in answers for delta in answer.deltas if delta.at_s in span) / span.length_s


def ttfts_s(answers: Iterable[Answer], span: Span) -> list[float]:
    """Times to the first token, of requests whose first token came within the span."""
    return [answer.ttft_s for answer in answers if answer.ttft_s is not None and answer.deltas[0].at_s in span]


def gaps_s(answers: Iterable[Answer], span: Span) -> list[float]:
    """Times between two deltas of a request, the later one within the span."""
    return [
        late.at_s - early.at_s for answer in answers for early, late in pairwise(answer.deltas) if late.at_s in span
    ]


def completed(answers: Iterable[Answer], span: Span) -> list[Answer]:
    """Requests that were completed within the span."""
    return [answer for answer in answers if answer.fate is Fate.COMPLETED and answer.ended_s in span]


def tpots_s(answers: Iterable[Answer]) -> list[float]:
    """Times per token after the first, of requests that were completed."""
    return [answer.tpot_s for answer in answers if answer.fate is Fate.COMPLETED and answer.tpot_s is not None]


def num_good(answers: Iterable[Answer], targets: Targets) -> int:
    """Requests that met the targets; refused, failed and cut ones did not."""
    return sum(map(targets.met_by, answers))


def token_bins(answers: Iterable[Answer], span: Span) -> list[float]:
    """Tokens per second in each bin of the span; what is left over at its end is no bin."""
    deltas = [delta for answer in answers for delta in answer.deltas]
    counts = _binned([delta.at_s for delta in deltas], [delta.num_tokens for delta in deltas], span)
    return [float(count / BIN_S) for count in counts]


def node_bins(answers: Iterable[Answer], span: Span) -> list[float | None]:
    """Draft nodes per round by bin: each delta stands for a round with the mean nodes of its request.

    The server counts them for a whole request, when it is completed. None where no delta of such a request came.
    """
    pairs = [(answer, mean) for answer in answers if (mean := nodes_per_round([answer])) is not None]
    times = [delta.at_s for answer, _ in pairs for delta in answer.deltas]
    nodes = _binned(times, [mean for answer, mean in pairs for _ in answer.deltas], span)
    rounds = _binned(times, [1] * len(times), span)
    return [float(total / count) if count else None for total, count in zip(nodes, rounds, strict=True)]


def settle_s(bins: Sequence[float], tolerance: float = TOLERANCE) -> float | None:
    """When a level had settled: the first time after which, for two seconds, every second has about the lasting speed.

    About is: its mean differs by `tolerance` times that at most.
    None where that never comes: in a level of less than two seconds too, and where nothing lasts. A second may begin a
    little before the level is steady. What takes turns within a second is taken for the lumps that rounds come in.
    """
    lasting = lasting_speed(bins)
    steady = [abs(mean - lasting) <= tolerance * lasting for mean in running_mean(bins)]
    num_means = STEADY_BINS - SMOOTHED_BINS + 1
    for first in range(len(steady) - num_means + 1) if lasting else ():
        if all(steady[first : first + num_means]):
            return first * BIN_S
    return None


def strays(bins: Sequence[float]) -> float:
    """By which share of its lasting speed a second of a level's second half differs from it at most; 0 of nothing."""
    lasting = lasting_speed(bins)
    second_half = bins[len(bins) - len(bins) // 2 :]
    return max((abs(mean / lasting - 1) for mean in running_mean(second_half)), default=0.0) if lasting else 0.0


def lost_s(bins: Sequence[float]) -> float | None:
    """What the beginning of a level costs: the tokens by which its first half falls short, in seconds of lasting speed.

    Below 0 where the first half is the faster one; None where nothing comes in the second.

    Lumps of tokens cancel out, so that a level that never stays near its lasting speed has one too.
    """
    half, lasting = len(bins) // 2, lasting_speed(bins)
    return half * BIN_S - sum(bins[:half]) * BIN_S / lasting if lasting else None


def lasting_speed(bins: Sequence[float]) -> float:
    """Of a level: the mean of its second half; 0 of nothing."""
    half = len(bins) // 2
    return statistics.fmean(bins[-half:]) if half else 0.0


def running_mean(bins: Sequence[float], width: int = SMOOTHED_BINS) -> list[float]:
    """Means of so many bins, one for each bin that has as many from itself on."""
    return [statistics.fmean(bins[start : start + width]) for start in range(len(bins) - width + 1)]


def _binned(times_s: Sequence[float], amounts: Sequence[float], span: Span) -> NDArray[np.float64]:
    """Sums of amounts by bins of the span [bins]."""
    # Rounding must not cost a bin.
    edges = span.start_s + BIN_S * np.arange(int(span.length_s / BIN_S + 1e-9) + 1)
    places = np.searchsorted(edges, times_s, side="right") - 1
    sums = np.zeros(len(edges))
    np.add.at(sums, places[places >= 0], np.asarray(amounts, float)[places >= 0])
    return sums[:-1]
