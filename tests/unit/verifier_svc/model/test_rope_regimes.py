"""Rotary factors that depend on a text's length are those of each text alone, whatever shares its passes and cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coppice.core.errors import IncompatibleError
from coppice.core.prefix_digests import prefix_digests
from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tokenizer import TargetTokenizer
from coppice.core.tree import TokenTree, chain
from tests.tiny_checkpoint import write_tiny_llama
from tests.unit.verifier_svc.adapters import random_adapter
from tests.unit.verifier_svc.early_heads import random_head
from tests.unit.verifier_svc.engine_harness import Harness
from tests.unit.verifier_svc.extras.redraft.test_redraft import SETTINGS
from tests.unit.verifier_svc.length_dependent_rope import (
    BOUNDARY,
    CONTEXT,
    FAMILIES,
    dynamic_llama,
    info_of,
    long_rope,
    new_model,
    new_target,
    plain_output,
)
from tests.unit.verifier_svc.model.test_pass_graphs import CPUKernel, Repeating
from tests.unit.verifier_svc.oracles import plain_logits
from tests.unit.verifier_svc.test_pruning_engine import FORCED
from tests.unit.verifier_svc.tiny_engine import VOCAB, character_tokenizer, oracle_drafter
from tests.unit.verifier_svc.traversal_door import some_tree
from verifier_svc.config import VerifierConfig
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.kv_cache import BLOCK_SIZE, IntArray, SequenceCache
from verifier_svc.engine.pass_plan import LONG_OFFSET, SequenceRows, moved
from verifier_svc.engine.scheduler import SchedulerLimits
from verifier_svc.engine.sequence import Draft, SequenceSpec
from verifier_svc.engine.sequence import Sequence as RunningSequence
from verifier_svc.kernels.cpu.packed_layers import pack_linears
from verifier_svc.model import target_model
from verifier_svc.model.conformance_probe import ConformanceProbe
from verifier_svc.model.exactness_probe import rows_stand_alone
from verifier_svc.model.loading import load_probed_target
from verifier_svc.model.parallel.pass_message import PassStep, decode, encode
from verifier_svc.model.pass_graphs import PassGraphs
from verifier_svc.model.rope_regimes import make_rotary_rowwise, position_limit, trained_length
from verifier_svc.model.target_model import TargetModel

COUNT = 24
MAX_NODES = 16
LIMITS = SchedulerLimits(max_sequences=8, max_queued=16, prefill_chunk=48)
# Prompts far below the boundary, up to it in the middle of the output, at it, just beyond it, and far beyond it.
LENGTHS = (9, BOUNDARY - 15, BOUNDARY - 1, BOUNDARY, BOUNDARY + 1, 190)
STOPPING = StoppingOptions(max_tokens=COUNT, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11)


def text(length: int, seed: int = 0) -> list[int]:
    """Random tokens; longer ones of the same seed begin with the shorter ones."""
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCAB, 300)[:length]]


@cache
def expected(family: str, length: int, seed: int = 0, count: int = COUNT, *, is_sampled: bool = False) -> list[int]:
    """What the model says behind a text by plain forwards without a cache."""
    return plain_output(new_model(family), text(length, seed), count, SAMPLED if is_sampled else None)


@contextmanager
def running(target: TargetModel, context: int = CONTEXT, limits: SchedulerLimits = LIMITS) -> Iterator[Engine]:
    engine = Engine(target, info_of(target, context), limits, MAX_NODES)
    engine.start()
    yield engine
    engine.stop()
    assert target.cache.num_free_blocks == target.cache.num_blocks, "a block leaked"


def outputs(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    drafter: Callable[..., TokenTree | None] | None = None,
    count: int = COUNT,
    **settings: Any,
) -> list[list[int]]:
    stopping = StoppingOptions(max_tokens=count, ignore_eos=True)
    results = Harness(engine).generate(prompts, stopping=stopping, drafter=drafter, **settings)
    assert all(result.error is None for result in results)
    return [result.token_ids for result in results]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_text_has_the_tokens_that_it_has_without_a_cache_alone_and_in_company(family: str) -> None:
    told = [expected(family, length) for length in LENGTHS]
    target = new_target(new_model(family))
    assert target.rope_boundary == BOUNDARY
    with running(target) as engine:
        alone = [outputs(engine, [text(length)])[0] for length in LENGTHS]
        assert alone == told
        target.cache.forget()
        assert outputs(engine, [text(length) for length in LENGTHS]) == told


@pytest.mark.parametrize("family", ["phi3", "llama", "gemma3"])
@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
def test_drafts_change_no_token(family: str, is_sampled: bool) -> None:
    sampling = SAMPLED if is_sampled else None
    told = [expected(family, length, is_sampled=is_sampled) for length in LENGTHS]
    prompts = [text(length) for length in LENGTHS]
    with running(new_target(new_model(family))) as engine:
        assert outputs(engine, prompts, sampling=sampling) == told
        for seed in range(2):
            assert outputs(engine, prompts, oracle_drafter(told, seed), sampling=sampling) == told
        # Each round accepts all that it may, up to the boundary and beyond it.
        true = outputs(engine, prompts, lambda index, done, _: chain(told[index][len(done) :][:12]), sampling=sampling)
        assert true == told


@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
def test_neither_re_drafts_nor_early_pruning_change_a_token(is_sampled: bool) -> None:
    sampling = SAMPLED if is_sampled else None
    told = [expected("llama", length, is_sampled=is_sampled) for length in LENGTHS]
    target = new_target(new_model("llama"))
    target.install_head(random_head(32))
    target.adapt(random_adapter(target.model, 3))
    info = replace(info_of(target), redraft=SETTINGS, pruning=FORCED)
    engine = Engine(target, info, replace(LIMITS, free_rows=60), MAX_NODES)
    engine.start()
    prompts = [text(length) for length in LENGTHS]
    drafter = oracle_drafter(told, 5)
    assert outputs(engine, prompts, sampling=sampling, redraft_nodes=7) == told
    assert outputs(engine, prompts, drafter, sampling=sampling, redraft_nodes=7, linger_s=0.05) == told
    engine.stop()
    assert engine.counts.num_masks > 0
    assert engine.counts.num_pruned_nodes > 0


def test_a_round_ends_at_the_boundary_and_the_text_is_computed_anew_behind_it() -> None:
    prompt = text(BOUNDARY - 15)
    told = expected("phi3", len(prompt))
    target = new_target(new_model("phi3"))
    with running(target) as engine:
        harness = Harness(engine)
        results = harness.generate(
            [prompt], stopping=STOPPING, drafter=lambda _, done, __: chain(told[len(done) :][:MAX_NODES])
        )
        assert results[0].token_ids == told
        # 1, then 14 accepted and the bonus token behind the boundary, then the rest.
        # A pass that computes the text anew waits for no draft.
        late = results[0].rounds - 3
        assert late in (0, 1)
        assert results[0].accepted == 14 + COUNT - 17 - late
        assert engine.scheduler.num_preemptions == 0
        assert engine.scheduler.num_recomputed_tokens == BOUNDARY
        assert engine.scheduler.num_prompt_tokens == len(prompt)
        assert engine.scheduler.num_cached_tokens == 0


@pytest.mark.parametrize("family", ["phi3", "gemma3"])
@pytest.mark.parametrize("lengths", [(190, BOUNDARY - 30), (BOUNDARY - 30, 190)], ids=["long first", "short first"])
def test_what_is_cached_for_one_kind_of_text_is_not_used_for_the_other(family: str, lengths: tuple[int, ...]) -> None:
    with running(new_target(new_model(family))) as engine:
        for turn in range(2):
            for length in lengths:
                [result] = Harness(engine).generate([text(length)], stopping=STOPPING)
                assert result.token_ids == expected(family, length)
                # It is used for texts of the same kind.
                assert result.num_cached == turn * BLOCK_SIZE * ((length - 1) // BLOCK_SIZE)


def test_resumed_tokens_count_for_the_length() -> None:
    told = expected("phi3", BOUNDARY - 15)
    with running(new_target(new_model("phi3"))) as engine:
        for resumed in (5, 14, 15, 16, 20):
            prompt = text(BOUNDARY - 15) + told[:resumed]
            assert outputs(engine, [prompt], num_resumed=resumed) == [told[resumed:]]


@pytest.mark.parametrize("num_blocks", [3, 4, 6])
def test_texts_that_pass_the_boundary_in_a_full_cache_wait_for_room(num_blocks: int) -> None:
    lengths = [BOUNDARY - 1 - 3 * number for number in range(6)]
    told = [expected("phi3", length) for length in lengths]
    target = new_target(new_model("phi3"), num_blocks)
    with running(target) as engine:
        # They share their first block until each passes the boundary.
        prompts = [text(length) for length in lengths]
        assert outputs(engine, prompts, oracle_drafter(told, 1)) == told
        assert outputs(engine, prompts) == told
        assert engine.scheduler.num_recomputed_tokens > 0
        assert engine.scheduler.num_prompt_tokens == 2 * sum(lengths)


def test_texts_that_make_room_for_each_other_and_pass_the_boundary_get_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As many start as have room for their prompts.
    monkeypatch.setattr("verifier_svc.engine.scheduler.MARGIN_TOKENS", 1)
    lengths = [35 + number for number in range(6)]
    told = [expected("llama", length, length, 80) for length in lengths]
    with running(new_target(new_model("llama"), 6)) as engine:
        prompts = [text(length, length) for length in lengths]
        assert outputs(engine, prompts, oracle_drafter(told, 3), 80) == told
        assert engine.scheduler.num_preemptions > 0
        assert engine.scheduler.num_recomputed_tokens >= BOUNDARY * len(lengths)


@pytest.mark.parametrize("family", ["phi3", "llama", "gemma3"])
def test_rows_have_the_same_bits_alone_and_beside_the_other_kind(family: str) -> None:
    target = new_target(new_model(family))
    logits = {}
    for lengths in ((BOUNDARY,), (BOUNDARY + 1,), (BOUNDARY + 1, BOUNDARY), (BOUNDARY, BOUNDARY + 1)):
        caches = [SequenceCache(target.cache, CONTEXT, is_long=length > BOUNDARY) for length in lengths]
        rows = [SequenceRows(cache, text(length)) for cache, length in zip(caches, lengths, strict=True)]
        plan = target.plan(rows)
        found = target.forward(plan)
        for length, (first, _) in zip(lengths, plan.logit_ranges, strict=True):
            assert torch.equal(logits.setdefault(length, found[first]), found[first])
            plain = plain_logits(new_model(family), text(length))
            assert torch.allclose(found[first], plain, atol=2e-3 * max(1.0, plain.std().item()))
        for own in caches:
            own.release()
    assert rows_stand_alone(target, VOCAB)


@pytest.mark.parametrize("family", FAMILIES)
def test_probes_refuse_a_model_whose_factors_follow_the_longest_text(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = ConformanceProbe(new_model(family), VOCAB)
    probe.check(new_target(new_model(family), 8))
    monkeypatch.setattr(target_model, "make_rotary_rowwise", lambda _: None)
    target = new_target(new_model(family), 8)
    with pytest.raises(IncompatibleError, match="depends on the longest text of a pass"):
        probe.check(target)
    assert not rows_stand_alone(target, VOCAB)


def test_recorded_passes_and_messages_to_other_processes_carry_the_kind_of_text() -> None:
    plain, recorded = new_target(new_model("phi3")), new_model("phi3")
    pack_linears(recorded)
    kernel, capture = CPUKernel(), Repeating()
    target = TargetModel(recorded, exact=True, num_blocks=32, kernel=kernel)
    target.record_passes(PassGraphs(kernel, capture, (16,)))
    for kinds in ((False, True), (True, False), (True, True), (False, False)):
        logits = []
        for one in (plain, target):
            caches = [SequenceCache(one.cache, 64, is_long=is_long) for is_long in kinds]
            plan = one.plan([SequenceRows(own, text(5, seed)) for seed, own in enumerate(caches)])
            logits.append(one.forward(plan))
            nothing: IntArray = np.empty(0, np.int64)
            sent = decode(bytearray(encode(PassStep(plan, nothing, nothing)))).plan
            assert np.array_equal(sent.position_ids, plan.position_ids)
            assert [position >= LONG_OFFSET for position in sent.position_ids[[0, 5]]] == list(kinds)
            for own in caches:
                own.release()
        assert torch.equal(*logits)
    assert capture.num_replays == 4


def test_a_sampled_tree_stays_one_where_it_is_cut_at_the_boundary() -> None:
    target = new_target(new_model("phi3"))
    tokenizer = TargetTokenizer(character_tokenizer())
    tree = some_tree(SAMPLED, widths=(2, 1, 1, 1))
    assert tree.depth == 4
    for length, depth in ((BOUNDARY - 4, 4), (BOUNDARY - 2, 2), (BOUNDARY, 0), (BOUNDARY + 1, 4)):
        spec = SequenceSpec(tuple(text(length)), SAMPLED, STOPPING, traverses=True)
        sequence = RunningSequence(spec, info_of(target), tokenizer, max_nodes=MAX_NODES, opened_s=0.0)
        sequence.start(target.cache, 0.0)
        sequence.submit(Draft(length, tree))
        rows = sequence.next_rows(length, MAX_NODES)
        assert rows.tree == tree.up_to_depth(depth)
        assert (rows.tree.depth, len(rows.tree.distributions)) == (depth, 1 + len(rows.tree))
        sequence.residence.release()


def test_digests_of_short_texts_are_those_that_orchestrators_compute() -> None:
    tokens = text(200)
    assert prefix_digests(tokens, 64, "a") == prefix_digests(tokens, 64, "a", is_long=False)
    assert not set(prefix_digests(tokens, 64, "a")) & set(prefix_digests(tokens, 64, "a", is_long=True))


def test_rotary_modules_are_replaced_once() -> None:
    model = new_model("gemma3")
    assert [make_rotary_rowwise(model) for _ in range(2)] == [BOUNDARY] * 2
    assert type(model.model.rotary_emb.short).__name__ == "Gemma3RotaryEmbedding"
    assert make_rotary_rowwise(dynamic_llama(128)) is None


def test_several_boundaries_are_refused() -> None:
    model = new_model("gemma3")
    rope = model.config.rope_parameters
    rope["sliding_attention"] = {**long_rope(16), "original_max_position_embeddings": 80}
    with pytest.raises(IncompatibleError, match="several lengths"):
        make_rotary_rowwise(type(model)(model.config))


def test_dynamic_factors_stay_those_of_the_trained_length() -> None:
    trained = 128
    told = [plain_output(dynamic_llama(trained), text(length), trained - length) for length in (20, 100, 127)]
    target = new_target(dynamic_llama(trained))
    assert (target.rope_boundary, trained_length(target.model)) == (None, trained)
    assert position_limit(target.model) == trained
    # A row beyond it, as a mask may be one, changes no other row.
    near, far = SequenceCache(target.cache, 64), SequenceCache(target.cache, 64)
    alone = target.forward(target.plan([SequenceRows(near, text(20))]))
    both = target.plan([SequenceRows(near, text(20)), SequenceRows(far, text(20))])
    assert torch.equal(target.forward(moved(both, [0, 10 * trained]))[0], alone[0])
    near.release()
    far.release()
    with running(target, trained) as engine:
        stopping = StoppingOptions(max_tokens=500, ignore_eos=True)
        prompts = [text(length) for length in (20, 100, 127)]
        results = Harness(engine).generate(prompts, stopping=stopping, drafter=oracle_drafter(told, 0))
        assert [result.token_ids for result in results] == told
        assert all(result.finish and result.finish.reason.value == "context_length" for result in results)


def test_a_server_says_that_requests_end_at_the_trained_length_of_dynamic_rope(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    write_tiny_llama(tmp_path, vocab_size=VOCAB, max_context_tokens=128, rope_parameters=rope)
    with caplog.at_level(logging.WARNING, "verifier_svc.model.loading"):
        _, info = load_probed_target(VerifierConfig(model=str(tmp_path), device="cpu", exactness="strict", threads=1))
    assert (info.max_context_tokens, info.rope_boundary) == (128, None)
    assert [record.getMessage() for record in caplog.records if "rope" in record.getMessage()] == [
        "rope of type dynamic: requests end at the trained length of 128 tokens, beyond which each token changes all "
        "factors"
    ]


def test_a_loaded_checkpoint_says_where_its_factors_change(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, vocab_size=VOCAB, max_context_tokens=CONTEXT, rope_parameters=long_rope(8))
    target, info = load_probed_target(VerifierConfig(model=str(tmp_path), device="cpu", exactness="strict", threads=1))
    assert info.rope_boundary == target.rope_boundary == BOUNDARY
    assert info.exact
    assert info.max_context_tokens == CONTEXT
