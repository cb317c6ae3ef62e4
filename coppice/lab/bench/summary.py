"""From samples to results: a row per contender and temperature, ratios, and who differs from whom.

Ratios compare contenders within each run; the ratio reported is the median over runs. Names: `on/off`,
`on/transformers`, `on/assisted` and `off/transformers` are ratios of tokens/s; `forward-share` and
`forward-share-off` are the shares of our requests' wall time inside the target's forward, with speculation on
and off. Figures at T = 0 have the plain name, those at other temperatures end in `@T1` and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from coppice.lab.bench import figures
from coppice.lab.bench.contenders import Contender
from coppice.lab.bench.latency import Sample

TRANSFORMERS = "transformers"
ASSISTED = "transformers-assisted"
OFF = "coppice-off"
ON = "coppice-on"

SPEED_RATIOS = {
    "on/off": (ON, OFF),
    "on/transformers": (ON, TRANSFORMERS),
    "on/assisted": (ON, ASSISTED),
    "off/transformers": (OFF, TRANSFORMERS),
}
FORWARD_SHARES = {"forward-share": ON, "forward-share-off": OFF}

RATIO_NOTE = (
    "median over runs of the ratio within a run; plain names are T=0, '@T1' marks temperature 1; "
    "forward-share (on) and forward-share-off are shares of our requests' wall time inside the target's "
    "forward"
)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Outputs that differ where they must not: same prompt, temperature, seed and run."""

    contender: str
    reference: str
    temperature: float
    run: int
    prompt: int

    def __str__(self) -> str:
        return (
            f"{self.contender} differs from {self.reference} at T={self.temperature:g} "
            f"on prompt {self.prompt + 1} (run {self.run + 1})"
        )


class Samples:
    """All samples of a benchmark, by contender and temperature."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._groups: dict[tuple[str, float], list[Sample]] = {}
        for sample in samples:
            self._groups.setdefault((sample.contender, sample.temperature), []).append(sample)
        self.temperatures = tuple(dict.fromkeys(temperature for _, temperature in self._groups))
        self.contenders = tuple(dict.fromkeys(name for name, _ in self._groups))

    def of(self, contender: str, temperature: float) -> list[Sample]:
        """A contender's samples at a temperature; empty where it did not take part."""
        return self._groups.get((contender, temperature), [])

    def outputs(self, contender: str, temperature: float) -> dict[tuple[int, int], tuple[int, ...]]:
        """A contender's token ids by (run, prompt)."""
        return {(sample.run, sample.prompt): sample.completion.token_ids for sample in self.of(contender, temperature)}


def rows(samples: Samples, contenders: Sequence[Contender]) -> list[dict[str, Any]]:
    """One flat row per contender and temperature."""
    return [_row(samples, contender, temperature) for temperature in samples.temperatures for contender in contenders]


def ratios(samples: Samples) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The named ratios, and the smallest and largest value of each over the runs."""
    by_run: dict[str, list[float]] = {}
    for temperature in samples.temperatures:
        for name, (first, second) in SPEED_RATIOS.items():
            by_run[ratio_name(name, temperature)] = speed_ratios(samples, first, second, temperature)
        for name, contender in FORWARD_SHARES.items():
            shares = figures.by_run(samples.of(contender, temperature), figures.forward_share)
            by_run[ratio_name(name, temperature)] = shares
    measured = {name: values for name, values in by_run.items() if values}
    middle = {name: round(median(values), 4) for name, values in measured.items()}
    return middle, {name: [round(min(v), 4), round(max(v), 4)] for name, v in measured.items()}


def ratio_name(name: str, temperature: float) -> str:
    """A ratio's name at a temperature."""
    return name if temperature == 0 else f"{name}@T{temperature:g}"


def speed_ratios(samples: Samples, first: str, second: str, temperature: float) -> list[float]:
    """The ratio of two contenders' tokens/s in each run; empty where one did not take part."""
    pair = (samples.of(first, temperature), samples.of(second, temperature))
    speeds = [figures.by_run(group, figures.tokens_per_s) for group in pair]
    return [mine / theirs for mine, theirs in zip(*speeds, strict=False) if theirs]


