"""The result as a JSON document, and the sentences that keep a reader from misreading it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coppice.lab.bench.divergence import Divergence
from coppice.lab.bench.environment import describe_run
from coppice.lab.bench.summary import ON, RATIO_NOTE, Mismatch

# Above this share of repeated 4-grams an output mostly copies itself.
LOOPING_SHARE = 0.3
# With speculation on, fewer rounds with a draft than this measure something else.
MIN_DRAFTED_SHARE = 0.8
# Above this load per core something else was running; starting our services alone stays below.
BUSY_LOAD_PER_CORE = 0.75


def document(
    suite: str,
    rows: Sequence[Mapping[str, Any]],
    ratios: tuple[Mapping[str, float], Mapping[str, Sequence[float]]],
    settings: Mapping[str, Any],
    machine: Mapping[str, Any],
    mismatches: Sequence[Mismatch] = (),
    divergences: Sequence[Divergence] = (),
) -> dict[str, Any]:
    """Everything that `SUITE.json` holds; `machine` is what `describe_machine` said before the first sample."""
    values, spread = ratios
    return {
        "suite": suite,
        "rows": list(rows),
        "ratios": dict(values),
        "ratio_spread": dict(spread),
        "ratio_note": RATIO_NOTE,
        "notes": [*remarks(rows), *machine_remarks(machine)],
        "mismatches": [str(mismatch) for mismatch in mismatches],
        "divergences": [divergence.record() for divergence in divergences],
        "settings": dict(settings),
        **describe_run(machine),
    }


def write_json(report: Mapping[str, Any], path: Path) -> None:
    """Write the document, for people to diff."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def remarks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What has to be said beside the figures."""
    return [*_looping_remarks(rows), *_undrafted_remarks(rows)]


def _looping_remarks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    looping = [row for row in rows if row["repeated_4grams"] >= LOOPING_SHARE]
    if not looping:
        return []
    worst = max(looping, key=lambda row: row["repeated_4grams"])
    temperatures = sorted({f"{row['temperature']:g}" for row in looping})
    return [
        f"Outputs at T={' and T='.join(temperatures)} loop: up to {worst['repeated_4grams']:.0%} of their 4-grams "
        f"occurred before in the same output ({worst['name']}). Repetition is easy to draft, so the speed-up there "
        "flatters speculation; read it beside the figures of a temperature without loops."
    ]


def _undrafted_remarks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{row['name']} had a draft in only {row['drafted_share']:.0%} of its rounds: this is mostly plain decoding."
        for row in rows
        if row["contender"].startswith(ON) and (row["drafted_share"] or 0) < MIN_DRAFTED_SHARE
    ]


def machine_remarks(machine: Mapping[str, Any]) -> list[str]:
    """What has to be said about the machine."""
    load, cores = machine["load_average_1m"], machine["usable_cores"] or 1
    if load < BUSY_LOAD_PER_CORE * cores:
        return []
    return [
        f"The machine was busy when the benchmark began (load average {load:.2f} on {cores} cores): these figures "
        "measure the neighbours too."
    ]
