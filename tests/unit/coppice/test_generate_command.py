"""`coppice generate` sees mistakes in its options before it loads a model."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from coppice.cli import generate
from coppice.cli.__main__ import app


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
    ],
)
def test_a_mistake_is_seen_before_anything_starts(
    options: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connected(*_: object) -> None:
        raise AssertionError("it goes on")

    if "--address" not in options:
        monkeypatch.setattr(generate, "connected", connected)
    ended = CliRunner().invoke(app, ["generate", *options])
    assert ended.exit_code == 2
    assert complaint in ended.output
