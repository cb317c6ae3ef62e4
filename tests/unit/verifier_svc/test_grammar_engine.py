"""Sequences with a grammar in the engine: the target's choice of what the grammar allows, whatever the drafts."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from transformers import PreTrainedModel

from coppice.core.errors import InvalidRequestError
from coppice.core.grammar import Grammar, GrammarKind
from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tree import TokenTree
from tests.unit.verifier_svc.byte_tokenizer import byte_level_tokenizer
from tests.unit.verifier_svc.engine_harness import Harness
from tests.unit.verifier_svc.oracles import plain_logits, tree_around
from tests.unit.verifier_svc.tiny_engine import VOCAB
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.scheduler import SchedulerLimits, SequenceKey
from verifier_svc.engine.sequence import Draft, SequenceSpec
from verifier_svc.grammar.matcher import CompiledGrammar, GrammarVocabulary
from verifier_svc.kernels.cpu.attention import CompiledKernel
from verifier_svc.kernels.cpu.packed_layers import pack_linears
from verifier_svc.model.target_model import TargetInfo, TargetModel
from verifier_svc.stream.events import ErrorEvent, OutcomeEvent
from verifier_svc.verify.output_end import FinishReason, SequenceFinish

# Tokens 3 and up are the printable characters, in order; two characters at the end have no token of their own.
SPECIAL = ["<pad>", "<bos>", "<eos>"]
CHARACTERS = [chr(code) for code in range(32, 32 + VOCAB - len(SPECIAL))]
TOKEN = {character: len(SPECIAL) + index for index, character in enumerate(CHARACTERS)}
EOS = 2
PROMPTS = [[10, 11, 12], list(range(20, 60)), [7]]
WORDS = ["".join(word) for length in (1, 2, 3) for word in itertools.product("abc", repeat=length)]
# Every match of PAIR, written out.
PAIR = "[a-c]{1,3},[a-c]{1,3}"
PAIRS = {f"{first},{second}" for first in WORDS for second in WORDS}
OPEN = r"[a-z ]+(,\d+)*"


def constrained(pattern: str, **values: object) -> SamplingParams:
    return SamplingParams(grammar=Grammar(GrammarKind.REGEX, pattern), **values)


def text_of(token_ids: Sequence[int]) -> str:
    return "".join("" if token < len(SPECIAL) else CHARACTERS[token - len(SPECIAL)] for token in token_ids)


@pytest.fixture
def engine(new_model: Callable[[str], PreTrainedModel]) -> Iterator[Engine]:
    model = new_model("llama")
    pack_linears(model)
    target = TargetModel(model, exact=True, num_blocks=60, kernel=CompiledKernel())
    info = TargetInfo(
        name="tiny",
        tokenizer_json=byte_level_tokenizer([character.encode() for character in CHARACTERS], SPECIAL),
        tokenizer_fingerprint="",
        vocab_size=VOCAB,
        hidden_size=64,
        max_context_tokens=200,
        eos_token_ids=(EOS,),
        exact=True,
    )
    engine = Engine(target, info, SchedulerLimits(max_sequences=8, max_queued=16, prefill_chunk=32), max_nodes=16)
    engine.start()
    yield engine
    engine.stop()
    assert target.cache.num_free_blocks == target.cache.num_blocks, "a block leaked"


def oracle_drafter(outputs: Sequence[Sequence[int]], seed: int) -> Callable[..., TokenTree | None]:
    """Drafts what comes among decoys that no grammar knows."""
    generator = np.random.default_rng(seed)

    def draft(index: int, generated: Sequence[int], base: int) -> TokenTree | None:
        path = outputs[index][len(generated) :][: int(generator.integers(0, 9))]
        return tree_around(generator, path, VOCAB, num_decoys=2)

    return draft


def test_greedy_output_is_the_likeliest_allowed_token_after_token(
    engine: Engine, new_model: Callable[[str], PreTrainedModel]
) -> None:
    model = new_model("llama")
    beginnings = {pair[:end] for pair in PAIRS for end in range(len(pair) + 1)}
    results = Harness(engine).generate(PROMPTS, constrained(PAIR))
    for prompt, result in zip(PROMPTS, results, strict=True):
        tokens: list[int] = []
        while True:
            text = text_of(tokens)
            allowed = [TOKEN[character] for character in CHARACTERS if text + character in beginnings]
            if not allowed:
                expected = SequenceFinish(FinishReason.STOP)
                break
            logits = plain_logits(model, [*prompt, *tokens]).numpy()
            tokens.append(max([*allowed, *([EOS] if text in PAIRS else [])], key=lambda token: logits[token]))
            if tokens[-1] == EOS:
                expected = SequenceFinish(FinishReason.EOS)
                break
        assert result.token_ids == tokens
        assert result.finish == expected


@pytest.mark.parametrize("pattern", [PAIR, OPEN])
@pytest.mark.parametrize(
    "values",
    [{}, {"temperature": 1.0, "seed": 4}, {"temperature": 1.5, "top_k": 9, "frequency_penalty": 1.0, "seed": 5}],
    ids=["greedy", "T=1", "T=1.5 top_k penalty"],
)
def test_speculation_changes_no_token(pattern: str, values: dict[str, object], engine: Engine) -> None:
    harness = Harness(engine)
    sampling, stopping = constrained(pattern, **values), StoppingOptions(max_tokens=30)
    plain = harness.generate(PROMPTS, sampling, stopping)
    outputs = [result.token_ids for result in plain]
    for result in plain:
        assert result.finish is not None
        assert re.fullmatch(pattern, text_of(result.token_ids)) or result.finish.reason is FinishReason.LENGTH
    accepted = 0
    for seed in range(3):
        drafted = harness.generate(PROMPTS, sampling, stopping, oracle_drafter(outputs, seed))
        assert [result.token_ids for result in drafted] == outputs
        assert [result.finish for result in drafted] == [result.finish for result in plain]
        accepted += sum(result.accepted for result in drafted)
    assert accepted > 10


def test_a_resumed_output_goes_on_where_it_was(engine: Engine) -> None:
    harness = Harness(engine)
    sampling, stopping = constrained(OPEN, temperature=1.0, seed=3), StoppingOptions(max_tokens=20)
    whole = harness.generate(PROMPTS[:1], sampling, stopping)[0]
    for cut in range(1, len(whole.token_ids)):
        prompt = [*PROMPTS[0], *whole.token_ids[:cut]]
        resumed = harness.generate([prompt], sampling, stopping, num_resumed=cut)[0]
        assert resumed.token_ids == whole.token_ids[cut:]
        assert resumed.finish == whole.finish


def test_an_output_that_was_complete_ends_without_a_pass(engine: Engine) -> None:
    harness = Harness(engine)
    complete = [TOKEN[character] for character in "aaa,bbb"]
    resumed = harness.generate([[7, *complete]], constrained(PAIR), num_resumed=len(complete))[0]
    empty = harness.generate([[7]], constrained("()"))[0]
    for result in (resumed, empty):
        assert (result.token_ids, result.rounds, result.finish) == ([], 0, SequenceFinish(FinishReason.STOP))


def test_a_resumed_output_that_is_no_beginning_is_refused(engine: Engine) -> None:
    result = Harness(engine).generate([[7, TOKEN["a"], TOKEN["x"]]], constrained(PAIR), num_resumed=2)[0]
    assert result.error is not None
    assert isinstance(result.error.error, InvalidRequestError)
    assert result.error.error.field == "resume_token_ids"


def test_the_end_of_the_grammar_comes_before_min_tokens_and_with_max_tokens(engine: Engine) -> None:
    harness = Harness(engine)
    three = [TOKEN["x"]] * 3
    for stopping in (StoppingOptions(max_tokens=3), StoppingOptions(max_tokens=9, min_tokens=9)):
        result = harness.generate([[7]], constrained("x{3}"), stopping)[0]
        assert (result.token_ids, result.finish) == (three, SequenceFinish(FinishReason.STOP))


def test_eos_waits_for_min_tokens_and_is_not_drawn_where_it_is_ignored(engine: Engine) -> None:
    harness = Harness(engine)
    eager = constrained("x+", logit_bias={EOS: 100.0})
    x = TOKEN["x"]
    at_once = harness.generate([[7]], eager)[0]
    late = harness.generate([[7]], eager, StoppingOptions(max_tokens=9, min_tokens=4))[0]
    never = harness.generate([[7]], eager, StoppingOptions(max_tokens=9, ignore_eos=True))[0]
    assert (at_once.token_ids, at_once.finish) == ([x, EOS], SequenceFinish(FinishReason.EOS))
    assert (late.token_ids, late.finish) == ([x, x, x, x, EOS], SequenceFinish(FinishReason.EOS))
    assert (never.token_ids, never.finish) == ([x] * 9, SequenceFinish(FinishReason.LENGTH))


def test_stops_end_a_match_anywhere(engine: Engine) -> None:
    harness = Harness(engine)
    comma = TOKEN[","]
    strings = harness.generate([[7]], constrained("abc,abc"), StoppingOptions(max_tokens=9, stop_strings=("c,a",)))[0]
    tokens = harness.generate([[7]], constrained("abc,abc"), StoppingOptions(max_tokens=9, stop_token_ids=(comma,)))[0]
    absent = harness.generate([[7]], constrained("abc,abc"), StoppingOptions(max_tokens=9, stop_token_ids=(EOS + 90,)))
    assert (text_of(strings.token_ids), strings.finish) == ("abc,a", SequenceFinish(FinishReason.STOP, "c,a"))
    assert (text_of(tokens.token_ids), tokens.finish) == ("abc,", SequenceFinish(FinishReason.STOP, ","))
    assert text_of(absent[0].token_ids) == "abc,abc"


@pytest.mark.parametrize(
    "values",
    [{"bad_token_ids": (TOKEN["b"],)}, {"allowed_token_ids": (TOKEN["a"], TOKEN["x"])}],
    ids=["bad tokens", "allowed tokens"],
)
def test_parameters_that_leave_no_token_fail_their_sequence_alone(values: dict[str, object], engine: Engine) -> None:
    harness = Harness(engine)
    failed = harness.generate([[7]], constrained("ab", **values))[0]
    assert failed.token_ids == [TOKEN["a"]]
    assert failed.error is not None
    assert isinstance(failed.error.error, InvalidRequestError)
    assert failed.error.error.field == "sampling.grammar"
    assert "1 tokens of output" in failed.error.error.description
    assert text_of(harness.generate([[7]], constrained("ab"))[0].token_ids) == "ab"


def test_a_grammar_that_is_being_compiled_holds_nobody_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    compile_grammar = GrammarVocabulary.compile

    def held(self: GrammarVocabulary, grammar: Grammar) -> CompiledGrammar:
        assert go.wait(30)
        return compile_grammar(self, grammar)

    monkeypatch.setattr(GrammarVocabulary, "compile", held)
    waiting = Harness(engine, stream=1)
    spec = SequenceSpec((7,), constrained("ab"), StoppingOptions(max_tokens=9), priority=5)
    for sequence_id in (0, 1):
        engine.open(SequenceKey(1, sequence_id), spec)
    engine.close(SequenceKey(1, 0))
    # Its id is free again, and what was compiled for the closed one is not for the new one.
    engine.open(SequenceKey(1, 0), replace(spec, sampling=constrained("x")))
    others = Harness(engine).generate(PROMPTS, stopping=StoppingOptions(max_tokens=24, ignore_eos=True))
    assert [len(result.token_ids) for result in others] == [24] * len(PROMPTS)
    go.set()
    finished: dict[int, list[int]] = {}
    while len(finished) < 2:
        waiting.collect(finished)
    assert {key: text_of(tokens) for key, tokens in finished.items()} == {0: "x", 1: "ab"}


def test_closing_takes_a_grammar_out_of_the_queue(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    go, begun = threading.Event(), threading.Event()
    compile_grammar = GrammarVocabulary.compile

    def held(self: GrammarVocabulary, grammar: Grammar) -> CompiledGrammar:
        begun.set()
        assert go.wait(30)
        return compile_grammar(self, grammar)

    monkeypatch.setattr(GrammarVocabulary, "compile", held)
    engine.open(SequenceKey(1, 0), SequenceSpec((7,), constrained("ab"), StoppingOptions()))
    assert begun.wait(30)
    for sequence_id in range(1, 9):
        spec = SequenceSpec((7,), constrained("x" * sequence_id), StoppingOptions())
        engine.open(SequenceKey(1 + sequence_id % 2, sequence_id), spec)
    # What the engine is told is done in order: behind a sequence of its own all have been opened or closed.
    harness = Harness(engine)
    harness.generate([[7]])
    assert engine.grammars.num_waiting == 8
    engine.close(SequenceKey(1, 2))
    engine.detach(2)
    harness.generate([[7]])
    assert engine.grammars.num_waiting == 3
    engine.detach(1)
    harness.generate([[7]])
    go.set()


def test_a_bad_grammar_fails_its_sequence_alone(engine: Engine) -> None:
    harness = Harness(engine, stream=3)
    for sequence_id, pattern in enumerate(("(", "ab")):
        engine.open(SequenceKey(3, sequence_id), SequenceSpec((7,), constrained(pattern), StoppingOptions()))
    events = [harness.next_event(), harness.next_event()]
    errors = [event for event in events if isinstance(event, ErrorEvent)]
    assert [(event.sequence_id, type(event.error)) for event in errors] == [(0, InvalidRequestError)]
    assert any(isinstance(event, OutcomeEvent) and event.sequence_id == 1 for event in [*events, harness.next_event()])


def test_rows_are_spent_on_allowed_tokens_only(engine: Engine) -> None:
    harness = Harness(engine)
    wrong = TokenTree((TOKEN["z"], TOKEN["a"]), (-1, 0), (0.0, 0.0))
    engine.open(SequenceKey(0, 0), SequenceSpec((7,), constrained("a{5}"), StoppingOptions(), linger_s=5.0))
    drafted: list[int] = []
    while True:
        event = harness.next_event()
        if isinstance(event, OutcomeEvent):
            drafted.append(event.outcome.draft_nodes)
            if event.outcome.finish is not None:
                break
            engine.submit(SequenceKey(0, 0), Draft(event.outcome.base_length + len(event.outcome.token_ids), wrong))
    assert drafted == [0] * 5
