"""Rows of a cache benchmark, one flat object per setting, temperature and phase, and what to say beside them.

Rates are of all requests of a run, medians over runs. Latencies are percentiles over all requests of all runs.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from coppice.lab.bench.cache.measure import Answer, Sample
from coppice.lab.bench.cache.phases import EXPLANATIONS, OFF
from coppice.lab.bench.cache.workload import EDITED, NEW, REPEATED, CachePrompt
from coppice.lab.bench.figures import repeated_4grams
from coppice.lab.bench.load.figures import percentile
from coppice.lab.bench.report import LOOPING_SHARE
from orchestrator.prefix_cache.guesses import SOURCE

KINDS = (NEW, REPEATED, EDITED)


@dataclass(frozen=True, slots=True)
class Samples:
    """All samples, and the prompts that their answers name by number."""

    taken: Sequence[Sample]
    prompts: Sequence[CachePrompt]

    def of(self, setting: str, temperature: float, phase: str) -> list[Sample]:
        """One sample per run, in order."""
        wanted = (setting, temperature, phase)
        return [one for one in self.taken if (one.setting, one.temperature, one.phase) == wanted]

    def groups(self) -> list[tuple[str, float, str]]:
        """Setting, temperature and phase of every row, settings and temperatures in the order of the first run."""
        pairs = dict.fromkeys((one.temperature, one.setting) for one in self.taken)
        order = sorted(pairs, key=lambda pair: (pair[0], pair[1] != OFF))
        phases = dict.fromkeys(one.phase for one in self.taken)
        return [(name, heat, phase) for heat, name in order for phase in phases if self.of(name, heat, phase)]

    def reference(self, temperature: float) -> dict[int, tuple[int, ...]]:
        """What speculation off gives, by prompt."""
        [sample] = self.of(OFF, temperature, OFF)
        return {answer.prompt: answer.token_ids for answer in sample.answers}


def rows(samples: Samples) -> list[dict[str, Any]]:
    """One flat object per setting, temperature and phase."""
    return [_row(samples, setting, temperature, phase) for setting, temperature, phase in samples.groups()]


def row_name(setting: str, temperature: float, phase: str) -> str:
    """What a row is called."""
    return f"{setting} T={temperature:g}" if phase == OFF else f"{setting} T={temperature:g} {phase}"


def mean_acceptance_length(answers: Iterable[Answer]) -> float | None:
    """τ: tokens committed per round, of completed requests; None where no round was."""
    completions = [answer.completion for answer in answers if answer.completion is not None]
    rounds = sum(one.speculation.rounds for one in completions)
    return sum(len(one.token_ids) for one in completions) / rounds if rounds else None


def later_acceptance_length(answers: Iterable[Answer]) -> float | None:
    """τ of the rounds behind the first one, of completed requests; None where there was none.

    The first round is the pass that reads the prompt's end, and waits for no draft. The colder the prompt, the longer
    it takes, and the likelier a draft is there by then: that says nothing of what drafts are worth.
    """
    ended = [answer.round_tokens for answer in answers if answer.completion is not None and answer.round_tokens]
    return _tokens_per_round((each, each[0]) for each in ended)


def later_acceptance_ratio(before: Iterable[Answer], after: Iterable[Answer]) -> float | None:
    """τ after over τ before, of the same prompts, from where the first rounds of both were over; None without rounds.

    A draft that is in time for one's first round is in the second of the other, which ends where that one did: behind
    its own first round alone, either would have the other's round for nothing.
    """
    known = {answer.prompt: answer.round_tokens for answer in before if answer.completion and answer.round_tokens}
    pairs = [
        (known[answer.prompt], answer.round_tokens, max(known[answer.prompt][0], answer.round_tokens[0]))
        for answer in after
        if answer.completion and answer.round_tokens and answer.prompt in known
    ]
    divisor = _tokens_per_round((first, start) for first, _, start in pairs)
    value = _tokens_per_round((second, start) for _, second, start in pairs)
    return None if divisor is None or value is None else value / divisor


def _tokens_per_round(outputs: Iterable[tuple[Sequence[int], int]]) -> float | None:
    """Of outputs, each given by the tokens of its rounds, and from which of its tokens on.

    A round counts by the share of its tokens that lie there.
    """
    tokens, rounds = 0, 0.0
    for sizes, start in outputs:
        for size, end in zip(sizes, itertools.accumulate(sizes), strict=True):
            counted = min(size, max(0, end - start))
            tokens += counted
            rounds += counted / size
    return tokens / rounds if rounds else None


def median_ttft_s(answers: Iterable[Answer]) -> float | None:
    """Median time to the first token; None where none came."""
    times = [answer.ttft_s for answer in answers if answer.ttft_s is not None]
    return statistics.median(times) if times else None


def mismatches(result: Iterable[Mapping[str, Any]]) -> list[str]:
    """What breaks the promise: tokens that are not those of the same request with speculation off."""
    return [
        f"{row['name']}: {row['num_requests'] - row['num_identical']} of {row['num_requests']} outputs differ"
        for row in result
        if not row["identical"]
    ]


def remarks(result: Sequence[Mapping[str, Any]], with_redis: bool) -> list[str]:
    """What has to be said beside the figures."""
    notes = [f"{row['name']}: {row['num_failed']} requests failed." for row in result if row["num_failed"]]
    looping = {f"{row['temperature']:g}" for row in result if row["repeated_4grams"] >= LOOPING_SHARE}
    if looping:
        notes.append(
            f"Outputs at T={' and T='.join(sorted(looping))} loop: {LOOPING_SHARE:.0%} or more of their 4-grams "
            "occurred before in the same output, which even a cold cache guesses."
        )
    if not with_redis:
        notes.append("No redis-server is installed: the phases through Redis are left out.")
    return notes


def _row(samples: Samples, setting: str, temperature: float, phase: str) -> dict[str, Any]:
    group = samples.of(setting, temperature, phase)
    answers = [answer for sample in group for answer in sample.answers]
    reference = samples.reference(temperature)
    num_identical = sum(_is_identical(answer, reference[answer.prompt]) for answer in answers)
    return {
        "name": row_name(setting, temperature, phase),
        "setting": setting,
        "temperature": temperature,
        "phase": phase,
        **_spread("mean_acceptance_length", [mean_acceptance_length(sample.answers) for sample in group]),
        **_spread("later_acceptance_length", [later_acceptance_length(sample.answers) for sample in group]),
        **_by_kind(samples, answers),
        "ttft_ms_p50": _ms(percentile(_ttfts(answers), 50)),
        "ttft_ms_p99": _ms(percentile(_ttfts(answers), 99)),
        **_spread("tokens_per_s", [_tokens_per_s(sample.answers) for sample in group]),
        **_cache_counts(group, answers),
        "repeated_4grams": round(repeated_4grams(answer.token_ids for answer in answers), 3),
        "num_requests": len(answers),
        "num_failed": sum(answer.completion is None for answer in answers),
        "num_identical": num_identical,
        "identical": num_identical == len(answers),
        "note": EXPLANATIONS[phase],
    }


def _is_identical(answer: Answer, expected: tuple[int, ...]) -> bool:
    """Of a request that failed, what came of it."""
    return answer.token_ids == (expected if answer.completion else expected[: len(answer.token_ids)])


def _by_kind(samples: Samples, answers: Sequence[Answer]) -> dict[str, float | None]:
    """τ by what prompts' endings are; where some are not the first that were sent with their system prompt."""
    found = {}
    for kind in KINDS:
        value = mean_acceptance_length(one for one in answers if samples.prompts[one.prompt].kind == kind)
        found[f"mean_acceptance_length_{kind}"] = _rounded(value)
    return found


