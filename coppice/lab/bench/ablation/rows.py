"""A row per group, variant and temperature: the latency benchmark's figures, and what the drafters counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coppice.lab.bench import figures, summary
from coppice.lab.bench.ablation.measure import Measured
from coppice.lab.bench.ablation.meters import Reading

# A third of a row of the latency benchmark, whose business it is.
_PASS_TIMES = "ms_per_pass_by_rows"
# Of outputs that follow the target's law and not its noise.
_OTHER_TOKENS = {"identical": None, "num_identical": None}


def rows(measured: Iterable[Measured]) -> list[dict[str, Any]]:
    """The rows of all groups; names are unique with the group's in front."""
    return [
        {
            **{key: value for key, value in row.items() if key != _PASS_TIMES},
            "name": f"{one.group.name}: {row['name']}",
            "group": one.group.name,
            "nodes_per_round": _rounded(row.get("draft_tokens", 0) / row["rounds"]) if row["rounds"] else None,
            "draft_ahead_hits": _hits(one, row),
            **_counted(one.reading(row["contender"], row["temperature"])),
            **(_OTHER_TOKENS if row["contender"] in one.drawing else {}),
        }
        for one in measured
        for row in summary.rows(one.samples, one.contenders)
    ]


def mismatches(measured: Iterable[Measured]) -> list[summary.Mismatch]:
    """Every output with speculation that is not that of speculation off in its group, but for those that are drawn."""
    return [
        mismatch
        for one in measured
        for mismatch in summary.mismatches(one.samples)
        if mismatch.contender not in one.drawing
    ]


def differing_offs(measured: Sequence[Measured]) -> list[summary.Mismatch]:
    """Outputs without speculation that are not those of the first group that has such."""
    first: dict[tuple[float, int, int], tuple[int, ...]] = {}
    found = []
    for one in measured:
        for temperature in one.samples.temperatures:
            for (run, prompt), token_ids in one.samples.outputs(summary.OFF, temperature).items():
                if first.setdefault((temperature, run, prompt), token_ids) != token_ids:
                    found.append(summary.Mismatch(summary.OFF, summary.OFF, temperature, run, prompt))
    return found


def _hits(measured: Measured, row: Mapping[str, Any]) -> float | None:
    completions = [item.completion for item in measured.samples.of(row["contender"], row["temperature"])]
    expected = sum(item.speculation.expected_outcomes for item in completions if item.speculation is not None)
    return _rounded(figures.draft_ahead_hits(completions)) if expected else None


def _counted(reading: Reading) -> dict[str, Any]:
    return {
        "trees": reading.num_trees,
        "draft_ms": _rounded(reading.draft_ms),
        "observed_nodes": reading.num_observed,
        "calibration_error": _rounded(reading.calibration_error),
        "chance_error": _rounded(reading.chance_error),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
