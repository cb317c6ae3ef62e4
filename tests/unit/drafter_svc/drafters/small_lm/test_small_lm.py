"""The small language model's sequences: what was drafted before never shows in what is drafted next."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from coppice.core.errors import IncompatibleError
from coppice.core.sampling import SamplingParams
from coppice.core.tree import TokenTree
from coppice.draft_models.coupling import ChildChoice
from coppice.search.tree_limits import Children, TreeLimits
from drafter_svc.drafters.base import DrafterInfo
from drafter_svc.drafters.small_lm.drafter import SmallLm
from drafter_svc.model.checkpoint import Calibration, load_calibration
from drafter_svc.model.hf_forward import CachedForward, PlainForward
from drafter_svc.model.llama_forward import LlamaForward
from drafter_svc.model.tree_cache import TreeCache

VOCAB = 61
CONTEXT = 64
PROMPT = (5, 9, 2, 44, 17)
ROUTES = {"lean": LlamaForward, "cached": CachedForward, "plain": PlainForward}


def make_drafter(model: LlamaForCausalLM, route: str = "lean", **limits: int) -> SmallLm:
    info = DrafterInfo("small-lm", "test", "", VOCAB, CONTEXT)
    return SmallLm(
        ROUTES[route](model),
        info,
        Calibration(((0.0, 0.8),)),
        TreeLimits(**{"max_nodes": 12, "max_steps": 4, **limits}),
    )


def assert_same(tree: TokenTree, expected: TokenTree) -> None:
    assert tree.token_ids == expected.token_ids
    assert tree.parents == expected.parents
    assert tree.log_probs == pytest.approx(expected.log_probs, abs=1e-4)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("repetition_penalty", [1.0, 3.0], ids="repetition {}".format)
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids="temperature {}".format)
def test_a_draft_after_outcomes_is_that_of_a_fresh_sequence(
    llama: LlamaForCausalLM, route: str, temperature: float, repetition_penalty: float
) -> None:
    drafter = make_drafter(llama, route)
    sampling = SamplingParams(temperature=temperature, seed=7, repetition_penalty=repetition_penalty)
    rng = np.random.default_rng(3)
    committed, sequence = list(PROMPT), drafter.open(PROMPT, sampling)
    for _ in range(6):
        tree = sequence.draft(12)
        assert_same(tree, drafter.open(committed, sampling).draft(12))
        accepted = tree.path(int(rng.integers(-1, len(tree))))
        outcome = [tree.token_ids[node] for node in accepted]
        if not outcome or rng.random() < 0.5:
            # Else the last of them is the target's own, and what was read behind it is used again.
            outcome.append(int(rng.integers(0, VOCAB)))
        sequence.extend(outcome)
        committed += outcome
        if rng.random() < 0.5:
            sequence.prepare()


@pytest.mark.parametrize("route", ROUTES)
def test_a_greedy_chain_is_what_transformers_generates_with_the_same_penalty(
    llama: LlamaForCausalLM, route: str
) -> None:
    drafter = make_drafter(llama, route, max_steps=11)
    one = SmallLm(drafter._forward, drafter.info, drafter._calibration, drafter._limits, choice=ChildChoice(1))
    for penalty in (1.0, 1.3, 3.0):
        prompt = torch.tensor([PROMPT])
        generated = llama.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=12,
            do_sample=False,
            # No token ends it.
            eos_token_id=VOCAB,
            repetition_penalty=penalty,
        )
        chain = one.open(PROMPT, SamplingParams(repetition_penalty=penalty)).draft(12)
        assert list(chain.token_ids) == generated[0, len(PROMPT) :].tolist()


def test_outcomes_that_queue_up_count_together(llama: LlamaForCausalLM) -> None:
    drafter = make_drafter(llama)
    sequence = drafter.open(PROMPT, SamplingParams())
    tree = sequence.draft(12)
    sequence.extend([tree.token_ids[0]])
    sequence.extend([3])
    sequence.extend([])
    sequence.extend([8, 1])
    assert_same(sequence.draft(12), drafter.open([*PROMPT, tree.token_ids[0], 3, 8, 1], SamplingParams()).draft(12))


def test_a_second_draft_without_an_outcome_is_the_first(llama: LlamaForCausalLM) -> None:
    sequence = make_drafter(llama).open(PROMPT, SamplingParams(temperature=0.6, seed=1))
    first = sequence.draft(12)
    assert_same(sequence.draft(12), first)
    assert_same(sequence.draft(5), first.prune(5))


def test_all_routes_draft_the_same_tree(llama: LlamaForCausalLM) -> None:
    sampling = SamplingParams(temperature=1.0, seed=5)
    trees = [make_drafter(llama, route).open(PROMPT, sampling).draft(12) for route in ROUTES]
    assert_same(trees[1], trees[0])
    assert_same(trees[2], trees[0])


def test_trees_end_with_the_context(llama: LlamaForCausalLM) -> None:
    drafter = make_drafter(llama, max_steps=10, width=1)
    for length, depth in ((CONTEXT - 2, 3), (CONTEXT - 1, 2), (CONTEXT, 1), (CONTEXT + 1, 0)):
        sequence = drafter.open([1] * (CONTEXT - 4), SamplingParams())
        sequence.extend([2] * (length - CONTEXT + 4))
        assert sequence.draft(200).depth <= depth
        sequence.prepare()


def test_the_drafters_own_limit_bounds_the_budget(llama: LlamaForCausalLM) -> None:
    sequence = make_drafter(llama).open(PROMPT, SamplingParams())
    assert len(sequence.draft(1000)) == 12
    assert len(sequence.draft(1)) == 1
    assert len(sequence.draft(0)) == 0


def test_warm_up_reaches_the_end(llama: LlamaForCausalLM) -> None:
    make_drafter(llama).warm_up()


def test_calibration_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    assert load_calibration(str(tmp_path)) == Calibration(((0.0, 1.0),), ())
    content = {"sigmas": {"1.0": 0.9, "0.0": 0.5}, "acceptance_by_rank": [0.6, 0.2]}
    (tmp_path / "drafter.json").write_text(json.dumps(content))
    assert load_calibration(str(tmp_path)) == Calibration(((0.0, 0.5), (1.0, 0.9)), (0.6, 0.2))


def test_sigma_is_that_of_the_temperature() -> None:
    calibration = Calibration(((0.0, 0.5), (1.0, 0.9)))
    sigmas = [calibration.sigma_at(temperature) for temperature in (0.0, 0.25, 1.0, 2.0)]
    assert sigmas == pytest.approx([0.5, 0.6, 0.9, 0.9])


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"sigmas": {}}',
        '{"sigmas": 0.5}',
        '{"sigmas": {"0": 0}}',
        '{"sigmas": {"0": "much"}}',
        '{"sigmas": {"warm": 1}}',
        '{"sigmas": {"0": NaN}}',
    ],
)
def test_a_calibration_file_that_makes_no_sense_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "drafter.json").write_text(content)
    with pytest.raises(IncompatibleError, match=r"drafter\.json"):
        load_calibration(str(tmp_path))


def test_what_leads_to_a_row_is_told_from_the_end_of_the_committed_tokens(llama: LlamaForCausalLM) -> None:
    cache = TreeCache(CachedForward(llama))
    cache.extend([5, 9])
    cache.grow([3, 4], [-1, -1], [1, 1])
    cache.grow([6, 7, 8], [0, 1, 1], [2, 2, 2])
    cache.note([Children((1,), (-0.1,))] * 5)
    assert [cache.path(row) for row in range(cache.num_rows)] == [[3], [4], [3, 6], [4, 7], [4, 8]]
    assert cache.follow([4]).children is not None
    assert [cache.path(row) for row in range(cache.num_rows)] == [[7], [8]]


def test_one_child_a_node_is_a_chain_of_the_likeliest(llama: LlamaForCausalLM) -> None:
    sampling = SamplingParams(temperature=1.0, seed=5)
    tree = make_drafter(llama).open(PROMPT, sampling).draft(12)
    drafter = make_drafter(llama, max_steps=3)
    one = SmallLm(drafter._forward, drafter.info, drafter._calibration, drafter._limits, choice=ChildChoice(1))
    chain = one.open(PROMPT, sampling).draft(12)
    assert chain.parents == (-1, 0, 1, 2)
    assert chain.token_ids[0] == tree.token_ids[0]


def test_without_coupling_the_tree_does_not_know_the_seed(llama: LlamaForCausalLM) -> None:
    coupled = make_drafter(llama)
    choice = ChildChoice(is_coupled=False)
    drafter = SmallLm(coupled._forward, coupled.info, coupled._calibration, coupled._limits, choice=choice)
    first, second = (drafter.open(PROMPT, SamplingParams(temperature=1.0, seed=seed)).draft(12) for seed in (1, 2))
    assert first == second
    assert coupled.open(PROMPT, SamplingParams(temperature=1.0, seed=1)).draft(12).token_ids != first.token_ids
