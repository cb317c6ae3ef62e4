"""The engine: the same tokens whatever the drafts, the batch and the faults."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from coppice.core.errors import InvalidRequestError, OverloadedError
from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tree import EMPTY_TREE, TokenTree, chain
from tests.unit.verifier_svc.engine_harness import Harness
from tests.unit.verifier_svc.oracles import plain_logits
from tests.unit.verifier_svc.tiny_engine import CONTEXT, PROMPTS, SAMPLING, VOCAB, oracle_drafter
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.scheduler import SequenceKey
from verifier_svc.engine.sequence import Draft, SequenceSpec
from verifier_svc.stream.events import ErrorEvent, Event, LoadEvent, OutcomeEvent
from verifier_svc.verify.output_end import FinishReason


@pytest.mark.parametrize("name", SAMPLING)
def test_speculation_changes_no_token(name: str, engine: Engine) -> None:
    harness = Harness(engine)
    stopping = StoppingOptions(max_tokens=40, ignore_eos=True)
    plain = harness.generate(PROMPTS, SAMPLING[name], stopping)
    alone = [harness.generate([prompt], SAMPLING[name], stopping)[0].token_ids for prompt in PROMPTS]
    outputs = [result.token_ids for result in plain]
    assert outputs == alone
    for seed in range(3):
        drafted = harness.generate(PROMPTS, SAMPLING[name], stopping, oracle_drafter(outputs, seed))
        assert [result.token_ids for result in drafted] == outputs
        assert sum(result.accepted for result in drafted) > 20
        assert sum(result.rounds for result in drafted) < sum(result.rounds for result in plain)


def test_greedy_output_is_that_of_transformers(engine: Engine, new_model: Callable[[str], PreTrainedModel]) -> None:
    model = new_model("llama")
    stopping = StoppingOptions(max_tokens=40, ignore_eos=True)
    results = Harness(engine).generate(PROMPTS, SamplingParams(), stopping)
    for prompt, result in zip(PROMPTS, results, strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
        )
        assert result.token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", SAMPLING)
def test_log_probabilities_are_the_target_s_whatever_was_drafted(
    name: str, engine: Engine, new_model: Callable[[str], PreTrainedModel]
) -> None:
    harness = Harness(engine)
    stopping = StoppingOptions(max_tokens=30, ignore_eos=True)
    plain = harness.generate(PROMPTS, SAMPLING[name], stopping, top_log_probs=5)
    outputs = [result.token_ids for result in plain]
    # The same bits among drafts and other company.
    drafted = harness.generate(PROMPTS, SAMPLING[name], stopping, oracle_drafter(outputs, 0), top_log_probs=5)
    alone = [harness.generate([prompt], SAMPLING[name], stopping, top_log_probs=5)[0] for prompt in PROMPTS]
    assert sum(result.accepted for result in drafted) > 20
    expected = [result.log_probs for result in plain]
    assert [result.log_probs for result in drafted] == [result.log_probs for result in alone] == expected
    # Raw logits of the library's own forward: no temperature, no penalty.
    model = new_model("llama")
    for prompt, result in zip(PROMPTS, plain, strict=True):
        assert len(result.log_probs) == len(result.token_ids) == 30
        for at in range(0, 30, 7):
            reference = plain_logits(model, [*prompt, *result.token_ids[:at]]).double().log_softmax(0)
            one = result.log_probs[at]
            assert one.log_prob == pytest.approx(float(reference[result.token_ids[at]]), abs=1e-4)
            assert one.top_token_ids == tuple(reference.topk(5).indices.tolist())
            assert one.top_log_probs == pytest.approx(reference.topk(5).values.tolist(), abs=1e-4)


def test_log_probabilities_are_computed_for_those_only_that_ask(engine: Engine) -> None:
    harness = Harness(engine)
    silent, chosen_only = (harness.generate([PROMPTS[0]], top_log_probs=number)[0] for number in (None, 0))
    assert silent.log_probs == []
    assert silent.token_ids == chosen_only.token_ids
    assert len(chosen_only.log_probs) == len(chosen_only.token_ids)
    assert not any(one.top_token_ids or one.top_log_probs for one in chosen_only.log_probs)


def test_a_resumed_output_has_the_log_probabilities_of_its_own_tokens(engine: Engine) -> None:
    harness = Harness(engine)
    sampling = SamplingParams(temperature=1.0, seed=9)
    stopping = StoppingOptions(max_tokens=30, ignore_eos=True)
    whole = harness.generate([PROMPTS[0]], sampling, stopping, top_log_probs=2)[0]
    prompt = [*PROMPTS[0], *whole.token_ids[:13]]
    rest = harness.generate([prompt], sampling, stopping, num_resumed=13, top_log_probs=2)[0]
    assert rest.log_probs == whole.log_probs[13:]


def test_resumed_output_goes_on_where_it_was_interrupted(engine: Engine) -> None:
    harness = Harness(engine)
    sampling = SamplingParams(temperature=1.0, repetition_penalty=1.2, seed=9)
    stopping = StoppingOptions(max_tokens=30, ignore_eos=True)
    whole = harness.generate([PROMPTS[0]], sampling, stopping)[0].token_ids
    for cut in (1, 13, 29):
        resumed = harness.generate([[*PROMPTS[0], *whole[:cut]]], sampling, stopping, num_resumed=cut)[0]
        assert resumed.token_ids == whole[cut:]
        assert resumed.finish is not None
        assert resumed.finish.reason is FinishReason.LENGTH


@pytest.mark.parametrize("speculate", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize("at", [1, 4, 9])
def test_output_ends_at_the_stop_token_inside_a_block(at: int, speculate: bool, engine: Engine) -> None:
    harness = Harness(engine)
    sampling = SamplingParams(temperature=1.0, seed=21)
    whole = harness.generate([PROMPTS[0]], sampling, StoppingOptions(max_tokens=20, ignore_eos=True))[0].token_ids
    stop = whole[at]
    first = whole.index(stop)
    drafter = (lambda index, done, base: chain(whole[len(done) :][:8])) if speculate else None
    stopping = StoppingOptions(max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    result = harness.generate([PROMPTS[0]], sampling, stopping, drafter)[0]
    assert result.token_ids == whole[: first + 1]
    assert result.finish is not None
    assert (result.finish.reason, result.finish.stop_match) == (FinishReason.STOP, chr(32 + stop))


@pytest.mark.parametrize("speculate", [False, True], ids=["plain", "drafted"])
def test_output_ends_at_a_stop_string_inside_a_block(speculate: bool, engine: Engine) -> None:
    harness = Harness(engine)
    sampling = SamplingParams(temperature=1.0, seed=22)
    whole = harness.generate([PROMPTS[0]], sampling, StoppingOptions(max_tokens=20, ignore_eos=True))[0].token_ids
    text = "".join(chr(32 + token) for token in whole)
    stop = text[6:9]
    end = text.index(stop) + 3
    drafter = (lambda index, done, base: chain(whole[len(done) :][:8])) if speculate else None
    stopping = StoppingOptions(max_tokens=20, ignore_eos=True, stop_strings=("never\n", stop))
    result = harness.generate([PROMPTS[0]], sampling, stopping, drafter)[0]
    assert result.token_ids == whole[:end]
    assert result.finish is not None
    assert result.finish.stop_match == stop


def test_max_tokens_and_the_context_end_the_output_exactly(engine: Engine) -> None:
    harness = Harness(engine)
    plain = harness.generate([PROMPTS[0]], stopping=StoppingOptions(ignore_eos=True))[0]
    assert len(plain.token_ids) == CONTEXT - len(PROMPTS[0])
    assert plain.finish is not None
    assert plain.finish.reason is FinishReason.CONTEXT_LENGTH

    def perfect(index: int, done: Sequence[int], base: int) -> TokenTree:
        return chain(plain.token_ids[len(done) :][:7])

    for count in (1, 2, 7, 8, 9):
        stopping = StoppingOptions(max_tokens=count, ignore_eos=True)
        result = harness.generate([PROMPTS[0]], stopping=stopping, drafter=perfect)[0]
        assert result.token_ids == plain.token_ids[:count]
    full = harness.generate([PROMPTS[0]], stopping=StoppingOptions(ignore_eos=True), drafter=perfect)[0]
    assert full.token_ids == plain.token_ids


def test_drafts_for_other_positions_are_counted_and_dropped(engine: Engine) -> None:
    harness = Harness(engine)
    stopping = StoppingOptions(max_tokens=12, ignore_eos=True)
    plain = harness.generate([PROMPTS[0]], stopping=stopping)[0]

    def late(index: int, done: Sequence[int], base: int) -> TokenTree:
        engine.submit(SequenceKey(0, 0), Draft(base - 1, chain([1, 2, 3])))
        return chain(plain.token_ids[len(done) :][:2])

    result = harness.generate([PROMPTS[0]], stopping=stopping, drafter=late)[0]
    assert result.token_ids == plain.token_ids
    assert result.stale > 0


def test_a_silent_drafter_costs_a_few_waits_only(engine: Engine) -> None:
    harness = Harness(engine)
    stopping = StoppingOptions(max_tokens=60, ignore_eos=True)
    waits: list[float] = []
    engine.open(SequenceKey(0, 0), SequenceSpec((5, 6), SamplingParams(), stopping, linger_s=0.02))
    while True:
        event = harness.next_event()
        if isinstance(event, LoadEvent | ErrorEvent):
            continue
        waits.append(event.outcome.linger_s)  # type: ignore[union-attr]
        if event.outcome.finish is not None:  # type: ignore[union-attr]
            break
    # The prompt's round waits for nobody, and so was not in vain.
    assert (len(waits), [wait >= 0.02 for wait in waits[:4]]) == (60, [False, True, True, False])
    assert sum(wait >= 0.02 for wait in waits) <= 5


def test_the_load_after_the_last_round_counts_nothing_that_runs(engine: Engine) -> None:
    harness = Harness(engine)
    engine.open(SequenceKey(0, 0), SequenceSpec((5, 6), SamplingParams(), StoppingOptions(max_tokens=1)))
    while not isinstance(event := harness.next_event(), LoadEvent):
        pass
    assert (event.batch_size, event.running_sequences, event.queued_sequences) == (1, 0, 0)


def test_a_sequence_without_drafter_is_not_held_up_by_one_that_waits(engine: Engine) -> None:
    waiting, plain = Harness(engine, stream=1), Harness(engine, stream=2)
    slow = SequenceSpec((5, 6), SamplingParams(), StoppingOptions(max_tokens=3, ignore_eos=True), linger_s=30.0)
    engine.open(SequenceKey(1, 0), slow)
    result = plain.generate([[9, 8, 7]], stopping=StoppingOptions(max_tokens=30, ignore_eos=True))[0]
    assert len(result.token_ids) == 30
    engine.detach(1)
    assert waiting.next_event() is not None


def test_a_prompt_that_was_read_before_is_not_read_again_and_gives_the_same_tokens(engine: Engine) -> None:
    harness = Harness(engine)
    sampling = SamplingParams(temperature=1.0, seed=4)
    stopping = StoppingOptions(max_tokens=60, ignore_eos=True)
    prompt = [int(token) for token in np.random.default_rng(1).integers(3, VOCAB, 130)]
    prompts = [prompt, [*prompt[:70], 5, 6], prompt[:64], prompt[:100]]
    cold = [harness.generate([some], sampling, stopping, salt=f"cold {n}")[0] for n, some in enumerate(prompts)]
    assert [result.num_cached for result in cold] == [0, 0, 0, 0]
    outputs = [result.token_ids for result in cold]
    assert harness.generate([prompt], sampling, stopping, salt="warm")[0].num_cached == 0
    warm = harness.generate(prompts, sampling, stopping, oracle_drafter(outputs, 1), salt="warm")
    assert [result.token_ids for result in warm] == outputs
    assert [result.num_cached for result in warm] == [128, 64, 0, 64]
    # Output is reused like a prompt.
    longer = harness.generate([prompt + outputs[0]], sampling, stopping, num_resumed=59, salt="warm")[0]
    assert longer.num_cached == 128
    more = harness.generate([prompt[:100] + outputs[3]], sampling, stopping, num_resumed=59, salt="warm")[0]
    assert more.num_cached == 128


@pytest.mark.timeout(120)
def test_sequences_that_come_and_go_disturb_no_other(engine: Engine) -> None:
    """Joins, leaves and cancellations at random, prompts shared and not: every output is the undisturbed one."""
    generator = np.random.default_rng(7)
    texts = [[int(token) for token in generator.integers(3, VOCAB, 120)] for _ in range(3)]
    stopping = StoppingOptions(max_tokens=20, ignore_eos=True)
    cases = [
        (texts[int(generator.integers(3))][: int(generator.integers(1, 120))], int(generator.integers(2)))
        for _ in range(12)
    ]
    undisturbed = [
        Harness(engine, stream=1).generate([prompt], SamplingParams(temperature=1.0, seed=seed), stopping, salt=str(n))
        for n, (prompt, seed) in enumerate(cases)
    ]
    expected = [results[0].token_ids for results in undisturbed]
    harness = Harness(engine, stream=2)
    finished: dict[int, list[int]] = {}
    opened: dict[int, int] = {}
    cancelled: set[int] = set()
    for number in range(300):
        case = int(generator.integers(len(cases)))
        prompt, seed = cases[case]
        opened[number] = case
        spec = SequenceSpec(tuple(prompt), SamplingParams(temperature=1.0, seed=seed), stopping)
        engine.open(SequenceKey(2, number), spec)
        while len(opened) - len(cancelled) - len(finished) > 6:
            if generator.random() < 0.03:
                victim = int(generator.choice([n for n in opened if n not in cancelled and n not in finished]))
                engine.close(SequenceKey(2, victim))
                cancelled.add(victim)
            harness.collect(finished)
    while len(finished) < len(opened) - len(cancelled - finished.keys()):
        harness.collect(finished)
    assert len(cancelled) > 50
    assert len(finished) > 100
    for number, token_ids in finished.items():
        assert token_ids == expected[opened[number]], number


def test_closing_and_detaching_frees_everything(engine: Engine) -> None:
    Harness(engine, stream=1)
    for index in range(12):
        spec = SequenceSpec((5, 6), SamplingParams(), StoppingOptions(max_tokens=100, ignore_eos=True))
        engine.open(SequenceKey(1, index), spec)
    engine.close(SequenceKey(1, 3))
    engine.close(SequenceKey(1, 99))
    engine.detach(1)
    # The fixture checks that every block came back.
    assert Harness(engine, stream=2).generate([[1, 2]])[0].finish is not None


def test_refusals_name_the_reason(engine: Engine) -> None:
    harness = Harness(engine)
    spec = SequenceSpec((5, 6), SamplingParams(), StoppingOptions(max_tokens=190, ignore_eos=True))
    for index in range(40):
        engine.open(SequenceKey(0, index), spec)
    engine.open(SequenceKey(0, 0), spec)
    errors = []
    while len(errors) < 2:
        event = harness.next_event()
        if isinstance(event, ErrorEvent):
            errors.append(event.error)
    assert {type(error) for error in errors} <= {OverloadedError, InvalidRequestError}
    assert any(isinstance(error, OverloadedError) for error in errors)
    engine.detach(0)


def test_a_failed_pass_fails_its_sequences_and_no_other(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(engine)
    forward = engine._target.forward

    def broken(plan: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._target, "forward", broken)
    failed = harness.generate([[1, 2, 3]])[0]
    assert failed.error is not None
    assert str(failed.error.error) == "the forward pass failed"
    monkeypatch.setattr(engine._target, "forward", forward)
    assert harness.generate([[1, 2, 3]])[0].finish is not None


def test_more_sequences_than_fit_all_finish(engine: Engine) -> None:
    prompts = [[3 + index, 4, 5] for index in range(14)]
    stopping = StoppingOptions(max_tokens=60, ignore_eos=True)
    together = Harness(engine).generate(prompts, stopping=stopping)
    assert all(result.finish is not None for result in together)
    alone = Harness(engine).generate([prompts[13]], stopping=stopping)[0]
    assert together[13].token_ids == alone.token_ids


def test_synchronous_rounds_wait_for_their_own_draft_even_behind_empty_ones_and_use_no_other(engine: Engine) -> None:
    harness, sampling = Harness(engine), SAMPLING["T=1 top_k"]
    stopping = StoppingOptions(max_tokens=24, ignore_eos=True)
    [plain] = harness.generate([PROMPTS[0]], sampling, stopping)
    known = [*PROMPTS[0], *plain.token_ids, 0]

    def drafter(sequence: int, tokens: Sequence[int], base: int) -> TokenTree | None:
        # Empty ones first: they are answers, and no reason to wait no longer. What is too long leaves nothing over.
        return EMPTY_TREE if len(tokens) < 8 else chain([known[base], *[(known[base + 1] + 1) % VOCAB] * 3])

    [result] = harness.generate([PROMPTS[0]], sampling, stopping, drafter, synchronous=True)
    assert result.token_ids == plain.token_ids
    # Eight rounds without nodes; then each draft's first node, and the target's own token behind it.
    assert result.rounds == 8 + 16 // 2
    assert (result.accepted, result.stale) == (8, 0)


def test_outcomes_are_delivered_behind_the_next_plan_and_before_its_pass(engine: Engine) -> None:
    happened: list[str] = []
    target = engine._target
    plan, forward = target.plan, target.forward

    def marked(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            happened.append(name)
            return function(*arguments)

        return call

    over = threading.Event()

    def sink(events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, OutcomeEvent):
                happened.append("outcome")
                if event.outcome.finish is not None:
                    over.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "plan", marked("plan", plan))
        patch.setattr(target, "forward", marked("forward", forward))
        engine.attach(7, sink)
        stopping = StoppingOptions(max_tokens=5, ignore_eos=True)
        engine.open(SequenceKey(7, 0), SequenceSpec(tuple(PROMPTS[0]), SamplingParams(), stopping))
        # The last outcome, behind which nothing is to be done, comes without a pass.
        assert over.wait(10)
    assert happened == ["plan", "forward", *["plan", "outcome", "forward"] * 4, "outcome"]
