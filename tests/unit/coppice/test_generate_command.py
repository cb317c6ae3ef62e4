"""`coppice generate` sees mistakes in its options before it loads a model."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from coppice.cli import generate
from coppice.cli.__main__ import app


def connected(*_: object) -> None:
    raise AssertionError("it goes on")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--prompt", "a", "--temperature", "nan"], "--temperature: must be in [0, 100]"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature: must be in [0, 100]"),
        (["--prompt", "a", "--top-p", "1.5"], "--top-p: must be in (0, 1]"),
        (["--prompt", ""], "must not be empty"),
        (["--token-ids", ""], "must not be empty"),
        (["--prompt", "a", "--json-schema", "{bad"], "--json-schema: is not JSON"),
        (["--prompt", "a", "--address", "http://127.0.0.1:1"], "--address: must be HOST:PORT"),
        (["--prompt", "a", "--address", "127.0.0.1:1", "--target", "other"], "--target: cannot go with --address"),
        (["--prompt", "a", "--address", "127.0.0.1:1", "--threads", "2"], "--threads: cannot go with --address"),
        (["--prompt", "a", "--address", "127.0.0.1:1", "--token", "\u00e9"], "--token: must be printable ASCII"),
        (["--token-ids", "1,x"], "--token-ids: must be unsigned 32-bit numbers with commas between, got 'x'"),
        (["--token-ids", "4294967296"], "got '4294967296'"),
        (["--prompt", "a", "--speculation", "fast"], "got 'fast'"),
        (["--prompt", "a", "--top-log-probs", "3"], "--top-log-probs: needs --json"),
        (["--prompt", "a", "--speculation", "small-lm,fast"], "got 'fast'"),
    ],
)
def test_a_mistake_is_seen_before_anything_starts(
    options: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--address" not in options:
        monkeypatch.setattr(generate, "connected", connected)
    ended = CliRunner().invoke(app, ["generate", *options])
    assert ended.exit_code == 2
    assert complaint in ended.output


@pytest.mark.parametrize("speculation", ["auto", "off", "cache", "small-lm, prompt-lookup"])
def test_sources_that_a_topology_may_have_are_no_mistake(speculation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "connected", connected)
    ended = CliRunner().invoke(app, ["generate", "--prompt", "a", "--speculation", speculation])
    assert isinstance(ended.exception, AssertionError)


def test_up_reads_the_file_of_tokens_before_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENS_FILE", "/nowhere/tokens")
    ended = CliRunner().invoke(app, ["up"])
    assert ended.exit_code == 2
    assert "TOKENS_FILE: " in ended.output
    assert "/nowhere/tokens" in ended.output


def test_several_verifiers_are_not_colocated() -> None:
    ended = CliRunner().invoke(app, ["up", "--colocated", "--verifiers", "2"])
    assert ended.exit_code == 2
    assert "--colocated: several verifiers are processes of their own" in ended.output
