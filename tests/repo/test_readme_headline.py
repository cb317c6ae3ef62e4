"""README's one table of measurements is that of `results/smollm2/latency.json`."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
REPORT = json.loads((ROOT / "results" / "smollm2" / "latency.json").read_text())
CONTENDERS = {
    "transformers `generate`": "transformers",
    "Coppice, speculation off": "coppice-off",
    "Coppice, speculation on": "coppice-on",
}


def test_the_table_has_the_figures_of_the_json() -> None:
    rows = {row["name"]: row for row in REPORT["rows"]}
    for label, contender in CONTENDERS.items():
        cells = [label]
        for temperature in (0, 1):
            row = rows[f"{contender} T={temperature}"]
            cells += [f"{row['tokens_per_s']:.0f}", f"{row['mean_acceptance_length']:.2f}"]
        assert f"| {' | '.join(cells)} |" in README.splitlines()


def test_machine_command_and_commit_are_those_of_the_json() -> None:
    text = " ".join(README.split())
    [commit] = re.findall(r"commit `(\w+)` of 20\d\d-\d\d-\d\d", text)
    assert REPORT["commit"].startswith(commit)
    assert REPORT["machine"]["cpu"] in README
    settings = REPORT["settings"]
    assert settings["num_runs"] == 1
    assert f"{settings['dtype']} with the head" in text
    prompts, tokens = len(settings["prompts"]), settings["max_tokens"]
    assert f"{prompts} prompts of Spec-Bench (two of each kind) x {tokens} tokens, one run" in text
    assert f"{REPORT['machine']['usable_cores']} cores" in README
    assert f"`{REPORT['command']}`" in README


def test_what_is_said_of_outputs_is_what_was_counted() -> None:
    rows = {row["name"]: row for row in REPORT["rows"]}
    assert rows["coppice-on T=0"]["identical"]
    assert rows["coppice-on T=1"]["identical"]
    pair = json.loads((ROOT / "results" / "latency.json").read_text())
    assert "([2 times](docs/results/latency.md))" in README
    assert round(pair["ratios"]["on/off"]) == 2


def test_the_readme_stays_short() -> None:
    assert len(README.splitlines()) <= 200
