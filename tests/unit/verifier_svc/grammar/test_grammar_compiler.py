"""Compiling grammars beside the model: elsewhere, once, and never fatal."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from tokenizers import Tokenizer, models

from coppice.core.errors import CoppiceError, InvalidRequestError, UnsupportedError
from coppice.core.grammar import Grammar, GrammarKind
from tests.unit.verifier_svc.byte_tokenizer import byte_level_tokenizer
from verifier_svc.grammar import compiler as grammar_compiler
from verifier_svc.grammar.cache import GrammarCache
from verifier_svc.grammar.compiler import GrammarCompiler, is_plain
from verifier_svc.grammar.matcher import CompiledGrammar, GrammarState, GrammarVocabulary

TOKENIZER = byte_level_tokenizer([b"a", b"b"], ["<eos>"])
VOCAB, EOS, A, B = 3, 0, 1, 2
TIMEOUT_S = 30.0


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts in the order in which they are really compiled."""
    texts: list[str] = []
    compile_grammar = GrammarVocabulary.compile

    def counting(self: GrammarVocabulary, grammar: Grammar) -> CompiledGrammar:
        texts.append(grammar.text)
        return compile_grammar(self, grammar)

    monkeypatch.setattr(GrammarVocabulary, "compile", counting)
    return texts


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(TOKENIZER, VOCAB, [EOS])
    yield compiler
    compiler.close()


def begin(compiler: GrammarCompiler, text: str, output: tuple[int, ...] = ()) -> GrammarState | CoppiceError:
    future: Future[GrammarState | CoppiceError] = Future()
    compiler.begin(regex(text), output, [EOS], future.set_result)
    return future.result(TIMEOUT_S)


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler, compiled: list[str]) -> None:
    states = [begin(compiler, "a*b") for _ in range(3)]
    assert all(isinstance(state, GrammarState) for state in states)
    assert compiled == ["a*b"]


def test_a_bad_grammar_is_tried_once_and_told_each_time(compiler: GrammarCompiler, compiled: list[str]) -> None:
    errors = [begin(compiler, "(") for _ in range(3)]
    assert all(isinstance(error, InvalidRequestError) for error in errors)
    assert compiled == ["("]


def test_the_grammar_that_was_used_longest_ago_is_forgotten(
    compiler: GrammarCompiler, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = GrammarVocabulary(TOKENIZER, VOCAB, [EOS]).compile(regex("a")).num_bytes
    compiled.clear()
    monkeypatch.setattr(compiler, "_cache", GrammarCache(int(2.5 * one)))
    for text in ("a", "b", "a", "ab", "a", "b"):
        begin(compiler, text)
    assert compiled == ["a", "b", "ab", "b"]
    assert 2 * one < compiler.cache_bytes <= 2.5 * one


def test_a_bad_beginning_does_not_spoil_the_grammar(compiler: GrammarCompiler) -> None:
    error = begin(compiler, "a*b", (B, B))
    assert isinstance(error, InvalidRequestError)
    assert error.field == "resume_token_ids"
    state = begin(compiler, "a*b", (A, B))
    assert isinstance(state, GrammarState)
    assert state.is_complete


def test_whoever_asks_does_not_wait(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    compile_grammar = GrammarVocabulary.compile

    def held(self: GrammarVocabulary, grammar: Grammar) -> CompiledGrammar:
        assert go.wait(TIMEOUT_S)
        return compile_grammar(self, grammar)

    monkeypatch.setattr(GrammarVocabulary, "compile", held)
    results: list[Future[GrammarState | CoppiceError]] = [Future() for _ in range(20)]
    for index, future in enumerate(results):
        compiler.begin(regex("a" * (index % 5 + 1)), (), [EOS], future.set_result)
    assert not any(future.done() for future in results)
    go.set()
    for index, future in enumerate(results):
        state = future.result(TIMEOUT_S)
        assert isinstance(state, GrammarState)
        for _ in range(index % 5 + 1):
            assert not state.is_complete
            state.push(A)
        assert state.is_complete


def test_a_crash_of_the_library_is_told(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicError(BaseException):
        """As Rust's panics arrive."""

    def panics(self: GrammarVocabulary, grammar: Grammar) -> CompiledGrammar:
        raise PanicError

    with monkeypatch.context() as patch:
        patch.setattr(GrammarVocabulary, "compile", panics)
        assert type(begin(compiler, "a")) is CoppiceError
    assert isinstance(begin(compiler, "a"), GrammarState)


def test_without_the_library_grammars_are_not_offered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "verifier_svc.grammar.matcher")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    error = begin(GrammarCompiler(TOKENIZER, VOCAB, [EOS]), "a")
    assert isinstance(error, UnsupportedError)
    # Why is for the log.
    assert str(error) == "sampling.grammar: not offered by this server"
    assert "llguidance" in caplog.text


def test_a_tokenizer_without_bytes_is_not_fatal(caplog: pytest.LogCaptureFixture) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    error = begin(GrammarCompiler(words.to_str().encode(), 2, []), "a")
    assert isinstance(error, UnsupportedError)
    assert "tokenizer" in caplog.text


def costly(index: int) -> Grammar:
    """A schema that takes minutes to compile."""
    patterns = [{"type": "string", "pattern": f"[ab]*a[ab]{{{length}}}"} for length in range(30)]
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"title": str(index), "allOf": patterns}))


