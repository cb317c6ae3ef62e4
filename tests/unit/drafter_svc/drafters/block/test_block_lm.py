"""Drafters of blocks: their pass is the plain model's under an explicit mask, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from coppice.core.denoising import LEFT_TO_DRAFTER, Denoising
from coppice.core.noise import gumbel
from coppice.core.sampling import SamplingParams
from coppice.core.tree import TokenTree
from coppice.draft_models.coupling import ChildChoice
from coppice.draft_models.kernels.base import Rows
from coppice.kernels.cpu.half_tables import floats, halves
from coppice.search.marginal_tree import marginal_tree
from coppice.search.transition_scores import TransitionScores
from coppice.search.tree_builder import Frontier, build_tree
from coppice.search.tree_limits import Children, TreeLimits
from drafter_svc.drafters.base import DrafterInfo
from drafter_svc.drafters.block.block_lm import BlockKind, BlockLm, BlockLmSequence
from drafter_svc.drafters.block.checkpoint import BlockCalibration
from drafter_svc.drafters.block.diffusion import Diffusion
from drafter_svc.drafters.block.semi_ar import SemiAr
from drafter_svc.model.hf_forward import CachedForward, PlainForward
from drafter_svc.model.llama_forward import LlamaForward
from drafter_svc.model.prefix_blocks import PIECE_ROWS, PrefixBlocks
from drafter_svc.model.tree_cache import TreeCache
from tests.tiny_checkpoint import tiny_llama

MODEL_VOCAB = 61
MASKS = (56, 57, 58, 59, 60)
VOCAB = 56
CONTEXT = 64
PROMPT = (5, 9, 2, 44, 17)
SIGMAS = ((0.0, (0.8, 0.9, 1.0)), (1.0, (0.6, 1.1, 1.3)))
ROUTES = {"lean": LlamaForward, "cached": CachedForward, "plain": PlainForward}
KINDS: dict[str, BlockKind] = {
    "semi-ar": SemiAr(MASKS),
    "diffusion": Diffusion(MASKS[:1], block=6),
    "diffusion in 3": Diffusion(MASKS[:1], steps=3, block=6),
}


class CountingForward(LlamaForward):
    """Notes the rows of each pass."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__(model)
        self.passes: list[int] = []

    def run(self, store: object, rows: Rows) -> np.ndarray:
        self.passes.append(len(rows.token_ids))
        return super().run(store, rows)


def make_drafter(model: LlamaForCausalLM, kind: str, route: type = LlamaForward, **parts: object) -> BlockLm:
    info = DrafterInfo(kind.split()[0], "test", "", VOCAB, model.config.max_position_embeddings)
    calibration = BlockCalibration(len(MASKS), 6, SIGMAS)
    return BlockLm(route(model), info, calibration, **{"block": KINDS[kind], "limits": TreeLimits(20), **parts})


@torch.inference_mode()
def plain_logits(model: LlamaForCausalLM, committed: Sequence[int], block: Sequence[int], sees_all: bool) -> np.ndarray:
    """The oracle: one plain forward with an explicit mask; logits of the last committed token and of the block."""
    rows = len(committed) + len(block)
    allowed = torch.ones(rows, rows).tril().bool()
    if sees_all:
        allowed[len(committed) :] = True
    mask = torch.zeros(rows, rows).masked_fill(~allowed, torch.finfo(torch.float32).min)
    ids = torch.tensor([[*committed, *block]])
    logits = model(input_ids=ids, attention_mask=mask[None, None], use_cache=False).logits
    return logits[0, len(committed) - 1 :].numpy()


def expected_children(
    logits: np.ndarray, committed: int, sampling: SamplingParams, first_depth: int = 0
) -> list[Children]:
    """softmax((logits + T * noise) / sigma) by depth, in plain numpy."""
    found = []
    for depth, row in enumerate(np.atleast_2d(logits)[:, :VOCAB].astype(np.float64), first_depth):
        cold, hot = (scales[min(depth, 2)] for _, scales in SIGMAS)
        sigma = cold + (hot - cold) * min(sampling.temperature, 1.0)
        noise = gumbel(sampling.seed, committed + depth, 1, VOCAB)[0] * sampling.temperature
        scores = (row + noise) / sigma
        order = np.argsort(-scores)[:16]
        log_probs = scores - np.log(np.exp(scores - scores.max()).sum()) - scores.max()
        found.append(Children(order.tolist(), np.minimum(log_probs[order], 0).tolist()))
    return found


