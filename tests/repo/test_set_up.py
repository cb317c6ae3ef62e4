"""The set-up script's decisions, without installing anything."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "setup_venv.py"

PLANNED_CPU = {"torch": "2.13.0+cpu", "sympy": "1.14.0"}
PLANNED_CUDA = {"torch": "2.13.0", "nvidia-cudnn-cu13": "9.1", "cuda-bindings": "13.0", "triton": "3.4"}


class RecordingVenv:
    """Plans what it is told to, and writes down what is asked of pip."""

    python = Path("no-such-python")

    def __init__(self, planned: dict[str, str]) -> None:
        self._planned = planned
        self.calls: list[tuple[str, ...]] = []

    def planned(self, *requirements: str) -> dict[str, str]:
        return self._planned

    def pip(self, *arguments: str) -> None:
        self.calls.append(arguments)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    names = runpy.run_path(str(SCRIPT))
    monkeypatch.setitem(names["install_torch"].__globals__, "say", lambda message: None)
    return names


def on_a_machine(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, gpu: bool, uv: bool = True) -> list[str]:
    """Pretend about the GPU and uv; returns the commands that are run instead of uv."""
    commands: list[str] = []

    def succeeds(command: list[str], quiet: bool = True) -> bool:
        commands.append(" ".join(command))
        return uv

    monkeypatch.setitem(script["install_torch"].__globals__, "has_gpu", lambda: gpu)
    monkeypatch.setitem(script["install_torch"].__globals__, "succeeds", succeeds)
    return commands


@pytest.mark.parametrize(("planned", "gpu"), [(PLANNED_CPU, False), (PLANNED_CPU, True), (PLANNED_CUDA, True)])
def test_pip_installs_torch_where_its_choice_fits_the_machine(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, planned: dict[str, str], gpu: bool
) -> None:
    on_a_machine(script, monkeypatch, gpu)
    venv = RecordingVenv(planned)
    script["install_torch"](venv)
    assert venv.calls == [("install", "-qq", script["TORCH"])]


def test_a_machine_without_a_gpu_gets_no_cuda(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    commands = on_a_machine(script, monkeypatch, gpu=False)
    venv = RecordingVenv(PLANNED_CUDA)
    script["install_torch"](venv)
    assert venv.calls == [("install", "-qq", "uv")]
    assert "--torch-backend cpu" in commands[-1]


def test_where_no_cpu_build_is_found_it_says_what_to_do(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_machine(script, monkeypatch, gpu=False, uv=False)
    with pytest.raises(SystemExit, match="TORCH_INDEX"):
        script["install_torch"](RecordingVenv(PLANNED_CUDA))


def test_an_index_that_is_named_is_used_for_torch_alone(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_INDEX", "https://wheels.example/cpu")
    venv = RecordingVenv(PLANNED_CUDA)
    script["install_torch"](venv)
    assert venv.calls == [
        ("install", "-qq", script["TORCH"], "--index-url", "https://wheels.example/cpu"),
    ]


def test_torch_that_is_there_already_is_left_alone(script: dict[str, Any]) -> None:
    venv = RecordingVenv({})
    script["install_torch"](venv)
    assert venv.calls == []


def test_the_key_changes_with_what_decides_the_installation(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key: Callable[[Any], str] = script["inputs_key"]
    venv, other = script["Venv"](tmp_path / "a"), script["Venv"](tmp_path / "b")
    keys = {key(venv), key(venv), key(other)}
    monkeypatch.setenv("TORCH_INDEX", "https://wheels.example/cpu")
    keys.add(key(venv))
    assert len(keys) == 3


def test_a_second_run_does_nothing(tmp_path: Path, script: dict[str, Any]) -> None:
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    # Stands in for pip, which takes seconds to install and is only asked whether it is there.
    [packages] = environment.glob("[lL]ib/**/site-packages")
    (packages / "pip.py").touch()
    venv = script["Venv"](environment)
    venv.finish(script["inputs_key"](venv))
    clean = {name: value for name, value in os.environ.items() if name != "TORCH_INDEX"}
    command = [sys.executable, str(SCRIPT), "--venv", str(environment)]
    done = subprocess.run(command, env=clean, check=True, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout == ""


def test_what_tests_need_is_added_once_and_not_taken_away(tmp_path: Path, script: dict[str, Any]) -> None:
    venv = script["Venv"](tmp_path)
    venv._works = lambda: True
    everyone, tests = script["EXTRAS"], script["TEST_EXTRAS"]
    assert not venv.is_current("key")
    venv.finish("key")
    assert venv.is_current("key", everyone)
    assert not venv.is_current("key", tests)
    venv.finish("key", tests)
    assert venv.is_current("key", everyone)
    assert venv.is_current("key", tests)
    assert not venv.is_current("other key", everyone)


def test_the_makefile_lists_its_targets() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    assert "make demo" in done.stdout


def test_a_python_without_pip_is_told_what_to_install(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"apt-get install python3\.\d+-venv"):
        script["Venv"](tmp_path / "venv").create()
    assert not (tmp_path / "venv").exists()


def test_an_old_python_is_told_so(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(script["main"].__globals__, "OLDEST_PYTHON", (9, 0))
    with pytest.raises(SystemExit, match="make setup PYTHON="):
        script["main"]()


def machine(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *programs: str, user: int, sudo: bool) -> None:
    """Pretend about what is installed, who runs the script, and whether sudo asks for a password."""
    names = script["redis_commands"].__globals__
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if name in programs else None)
    monkeypatch.setattr("os.geteuid", lambda: user)
    monkeypatch.setitem(names, "succeeds", lambda command, quiet=True: sudo)


@pytest.mark.parametrize(
    ("programs", "user", "sudo", "expected"),
    [
        (("apt-get",), 0, False, ["env DEBIAN_FRONTEND=noninteractive apt-get"] * 2),
        (("apt-get", "sudo"), 1000, True, ["sudo -n env DEBIAN_FRONTEND=noninteractive apt-get"] * 2),
        (("apt-get", "sudo"), 1000, False, []),
        (("brew",), 1000, False, ["brew install"]),
        ((), 0, True, []),
    ],
)
def test_redis_is_installed_where_that_takes_no_password(
    script: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    programs: tuple[str, ...],
    user: int,
    sudo: bool,
    expected: list[str],
) -> None:
    machine(script, monkeypatch, *programs, user=user, sudo=sudo)
    commands = [" ".join(command) for command in script["redis_commands"]()]
    assert len(commands) == len(expected)
    assert all(command.startswith(start) for command, start in zip(commands, expected, strict=True))
    assert not commands or "redis" in commands[-1]


def test_a_redis_that_is_there_is_left_alone_and_none_is_no_failure(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = script["install_redis_server"].__globals__
    said: list[str] = []
    monkeypatch.setitem(names, "say", said.append)
    machine(script, monkeypatch, "redis-server", "apt-get", user=0, sudo=False)
    script["install_redis_server"]()
    assert not said
    machine(script, monkeypatch, "apt-get", user=0, sudo=False)
    script["install_redis_server"]()
    assert "apt-get -qq update" in said[0]
    assert "skipped" in said[-1]
    assert len(said) == 2
