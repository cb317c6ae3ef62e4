"""Figures of a set of batches, each a function of samples alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coppice.completion import Completion
from coppice.lab.bench.in_pass.measure import BatchSample, Measured
from coppice.lab.bench.in_pass.passes import PassCounts
from orchestrator.request.rounds import REDRAFT

Figure = Callable[[Sequence[BatchSample]], float | None]


def completions_of(samples: Sequence[BatchSample]) -> list[Completion]:
    """All completions, batch by batch."""
    return [completion for sample in samples for completion in sample.outcome.completions]


def tokens_per_s(samples: Sequence[BatchSample]) -> float | None:
    """All tokens over the time of all batches, each until its last request was done."""
    tokens = sum(len(one.token_ids) for one in completions_of(samples))
    return _ratio(tokens, sum(sample.outcome.wall_s for sample in samples))


def mean_acceptance_length(samples: Sequence[BatchSample]) -> float | None:
    """Tokens committed per round, the target's own token included."""
    completions = completions_of(samples)
    return _ratio(sum(len(one.token_ids) for one in completions), num_rounds(samples))


def num_rounds(samples: Sequence[BatchSample]) -> int:
    """Rounds of all requests."""
    return sum(one.speculation.rounds for one in completions_of(samples))


def redraft_rounds(samples: Sequence[BatchSample]) -> int:
    """Rounds that verified the target's own draft as it was: nothing better had arrived."""
    origins = (one.speculation.origins.get(REDRAFT) for one in completions_of(samples))
    return sum(counts.rounds for counts in origins if counts is not None)


def drafted_share(samples: Sequence[BatchSample]) -> float | None:
    """Share of the rounds that had a draft."""
    drafted = sum(sum(one.speculation.rounds_drafted_by_depth[:1]) for one in completions_of(samples))
    return _ratio(drafted, num_rounds(samples))


def passes(samples: Sequence[BatchSample]) -> PassCounts:
    """What the verifier counted while all requests of a batch decoded, over all batches."""
    total = PassCounts()
    for sample in samples:
        total = total.plus(sample.outcome.passes)
    return total


def ms_per_pass(samples: Sequence[BatchSample]) -> float | None:
    """Milliseconds of a pass."""
    return passes(samples).ms_per_pass


def ms_per_whole_row(samples: Sequence[BatchSample]) -> float | None:
    """Milliseconds for each row of passes that could be pruned, and were not."""
    return passes(samples).ms_per_row(pruned=False)


def ms_per_pruned_row(samples: Sequence[BatchSample]) -> float | None:
    """Milliseconds for each row, as they began, of passes that were pruned."""
    return passes(samples).ms_per_row(pruned=True)


def by_run(measured: Measured, contender: str, temperature: float, figure: Figure) -> list[float | None]:
    """A figure of each run, runs in order."""
    return [figure(measured.of(contender, temperature, run)) for run in measured.runs()]


def over(first: Sequence[float | None], second: Sequence[float | None]) -> list[float]:
    """The ratio of two figures, run by run, where there are both."""
    return [mine / theirs for mine, theirs in zip(first, second, strict=True) if mine is not None and theirs]


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
