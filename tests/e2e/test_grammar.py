"""Grammars through the whole system, separate processes, the bundled pair: outputs that keep them, the same twice."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from coppice.cli.__main__ import app
from coppice.client import Client, Options, RequestFailedError

PROMPT = "config = "
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["file", "folder"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
    # Compact, so that outputs end soon.
    "x-guidance": {"whitespace_flexible": False},
}
CALL = r"[a-z]{1,12}\(\d{1,3}(, \d{1,3}){0,3}\)"


def keeps_schema(value: Any) -> bool:
    return (
        set(value) == {"name", "size", "kind"}
        and re.fullmatch("[a-z]{1,8}", value["name"]) is not None
        and type(value["size"]) is int
        and 0 <= value["size"] <= 99
        and value["kind"] in ("file", "folder")
    )


@pytest.mark.timeout(240)
async def test_outputs_keep_their_grammar_and_speculation_changes_no_token(bundled: Client) -> None:
    for sampling in (
        Options(),
        Options(temperature=0.7, top_p=0.9, seed=1),
        Options(temperature=1.0, seed=2),
        Options(temperature=1.5, seed=3),
    ):
        for grammar in ({"json_schema": SCHEMA}, {"regex": CALL}):
            options = replace(sampling, max_tokens=60, **grammar)
            on = await bundled.generate(PROMPT, options)
            off = await bundled.generate(PROMPT, replace(options, speculation="off"))
            assert on.token_ids == off.token_ids
            assert (on.text, on.finish_reason, on.stop_match) == (off.text, "stop", None)
            assert keeps_schema(json.loads(on.text)) if "json_schema" in grammar else re.fullmatch(CALL, on.text)
            for cut in (1, len(on.token_ids) - 1, len(on.token_ids)):
                rest = await bundled.generate(PROMPT, replace(options, resume_token_ids=on.token_ids[:cut]))
                assert rest.token_ids == on.token_ids[cut:]
                assert rest.finish_reason == "stop"


async def test_a_bad_grammar_names_its_field_and_the_next_request_is_served(bundled: Client) -> None:
    for options, field in (
        (Options(regex="("), "sampling.grammar.regex"),
        (Options(json_schema="{"), "sampling.grammar.json_schema"),
        (Options(json_schema={"not": {}}), "sampling.grammar.json_schema"),
        (Options(regex="abc", resume_token_ids=(5,)), "resume_token_ids"),
    ):
        with pytest.raises(RequestFailedError) as caught:
            await bundled.generate(PROMPT, options)
        assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.fields == (field,)
    assert (await bundled.generate(PROMPT, Options(regex="yes"))).text == "yes"


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