def expected_tree(model: LlamaForCausalLM, kind: str, committed: Sequence[int], sampling: SamplingParams) -> TokenTree:
    block = KINDS[kind]

    def look(ids: Sequence[int]) -> list[Children]:
        return expected_children(plain_logits(model, committed, ids, block.sees_all), len(committed), sampling)

    return marginal_tree(block.predict(look, block.num_masks(20)), TreeLimits(20), kind.split()[0])


def assert_same(tree: TokenTree, expected: TokenTree) -> None:
    assert (tree.token_ids, tree.parents, tree.source_names) == (
        expected.token_ids,
        expected.parents,
        expected.source_names,
    )
    assert tree.log_probs == pytest.approx(expected.log_probs, abs=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0], ids="temperature {}".format)
def test_a_draft_is_that_of_plain_forwards_with_explicit_masks_round_after_round(
    llama: LlamaForCausalLM, kind: str, temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=7)
    committed = list(PROMPT)
    sequence = make_drafter(llama, kind).open(PROMPT, sampling)
    rng = np.random.default_rng(3)
    for _ in range(5):
        tree = sequence.draft(20)
        assert_same(tree, expected_tree(llama, kind, committed, sampling))
        assert tree.depth > 1
        path = tree.path(int(rng.integers(-1, len(tree))))
        outcome = [*(tree.token_ids[node] for node in path), int(rng.integers(VOCAB))]
        sequence.extend(outcome)
        committed += outcome
        if rng.random() < 0.5:
            sequence.prepare()


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids="temperature {}".format)
def test_with_a_transition_children_know_the_token_above_them(llama: LlamaForCausalLM, temperature: float) -> None:
    """Every node's children are those of plain scores, with what its own token adds; the root's are as ever."""
    rng = np.random.default_rng(4)
    tables = [floats(halves(rng.normal(0, 1, (VOCAB, 3)))) for _ in range(2)]
    pairs = tables[0] @ tables[1].T
    sampling = SamplingParams(temperature=temperature, seed=7)
    drafter = make_drafter(llama, "semi-ar", transition=TransitionScores(*tables))
    sequence = drafter.open(PROMPT, sampling)
    committed = list(PROMPT)
    for outcome in ([3, 4], [9], []):
        tree = sequence.draft(20)
        logits = plain_logits(llama, committed, MASKS, sees_all=False)[:, :VOCAB]

        def expand(frontier: Frontier, logits: np.ndarray = logits, length: int = len(committed)) -> list[Children]:
            return [
                expected_children(logits[depth] + pairs[token], length, sampling, depth)[0]
                for token, depth in zip(frontier.token_ids, frontier.depths, strict=True)
            ]

        root = expected_children(logits[0], len(committed), sampling)[0]
        expected = build_tree(root, expand, TreeLimits(20, max_depth=6), "semi-ar")
        found, wanted = (dict(zip(one.paths(), one.path_log_probs, strict=True)) for one in (tree, expected))
        assert found == pytest.approx(wanted, abs=1e-4)
        assert tree.depth > 2
        assert tree.token_ids != expected_tree(llama, "semi-ar", committed, sampling).token_ids
        assert_same(sequence.draft(5), tree.prune(5))
        sequence.extend(outcome)
        committed += outcome


@pytest.mark.parametrize(("kind", "route"), [("semi-ar", "cached"), ("semi-ar", "plain"), ("diffusion", "cached")])
def test_other_forwards_draft_the_same(llama: LlamaForCausalLM, kind: str, route: str) -> None:
    sampling = SamplingParams(temperature=1.0, seed=2)
    sequence = make_drafter(llama, kind, ROUTES[route]).open(PROMPT, sampling)
    sequence.draft(20)
    sequence.extend([3, 4])
    assert_same(sequence.draft(20), expected_tree(llama, kind, [*PROMPT, 3, 4], sampling))


