"""The simulator next to a measured run: the same closed loads, policies and lengths, and how far off it is."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coppice.lab.simulator.loads import ClosedLoad, Window, Workload
from coppice.lab.simulator.policies import Policy
from coppice.lab.simulator.profile import Profile
from coppice.lab.simulator.scenario import Scenario

ERROR = "simulator.error"


class ValidationError(ValueError):
    """A report that cannot be compared with; the message says what it lacks."""


def read_load_report(path: Path) -> dict[str, Any]:
    """The report of `coppice bench load` in a file.

    Raises ValidationError if it cannot be read, or lacks what a simulation needs.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValidationError(f"{path.name}: {error}") from error
    if not isinstance(report, dict) or report.get("suite") != "load":
        raise ValidationError(f"{path.name}: not a report of coppice bench load")
    settings = report["settings"]
    missing = [name for name in ("policies", "prompt_tokens") if name not in settings]
    if missing:
        raise ValidationError(f"{path.name}: its settings lack {' and '.join(missing)}; measure it anew")
    if settings["temperature"] != 0:
        raise ValidationError(f"{path.name}: measured at T={settings['temperature']:g}, and records are greedy")
    if not any(row["part"] == "closed" for row in report["rows"]):
        raise ValidationError(f"{path.name}: holds no closed load")
    return report


def compare(profile: Profile, report: Mapping[str, Any], seed: int = 0) -> Iterator[dict[str, Any]]:
    """For each closed load and policy of a report: tokens per second as measured and as simulated."""
    settings = report["settings"]
    shortest, longest = settings["output_tokens"]
    workload = Workload(profile.traces, shortest, longest, tuple(settings["prompt_tokens"]), settings["seed"])
    scenario = Scenario(profile.machine, workload, max_nodes=settings["server_max_nodes"], seed=seed)
    for row in report["rows"]:
        if row["part"] != "closed":
            continue
        load = ClosedLoad(row["concurrency"], settings["duration_s"])
        window = scenario.run(Policy.parse(settings["policies"][row["policy"]]), load)
        measured, simulated = row["tokens_per_s"], window.tokens_per_s
        figures = _figures(window)
        yield {
            "name": row["name"],
            "measured_tokens_per_s": measured,
            "tokens_per_s": round(simulated, 3),
            "simulated/measured": round(simulated / measured, 4),
            # Whether the machine was fitted to such a load, in other windows.
            "is_fitted": row["name"] in settings.get("fitted", ()),
            # Where one of these is off, it tells which part of the model is.
            **{f"measured_{name}": row.get(name) for name in figures},
            **figures,
        }


def _figures(window: Window) -> dict[str, float | None]:
    """What the tokens per second come from, by the names that measured rows have for it."""
    counts, seconds = window.counts, window.duration_s
    rounds = max(1, counts.rounds)
    return {
        "mean_acceptance_length": round(counts.tokens / rounds, 3),
        "rows_per_pass": round(counts.row_passes / rounds, 3),
        "nodes_per_round": round(counts.nodes / rounds, 3),
        "passes_per_s": round(counts.passes / seconds, 3),
        "pass_ms": round(1000 * counts.pass_s / max(1, counts.passes), 3),
        "rounds_per_s": round(counts.rounds / seconds, 3),
        "drafted_share": round(counts.drafted / rounds, 4),
        "drafts_per_s": round(counts.drafts / seconds, 3),
    }


def errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The median and the largest of the absolute relative errors of what was predicted."""
    sizes = [abs(row["simulated/measured"] - 1) for row in rows if not row["is_fitted"]]
    if not sizes:
        return {}
    return {ERROR: round(statistics.median(sizes), 4), f"{ERROR}.max": round(max(sizes), 4)}
