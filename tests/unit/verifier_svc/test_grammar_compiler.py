"""Compiling grammars beside the model: elsewhere, once, and never fatal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from tokenizers import Tokenizer, models

from coppice.errors import CoppiceError, InvalidRequestError, UnsupportedError
from coppice.grammar import Grammar, GrammarKind
from tests.unit.verifier_svc.byte_tokenizer import byte_level_tokenizer
from verifier_svc import grammar_compiler
from verifier_svc.grammar import CompiledGrammar, GrammarState, GrammarVocabulary
from verifier_svc.grammar_compiler import GrammarCompiler

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
    monkeypatch.setattr(grammar_compiler, "MAX_REMEMBERED", 2)
    for text in ("a", "b", "a", "ab", "a", "b"):
        begin(compiler, text)
    assert compiled == ["a", "b", "ab", "b"]


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
    monkeypatch.delitem(sys.modules, "verifier_svc.grammar")
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