@pytest.mark.parametrize("sees_all", [False, True])
@pytest.mark.parametrize("way", ["tensors", "w8"])
def test_a_block_leaves_no_trace_in_the_cache(llama: LlamaForCausalLM, sees_all: bool, way: str) -> None:
    forward = LlamaForward(llama, way)
    looked, never = TreeCache(forward), TreeCache(forward)
    for tokens in (PROMPT[:3], PROMPT[3:], (8,), (1, 2)):
        looked.look(tokens, MASKS, sees_all=sees_all)
        looked.look((), MASKS[:2], sees_all=sees_all)
        never.extend(tokens)
    assert looked.trunk_length == never.trunk_length == 8
    kept, expected = (forward.take(cache._store, 0, 8).content for cache in (looked, never))
    assert looked._store.length == 8
    assert torch.allclose(kept, expected, atol=1e-5)
    np.testing.assert_allclose(looked.extend((7,)), never.extend((7,)), atol=1e-4)


@pytest.mark.parametrize(("kind", "passes"), [("semi-ar", 1), ("diffusion", 1), ("diffusion in 3", 3)])
def test_a_draft_is_one_pass_over_new_tokens_and_masks_for_each_step(
    llama: LlamaForCausalLM, kind: str, passes: int
) -> None:
    drafter = make_drafter(llama, kind, CountingForward)
    sequence = drafter.open(PROMPT, SamplingParams())
    rows = drafter._forward.passes
    sequence.draft(20)
    sequence.extend([1, 2])
    sequence.prepare()
    sequence.draft(20)
    later = [5] * (passes - 1)
    assert rows == [5 + 5, *later, 2 + 5, *later]
    sequence.draft(20)
    assert len(rows) == 2 * passes, "what is known is not computed again"


def test_a_small_budget_needs_few_masks_where_no_mask_sees_those_behind_it(llama: LlamaForCausalLM) -> None:
    drafter = make_drafter(llama, "semi-ar", CountingForward)
    sequence = drafter.open(PROMPT, SamplingParams())
    small = sequence.draft(3)
    assert drafter._forward.passes == [5 + 2]
    whole = sequence.draft(20)
    assert drafter._forward.passes == [7, 5]
    assert_same(small, whole.prune(3))


def test_trees_end_with_the_context(llama: LlamaForCausalLM) -> None:
    for kind in KINDS:
        for length, depth in ((CONTEXT - 2, 3), (CONTEXT - 1, 2), (CONTEXT, 1), (CONTEXT + 1, 0)):
            sequence = make_drafter(llama, kind).open([1] * (CONTEXT - 4), SamplingParams())
            sequence.extend([2] * (length - CONTEXT + 4))
            assert sequence.draft(200).depth <= depth
            sequence.prepare()


def test_masks_are_never_drafted_and_penalties_and_bans_are_heeded(llama: LlamaForCausalLM) -> None:
    with torch.no_grad():
        model = tiny_llama(vocab_size=MODEL_VOCAB, max_context_tokens=CONTEXT, initializer_range=0.4)
        model.lm_head.weight[VOCAB:] *= 50
    for kind in KINDS:
        free = make_drafter(model, kind).open(PROMPT, SamplingParams()).draft(20)
        assert max(free.token_ids) < VOCAB
        banned = SamplingParams(bad_token_ids=tuple(free.token_ids))
        assert not set(make_drafter(model, kind).open(PROMPT, banned).draft(20).token_ids) & set(free.token_ids)
        single = SamplingParams(allowed_token_ids=(4,))
        assert set(make_drafter(model, kind).open(PROMPT, single).draft(20).token_ids) == {4}


def test_long_prompts_are_read_in_pieces_that_others_share() -> None:
    model = tiny_llama(vocab_size=MODEL_VOCAB, max_context_tokens=4 * PIECE_ROWS, initializer_range=0.4)
    prompt = np.random.default_rng(0).integers(0, VOCAB, 2 * PIECE_ROWS + 9).tolist()
    prefixes = PrefixBlocks(1 << 24)
    drafter = make_drafter(model, "semi-ar", prefixes=prefixes)
    sequence = drafter.open(prompt, SamplingParams())
    assert [sequence.read(0), sequence.read(1), sequence.read(1)] == [2, 1, 0]
    first = sequence.draft(20)
    assert_same(drafter.open(prompt, SamplingParams()).draft(20), first)
    assert prefixes.num_reused_tokens == 2 * PIECE_ROWS


