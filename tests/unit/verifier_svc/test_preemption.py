"""Preemption by recomputation: with a cache far too small for all, everyone still gets exactly the same tokens."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tree import chain
from tests.tiny_checkpoint import tiny_llama
from tests.unit.verifier_svc.crowd import MAX_NODES, Case, Crowd
from tests.unit.verifier_svc.engine_harness import Harness
from tests.unit.verifier_svc.tiny_engine import EOS, VOCAB, tiny_info
from verifier_svc.engine import scheduler
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.scheduler import SchedulerLimits
from verifier_svc.engine.sequence import SequenceKey, SequenceSpec
from verifier_svc.kernels.cpu.attention import CompiledKernel
from verifier_svc.kernels.cpu.packed_layers import pack_linears
from verifier_svc.model.target_model import TargetModel
from verifier_svc.stream.events import Event, OutcomeEvent

CONTEXT = 420
LIMITS = SchedulerLimits(max_sequences=8, max_queued=1000, prefill_chunk=48)
# The longest output needs seven blocks.
SMALL = 8
INFO = replace(tiny_info(), hidden_size=32, max_context_tokens=CONTEXT)
SAMPLING = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9, seed=1),
    SamplingParams(temperature=1.0, top_k=20, seed=2),
    SamplingParams(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5, seed=3),
    SamplingParams(temperature=1.3, min_p=0.02, presence_penalty=0.5, seed=4),
    SamplingParams(repetition_penalty=1.2, logit_bias={7: 3.0}),
]


def small_target(num_blocks: int) -> TargetModel:
    """A tiny random Llama, always the same."""
    # What happens to a crowd depends on what is said: the counts below are of this model.
    shape = {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny_llama(vocab_size=VOCAB, max_context_tokens=CONTEXT, eos_token_id=EOS, **shape)
    pack_linears(model)
    return TargetModel(model, exact=True, num_blocks=num_blocks, kernel=CompiledKernel())


def alone(target: TargetModel, case: Case) -> Case:
    """The case with its output by plain decoding, alone, with nothing shared."""
    engine = Engine(target, INFO, LIMITS, MAX_NODES)
    events: list[Event] = []
    engine.attach(0, events.extend)
    engine.open(SequenceKey(0, 0), SequenceSpec(case.prompt, case.sampling, case.stopping))
    while True:
        engine.step()
        outcomes = [event.outcome for event in events if isinstance(event, OutcomeEvent)]
        if outcomes and outcomes[-1].finish is not None:
            output = tuple(token for outcome in outcomes for token in outcome.token_ids)
            return replace(case, output=output, finish=outcomes[-1].finish)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Requests of many kinds, some with beginnings in common, some ended by a stop string inside their output."""
    generator = np.random.default_rng(5)
    texts = [tuple(int(token) for token in generator.integers(3, VOCAB, 150)) for _ in range(2)]
    target = small_target(60)
    target.resize_cache(60, reuses_prefixes=False)
    cases: list[Case] = []
    for number in range(9):
        own = tuple(int(token) for token in generator.integers(3, VOCAB, int(generator.integers(1, 30))))
        prompt = texts[number % 2][: int(generator.choice([0, 0, 70, 140]))] + own
        stopping = StoppingOptions(
            max_tokens=int(generator.integers(90, 190)), min_tokens=number % 3 * 5, ignore_eos=number % 4 > 0
        )
        case = alone(target, Case(prompt, SAMPLING[number % len(SAMPLING)], stopping, salt="b" if number == 7 else ""))
        if number % 3 == 2 and len(case.output) > 30:
            text = "".join(chr(32 + token) for token in case.output)
            place = int(generator.integers(15, len(text) - 4))
            stopping = replace(stopping, stop_strings=("never\n", text[place : place + 4]))
            case = alone(target, replace(case, stopping=stopping))
            assert case.finish is not None
            assert case.finish.stop_match == stopping.stop_strings[1]
        cases.append(case)
    return cases


@pytest.mark.parametrize(("seed", "max_rows", "margin"), [(0, 0, 1), (4, 20, 4)])
def test_a_crowd_in_a_small_cache_gets_the_tokens_that_each_gets_alone(
    seed: int, max_rows: int, margin: int, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MARGIN_TOKENS", margin)
    generator = np.random.default_rng(100 + seed)
    crowd = Crowd(small_target(SMALL), INFO, replace(LIMITS, max_rows=max_rows), seed)
    while crowd.counts["joins"] < 50:
        if crowd.num_live < 14 and generator.random() < 0.5:
            case = cases[int(generator.integers(len(cases)))]
            resumed = int(generator.integers(len(case.output))) if generator.random() < 0.2 else 0
            crowd.join(
                case,
                num_resumed=resumed,
                priority=int(generator.choice([-1, 0, 0, 0, 2])),
                linger_s=float(generator.choice([0.0, 0.0, 3e-4])),
            )
        for _ in range(int(generator.integers(0, 4)) if crowd.num_live else 0):
            crowd.draft()
        if crowd.num_live and generator.random() < 0.01:
            crowd.cancel()
        if generator.random() < 0.01:
            crowd.preempt()
        crowd.turn()
    crowd.finish()
    crowd.check_outputs()
    crowd.check_nothing_is_left()
    counts, natural = crowd.counts, crowd.engine.scheduler.num_preemptions - crowd.counts["forced preemptions"]
    assert counts["joins"] + counts["cancels"] + counts["drafts"] + crowd.engine.scheduler.num_preemptions > 1000
    assert natural >= 5
    assert crowd.engine.scheduler.num_recomputed_tokens > 200
    assert counts["accepted"] > 500
    assert counts["prefix hits"] >= 3
    assert counts["ended by a stop string"] >= 3
    assert counts["cancelled while preempted"] >= 1


def test_an_engine_on_its_own_thread_preempts_and_says_so_in_its_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stopping = StoppingOptions(max_tokens=200, ignore_eos=True)
    output = alone(small_target(60), Case((5, 6, 7), SAMPLING[1], stopping)).output
    target = small_target(SMALL)
    engine = Engine(target, INFO, LIMITS, MAX_NODES)
    engine.start()
    with caplog.at_level(logging.INFO, "verifier_svc.engine.scheduler"):
        results = Harness(engine).generate(
            [(5, 6, 7)] * 7, SAMPLING[1], stopping, lambda _, done, base: chain(output[len(done) :][:5])
        )
        engine.stop()
    assert [tuple(result.token_ids) for result in results] == [output] * 7
    assert engine.scheduler.num_preemptions > 0
    told = [record.getMessage() for record in caplog.records if record.name == "verifier_svc.engine.scheduler"]
    assert (
        sum(int(message.split(" times")[0].rsplit(" ", 1)[1]) for message in told) == engine.scheduler.num_preemptions
    )
    assert (
        sum(int(message.split(" tokens")[0].rsplit(" ", 1)[1]) for message in told)
        == engine.scheduler.num_recomputed_tokens
    )
    assert target.cache.num_free_blocks == SMALL