def _cache_counts(group: Sequence[Sample], answers: Sequence[Answer]) -> dict[str, Any]:
    """Nodes of the cache's, what it read, and what of the prompts the verifier had computed before."""
    completions = [answer.completion for answer in answers if answer.completion is not None]
    sources = [one.speculation.sources[SOURCE] for one in completions if SOURCE in one.speculation.sources]
    cached = sum(one.usage.cached_prompt_tokens for one in completions)
    prompt_tokens = sum(one.usage.prompt_tokens for one in completions)
    counts = [asdict(sample.counts) for sample in group]
    return {
        "cache_proposed": sum(one.proposed for one in sources),
        "cache_accepted": sum(one.accepted for one in sources),
        **{f"cache_{name}": sum(one[name] for one in counts) for name in counts[0]},
        "cached_prompt_share": round(cached / prompt_tokens, 3) if prompt_tokens else None,
    }


def _tokens_per_s(answers: Iterable[Answer]) -> float | None:
    """All tokens over all time, prompts and transport included."""
    completed = [answer for answer in answers if answer.completion is not None]
    wall_s = sum(answer.wall_s for answer in completed)
    return sum(len(answer.token_ids) for answer in completed) / wall_s if wall_s else None


def _ttfts(answers: Iterable[Answer]) -> list[float]:
    return [answer.ttft_s for answer in answers if answer.ttft_s is not None]


def _spread(name: str, by_run: Iterable[float | None]) -> dict[str, float | None]:
    """A figure of every run: its median, and the smallest and largest."""
    values = [value for value in by_run if value is not None]
    if not values:
        return {name: None, f"{name}_min": None, f"{name}_max": None}
    middle = statistics.median(values)
    return {name: round(middle, 3), f"{name}_min": round(min(values), 3), f"{name}_max": round(max(values), 3)}


def _ms(time_s: float | None) -> float | None:
    return None if time_s is None else round(1000 * time_s, 3)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
