"""Checkpoints that no service can use: each is refused at start, in one line, with the exit code of wrong settings.

`docs/checkpoints.md` has a table of them. With COPPICE_WRITE_TABLES=1 it is written anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import drafter_svc.__main__ as drafter_process
from tests.integration.damaged_checkpoints import CASES, VOCAB, Case, config, eagle_drafter
from tests.tiny_checkpoint import write_tiny_llama
from verifier_svc import app
from verifier_svc.config import CONFIGURATION_ERROR, VerifierConfig

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
HEAD = "| Checkpoint | What the service says | Exit code | Seconds |\n|---|---|---|---|\n"
# Beside importing torch, which all starts of a process have in common.
MOST_SECONDS = 5.0
# A process for each, at the same time: of the verifier's, this is what transformers itself says most about.
IN_PROCESSES = (("verifier", "an adapter that was not merged"), ("drafter", "a matrix that is missing"))
PROCESS_S = 120.0


@dataclass(frozen=True)
class Refusal:
    """What a service says of a checkpoint, in whose place the message has MODEL, and how it ends."""

    message: str
    exit_code: int
    seconds: float


class Heard(logging.Handler):
    """Keeps records of warnings and worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    write_tiny_llama(directory, vocab_size=VOCAB, max_context_tokens=64)
    return directory


def damaged(case: Case, whole: Path, directory: Path) -> Path:
    """The checkpoint of a case."""
    checkpoint = directory / ("model.gguf" if case.what.startswith("a GGUF file") else "checkpoint")
    shutil.copytree(whole, checkpoint)
    case.change(checkpoint)
    return checkpoint


@contextlib.contextmanager
def hearing() -> Iterator[Heard]:
    heard = Heard()
    logging.getLogger().addHandler(heard)
    try:
        yield heard
    finally:
        logging.getLogger().removeHandler(heard)


def refused(case: Case, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Refusal:
    """What the service does with a checkpoint, in this process."""
    with hearing() as heard:
        started_s = time.monotonic()
        if case.service == "verifier":
            with pytest.raises(SystemExit) as ended:
                app.run_verifier(VerifierConfig(model=str(checkpoint), device="cpu", threads=1, kv_cache_mib=1))
            assert isinstance(ended.value.code, int)
            code = ended.value.code
        else:
            for name, value in {"MODEL": str(checkpoint), "DRAFTER_KIND": case.kind, "DEVICE": "cpu"}.items():
                monkeypatch.setenv(name, value)
            # It would be this process's.
            monkeypatch.setattr(drafter_process, "configure_logging", lambda _: None)
            monkeypatch.setattr(drafter_process, "set_threads", lambda _: None)
            code = drafter_process.main()
        seconds = time.monotonic() - started_s
    [record] = heard.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is None
    return Refusal(without_place(record.getMessage(), checkpoint), code, seconds)


def without_place(message: str, checkpoint: Path) -> str:
    return message.replace(str(checkpoint), "MODEL").replace(str(checkpoint.parent), "")


def row(case: Case, refusal: Refusal) -> str:
    kind = f", {case.kind}" if case.service == "drafter" else ""
    # A bar ends a cell.
    message = refusal.message.replace("|", "\\|")
    return f"| {case.service}{kind}: {case.what} | {message} | {refusal.exit_code} | {refusal.seconds:.2f} |\n"


def comparable(line: str, words: str) -> str:
    """A row of the table without what differs from run to run."""
    line = re.sub(r"\| [\d.]+ \|$", "", line.rstrip("\n"))
    if words:
        before, found, after = line.partition(words)
        assert found, line
        # What the library says is not empty, and is followed by the exit code alone.
        assert re.fullmatch(r".+ \| \d+ ", after), line
        return before
    return line


@pytest.mark.timeout(120)
def test_each_is_refused_in_one_line_as_the_table_says(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = []
    for number, case in enumerate(CASES):
        refusal = refused(case, damaged(case, whole, tmp_path / str(number)), monkeypatch)
        assert refusal.exit_code == CONFIGURATION_ERROR, case.what
        assert "\n" not in refusal.message, case.what
        assert len(refusal.message) < 700, case.what
        assert refusal.seconds < MOST_SECONDS, case.what
        rows.append(row(case, refusal))
    assert "Traceback" not in "".join(capfd.readouterr())
    text = DOCUMENT.read_text()
    before, head, table = text.partition(HEAD)
    assert head
    if os.environ.get("COPPICE_WRITE_TABLES") == "1":
        DOCUMENT.write_text(before + head + "".join(rows))
        return
    found = table.splitlines()
    assert len(found) == len(rows)
    for case, line, expected in zip(CASES, found, rows, strict=True):
        assert comparable(line, case.words) == comparable(expected, case.words)


def test_a_long_reason_is_cut(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change = eagle_drafter(config(eagle_aux_hidden_state_layer_ids=["\n"] * 10_000))
    case = Case("layers that are none", change, "drafter", "eagle")
    refusal = refused(case, damaged(case, whole, tmp_path), monkeypatch)
    assert refusal.exit_code == CONFIGURATION_ERROR
    assert "reads layers" in refusal.message
    assert refusal.message.endswith("...")
    assert len(refusal.message) < 700


@pytest.mark.timeout(400)
def test_as_processes_they_say_the_same_and_nothing_else(whole: Path, tmp_path: Path) -> None:
    by_name = {(case.service, case.what): case for case in reversed(CASES)}
    cases = [by_name[name] for name in IN_PROCESSES]
    places = [damaged(case, whole, tmp_path / str(number)) for number, case in enumerate(cases)]
    table = DOCUMENT.read_text()
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(started(*pair)) for pair in zip(cases, places, strict=True)]
        for case, place, process in zip(cases, places, processes, strict=True):
            output, errors = process.communicate(timeout=PROCESS_S)
            assert (process.returncode, output) == (CONFIGURATION_ERROR, ""), errors
            [line] = errors.splitlines()
            assert f" ERROR {case.service}_svc" in line
            _, _, message = line.partition(f"{case.service}_svc")[2].partition(": ")
            assert f"| {without_place(message, place)} | {CONFIGURATION_ERROR} |" in table


@contextlib.contextmanager
def started(case: Case, checkpoint: Path) -> Iterator[subprocess.Popen[str]]:
    settings = {"MODEL": str(checkpoint), "DRAFTER_KIND": case.kind, "DEVICE": "cpu", "THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", f"{case.service}_svc"],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
