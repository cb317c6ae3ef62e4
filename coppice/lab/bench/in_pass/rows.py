"""A flat row per group, variant and temperature, and every token that is not plain decoding's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from coppice.lab.bench import figures as text_figures
from coppice.lab.bench.in_pass import figures
from coppice.lab.bench.in_pass.measure import BatchSample, Measured
from coppice.lab.bench.in_pass.variants import Variant
from coppice.lab.bench.summary import OFF, Mismatch

# Token ids of plain decoding by temperature and number of the request.
Expected = Mapping[tuple[float, int], tuple[int, ...]]


def rows(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """The rows of all groups; names are unique with the group's in front."""
    expected = plain_outputs(measured)
    return [
        _row(one, variant, note, temperature, expected)
        for one in measured
        for temperature in one.temperatures
        for variant, note in zip(one.group.variants, one.notes, strict=True)
    ]


def plain_outputs(measured: Iterable[Measured]) -> dict[tuple[float, int], tuple[int, ...]]:
    """What plain decoding said first to each request; runs and groups have the same ones."""
    found: dict[tuple[float, int], tuple[int, ...]] = {}
    for one in measured:
        for sample in one.samples:
            if sample.contender == OFF:
                for number, token_ids in _outputs(sample):
                    found.setdefault((sample.temperature, number), token_ids)
    return found


def mismatches(measured: Sequence[Measured]) -> list[Mismatch]:
    """Every output that is not that of plain decoding, later ones of plain decoding included."""
    expected = plain_outputs(measured)
    return [
        Mismatch(sample.contender, OFF, sample.temperature, sample.run, number)
        for one in measured
        for sample in one.samples
        for number in _differing(sample, expected)
    ]


def _row(measured: Measured, variant: Variant, note: str, temperature: float, expected: Expected) -> dict[str, Any]:
    name, group = variant.contender, measured.group
    samples = measured.of(name, temperature)
    speeds = _known(figures.by_run(measured, name, temperature, figures.tokens_per_s))
    plain = figures.by_run(measured, OFF, temperature, figures.tokens_per_s)
    over_off = figures.over(figures.by_run(measured, name, temperature, figures.tokens_per_s), plain)
    completions = figures.completions_of(samples)
    differing = [number for sample in samples for number in _differing(sample, expected)]
    counts = figures.passes(samples)
    return {
        "name": f"{group.name}: {name} T={temperature:g}",
        "group": group.name,
        "contender": name,
        "temperature": temperature,
        "batch_size": group.batch_size,
        "max_nodes": variant.max_nodes,
        "tokens_per_s": round(median(speeds), 3),
        "tokens_per_s_min": round(min(speeds), 3),
        "tokens_per_s_max": round(max(speeds), 3),
        "speed_over_off": round(median(over_off), 4) if over_off else None,
        "mean_acceptance_length": _rounded(figures.mean_acceptance_length(samples)),
        "drafted_share": _rounded(figures.drafted_share(samples)),
        "rounds": figures.num_rounds(samples),
        "redraft_rounds": figures.redraft_rounds(samples),
        "redraft_tokens": sum(one.speculation.redraft_tokens for one in completions),
        "draft_tokens": sum(one.speculation.draft_tokens for one in completions),
        "accepted_tokens": sum(one.speculation.accepted_tokens for one in completions),
        "passes": counts.num_passes,
        "ms_per_pass": _rounded(counts.ms_per_pass),
        "rows_per_pass": _rounded(counts.rows_per_pass),
        "rows_left_per_pass": _rounded(counts.rows_left),
        "masks_per_pass": _rounded(counts.masks_per_pass),
        "pruned_passes": counts.num_pruned_passes,
        "removed_share": _rounded(counts.removed_share),
        "ms_per_whole_row": _rounded(counts.ms_per_row(pruned=False)),
        "ms_per_pruned_row": _rounded(counts.ms_per_row(pruned=True)),
        "identical": not differing,
        "num_identical": len(completions) - len(differing),
        "num_requests": len(completions),
        "repeated_4grams": round(text_figures.repeated_4grams(one.token_ids for one in completions), 4),
        "note": note,
    }


def _outputs(sample: BatchSample) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The number of each request, and its tokens."""
    for number, completion in enumerate(sample.outcome.completions, sample.first):
        yield number, completion.token_ids


def _differing(sample: BatchSample, expected: Expected) -> list[int]:
    return [number for number, token_ids in _outputs(sample) if token_ids != expected.get((sample.temperature, number))]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
