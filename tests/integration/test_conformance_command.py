"""`coppice conformance` against a running deployment: what it prints and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coppice.cli.__main__ import app
from tests.tiny_checkpoint import write_tiny_llama
from tests.toy_deployment import ToyDeployment, serving_toy

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0


class OffByOne(ToyDeployment):
    """Counts one token too many."""

    def say(self, message: object, request: object) -> None:
        message.usage.completion_tokens += message.HasField("finished")  # type: ignore[attr-defined]


async def command(toy: ToyDeployment, *arguments: str) -> tuple[int | None, str, str]:
    async with serving_toy(toy) as address:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "coppice.cli", "conformance", "--address", address, *arguments),
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(TIMEOUT_S):
            out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_a_deployment_that_passes_ends_with_code_0_and_a_line_for_each_case() -> None:
    code, out, err = await command(ToyDeployment(), "--only", "greedy/is-*", "--only", "reference/text-*")
    assert (code, err) == (0, "")
    heading, first, second, summary = out.splitlines()
    assert "model toy" in heading
    assert first.split()[:2] == ["pass", "greedy/is-the-default"]
    assert second.endswith("no --reference is given")
    assert summary.startswith("2 cases: 1 passed, 0 failed, 0 explained, 1 skipped")


async def test_a_failure_ends_with_code_1_and_one_object_where_that_is_asked_for() -> None:
    code, out, err = await command(OffByOne(), "--only", "usage/completion-tokens-are-*", "--json")
    assert (code, err) == (1, "")
    report = json.loads(out)
    served = {"address", "model", "version", "dtype", "serving_fingerprint"}
    assert set(report) == served | {"passed", "failed", "explained", "skipped", "cases"}
    assert (report["passed"], report["failed"], report["skipped"]) == (0, 1, 0)
    [case] = report["cases"]
    assert (case["name"], case["status"]) == ("usage/completion-tokens-are-those-delivered", "failed")
    assert case["reason"].startswith("25 are counted, 24 were delivered; request: {")


def test_nobody_at_the_address_ends_with_code_1_and_the_reason() -> None:
    result = CliRunner().invoke(app, ["conformance", "--address", "127.0.0.1:1", "--timeout", "5"])
    assert result.exit_code == 1
    assert "coppice: UNAVAILABLE" in result.stderr


def test_the_list_needs_no_deployment() -> None:
    result = CliRunner().invoke(app, ["conformance", "--list", "--only", "stops/*"])
    assert result.exit_code == 0
    assert "stops/one-character-wherever-it-is" in result.stdout.splitlines()
    assert all(line.startswith("stops/") for line in result.stdout.splitlines())


@pytest.mark.parametrize("arguments", [["--only", "no-such-case"], ["--reference", "no-such-folder"]], ids=" ".join)
def test_wrong_options_end_with_code_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["conformance", *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"coppice: {arguments[0]}: ")


@pytest.mark.timeout(240)
def test_a_small_cache_makes_sequences_preempt_each_other_and_changes_no_token(tmp_path: Path) -> None:
    """The command counts preemptions by what the verifier says of them."""
    write_tiny_llama(tmp_path, vocab_size=62, max_context_tokens=400)
    command = [sys.executable, "-m", "coppice.cli", "conformance", "--target", str(tmp_path), "--drafter", "none"]
    command += ["--device", "cpu", "--kv-cache-mib", "1", "--only", "pressure/*", "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=env, stdout=subprocess.PIPE, timeout=220, check=False)
    report = json.loads(ended.stdout)
    assert [case["status"] for case in report["cases"]] == ["passed", "passed"]
    assert report["preemptions"] > 0
