"""`coppice doctor`: each finding from what there is."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coppice.cli import doctor
from coppice.cli.__main__ import app


def findings(*arguments: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """Exit code, and the findings by what was looked at."""
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    found: dict[str, list[dict[str, str]]] = {}
    for one in json.loads(result.stdout):
        found.setdefault(one["what"], []).append(one)
    return result.exit_code, found


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, found = findings("--port", str(port))
    assert code == 1
    assert [one["state"] for one in found["port"]] == ["refused"]
    code, found = findings("--port", str(port))
    assert (code, found["port"][0]["state"]) == (0, "ok")


def test_a_redis_is_one_that_answers() -> None:
    assert findings("--redis", "redis://127.0.0.1:1/0")[1]["Redis"][0]["state"] == "off"
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        # In the server's backlog, where nobody answers in time.
        assert doctor.redis_at(url).state == "off"


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("--redis", "foo", "--redis: must be a URL as in redis://"),
        ("--redis", "redis://127.0.0.1:99999/0", "--redis: Port out of range"),
        ("--port", "99999", "'--port': "),
    ],
)
def test_what_is_no_address_is_a_mistake(option: str, value: str, complaint: str) -> None:
    ended = CliRunner().invoke(app, ["doctor", option, value])
    assert ended.exit_code == 2
    assert complaint in ended.output


def test_packages_that_are_missing_are_named_with_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setitem(sys.modules, "redis", None)
    found = {one.what: one for one in doctor.packages()}
    assert (found["drafter"].state, found["redis"].state) == ("refused", "off")
    assert "pip install 'coppice[drafter]'" in found["drafter"].found


def test_fewer_threads_than_cores_and_pages_that_are_never_huge_are_slow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    assert "threads" in {one.what for one in doctor.processor() if one.state == "slow"}
    mode = tmp_path / "enabled"
    mode.write_text("always madvise [never]\n")
    monkeypatch.setattr(doctor, "MODE_FILE", mode)
    [pages] = [one for one in doctor.memory() if one.what == "huge pages"]
    assert (pages.state, "madvise" in pages.advice) == ("slow", True)


def test_no_room_on_disk_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COPPICE_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(doctor, "NEEDED_DISK_GIB", 1e9)
    [finding] = doctor.disk()
    assert (finding.state, finding.advice) == ("slow", "set COPPICE_CACHE to another disk")
