"""The simulator beside a measured run: the same closed loads, policies and lengths, and how far off it is."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from simulator.loads import ClosedLoad, Workload
from simulator.policies import Policy
from simulator.profile import Profile
from simulator.scenario import Scenario

ERROR = "simulator.error"


class ValidationError(ValueError):
    """A report that cannot be compared with; the message says what it lacks."""


def read_load_report(path: Path) -> dict[str, Any]:
    """The report of `coppice bench load` in a file.

    Raises:
        ValidationError: it cannot be read, or lacks what a simulation needs.
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
        yield {
            "name": row["name"],
            "measured_tokens_per_s": measured,
            "tokens_per_s": round(simulated, 3),
            "simulated/measured": round(simulated / measured, 4),
            "measured_mean_acceptance_length": row["mean_acceptance_length"],
            "mean_acceptance_length": round(window.counts.tokens / max(1, window.counts.rounds), 3),
        }


def errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The median and the largest of the absolute relative errors."""
    sizes = [abs(row["simulated/measured"] - 1) for row in rows]
    return {ERROR: round(statistics.median(sizes), 4), f"{ERROR}.max": round(max(sizes), 4)}
