"""Ratios over other engines, and figures of each kind of prompts with intervals."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from coppice.lab.bench import figures
from coppice.lab.bench.client import OFF, ON
from coppice.lab.bench.comparison import Sample, answers_of, speed_ratios, speeds, tokens_per_s
from coppice.lab.bench.harness.experiment import (
    ByRun,
    Samples,
    at_temperature,
    bootstrap_ratio,
    known,
    rounded,
    spread,
)
from coppice.lab.bench.harness.report import Row
from coppice.lab.bench.peers import hard
from coppice.lab.bench.peers.server import LLAMA_CPP

HUMANEVAL = "humaneval"
# Kinds that have ratios of their own, and all others.
APART = frozenset({HUMANEVAL, *hard.KINDS})
ALL = "all"
LLAMA_CPP_BF16, LLAMA_CPP_Q8_0 = "llama.cpp-bf16", "llama.cpp-q8_0"
# The ratios that the suite is for: contenders that each needs beside ours, and why it may be missing otherwise.
WANTED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "on/off": ((), "temperature 0 was not asked for (--temperature)"),
    "on/off@T1": ((), "temperature 1 was not asked for (--temperature)"),
    "on/llama.cpp-bf16": ((LLAMA_CPP_BF16,), "bf16 was not asked for (--precisions)"),
    "on/llama.cpp-q8_0": ((LLAMA_CPP_Q8_0,), "int8 was not asked for (--precisions)"),
    "on/best-speculative-peer": ((), "no peer that speculates took part"),
    "on/llama.cpp@c16": ((LLAMA_CPP.name,), "16 requests at once were not asked for (--concurrency)"),
    "on/off@humaneval": ((), "no prompts of HumanEval were given (--humaneval)"),
    "hard/off.min": ((), "no hard prompts were asked for (--hard)"),
    "planner/off.min": ((), "no requests at once were asked for (--concurrency)"),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Samples of one stream and of many requests at once, the kind of each prompt, and peers that speculate."""

    alone: Samples[Sample]
    at_once: Samples[Sample]
    kinds: Sequence[str]
    speculative: Collection[str] = ()

    def of(self, kind: str) -> Samples[Sample]:
        """One stream's samples of a kind of prompts, or of all kinds but those with ratios of their own."""
        wanted = {*self.kinds} - APART if kind == ALL else {kind}
        return Samples(one for one in self.alone if self.kinds[_prompt(one)] in wanted)

    def best_speculative(self, temperature: float) -> str | None:
        """The fastest peer that speculates, by its median over runs; None where there is none."""
        samples = self.of(ALL)
        found = {name: known(speeds(samples, name, temperature)) for name in self.speculative}
        medians = {name: statistics.median(values) for name, values in found.items() if values}
        return max(medians, key=medians.__getitem__, default=None)


def peer_ratios(measured: Measured) -> ByRun:
    """Ratios of tokens/s within a run, by name."""
    found: ByRun = {}
    hardest: ByRun = {}
    spec_bench, humaneval = measured.of(ALL), measured.of(HUMANEVAL)
    for temperature in measured.alone.each("temperature"):
        best = measured.best_speculative(temperature)
        others = {"off": OFF, LLAMA_CPP_BF16: LLAMA_CPP_BF16, LLAMA_CPP_Q8_0: LLAMA_CPP_Q8_0}
        for name, other in (others | ({"best-speculative-peer": best} if best else {})).items():
            found[at_temperature(f"on/{name}", temperature)] = speed_ratios(spec_bench, ON, other, temperature)
        found[at_temperature("on/off@humaneval", temperature)] = speed_ratios(humaneval, ON, OFF, temperature)
        for kind in hard.KINDS:
            hardest[at_temperature(f"hard/off.{kind}", temperature)] = speed_ratios(
                measured.of(kind), ON, OFF, temperature
            )
    planned: ByRun = {}
    for size in measured.at_once.each("size"):
        samples = measured.at_once.where(size=size)
        found[f"on/llama.cpp@c{size}"] = speed_ratios(samples, ON, LLAMA_CPP.name, 0.0)
        planned[f"planner/off.c{size}"] = speed_ratios(samples, ON, OFF, 0.0)
    return {**found, **hardest, **planned, **_least("hard/off.min", hardest), **_least("planner/off.min", planned)}


def _least(name: str, ratios: ByRun) -> ByRun:
    """The ratio whose median over runs is least, under a name; none where there is none."""
    values = [runs for runs in ratios.values() if runs]
    return {name: min(values, key=statistics.median)} if values else {}


def absences(ratios: Collection[str], missing: Mapping[str, str]) -> Iterator[str]:
    """Remarks on ratios that are missing; `missing` has the reason of each contender that is."""
    for name, (needed, otherwise) in WANTED.items():
        if name not in ratios:
            reason = next((f"{one}: {missing[one]}" for one in needed if one in missing), otherwise)
            yield f"{name} is missing: {reason}"


def kind_rows(measured: Measured) -> dict[str, Row]:
    """Figures of ours, of llama.cpp and of the best speculative peer by kind of prompts and temperature, by name."""
    rows = {}
    for temperature in measured.alone.each("temperature"):
        names = [name for name in measured.alone.each("contender") if name.startswith((OFF, ON))]
        names += filter(None, dict.fromkeys((LLAMA_CPP_BF16, measured.best_speculative(temperature))))
        for kind in dict.fromkeys((ALL, *measured.kinds)):
            samples = measured.of(kind)
            for name in names:
                if taken := samples.where(contender=name, temperature=temperature):
                    rows[f"{kind}, {name} T={temperature:g}"] = _kind_row(samples, taken, kind)
    return rows


def _kind_row(samples: Samples[Sample], taken: Samples[Sample], kind: str) -> Row:
    first, answers = taken[0], answers_of(taken)
    return {
        "kind": kind,
        "contender": first.contender,
        "temperature": first.temperature,
        "num_prompts": len(set(map(_prompt, taken))),
        "tokens_per_s": spread("it", taken.by_run(tokens_per_s))["it"],
        "mean_acceptance_length": rounded(figures.mean_acceptance_length(answers), 4),
        **_interval("speed_over_off", samples, first, OFF),
        **_interval("speed_over_llama_cpp", samples, first, LLAMA_CPP_BF16),
        "repeated_4grams": round(figures.repeated_4grams(answers), 4),
    }


def _interval(field: str, samples: Samples[Sample], one: Sample, other: str) -> Row:
    """The speed of one sample's contender over another's, median of runs, with a bootstrap interval over prompts.

    Outputs have the same length, so that times say it all.
    """
    ratios = speed_ratios(samples, one.contender, other, one.temperature)
    mine, theirs = (_seconds(samples, name, one.temperature) for name in (one.contender, other))
    ends = bootstrap_ratio([(theirs[prompt], mine[prompt]) for prompt in mine if prompt in theirs])
    low, high = (rounded(end, 4) for end in ends or (None, None))
    return {
        field: rounded(statistics.median(ratios), 4) if ratios else None,
        f"{field}_min": low,
        f"{field}_max": high,
    }


def _seconds(samples: Samples[Sample], contender: str, temperature: float) -> dict[int, float]:
    """Time of all runs by prompt."""
    found: dict[int, float] = defaultdict(float)
    for one in samples.where(contender=contender, temperature=temperature):
        found[_prompt(one)] += one.batch.wall_s
    return found


def _prompt(one: Sample) -> int:
    return one.answers[0].task.prompt
