"""Grammars through the command line, separate processes, the bundled pair; what outputs keep, the suite tries."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coppice.cli.__main__ import app
from coppice.client import Client, Options

PROMPT = "config = "


async def test_the_command_line_takes_a_schema_as_text_or_file_and_a_regex(bundled: Client, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"const": [1]}))
    for arguments, expected in (
        (["--json-schema", str(file)], [1]),
        (["--json-schema", '{"const": 7}'], 7),
        (["--regex", "42"], 42),
    ):
        command = ["generate", "--address", bundled.address, "--prompt", PROMPT, "--json", *arguments]
        result = await asyncio.to_thread(CliRunner().invoke, app, command)
        assert result.exit_code == 0, result.stderr
        assert json.loads(json.loads(result.stdout)["text"]) == expected


def test_a_schema_and_a_regex_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="regex"):
        Options(json_schema="{}", regex="x")
