"""What a grammar allows, against brute force over a tiny alphabet, and against the schema read by hand."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits
from tokenizers import Tokenizer, models

from coppice.checkpoints.bundled import MODELS
from coppice.core.errors import InvalidRequestError, UnsupportedError
from coppice.core.grammar import Grammar, GrammarKind
from coppice.core.tokenizer import TargetTokenizer
from tests.unit.verifier_svc.byte_tokenizer import byte_level_tokenizer
from verifier_svc.grammar import matcher as grammar
from verifier_svc.grammar.matcher import GrammarState, GrammarVocabulary

TEXTS = [b"a", b"b", b"1", b".", b"ab", b"ba", b"aab", b"11", b"1.", b"b1", b"\xc3", b"\xa9", b"a\xc3", b"\xa9b"]
SPECIAL = ["<eos>", "<pad>"]
EOS, PAD = 0, 1
TOKENS = [b"", b"", *TEXTS]
# Rows that the model has beyond its tokenizer.
VOCAB = len(TOKENS) + 6

ALPHABET = "ab1.é"
LONGEST = 7
# Completions of a viable beginning are found when they need no more characters than this.
REACH = 3
REGEXES = [
    "a*b",
    "(ab|ba)*",
    "a{2,4}1?",
    "(a|b)*1(a|b)",
    r"[ab]+(1\.[ab])?",
    r"\w+\.\d",
    ".",
    "é+a?",
    "(é|a)*b|1",
    "[^a]{1,3}",
    r"a(b|[^\s\S])|1",
    "a?",
    "^a+$",
]


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def schema(value: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, value if isinstance(value, str) else json.dumps(value))


@pytest.fixture(scope="module")
def tiny() -> GrammarVocabulary:
    return GrammarVocabulary(byte_level_tokenizer(TEXTS, SPECIAL), VOCAB, [EOS])


@pytest.fixture(scope="module")
def bundled() -> GrammarVocabulary:
    return GrammarVocabulary((MODELS / "target" / "tokenizer.json").read_bytes(), 4096, [0])


@cache
def all_texts() -> tuple[str, ...]:
    return tuple("".join(word) for length in range(LONGEST + 1) for word in itertools.product(ALPHABET, repeat=length))


def oracle(pattern: str) -> tuple[set[bytes], set[bytes]]:
    """Every match of a pattern up to a length, and every beginning of one."""
    matches = {text.encode() for text in all_texts() if re.fullmatch(pattern, text)}
    return matches, {match[:end] for match in matches for end in range(len(match) + 1)}


def allowed_by_brute_force(text: bytes, matches: set[bytes], beginnings: set[bytes]) -> set[int]:
    followers = {index for index, token in enumerate(TOKENS) if token and text + token in beginnings}
    return followers | ({EOS} if text in matches else set())


@pytest.mark.parametrize("pattern", REGEXES)
def test_a_regex_allows_what_brute_force_allows(pattern: str, tiny: GrammarVocabulary) -> None:
    matches, beginnings = oracle(pattern)
    compiled = tiny.compile(regex(pattern))
    generator = random.Random(pattern)
    checked = 0
    for _ in range(60):
        state = tiny.begin(compiled, [], [EOS])
        text = b""
        # The longest token has three bytes: what the oracle is asked about stays within its reach.
        while len(text.decode(errors="ignore")) + 3 + REACH <= LONGEST:
            expected = allowed_by_brute_force(text, matches, beginnings)
            assert set(np.flatnonzero(state.allowed).tolist()) == expected, text
            assert state.is_complete == (expected == {EOS}), text
            checked += 1
            followers = sorted(expected - {EOS})
            if not followers:
                break
            token = generator.choice(followers)
            state.push(token)
            text += TOKENS[token]
    assert checked >= 60


def test_an_end_that_the_request_ignores_is_never_allowed(tiny: GrammarVocabulary) -> None:
    state = tiny.begin(tiny.compile(regex("a*")), [], [])
    assert TEXTS[0] == b"a"
    assert np.flatnonzero(state.allowed).tolist() == [2]
    assert not state.is_complete
    state = tiny.begin(tiny.compile(regex("a")), [2], [])
    assert not state.allowed.any()
    assert state.is_complete


def test_an_output_that_has_begun_is_where_its_tokens_lead(tiny: GrammarVocabulary) -> None:
    compiled = tiny.compile(regex("(a|b)*1(a|b)"))
    step_by_step = tiny.begin(compiled, [], [EOS])
    tokens = [TOKENS.index(token) for token in (b"aab", b"b", b"b1", b"a")]
    for count, token in enumerate(tokens, start=1):
        step_by_step.push(token)
        at_once = tiny.begin(compiled, tokens[:count], [EOS])
        assert np.array_equal(step_by_step.allowed, at_once.allowed)
    assert step_by_step.is_complete


@pytest.mark.parametrize(
    ("output", "wrong"), [([b"b1", b"1"], 1), ([b"."], 0), ([b"aab", b"1.", b"b"], 1)], ids=["1", "at once", "inside"]
)
def test_an_output_that_is_no_beginning_is_refused(output: list[bytes], wrong: int, tiny: GrammarVocabulary) -> None:
    with pytest.raises(InvalidRequestError, match=f"entry {wrong} ") as caught:
        tiny.begin(tiny.compile(regex("(a|b)*1(a|b)")), [TOKENS.index(token) for token in output], [EOS])
    assert caught.value.field == "resume_token_ids"


@pytest.mark.parametrize("output", [[EOS], [PAD], [VOCAB - 1], [10**6]])
def test_tokens_without_text_are_no_beginning(output: list[int], tiny: GrammarVocabulary) -> None:
    with pytest.raises(InvalidRequestError, match="entry 0 "):
        tiny.begin(tiny.compile(regex(".*")), output, [EOS])


def test_outputs_of_one_grammar_do_not_know_of_each_other(tiny: GrammarVocabulary) -> None:
    compiled = tiny.compile(regex("(ab|ba)*"))
    first, second = tiny.begin(compiled, [], [EOS]), tiny.begin(compiled, [], [EOS])
    before = second.allowed.copy()
    first.push(2)
    assert np.array_equal(second.allowed, before)
    assert not np.array_equal(first.allowed, before)
    assert np.array_equal(tiny.begin(compiled, [], [EOS]).allowed, before)


def keeps_person(value: Any) -> bool:
    return (
        list(value) == ["name", "age", "tags"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 4
        and type(value["age"]) is int
        and 0 <= value["age"] <= 120
        and len(value["tags"]) <= 2
        and all(tag in ("red", "green") for tag in value["tags"])
    )


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, tuple[object, Callable[[Any], bool]]] = {
    "person": (PERSON, keeps_person),
    "tree": (
        {
            "$ref": "#/$defs/node",
            "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}},
        },
        lambda value: isinstance(value, list) and len(value) <= 1,
    ),
    "one of": (
        {"anyOf": [{"const": None}, {"type": "boolean"}, {"type": "string", "pattern": "^x{1,3}$"}]},
        lambda value: value is None or isinstance(value, bool) or value in ("x", "xx", "xxx"),
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_any_walk_through_a_schema_writes_json_that_keeps_it(name: str, bundled: GrammarVocabulary) -> None:
    written, keeps = SCHEMAS[name]
    compiled = bundled.compile(schema(written))
    tokenizer = bundled_tokenizer()
    generator = random.Random(name)
    for _ in range(10):
        state = bundled.begin(compiled, [], [0])
        output = walk(state, generator)
        assert keeps(json.loads(tokenizer(output))), tokenizer(output)


def walk(state: GrammarState, generator: random.Random) -> list[int]:
    """Random tokens, the short ones likelier, until the end."""
    output: list[int] = []
    while not state.is_complete:
        token = min(generator.choices(np.flatnonzero(state.allowed).tolist(), k=3))
        if token == 0:
            break
        state.push(token)
        output.append(token)
        assert len(output) < 2000
    return output


def bundled_tokenizer() -> Callable[[list[int]], str]:
    return TargetTokenizer((MODELS / "target" / "tokenizer.json").read_bytes()).decode


def test_white_space_between_symbols_comes_to_an_end(bundled: GrammarVocabulary) -> None:
    compiled = bundled.compile(schema({"type": "array", "items": {"type": "integer"}}))
    tokenizer = TargetTokenizer((MODELS / "target" / "tokenizer.json").read_bytes())
    [bracket], [space] = tokenizer.encode("["), tokenizer.encode(" ")
    state = bundled.begin(compiled, [bracket, *[space] * 31], [0])
    assert state.allowed[space]
    state.push(space)
    assert not any(tokenizer.token_text(int(token)).isspace() for token in np.flatnonzero(state.allowed))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (regex("("), "unclosed group"),
        (regex("(?=a)b"), "look-around"),
        (regex(r"(a)\1"), "backreferences"),
        (regex("ab\\"), "lone backslash"),
        (regex(r"a[^\s\S]"), "nothing matches it"),
        (schema("{"), "not JSON"),
        (schema("[1]"), "must be a JSON object"),
        (schema('{"maximum": NaN}'), "NaN is no JSON value"),
        (schema("[" * 60_000), "not JSON"),
        (schema({"const": "\ud800"}), "hex escape"),
        (schema({"type": "foo"}), "foo"),
        (schema({"not": {}}), "not"),
        (schema({"type": "string", "pattern": "("}), "unclosed group"),
        (schema({"type": "string", "minLength": 2, "maxLength": 1}), "nsatisfiable"),
        (schema({"$ref": "#"}), "nothing matches it"),
        (schema({"$ref": "http://localhost/x"}), "not present"),
    ],
    ids=lambda value: value.text[:16] if isinstance(value, Grammar) else "",
)
def test_a_bad_grammar_is_told_why(bad: Grammar, says: str, tiny: GrammarVocabulary) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        tiny.compile(bad)
    assert caught.value.field == bad.field
    assert says in caught.value.description
    assert "<" not in caught.value.description


def test_a_grammar_that_takes_too_long_is_refused(tiny: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    nested = regex("((a{1,30}b){1,30}1){1,30}")
    tiny.compile(nested)
    monkeypatch.setattr(grammar, "_LIMITS", LLParserLimits(initial_lexer_fuel=20, verbose_errors=False))
    with pytest.raises(InvalidRequestError) as caught:
        tiny.compile(nested)
    assert caught.value.field == "sampling.grammar.regex"


def test_an_output_whose_masks_take_too_long_ends_and_no_other_begins(
    tiny: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = tiny.compile(regex("(a|b)*1(a|b)"))
    state = tiny.begin(compiled, [], [EOS])
    state.push(2)
    monkeypatch.setattr(grammar, "STEP_CREDIT_S", 0.0)
    with pytest.raises(InvalidRequestError, match="takes too long") as caught:
        state.push(2)
    assert caught.value.field == "sampling.grammar.regex"
    monkeypatch.undo()
    with pytest.raises(InvalidRequestError, match="takes too long"):
        tiny.begin(compiled, [], [EOS])


def test_a_copy_goes_its_own_way(tiny: GrammarVocabulary) -> None:
    state = tiny.begin(tiny.compile(regex("(ab|ba)*")), [], [EOS])
    before = state.allowed.copy()
    other = state.copy()
    other.push(2)
    assert np.array_equal(state.allowed, before)
    assert not np.array_equal(other.allowed, before)


def test_an_object_with_too_many_properties_is_refused_before_anyone_compiles_it() -> None:
    def wide(num: int) -> dict[str, object]:
        return {"items": [{"properties": {f"key{index}": {} for index in range(num)}}]}

    assert schema(wide(1000)).text
    with pytest.raises(InvalidRequestError, match="1001 properties in one object, at most 1000"):
        schema(wide(1001))
    # Many properties of many objects are fine, and so is what is no JSON for now.
    assert schema({"$defs": {str(index): wide(50) for index in range(40)}}).text
    assert schema('{"properties": ' + ":" * 2000).text


def test_a_text_that_the_vocabulary_cannot_write_is_refused(tiny: GrammarVocabulary) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        tiny.begin(tiny.compile(regex("ax")), [2], [EOS])
    assert caught.value.field == "sampling.grammar.regex"


def test_an_empty_and_a_long_text_are_refused() -> None:
    for text, says in (("", "empty"), ("é" * 32769, "65536 bytes")):
        with pytest.raises(InvalidRequestError, match=says):
            regex(text)
    assert regex("é" * 32768).text


def test_a_tokenizer_whose_tokens_are_no_bytes_has_no_grammars() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(UnsupportedError, match="tokenizer"):
        GrammarVocabulary(words.to_str().encode(), 2, [])
