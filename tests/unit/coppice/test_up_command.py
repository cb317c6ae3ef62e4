"""What `coppice up` says of itself, how long its services have after Ctrl-C, and what it may not read or write."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path
from typing import Any, cast

import pytest
import typer
from typer.testing import CliRunner

from coppice.checkpoints.files import refuse_special_files
from coppice.cli.__main__ import app
from coppice.cli.child import Child
from coppice.cli.errors import explained
from coppice.cli.options import writable
from coppice.cli.topology import LAST_WORDS_S, Topology, TopologySpec
from coppice.cli.up import INTERRUPTED_S, expected_gain
from coppice.core.errors import IncompatibleError

MACHINE = {"cpu": "a processor", "usable_cores": 2}


def write_report(path: Path, target: str, at_0: float, at_1: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    ratios = {"on/off": at_0, "on/off@T1": at_1}
    path.write_text(json.dumps({"machine": MACHINE, "ratios": ratios, "settings": {"target": target}}))


def test_the_gain_is_that_of_the_report_of_the_target(tmp_path: Path) -> None:
    write_report(tmp_path / "latency.json", "elsewhere/code", 1.96, 1.44)
    write_report(tmp_path / "chat" / "latency.json", "chat", 1.57, 1.25)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "latency.json").write_text("{}")
    where = "where it was measured (one stream, a processor, 2 cores)"
    assert expected_gain("models/code", False, tmp_path) == f"x2.0 at temperature 0 and x1.4 at 1 {where}"
    assert expected_gain("chat", False, tmp_path) == f"x1.6 at temperature 0 and x1.2 at 1 {where}"
    for target, has_own_drafters in (("other", False), ("chat", True)):
        assert expected_gain(target, has_own_drafters, tmp_path).startswith("not measured for this pair")


class SlowlyStopped:
    """A service that takes all the time that it is given to stop."""

    def __init__(self, module: str, events: list[str]) -> None:
        self.module = module
        self._events = events

    async def stop(self, timeout_s: float) -> None:
        self._events.append(f"{self.module} has {timeout_s:g} s")
        await asyncio.sleep(0.01)
        self._events.append(f"{self.module} ended")


@pytest.mark.parametrize("is_interrupted", [False, True])
async def test_after_ctrl_c_what_is_in_front_stops_at_once_before_the_back_ends(is_interrupted: bool) -> None:
    events: list[str] = []
    topology = Topology(TopologySpec(drafters=()))
    modules = ("verifier_svc", "drafter_svc", "orchestrator", "coppice.gateway")
    topology._children = [cast(Child, SlowlyStopped(module, events)) for module in modules]
    await topology.stop(0.5, 0.25, is_interrupted=is_interrupted)
    gateway_s = 0.5 + (LAST_WORDS_S if is_interrupted else 0.0)
    gateway, orchestrator = f"coppice.gateway has {gateway_s:g} s", "orchestrator has 0.5 s"
    assert events.index(gateway) < events.index(orchestrator) < events.index("verifier_svc has 0.25 s")
    assert (events.index("coppice.gateway ended") < events.index(orchestrator)) != is_interrupted
    assert events.index("orchestrator ended") < events.index("verifier_svc has 0.25 s")
    assert events.index("drafter_svc has 0.25 s") < events.index("verifier_svc ended")


def test_services_have_less_than_three_seconds_after_ctrl_c() -> None:
    assert sum(INTERRUPTED_S) <= 2.0


@pytest.mark.parametrize(
    ("number", "words"), [(errno.EACCES, "give this user the right"), (errno.ENOSPC, "there is no space for a/path")]
)
def test_errors_of_space_and_permission_say_what_to_do(number: int, words: str) -> None:
    code, line = explained(OSError(number, "reason", "a/path"))
    assert (code, "a/path" in line, words in line) == (2, True, True)
    assert explained(OSError(number, "reason"))[0] == 1


def test_what_may_not_be_read_or_written_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").touch()
    refuse_special_files(str(tmp_path))
    writable(tmp_path / "new" / "out")
    # As the system answers a user without the right, which root has.
    monkeypatch.setattr("os.access", lambda path, _: Path(path).name == "README.md")
    with pytest.raises(IncompatibleError, match=r"config.json of .* cannot be read: Permission denied; let this user"):
        refuse_special_files(str(tmp_path))
    with pytest.raises(typer.BadParameter, match=f"nothing may be written to {tmp_path}"):
        writable(tmp_path / "new" / "out")
    for command in (["export", "gguf", "--target", "x"], ["adapt", "--target", "x"], ["train", "tokenizer"]):
        ended = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out")])
        assert (ended.exit_code, f"nothing may be written to {tmp_path}" in ended.stderr) == (2, True)


def test_a_directory_that_may_not_be_listed_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(IncompatibleError, match=f"{tmp_path} cannot be read: Permission denied; let this user read it"):
        refuse_special_files(str(tmp_path))
