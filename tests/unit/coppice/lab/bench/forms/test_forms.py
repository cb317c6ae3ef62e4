"""Forms beside each other: what is started for them, what their ratios say, and what is refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coppice.cli.child import ChildError
from coppice.cli.topology import DrafterSpec, TopologySpec
from coppice.completion import OriginCounts, Speculation
from coppice.lab.bench import form_services as deployment
from coppice.lab.bench.contenders import OFF, Completion
from coppice.lab.bench.forms import (
    Form,
    Kind,
    form_lines,
    form_panels,
    form_ratios,
    form_remarks,
    parse_forms,
    with_forms,
)
from coppice.lab.bench.harness.experiment import BenchmarkError, Ratios, Samples
from coppice.lab.bench.harness.plots import draw
from coppice.lab.bench.latency import SHOWN, LatencySuite, Plan, Sample, figure_by_run, latency_rows, speed_ratios
from coppice.lab.bench.prompts import Prompt
from tests.stream_server import stream_server
from tests.unit.coppice.lab.bench.named_contender import NamedContender

ASYNC, SYNC, COLOCATED = Form(Kind.ASYNCHRONOUS), Form(Kind.SYNCHRONOUS), Form(Kind.COLOCATED)
AHEAD = Form(Kind.DRAFT_AHEAD)
SPEC = TopologySpec("the-target", (DrafterSpec("small-lm", "the-lm"),), threads=2)


def sample(name: str, wall_s: float, run: int = 0, origins: dict[str, OriginCounts] | None = None) -> Sample:
    speculation = Speculation(0, 9, 6, 0, 0, origins=origins or {})
    return Sample(name, 0.0, run, 0, Completion((1, 2, 3, 4, 5), wall_s, 0.1, 4, wall_s / 2, speculation=speculation))


def ratios_of(samples: Sequence[Sample], forms: Sequence[Form]) -> Ratios:
    every = Samples(samples)
    return Ratios.of(form_ratios([0.0], forms, partial(speed_ratios, every), partial(figure_by_run, every)))


def remarks_of(samples: Sequence[Sample], forms: Sequence[Form]) -> list[str]:
    every = Samples(samples)
    rows = latency_rows(every, [NamedContender(name) for name in every.each("contender")])
    return form_remarks(ratios_of(samples, forms).values, rows, forms)


def test_every_form_but_the_co_located_one_has_every_delay() -> None:
    forms = parse_forms("colocated, asynchronous,synchronous,asynchronous", "0,20")
    assert [form.name for form in forms] == [
        "coppice-on asynchronous",
        "coppice-on synchronous",
        "coppice-on asynchronous 20 ms",
        "coppice-on synchronous 20 ms",
        "coppice-on colocated",
    ]
    assert parse_forms("", "0") == ()


@pytest.mark.parametrize(
    ("names", "delays", "message"),
    [
        ("quick", "0", "'quick' has one that is none of"),
        ("asynchronous", "5,x", "--delays"),
        ("synchronous", "-1", "--delays"),
    ],
)
def test_what_is_no_form_is_refused(names: str, delays: str, message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        parse_forms(names, delays)


async def test_a_wire_takes_its_delay_each_way() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)

    async with (
        stream_server(echo) as address,
        deployment.wires([address], 0) as same,
        deployment.wires([address], 60) as [longer],
    ):
        assert same == (address,)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(longer.rpartition(":")[2]))
        started_s = time.monotonic()
        writer.write(b"ping")
        async with asyncio.timeout(20):
            assert await reader.readexactly(4) == b"ping"
        assert time.monotonic() - started_s >= 0.115
        writer.close()


class FakeTopology:
    """Back ends that are there, and orchestrators that are only asked for."""

    address = "base:1"
    drafter_addresses = ("drafter:1",)
    is_stopped = False

    def __init__(self, spec: TopologySpec) -> None:
        self.settings: dict[str, Mapping[str, str]] = {}

    async def start(self) -> None: ...

    async def stop(self) -> None:
        self.is_stopped = True

    async def add_orchestrator(self, name: str, env: Mapping[str, str]) -> str:
        self.settings[name] = env
        return f"{name}:1"

    async def add_drafter(self, name: str, drafter: DrafterSpec, env: Mapping[str, str]) -> str:
        self.settings[name] = env
        return f"{drafter.kind}-ahead:1"

    async def failed(self) -> ChildError:
        await asyncio.Event().wait()
        return ChildError()


class FakeChild:
    """A process that serves at once, or ends."""

    is_mortal = False

    def __init__(self, name: str, module: str, env: object, echo: object, arguments: Sequence[str]) -> None:
        assert (module, arguments[0], arguments[-1]) == ("coppice.cli", "up", "--colocated")

    async def start(self) -> None: ...

    async def ready(self, timeout_s: float) -> str:
        return "colocated:1"

    async def ended(self) -> ChildError:
        if not self.is_mortal:
            await asyncio.Event().wait()
        return ChildError("it ended")

    async def stop(self, timeout_s: float) -> None: ...


@pytest.fixture
def topologies(monkeypatch: pytest.MonkeyPatch) -> list[FakeTopology]:
    made: list[FakeTopology] = []

    def topology(spec: TopologySpec) -> FakeTopology:
        made.append(FakeTopology(spec))
        return made[-1]

    monkeypatch.setattr(deployment, "Topology", topology)
    monkeypatch.setattr(deployment, "Child", FakeChild)
    return made


async def test_each_form_is_an_address_of_its_own(
    topologies: list[FakeTopology], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(suite: LatencySuite, address: str) -> dict[str, Any]:
        return {"base": address, "forms": dict(suite.forms)}

    monkeypatch.setattr(LatencySuite, "run", run)
    suite = LatencySuite(Path("t"), Path("s"), (), Plan(1, 4, (0.0,), 0), threads=1)
    far = Form(Kind.SYNCHRONOUS, 20)
    found = await deployment.measure_with_forms(suite, SPEC, [ASYNC, AHEAD, far, COLOCATED])
    assert found == {
        "base": "base:1",
        "forms": {ASYNC: f"{ASYNC.name}:1", AHEAD: f"{AHEAD.name}:1", far: f"{far.name}:1", COLOCATED: "colocated:1"},
    }
    [topology] = topologies
    assert topology.is_stopped
    assert topology.settings[ASYNC.name]["DRAFTER_ADDRESSES"] == "drafter:1"
    assert topology.settings[AHEAD.name]["DRAFTER_ADDRESSES"] == "small-lm-ahead:1"
    assert topology.settings["small-lm ahead"] == {"DRAFT_AHEAD": "on"}
    assert topology.settings[far.name]["ROUNDS"] == "synchronous"
    # Behind a proxy.
    assert topology.settings[far.name]["DRAFTER_ADDRESSES"].startswith("127.0.0.1:")


def test_ratios_are_those_of_the_forms_at_each_delay() -> None:
    far_async, far_sync = Form(Kind.ASYNCHRONOUS, 20), Form(Kind.SYNCHRONOUS, 20)
    forms = [ASYNC, AHEAD, SYNC, far_async, far_sync, COLOCATED]
    early = {"fresh": OriginCounts(1, 0, 1), "left_over": OriginCounts(1, 0, 1), "rerooted": OriginCounts(1, 0, 2)}
    walls = {OFF: 6.0, ASYNC.name: 2.0, SYNC.name: 3.0, far_async.name: 5.0, far_sync.name: 20.0}
    samples = [sample(name, wall_s * (1 + run), run) for name, wall_s in walls.items() for run in range(3)]
    samples += [sample(COLOCATED.name, 1.0 * (1 + run), run) for run in range(3)]
    samples += [sample(AHEAD.name, 1.6 * (1 + run), run, {"ahead": OriginCounts(3, 0, 6)}) for run in range(3)]
    samples = [
        Sample(one.contender, 0.0, one.run, 0, sample("", one.completion.wall_s, origins=early).completion)
        if one.contender in (ASYNC.name, far_async.name)
        else one
        for one in samples
    ]
    found = ratios_of(samples, forms)
    values, spread = found.values, found.spread
    assert values == {
        "async/sync": 1.5,
        "async/off": 3.0,
        "sync/off": 2.0,
        "ahead/off": 3.75,
        "ahead/async": 1.25,
        "colocated/async": 2.0,
        "forward-share-async": 0.5,
        "forward-share-sync": 0.5,
        "forward-share-ahead": 0.5,
        "draft-ahead-hits": 0.0,
        "early-drafts-ahead": 0.75,
        "early-drafts": 0.5,
        "rerooted-tokens": 0.4,
        "async/sync@20ms": 4.0,
        "async/off@20ms": 1.2,
        "sync/off@20ms": 0.3,
        "forward-share-async@20ms": 0.5,
        "forward-share-sync@20ms": 0.5,
        "early-drafts@20ms": 0.5,
        "rerooted-tokens@20ms": 0.4,
    }
    assert spread["async/off"] == [3.0, 3.0]
    assert ratios_of(samples, []).values == {}


def test_what_must_not_be_is_remarked_on() -> None:
    late = {"rerooted": OriginCounts(1, 0, 1)}
    slow = [sample(OFF, 1.0), sample(ASYNC.name, 1.25), sample(SYNC.name, 1.5, origins=late)]
    texts = remarks_of(slow, [ASYNC, SYNC])
    assert any("async/off is 0.800" in text for text in texts)
    assert any("is not synchronous" in text for text in texts)
    fine = [sample(OFF, 1.0), sample(ASYNC.name, 0.8), sample(SYNC.name, 1.5)]
    texts = remarks_of(fine, [ASYNC, SYNC])
    assert not any("slower than plain" in text or "not synchronous" in text for text in texts)
    assert remarks_of(fine, []) == []


def test_the_suite_measures_forms_beside_all_others(tiny_target: Path, server: str, tmp_path: Path) -> None:
    far = Form(Kind.ASYNCHRONOUS, 5)
    plan, prompts = Plan(1, 4, (0.0,), seed=3), (Prompt("def f(x):", "a"),)
    report = LatencySuite(
        tiny_target, tiny_target, prompts, plan, threads=1, forms={ASYNC: server, far: server, SYNC: server}
    ).run(server)
    rows = {row["contender"]: row for row in report["rows"]}
    assert list(rows)[-3:] == [ASYNC.name, far.name, SYNC.name]
    assert "MODE_AUTO" in rows[far.name]["note"]
    assert "5 ms each way" in rows[far.name]["note"]
    assert "MODE_FORCED" in rows[SYNC.name]["note"]
    assert {"on/off", "async/sync", "async/off@5ms", "early-drafts"} <= report["ratios"].keys()
    assert "async/sync@5ms" not in report["ratios"]
    assert report["mismatches"] == []
    assert any("each way" in note for note in report["notes"])
    assert form_lines(report, 0.0) == {
        "asynchronous": [(0, rows[ASYNC.name]["speed_over_off"]), (5, rows[far.name]["speed_over_off"])],
        "synchronous": [(0, rows[SYNC.name]["speed_over_off"])],
    }
    draw(report, form_panels(report), tmp_path / "out" / "forms.png")
    assert (tmp_path / "out" / "forms.png").read_bytes().startswith(b"\x89PNG")
    assert [table.title for table in with_forms(SHOWN, report).tables][-1].startswith("Forms")
