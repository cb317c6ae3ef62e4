"""The harness: turns, groups of samples, ratios, and what is written and drawn of a made-up report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from coppice.lab.bench.environment import describe_machine
from coppice.lab.bench.harness.experiment import Experiment, Ratios, Samples, bootstrap_ratio, over, spread
from coppice.lab.bench.harness.plots import Panel, bars, stacked
from coppice.lab.bench.harness.report import Shown, document, machine_remarks, write_report
from coppice.lab.bench.harness.tables import Table, cell, rows_of


@dataclass(frozen=True)
class Speed:
    arm: str
    load: int
    run: int
    tokens_per_s: float


def test_arms_take_turns_and_the_first_place_rotates() -> None:
    experiment = Experiment(["a", "b", "c"], [1, 2], num_runs=2)
    turns = [(turn.run, turn.load, turn.arm) for turn in experiment.turns()]
    assert len(turns) == 12
    assert "".join(arm for _, _, arm in turns) == "abcbcabcacab"
    assert [(run, load) for run, load, _ in turns[::3]] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    by_load = Experiment(["a"], [1, 2], num_runs=2, by_load=True)
    assert [(turn.run, turn.load) for turn in by_load.turns()] == [(0, 1), (1, 1), (0, 2), (1, 2)]


def test_a_ratio_is_the_median_of_the_runs_own_ratios() -> None:
    # The machine is twice as slow in run 1, for both arms: medians of speeds alone would mix runs up.
    samples = Samples(
        Speed(arm, 1, run, value)
        for arm, values in {"off": (2.0, 1.0, 2.0), "on": (4.0, 2.0, 8.0)}.items()
        for run, value in enumerate(values)
    )
    on, off = (samples.where(arm=arm).by_run(lambda run: run[0].tokens_per_s) for arm in ("on", "off"))
    ratios = Ratios.of({"on/off": over(on, off), "nothing": [None]})
    assert (ratios.values, ratios.spread) == ({"on/off": 2.0}, {"on/off": [2.0, 4.0]})
    assert spread("speed", off) == {"speed": 2.0, "speed_min": 1.0, "speed_max": 2.0}
    assert samples.each("arm") == ["off", "on"]


def test_a_report_is_written_drawn_and_printed_from_what_a_suite_declares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"name": f"{arm} x{load}", "arm": arm, "load": load, **spread("speed", [1.0 * load, 3.0 * load]), "num_a": load}
        for arm in ("off", "on")
        for load in (1, 2)
    ]
    report = document(
        *("made-up", describe_machine(), {"num_runs": 2}, rows),
        Ratios({"on/off": 1.0}, {"on/off": [0.5, 2.0]}),
        notes=["A note with <angles>."],
        mismatches=["on differs"],
    )
    columns = "speed num_missing"
    shown = Shown(
        tables=(Table("Flat, {num_runs} runs", columns), Table("Pivot", columns, label="{arm}", across="load")),
        panels=(
            Panel("Lines", "speed", "load", "{arm}", log_x=True),
            Panel("Bars", "speed", "{arm}", "{load}", bars, has_base=True),
            Panel("Of {}", "num_a", "{name}", drawing=stacked, by="arm"),
        ),
        line="{num_runs} runs.",
    )
    said = write_report(report, shown, tmp_path)
    assert json.loads((tmp_path / "made-up.json").read_text()) == report
    assert (tmp_path / "made-up.png").read_bytes().startswith(b"\x89PNG")
    assert all(str(tmp_path / f"made-up.{kind}") in said for kind in ("json", "png"))
    printed = capsys.readouterr().out
    for expected in (
        "Flat, 2 runs",
        "on x2",
        "4 (2 to 6)",
        "Pivot: speed · num missing",
        "4 (2 to 6) · -",
        "on/off",
        "MISMATCH: on differs",
    ):
        assert expected in printed


def test_a_busy_machine_is_remarked_on() -> None:
    assert machine_remarks({"load_average_1m": 0.4, "usable_cores": 2}) == []
    [text] = machine_remarks({"load_average_1m": 2.1, "usable_cores": 2})
    assert "load average 2.10 on 2 cores" in text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (True, "yes"),
        (3, "3"),
        (0.123456, "0.1235"),
        (12345.6, "12346"),
        ([0.5, 0.25], "0.5 0.25"),
        ({"fresh": {"rounds": 3, "accepted": 7}, "late": 1}, "fresh=3/7 late=1"),
    ],
)
def test_a_cell_is_short(value: object, shown: str) -> None:
    assert cell(value) == shown


def test_a_bootstrapped_interval_holds_the_ratio_and_is_repeatable() -> None:
    pairs = [(2.0 * weight, weight) for weight in (1.0, 3.0, 5.0)]
    assert bootstrap_ratio(pairs) == pytest.approx((2.0, 2.0))
    uneven = [(1.0, 1.0), (4.0, 1.0), (2.0, 1.0), (3.0, 1.0)]
    low, high = bootstrap_ratio(uneven, seed=3) or (0.0, 0.0)
    assert 1.0 < low < 2.5 < high < 4.0
    assert bootstrap_ratio(uneven, seed=3) == (low, high)
    assert bootstrap_ratio(uneven[:1]) is None


def test_rows_are_a_list_or_a_mapping_from_names() -> None:
    row = {"name": "a"}
    assert rows_of({"rows": [row]}, "rows") == rows_of({"kinds": {"a": row}}, "kinds") == [row]
    assert rows_of({}, "kinds") == []