def tried(index: int) -> Grammar:
    """A schema that is fine, but has to be tried first."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"title": str(index), "allOf": [{"const": 1}]}))


@pytest.fixture
def digits() -> Iterator[GrammarCompiler]:
    tokenizer = byte_level_tokenizer([bytes([code]) for code in range(32, 127)], ["<eos>"])
    compiler = GrammarCompiler(tokenizer, 96, [EOS])
    yield compiler
    compiler.close()


@pytest.mark.timeout(60)
def test_a_flood_of_costly_grammars_holds_up_no_other(digits: GrammarCompiler) -> None:
    refused: list[Future[GrammarState | CoppiceError]] = [Future() for _ in range(40)]
    for index, future in enumerate(refused):
        digits.begin(costly(index), (), [EOS], future.set_result, "flood")
    slowest_s = 0.0
    for length in range(1, 20):
        future = Future()
        started_s = time.monotonic()
        digits.begin(regex(f"[a-z]{{{length}}}"), (), [EOS], future.set_result, "flood")
        assert isinstance(future.result(TIMEOUT_S), GrammarState)
        slowest_s = max(slowest_s, time.monotonic() - started_s)
    # Where the flood goes first, somebody waits for forty trials.
    assert slowest_s < 5.0
    # What has to be tried waits for the one that is being tried, and not for the flood.
    future = Future()
    digits.begin(tried(0), (), [EOS], future.set_result, "other")
    assert isinstance(future.result(TIMEOUT_S), GrammarState)
    assert sum(future.done() for future in refused) < 20
    error = next(future for future in refused if future.done()).result()
    assert isinstance(error, InvalidRequestError)
    assert "too complex" in str(error)
    assert digits.counts.results["refused"] >= 1


def test_a_grammar_that_is_closed_leaves_the_queue(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    go, held = threading.Event(), threading.Event()
    compile_grammar = GrammarVocabulary.compile

    def hold(self: GrammarVocabulary, grammar: Grammar) -> CompiledGrammar:
        held.set()
        assert go.wait(TIMEOUT_S)
        return compile_grammar(self, grammar)

    monkeypatch.setattr(GrammarVocabulary, "compile", hold)
    first: Future[GrammarState | CoppiceError] = Future()
    compiler.begin(regex("a"), (), [EOS], first.set_result)
    assert held.wait(TIMEOUT_S)
    delivered: list[object] = []
    cancels = [compiler.begin(regex("b" * length), (), [EOS], delivered.append) for length in range(1, 9)]
    assert compiler.num_waiting == 8
    for cancel in cancels:
        cancel()
    assert compiler.num_waiting == 0
    go.set()
    assert isinstance(first.result(TIMEOUT_S), GrammarState)
    assert isinstance(begin(compiler, "ab"), GrammarState)
    assert delivered == []


def test_tried_grammars_in_use_leave_room_before_others_are_compiled(
    digits: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digits, "_cache", GrammarCache(0))
    futures: list[Future[GrammarState | CoppiceError]] = [Future() for _ in range(2)]
    digits.begin(tried(0), (), [EOS], futures[0].set_result)
    assert isinstance(futures[0].result(TIMEOUT_S), GrammarState)
    monkeypatch.setattr(grammar_compiler, "MAX_TRIED_BYTES", 1)
    digits.begin(tried(1), (), [EOS], futures[1].set_result)
    with pytest.raises(TimeoutError):
        futures[1].result(0.5)
    monkeypatch.setattr(grammar_compiler, "MAX_TRIED_BYTES", 1 << 20)
    assert isinstance(futures[1].result(TIMEOUT_S), GrammarState)


def test_closing_ends_what_is_being_tried() -> None:
    compiler = GrammarCompiler(TOKENIZER, VOCAB, [EOS])
    compiler.begin(costly(0), (), [EOS], lambda _: None)
    time.sleep(0.1)
    started_s = time.monotonic()
    compiler.close()
    assert time.monotonic() - started_s < 10
    gc.collect()


@pytest.mark.parametrize(
    ("grammar", "plain"),
    [
        (regex("(a{1,30}b){1,30}"), True),
        (regex("x" * 5000), False),
        (
            Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object","properties":{"a":{"type":"string","maxLength":9}}}'),
            True,
        ),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type":"string","pattern":"a+"}'), True),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type":"string","pattern":"a+","maxLength":9}'), False),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"\\u0061llOf":[]}'), False),
        (tried(0), False),
    ],
    ids=["regex", "long regex", "schema", "pattern", "pattern and length", "escaped", "allOf"],
)
def test_which_grammars_are_known_to_be_cheap(grammar: Grammar, plain: bool) -> None:
    assert is_plain(grammar) == plain
