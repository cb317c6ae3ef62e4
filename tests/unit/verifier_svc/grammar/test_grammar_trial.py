"""A process that finds out which grammars are affordable."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coppice.checkpoints.bundled import MODELS
from coppice.core.errors import InvalidRequestError
from coppice.core.grammar import Grammar, GrammarKind
from verifier_svc.grammar import trial as grammar_trial
from verifier_svc.grammar.trial import GrammarTrial


def schema(value: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


@pytest.fixture(scope="module")
def trial() -> Iterator[GrammarTrial]:
    trial = GrammarTrial((MODELS / "target" / "tokenizer.json").read_bytes(), 4096, [0])
    yield trial
    trial.close()


def words(num: int) -> list[str]:
    return [f"a word of some length, number {index}" for index in range(num)]


TOOL = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where " * 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
        "at": {"type": "string", "format": "date-time"},
        "code": {"anyOf": [{"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, {"type": "null"}]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"op": {"const": f"op_{index}"}, "args": {"items": {"$ref": "#/$defs/node"}}},
                    "required": ["op", "args"],
                }
                for index in range(40)
            ]
        }
    },
    "$ref": "#/$defs/node",
}
ORDINARY: dict[str, Any] = {
    "500 properties": {"properties": {f"property_{index}": {"type": "string"} for index in range(500)}},
    "500 closed ones": {
        "properties": {f"property_{index}": {"type": "string"} for index in range(500)},
        "additionalProperties": False,
    },
    "enum of 64 KiB": {"enum": words(1600)},
    "100 tools": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": {"const": f"tool_{index}"}, "arguments": TOOL},
                "required": ["name", "arguments"],
            }
            for index in range(100)
        ]
    },
    "tree of 40 kinds": TREE,
    "four patterns": {"allOf": [{"type": "string", "pattern": f".*{kind}.*"} for kind in ("[a-z]", "[A-Z]", "[0-9]")]},
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ORDINARY)
def test_large_schemas_of_an_ordinary_kind_are_affordable(name: str, trial: GrammarTrial) -> None:
    assert 0 < trial.measure(schema(ORDINARY[name])) < grammar_trial.MAX_COMPILED_BYTES / 2


AMBIGUOUS = {
    "$defs": {"n": {"anyOf": [*[{"type": "array", "items": {"$ref": "#/$defs/n"}}] * 200, {"type": "integer"}]}},
    "$ref": "#/$defs/n",
}
# 2^10 kinds of objects.
PRODUCT = {
    "allOf": [
        {
            "anyOf": [
                {"type": "object", "properties": {f"k{i}_{j}": {"type": "string"}}, "required": [f"k{i}_{j}"]}
                for j in range(2)
            ]
        }
        for i in range(10)
    ]
}
EXPLODING: dict[str, Any] = {
    "intersection": {"allOf": [{"type": "string", "pattern": f"[ab]*a[ab]{{{length}}}"} for length in range(30)]},
    "product": PRODUCT,
    "ambiguous": AMBIGUOUS,
}


@pytest.mark.timeout(60)
def test_what_explodes_is_refused_and_the_next_one_is_tried(trial: GrammarTrial) -> None:
    for name in EXPLODING:
        with pytest.raises(InvalidRequestError, match="too complex") as caught:
            trial.measure(schema(EXPLODING[name]))
        assert caught.value.field == "sampling.grammar.json_schema"
        assert trial.measure(schema({"const": 1})) < 1 << 20


def test_a_grammar_that_is_wrong_is_told_why(trial: GrammarTrial) -> None:
    with pytest.raises(InvalidRequestError, match="foo"):
        trial.measure(schema({"type": "foo"}))


@pytest.mark.timeout(60)
def test_it_is_not_started_before_it_is_needed_and_ends_with_who_started_it() -> None:
    trial = GrammarTrial((MODELS / "target" / "tokenizer.json").read_bytes(), 4096, [0])
    assert trial._process is None
    trial.measure(schema({"const": 1}))
    process: subprocess.Popen[bytes] | None = trial._process
    assert process is not None
    assert process.stdin is not None
    # As when its parent is gone.
    process.stdin.close()
    assert process.wait(10) == 0
    # It is started anew.
    trial.measure(schema({"const": 1}))
    trial.close()


@pytest.mark.timeout(60)
def test_a_machine_without_time_for_it_is_no_mistake_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = GrammarTrial((MODELS / "target" / "tokenizer.json").read_bytes(), 4096, [0])
    trial.measure(schema({"const": 1}))
    monkeypatch.setattr(grammar_trial, "TRIAL_S", 0.0)
    with pytest.raises(grammar_trial.OverloadedError):
        trial.measure(schema(EXPLODING["intersection"]))
    monkeypatch.undo()
    started_s = time.monotonic()
    trial.measure(schema({"const": 1}))
    assert time.monotonic() - started_s < 30
    trial.close()


def test_a_trial_needs_no_model_library() -> None:
    """What it loads is paid for with memory and time at its start."""
    code = "import sys, verifier_svc.grammar.trial_worker; print('torch' in sys.modules, 'numba' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[4]
    )
    assert done.stdout.split() == ["False", "False"]
