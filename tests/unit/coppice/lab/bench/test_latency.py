"""One stream: the measuring loop, rows, ratios, mismatches and forms, and the whole suite on a tiny model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from coppice.client import Client
from coppice.completion import OriginCounts, Speculation
from coppice.lab.bench.client import OFF, ON, Batch, Mode, Policy, Server, Task
from coppice.lab.bench.comparison import Plan, Setup, measure, mismatches, rows
from coppice.lab.bench.divergences import find_divergences
from coppice.lab.bench.forms import PANEL, Form, Kind, form_ratios, form_remarks
from coppice.lab.bench.harness.experiment import BenchmarkError, Ratios, Samples
from coppice.lab.bench.harness.plots import draw
from coppice.lab.bench.latency import LatencySuite, latency_ratios
from coppice.lab.bench.prompts import Prompt
from tests.unit.coppice.lab.bench.made_up import Named, answer, sample
from tests.unit.coppice.lab.bench.schema import lost_fields

ASYNC, SYNC, COLOCATED = Form(Kind.ASYNCHRONOUS), Form(Kind.SYNCHRONOUS), Form(Kind.COLOCATED)
AHEAD = Form(Kind.DRAFT_AHEAD)


class Recorder:
    """A contender that notes who was called, and for what."""

    note = ""

    def __init__(self, name: str, calls: list[tuple[str, Task]], *, missing: int = 0) -> None:
        self.name = name
        self._calls = calls
        self._missing = missing

    async def complete(self, tasks: Sequence[Task]) -> Batch:
        self._calls += [(self.name, task) for task in tasks]
        done = [answer([(1.0, task.max_tokens - self._missing)], max_tokens=task.max_tokens) for task in tasks]
        return Batch(tuple(done))


async def test_contenders_take_turns_and_a_prompt_keeps_its_own_seed_over_runs() -> None:
    calls: list[tuple[str, Task]] = []
    both = [Recorder(name, calls) for name in "ab"]
    await measure(both, [[1], [2]], Plan(2, 4, (0.0, 1.0), seed=7), [range(1), range(1, 2)])
    assert {(task.prompt_ids, task.seed) for _, task in calls[8:]} == {((1,), 7), ((2,), 8)}
    # After a warm-up of both prompts at both temperatures.
    assert "".join(name for name, _ in calls[8:]) == "ab" + "ba" + "ab" + "ba" + "ba" + "ab" + "ba" + "ab"


async def test_an_output_of_another_length_is_refused() -> None:
    short = Recorder("short", [], missing=1)
    with pytest.raises(BenchmarkError, match="short gave 3 tokens where 4 were asked for"):
        await measure([short], [[1]], Plan(1, 4, (0.0,), seed=0), [range(1)])


def test_a_ratio_is_the_median_of_the_runs_own_ratios() -> None:
    # The machine is twice as slow in run 1, for everybody: medians of speeds alone would see 2, 3 or 6 mixed up.
    walls = {OFF: [2.0, 4.0, 2.0], ON: [1.0, 2.0, 0.5]}
    found = Ratios.of(
        latency_ratios(
            Samples(sample(name, wall, run=run) for name, all in walls.items() for run, wall in enumerate(all))
        )
    )
    assert (found.values["on/off"], found.spread["on/off"]) == (2.0, [2.0, 4.0])
    assert found.values["forward-share"] == found.values["forward-share-off"] == 0.25
    assert "on/transformers" not in found.values


def test_on_must_repeat_off_in_every_run() -> None:
    samples = Samples(
        [
            *(sample(name, 1.0, run=run, temperature=1.0) for name in (OFF, ON) for run in (0, 1)),
            sample(OFF, 1.0, prompt=1, temperature=1.0),
            sample(ON, 1.0, prompt=1, temperature=1.0, tokens=(1, 2, 3, 5)),
        ]
    )
    assert mismatches(samples) == ["coppice-on differs from coppice-off at T=1 on prompt 2 (run 1)"]
    assert mismatches(samples, drawing=[ON]) == []
    [off, on] = rows(samples, [Named(OFF), Named(ON)])
    assert (off["identical"], off["identical_to"], off["num_identical"]) == (None, None, None)
    assert (on["identical"], on["identical_to"], on["num_identical"]) == (False, OFF, 1)
    assert on["num_identical_to_transformers"] is None


def test_a_row_says_speed_spread_and_identity() -> None:
    samples = Samples(
        [
            *(sample("transformers", 1.0, run=run) for run in range(3)),
            *(sample(OFF, wall_s, run=run) for run, wall_s in enumerate((1.0, 2.0, 4.0))),
        ]
    )
    [_, row] = rows(samples, [Named("transformers"), Named(OFF)])
    assert row["name"] == "coppice-off T=0"
    assert (row["tokens_per_s"], row["tokens_per_s_min"], row["tokens_per_s_max"]) == (2.0, 1.0, 4.0)
    assert row["mean_acceptance_length"] == 2.0
    assert (row["identical"], row["identical_to"], row["num_identical"]) == (True, "transformers", 1)
    assert row["num_identical_to_transformers"] == 1


@pytest.mark.parametrize(
    ("gap", "dtype", "near_tie"),
    [(1e-6, "float32", True), (0.1, "float32", False), (0.1, "bfloat16", True), (0.5, "bfloat16", False)],
)
def test_a_divergence_names_the_place_and_how_close_it_was(gap: float, dtype: str, near_tie: bool) -> None:
    samples = Samples([sample("transformers", 1.0), sample(OFF, 1.0, tokens=(1, 2, 9, 4))])
    asked: list[list[int]] = []

    def top_two(context: Sequence[int]) -> tuple[float, tuple[int, int]]:
        asked.append(list(context))
        return gap, (3, 9)

    [found] = find_divergences(samples, [OFF], top_two, dtype)
    assert asked == [[1, 1, 2]]
    assert (found.position, found.token_id, found.transformers_token_id) == (2, 9, 3)
    assert found.record()["near_tie"] is near_tie


def suite(target: Path, forms: Mapping[Form, str] | None = None) -> LatencySuite:
    prompts = (Prompt("def f(x):", "a"), Prompt("import os" * 20, "b"))
    setup = Setup(target, prompts, Plan(2, 8, (0.0, 1.0), seed=3), threads=1)
    return LatencySuite(setup, target, forms or {})


async def test_the_report_has_every_contender_ratio_and_circumstance(tiny_target: Path, server: str) -> None:
    report = await suite(tiny_target).run(server)
    names = ["transformers", "transformers-assisted", OFF, ON]
    assert [row["name"] for row in report["rows"]] == [f"{name} T={t}" for t in (0, 1) for name in names]
    wanted = {"on/off", "on/transformers", "on/assisted", "off/transformers", "forward-share"}
    assert wanted | {f"{name}@T1" for name in wanted} <= set(report["ratios"])
    assert report["settings"]["num_cut_prompts"] == 1
    assert report["mismatches"] == report["divergences"] == []
    assert lost_fields(report, "latency.json") == set()
    by_name = {row["name"]: row for row in report["rows"]}
    on = by_name["coppice-on T=0"]
    assert (on["mean_acceptance_length"], on["acceptance_by_depth"]) == (2.0, [1.0, 0.0, 0.0])
    assert (on["drafted_share"], by_name["transformers T=0"]["drafted_share"]) == (1.0, None)
    assert on["ms_per_pass_by_rows"] == {"4": {"count": 16, "mean_ms": 0.25}}
    assert on["origins"] == {"fresh": {"rounds": 16, "accepted": 16}}
    assert (on["bubble_ms"], on["sources"]) == (0.25, {"small-lm": {"proposed": 48, "accepted": 16}})
    assert (on["identical"], on["num_identical_to_transformers"]) == (True, 2)


async def test_a_request_finds_nothing_that_was_computed_before(once_server: str) -> None:
    tasks = [Task((1, 2), 4, 0.0, seed=0)] * 2
    async with Client(once_server) as client:
        for _ in range(2):
            await Server(client, Policy(OFF, Mode.MODE_OFF)).complete(tasks)


def test_ratios_are_those_of_the_forms_at_each_delay() -> None:
    far_async, far_sync = Form(Kind.ASYNCHRONOUS, 20), Form(Kind.SYNCHRONOUS, 20)
    early = {"fresh": OriginCounts(1, 0, 1), "left_over": OriginCounts(1, 0, 1), "rerooted": OriginCounts(1, 0, 2)}
    made = {
        OFF: (6.0, {}),
        ASYNC.name: (2.0, early),
        SYNC.name: (3.0, {}),
        far_async.name: (5.0, early),
        far_sync.name: (20.0, {}),
        COLOCATED.name: (1.0, {}),
        AHEAD.name: (1.6, {"ahead": OriginCounts(3, 0, 6)}),
    }
    samples = Samples(
        sample(
            name, wall_s * (1 + run), run=run, tokens=(1, 2, 3, 4, 5), speculation=Speculation(4, 9, 6, origins=origins)
        )
        for name, (wall_s, origins) in made.items()
        for run in range(3)
    )
    found = Ratios.of(form_ratios(samples, [ASYNC, AHEAD, SYNC, far_async, far_sync, COLOCATED]))
    assert found.values == {
        "async/sync": 1.5,
        "async/off": 3.0,
        "sync/off": 2.0,
        "ahead/off": 3.75,
        "ahead/async": 1.25,
        "colocated/async": 2.0,
        "forward-share-async": 0.25,
        "forward-share-sync": 0.25,
        "forward-share-ahead": 0.25,
        "draft-ahead-hits": 0.0,
        "early-drafts-ahead": 0.75,
        "early-drafts": 0.5,
        "rerooted-tokens": 0.4,
        "async/sync@20ms": 4.0,
        "async/off@20ms": 1.2,
        "sync/off@20ms": 0.3,
        "forward-share-async@20ms": 0.25,
        "forward-share-sync@20ms": 0.25,
        "early-drafts@20ms": 0.5,
        "rerooted-tokens@20ms": 0.4,
    }
    assert form_ratios(samples, []) == {}
    late = Samples([sample(OFF, 6.0), replace(samples.where(contender=ASYNC.name)[0], contender=SYNC.name)])
    texts = form_remarks({"async/off": 0.8}, rows(late, [Named(OFF), Named(SYNC.name)]), [ASYNC, SYNC])
    assert any("async/off is 0.800" in text for text in texts)
    assert any("is not synchronous" in text for text in texts)
    assert form_remarks({"async/off": 0.8}, [], []) == []


async def test_the_suite_measures_forms_with_all_others(tiny_target: Path, server: str, tmp_path: Path) -> None:
    far = Form(Kind.ASYNCHRONOUS, 5)
    report = await suite(tiny_target, {ASYNC: server, far: server, SYNC: server}).run(server)
    found = {row["contender"]: row for row in report["rows"] if row["temperature"] == 0}
    assert list(found)[-3:] == [ASYNC.name, far.name, SYNC.name]
    assert "MODE_AUTO" in found[far.name]["note"]
    assert "5 ms each way" in found[far.name]["note"]
    assert "MODE_FORCED" in found[SYNC.name]["note"]
    assert {"on/off", "async/sync", "async/off@5ms", "early-drafts"} <= report["ratios"].keys()
    assert "async/sync@5ms" not in report["ratios"]
    assert report["mismatches"] == []
    assert lost_fields(report, "forms/latency.json") == set()
    assert (found[far.name]["form"], found[far.name]["delay_ms"]) == ("asynchronous", 5)
    draw(report, [PANEL], tmp_path / "forms.png")
    assert (tmp_path / "forms.png").read_bytes().startswith(b"\x89PNG")