def mismatches(samples: Samples) -> list[Mismatch]:
    """Every output of ours with speculation on that is not what we gave with speculation off."""
    found = []
    for temperature in samples.temperatures:
        expected = samples.outputs(OFF, temperature)
        for name in samples.contenders:
            if not name.startswith(ON):
                continue
            for key, token_ids in samples.outputs(name, temperature).items():
                if token_ids != expected.get(key):
                    found.append(Mismatch(name, OFF, temperature, *key))
    return found


def _row(samples: Samples, contender: Contender, temperature: float) -> dict[str, Any]:
    group = samples.of(contender.name, temperature)
    completions = [sample.completion for sample in group]
    speeds = figures.by_run(group, figures.tokens_per_s)
    drafted = figures.drafted_share(completions)
    over_off = speed_ratios(samples, contender.name, OFF, temperature)
    return {
        "name": f"{contender.name} T={temperature:g}",
        "contender": contender.name,
        "temperature": temperature,
        "tokens_per_s": round(median(speeds), 3),
        "tokens_per_s_min": round(min(speeds), 3),
        "tokens_per_s_max": round(max(speeds), 3),
        "speed_over_off": round(median(over_off), 4) if over_off else None,
        "mean_acceptance_length": round(figures.mean_acceptance_length(completions), 4),
        "drafted_share": None if drafted is None else round(drafted, 4),
        "acceptance_by_depth": [round(share, 4) for share in figures.acceptance_by_depth(completions)],
        "forward_share": round(figures.forward_share(completions), 4),
        "linger_share": round(figures.linger_share(completions), 4),
        "bubble_ms": round(figures.bubble_ms(completions), 4),
        "draft_ahead_hits": round(figures.draft_ahead_hits(completions), 4),
        "guessed_outcomes": round(figures.guessed_outcomes(completions), 4),
        "early_drafts": round(figures.early_drafts(completions), 4),
        "ttft_ms": round(figures.median_ttft_ms(completions), 3),
        "repeated_4grams": round(figures.repeated_4grams(item.token_ids for item in completions), 4),
        **_identity(samples, contender.name, temperature),
        "ms_per_pass_by_rows": figures.ms_per_pass_by_rows(completions),
        "rounds": sum(item.num_rounds for item in completions),
        "tokens": sum(len(item.token_ids) for item in completions),
        **figures.draft_counts(completions),
        "note": contender.note,
    }


def _identity(samples: Samples, contender: str, temperature: float) -> dict[str, Any]:
    """Whom a contender must agree with, and on how many prompts it does (in every run).

    With speculation on we must repeat what we gave with it off. Under greedy decoding everybody should agree
    with plain `generate`, which sampling cannot ask for: the random numbers are not the same.
    """
    reference = _reference(contender, temperature)
    expected_by_generate = samples.outputs(TRANSFORMERS, 0.0) if temperature == 0 else {}
    given = samples.outputs(contender, temperature)
    num_prompts = len({prompt for _, prompt in given})
    num_identical = None
    if reference is not None:
        num_identical = _num_identical(given, samples.outputs(reference, temperature))
    return {
        "num_prompts": num_prompts,
        "identical": None if num_identical is None else num_identical == num_prompts,
        "identical_to": reference,
        "num_identical": num_identical,
        "num_identical_to_transformers": (
            _num_identical(given, expected_by_generate) if expected_by_generate else None
        ),
    }


def _reference(contender: str, temperature: float) -> str | None:
    if contender.startswith(ON):
        return OFF
    return TRANSFORMERS if temperature == 0 and contender != TRANSFORMERS else None


def _num_identical(
    given: dict[tuple[int, int], tuple[int, ...]], expected: dict[tuple[int, int], tuple[int, ...]]
) -> int:
    differing = {prompt for (run, prompt), ids in given.items() if ids != expected.get((run, prompt))}
    return len({prompt for _, prompt in given} - differing)
