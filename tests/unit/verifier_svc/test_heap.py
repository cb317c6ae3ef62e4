"""A process that has compiled its kernels makes room for one that reads them."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

from coppice.kernels.cpu import compiler
from coppice.kernels.cpu.compiler import COMPILATIONS, compiled
from verifier_svc.heap import start_again_if_compiled

COMMAND = ["python", "-m", "verifier_svc"]


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands by which the process was replaced; two functions have been compiled."""
    commands: list[list[str]] = []

    def execv(_: str, command: list[str]) -> None:
        commands.append(command[1:])

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(sys, "orig_argv", COMMAND)
    monkeypatch.setattr(COMPILATIONS, "num_kept", 2)
    monkeypatch.setenv("COPPICE_STARTED_AGAIN", "")
    return commands


def test_it_starts_again_once(replaced: list[list[str]]) -> None:
    start_again_if_compiled()
    assert replaced == [COMMAND[1:]]
    start_again_if_compiled()
    assert len(replaced) == 1


def test_not_where_all_was_on_disk(replaced: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(COMPILATIONS, "num_kept", 0)
    start_again_if_compiled()
    assert not replaced


def test_not_as_a_part_of_a_command(replaced: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "coppice.cli.tied_process", "1", "verifier_svc"])
    start_again_if_compiled()
    assert not replaced


def test_what_is_not_kept_on_disk_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(values: np.ndarray) -> np.ndarray:
        return 2 * values

    monkeypatch.setattr(compiler, "_cache_directory", lambda _: None)
    before = COMPILATIONS.num_kept
    assert compiled(double)(np.ones(2)).tolist() == [2, 2]
    assert COMPILATIONS.num_kept == before
