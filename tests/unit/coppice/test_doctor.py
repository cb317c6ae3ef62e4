"""`coppice doctor`: each finding from what there is."""

from __future__ import annotations

import json
import math
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from coppice import memory_limit
from coppice.cli import doctor
from coppice.cli.__main__ import app
from tests.one_answer import answering


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


def test_a_usual_port_that_is_taken_concerns_its_option_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(doctor, "USUAL_PORTS", {port: "--http-port"})
        code, found = findings()
    assert code == 0
    [finding] = found["port"]
    assert (finding["state"], finding["advice"]) == ("slow", f"it concerns --http-port {port} alone")


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (b"+PONG\r\n", "ok"),
        (b"-NOAUTH Authentication required.\r\n", "off"),
        (b"-DENIED Redis is running in protected mode\r\n", "off"),
        # An alert of TLS.
        (b"\x15\x03\x01\x00\x02\x02\x0a", "ok"),
    ],
)
def test_a_redis_that_refuses_its_clients_is_none(answer: bytes, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ANSWER_S", 30.0)
    with answering(answer) as (address, sent):
        finding = doctor.redis_at(f"redis://{address}/0")
    assert (finding.state, sent) == (state, [b"PING\r\n"])
    assert ("PASSWORD" in finding.advice) == (state == "off")


def test_a_redis_gets_the_password_of_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ANSWER_S", 30.0)
    with answering(b"-WRONGPASS invalid\r\n-NOAUTH\r\n") as (address, sent):
        assert doctor.redis_at(f"redis://al:p%20w@{address}/0").state == "off"
    assert sent == [b"*3\r\n$4\r\nAUTH\r\n$2\r\nal\r\n$3\r\np w\r\nPING\r\n"]


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


@pytest.mark.parametrize(
    ("flags", "has_tiles", "states"),
    [
        ("avx512f avx512_bf16 avx512_vnni amx_tile amx_bf16", True, ["ok", "ok", "ok", "ok"]),
        ("avx512f avx512_bf16 avx512_vnni amx_tile amx_bf16", False, ["ok", "ok", "ok", "slow"]),
        ("avx512f avx512_vnni", True, ["ok", "slow", "ok", "slow"]),
        ("sse2", False, ["slow", "slow", "slow", "slow"]),
    ],
)
def test_instructions_that_a_processor_lacks_are_slow(
    flags: str, has_tiles: bool, states: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor : 0\nflags\t\t: fpu {flags}\n")
    monkeypatch.setattr(doctor, "PROCESSORS", file)
    monkeypatch.setattr(doctor, "has_tiles", lambda: has_tiles)
    found = [one for one in doctor.processor() if one.what == "instructions"]
    assert [one.state for one in found] == states
    for one, flag in zip(found, ("avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16"), strict=True):
        assert one.found.startswith(("has" if flag in flags else "no") + f" {flag}, ")


def test_tiles_are_those_of_services() -> None:
    amx = pytest.importorskip("coppice.kernels.cpu.amx")
    assert doctor.has_tiles() is amx.MULTIPLIES_TILES


@pytest.mark.parametrize(
    ("free_mib", "limit_mib", "states", "found"),
    [
        (8192, math.inf, ["ok"], "8.0 GiB available"),
        (2048, math.inf, ["slow"], "2.0 GiB available"),
        (8192, 2048, ["slow"], "2.0 GiB available, by a limit of 2.0 GiB"),
        (8192, 511, ["refused", "slow"], "0.5 GiB available, by a limit of 0.5 GiB"),
    ],
)
def test_memory_is_what_is_free_and_allowed(
    free_mib: int, limit_mib: float, states: list[str], found: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "meminfo"
    file.write_text(f"MemTotal:  99999999 kB\nMemAvailable:  {free_mib * 1024} kB\n")
    monkeypatch.setattr(doctor, "MEMORY", file)
    monkeypatch.setattr(doctor, "memory_limit_mib", lambda: limit_mib)
    memory = [one for one in doctor.memory() if one.what == "memory"]
    assert ([one.state for one in memory], memory[-1].found) == (states, found)
    code, all_found = findings()
    assert code == ("refused" in states)
    assert [one["state"] for one in all_found["memory"]] == states


def test_a_limit_with_which_services_refuse_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit.resource, "getrlimit", lambda _: (511 << 20, -1))
    with pytest.raises(ValueError, match="only 511 MiB"):
        memory_limit.check_memory()
    assert next(one.state for one in doctor.memory() if one.what == "memory") == "refused"


@pytest.mark.parametrize(
    ("is_available", "has_driver", "state"), [(True, True, "ok"), (False, True, "slow"), (False, False, "off")]
)
def test_a_gpu_is_one_that_torch_finds(
    is_available: bool, has_driver: bool, state: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cuda = SimpleNamespace(is_available=lambda: is_available, get_device_name=lambda: "a GPU")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, __version__="2.0", __spec__=object()))
    driver = tmp_path / "version"
    if has_driver:
        driver.touch()
    monkeypatch.setattr(doctor, "DRIVER", driver)
    assert doctor.gpu().state == state