def test_the_surest_tokens_are_unmasked_first_and_keep_what_they_were_chosen_from() -> None:
    blocks = []

    def look(block: Sequence[int]) -> list[Children]:
        """Surest at depth 3, then 1; what is found names the pass and the depth."""
        blocks.append(list(block))
        sure = [-2.0, -3.0, -1.0, -4.0]
        return [Children([10 * len(blocks) + depth], [sure[depth]]) for depth in range(4)]

    found = Diffusion((99,), steps=3, block=4).predict(look, 3)
    # Of the four tokens the last has no row. Depths count from 0 here.
    assert blocks == [[99, 99, 99], [99, 99, 12], [20, 99, 12]]
    assert [children.token_ids[0] for children in found] == [20, 31, 12, 33]


@pytest.mark.parametrize(("steps", "block"), [(3, 6), (0, 4), (2, 0), (5, 9)])
def test_a_request_says_how_its_blocks_are_denoised(llama: LlamaForCausalLM, steps: int, block: int) -> None:
    """As a drafter of that setting would do it; other requests are none the wiser."""
    sampling = SamplingParams(temperature=0.7, seed=3)
    served = make_drafter(llama, "diffusion", CountingForward)
    asked = served.open_denoising(PROMPT, sampling, Denoising(steps, block))
    kind = Diffusion(MASKS[:1], steps=steps or 1, block=block or 6)
    as_set = make_drafter(llama, "diffusion", block=kind).open(PROMPT, sampling)
    usual, other = served.open(PROMPT, sampling), make_drafter(llama, "diffusion").open(PROMPT, sampling)
    for tokens in ([], [1, 2]):
        for sequence in (asked, as_set, usual, other):
            sequence.extend(tokens)
        del served._forward.passes[:]
        assert_same(asked.draft(20), as_set.draft(20))
        assert len(served._forward.passes) == (steps or 1)
        assert_same(usual.draft(20), other.draft(20))


def test_a_request_gets_no_more_steps_than_the_drafter_lets_it() -> None:
    kind = Diffusion(MASKS[:1], steps=2, block=6, max_steps=4)
    assert kind.as_asked(Denoising(steps=9)) == Diffusion(MASKS[:1], steps=4, block=6, max_steps=4)
    assert kind.as_asked(Denoising(block_tokens=3)).steps == 2
    # The operator's own setting is no request.
    assert Diffusion(MASKS[:1], steps=9, max_steps=4).as_asked(LEFT_TO_DRAFTER).steps == 9


def test_what_denoises_nothing_drafts_as_ever(llama: LlamaForCausalLM) -> None:
    drafter = make_drafter(llama, "semi-ar")
    asked = drafter.open_denoising(PROMPT, SamplingParams(), Denoising(steps=3, block_tokens=2))
    assert_same(asked.draft(20), drafter.open(PROMPT, SamplingParams()).draft(20))


def test_warm_up_reaches_the_end(llama: LlamaForCausalLM) -> None:
    for kind in KINDS:
        drafter = make_drafter(llama, kind)
        drafter.warm_up()
        assert isinstance(drafter.open(PROMPT, SamplingParams()), BlockLmSequence)


@pytest.mark.parametrize("kind", KINDS)
def test_one_child_a_node_is_a_chain_and_without_coupling_seeds_say_nothing(llama: LlamaForCausalLM, kind: str) -> None:
    drafter = make_drafter(llama, kind, choice=ChildChoice(1, is_coupled=False))
    first, second = (drafter.open((1, 2, 3), SamplingParams(temperature=1.0, seed=seed)).draft(9) for seed in (1, 2))
    assert first == second
    assert len(first) > 1
    assert first.parents == tuple(range(-1, len(first) - 1))


def test_fewer_masks_than_were_trained_make_shallower_trees() -> None:
    assert SemiAr(MASKS, most=2).num_masks(30) == 2
    assert SemiAr(MASKS, most=len(MASKS) + 5).max_masks == SemiAr(MASKS).max_masks == len(MASKS)
