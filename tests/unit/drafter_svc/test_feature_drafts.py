"""Drafts with features are those of plain forwards with what the heads say, whatever was kept, cut or read again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from coppice.core.errors import InvalidRequestError
from coppice.core.sampling import SamplingParams
from coppice.core.tree import TokenTree
from coppice.search.marginal_tree import marginal_tree
from coppice.search.tree_limits import TreeLimits
from drafter_svc.drafters.base import DraftSequence
from drafter_svc.drafters.features.heads import FeatureHeads, last_feature
from drafter_svc.model.hf_forward import CachedForward, PlainForward
from drafter_svc.model.llama_forward import LlamaForward
from drafter_svc.model.prefix_blocks import PIECE_ROWS
from drafter_svc.search.joint_passes import joined
from tests.eight_bits import round_to_8_bits
from tests.feature_drafters import encode, random_matrices
from tests.tiny_checkpoint import tiny_llama
from tests.unit.drafter_svc.drafters.block.test_block_lm import (
    CONTEXT,
    MASKS,
    MODEL_VOCAB,
    PROMPT,
    VOCAB,
    assert_same,
    expected_children,
    make_drafter,
)

SIZE = 6
ROUTES = {"lean": LlamaForward, "cached": CachedForward, "plain": PlainForward}


def heads_of(model: LlamaForCausalLM) -> FeatureHeads:
    matrices = random_matrices(model.config.hidden_size, SIZE, 1 + len(MASKS))
    return FeatureHeads(**matrices, embeddings=model.get_input_embeddings().weight.detach().numpy())


@pytest.fixture(scope="module")
def heads(llama: LlamaForCausalLM) -> FeatureHeads:
    return heads_of(llama)


@torch.inference_mode()
def expected_draft(
    model: LlamaForCausalLM, committed: Sequence[int], feature: Sequence[float] | None, sampling: SamplingParams
) -> TokenTree:
    """The oracle, in torch: hidden states of one plain forward, then the heads, then the output layer."""
    hidden = model.model(torch.tensor([[*committed, *MASKS]])).last_hidden_state[0, len(committed) - 1 :]
    if feature is not None:
        matrices = random_matrices(model.config.hidden_size, SIZE, 1 + len(MASKS))
        of_feature, of_token, up = (torch.from_numpy(matrix) for matrix in matrices.values())
        row, token = torch.tensor(feature), model.get_input_embeddings().weight[committed[-1]]
        row, token = (vector / vector.square().mean().sqrt() for vector in (row, token))
        own = of_feature @ row + of_token @ token
        hidden = hidden + torch.stack([head @ own for head in up])
    children = expected_children(model.lm_head(hidden).numpy(), len(committed), sampling)
    return marginal_tree(children, TreeLimits(20), "semi-ar")


def outcome_of(tree: TokenTree, rng: np.random.Generator) -> list[int]:
    path = tree.path(int(rng.integers(-1, len(tree))))
    return [*(tree.token_ids[node] for node in path), int(rng.integers(VOCAB))]


def some_features(count: int, rng: np.random.Generator) -> list[list[float]]:
    """Numbers that bfloat16 has, of all sizes."""
    return ((rng.integers(-8, 8, (count, SIZE)) + 0.5) * 2.0 ** rng.integers(-10, 30, (count, 1))).tolist()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids="temperature {}".format)
def test_a_draft_is_that_of_plain_forwards_round_after_round(
    llama: LlamaForCausalLM, heads: FeatureHeads, route: str, temperature: float
) -> None:
    """Rounds with all features, with those of the last tokens alone, and with none; forgotten and drafted again."""
    sampling = SamplingParams(temperature=temperature, seed=7)
    sequence = make_drafter(llama, "semi-ar", ROUTES[route], heads=heads).open(PROMPT, sampling)
    committed, features = list(PROMPT), some_features(0, np.random.default_rng(0))
    rng = np.random.default_rng(3)
    for share in (1.0, 0.5, 1.0, 0.0, 1.0, 0.0, 1.0):
        feature = features[-1] if features else None
        tree = sequence.draft(20)
        assert_same(tree, expected_draft(llama, committed, feature, sampling))
        if rng.random() < 0.5:
            sequence.forget()
            assert_same(sequence.draft(20), tree)
        outcome = outcome_of(tree, rng)
        features = some_features(int(np.ceil(share * len(outcome))), rng)
        sequence.extend(outcome, encode(features))
        committed += outcome
        sequence.prepare()
    assert_same(sequence.draft(20), expected_draft(llama, committed, features[-1], sampling))
    assert not trees_agree(llama, committed, features[-1], sampling)


def trees_agree(
    model: LlamaForCausalLM, committed: Sequence[int], feature: Sequence[float], sampling: SamplingParams
) -> bool:
    """Whether the feature makes no difference."""
    one, other = (expected_draft(model, committed, row, sampling) for row in (feature, None))
    return one.token_ids == other.token_ids


def test_without_features_drafts_are_those_of_the_trunk(llama: LlamaForCausalLM, heads: FeatureHeads) -> None:
    """At the beginning, where the streaming stops, and where what came is no number."""
    sampling = SamplingParams(temperature=1.0, seed=5)
    one, other = (make_drafter(llama, "semi-ar", **parts).open(PROMPT, sampling) for parts in ({}, {"heads": heads}))
    nothing = [b"", b"", encode([[float("nan"), *[1.0] * (SIZE - 1)]]), b"", encode([[0.0] * SIZE])]
    for features in nothing:
        tree = one.draft(20)
        assert other.draft(20) == tree
        one.extend([3, 4])
        other.extend([3, 4], features)
    one.extend([7])
    other.extend([7], encode([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]))
    assert other.draft(20) != one.draft(20)
    # Rounds without tokens leave the feature where it is.
    drawn = other.draft(20)
    other.extend([], b"")
    assert other.draft(20) == drawn
    other.extend([8])
    one.extend([8])
    assert other.draft(20) == one.draft(20)


def test_a_long_text_is_read_in_pieces_and_cut_back_and_the_latest_feature_stays() -> None:
    model = tiny_llama(vocab_size=MODEL_VOCAB, max_context_tokens=4 * PIECE_ROWS, initializer_range=0.4)
    rng = np.random.default_rng(0)
    text = rng.integers(0, VOCAB, 2 * PIECE_ROWS + 9).tolist()
    drafter = make_drafter(model, "semi-ar", heads=heads_of(model), max_context=64)
    sequence = drafter.open(PROMPT, SamplingParams())
    features = some_features(len(text), rng)
    sequence.extend(text, encode(features))
    known = sequence._context.unread.copy()
    assert len(known) <= 64 < len(text)
    expected = expected_draft(model, known, features[-1], SamplingParams())
    assert_same(sequence.draft(20), expected)
    sequence.forget()
    assert_same(sequence.draft(20), expected)


def test_drafts_that_are_made_together_have_their_own_features(llama: LlamaForCausalLM, heads: FeatureHeads) -> None:
    forward = joined(LlamaForward(llama), 4)
    drafter = make_drafter(llama, "semi-ar", lambda _: forward, heads=heads)
    assert drafter.joint is not None
    rng = np.random.default_rng(2)
    sequences: list[DraftSequence] = []
    expected: list[TokenTree] = []
    for count in (1, 3, 0):
        outcome, features = rng.integers(0, VOCAB, 3).tolist(), some_features(count, rng)
        sequence = drafter.open(PROMPT, SamplingParams())
        sequence.extend(outcome, encode(features))
        sequences.append(sequence)
        latest = features[-1] if features else None
        expected.append(expected_draft(llama, [*PROMPT, *outcome], latest, SamplingParams()))
    trees: dict[int, TokenTree] = {}

    def draft(number: int) -> None:
        trees[number] = sequences[number].draft(20)

    drafter.joint.together([lambda number=number: draft(number) for number in range(3)])
    for number, tree in enumerate(expected):
        assert_same(trees[number], tree)
    assert drafter.joint.num_joint > 0


def test_compiled_passes_add_the_same() -> None:
    """Against the pass in tensors over weights of 8 bits."""
    model = round_to_8_bits(tiny_llama(vocab_size=MODEL_VOCAB, max_context_tokens=CONTEXT, initializer_range=0.4))
    trees = []
    for forward in (LlamaForward(model, "w8"), LlamaForward(model)):
        drafter = make_drafter(model, "semi-ar", lambda _, forward=forward: forward, heads=heads_of(model))
        sequence = drafter.open(PROMPT, SamplingParams(temperature=1.0, seed=3))
        sequence.draft(20)
        sequence.extend([4, 5, 6], encode(some_features(3, np.random.default_rng(9))))
        trees.append(sequence.draft(20))
    assert_same(*trees)


def test_a_small_draft_has_the_heads_of_its_places(llama: LlamaForCausalLM, heads: FeatureHeads) -> None:
    trees = []
    for most in (3, 20):
        sequence = make_drafter(llama, "semi-ar", heads=heads).open(PROMPT, SamplingParams())
        sequence.extend([1], encode([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]))
        trees.append(sequence.draft(most))
    assert_same(trees[0], trees[1].prune(3))
    # The same sequence is asked for more: the last token is read by then, and the masks alone are looked at.
    sequence = make_drafter(llama, "semi-ar", heads=heads).open(PROMPT, SamplingParams())
    sequence.extend([1], encode([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]))
    assert_same(sequence.draft(3), trees[0])
    assert_same(sequence.draft(20), trees[1])


def test_of_many_features_the_last_counts_as_large_as_any_other() -> None:
    rows = [[1.0, 2.0], [2.0**127, -(2.0**127)]]
    np.testing.assert_allclose(last_feature(encode(rows), 2, 5), [1.0, -1.0], rtol=1e-6)
    np.testing.assert_allclose(last_feature(encode(rows[:1]), 2, 1), np.array([1, 2]) / np.sqrt(2.5), rtol=1e-6)
    np.testing.assert_allclose(last_feature(encode([[2.0**-100, 0.0]]), 2, 1), [0.0, 0.0], atol=1e-6)
    for none in ([], [[1.0, float("inf")]], [[1.0, 1.0], [float("nan"), 0.0]], [[0.0, 0.0]]):
        assert last_feature(encode(none), 2, 2) is None


@pytest.mark.parametrize(("num_bytes", "num_tokens"), [(1, 1), (2, 1), (6, 1), (8, 1), (4, 0), (12, 2)])
def test_features_of_another_size_or_of_more_tokens_are_refused(
    llama: LlamaForCausalLM, num_bytes: int, num_tokens: int
) -> None:
    with pytest.raises(InvalidRequestError, match=r"outcome\.features") as caught:
        last_feature(bytes(num_bytes), 2, num_tokens)
    assert caught.value.field == "outcome.features"
    sequence = make_drafter(llama, "semi-ar", heads=heads_of(llama)).open(PROMPT, SamplingParams())
    with pytest.raises(InvalidRequestError, match=r"outcome\.features"):
        sequence.extend([1], bytes(2 * SIZE - 1))


@pytest.mark.parametrize(
    "shapes",
    [
        ((4, 6), (5, 8), (3, 8, 4), (9, 8)),
        ((4, 6), (4, 8), (3, 7, 4), (9, 8)),
        ((4, 6), (4, 8), (3, 8, 5), (9, 8)),
        ((4, 6), (4, 8), (3, 8, 4), (9, 7)),
        ((4, 6), (4, 8), (8, 4), (9, 8)),
        ((4,), (4, 8), (3, 8, 4), (9, 8)),
    ],
)
def test_heads_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="shapes"):
        FeatureHeads(*(np.zeros(shape, np.float32) for shape in shapes))
    whole = [np.zeros(shape, np.float32) for shape in ((4, 6), (4, 8), (3, 8, 4), (9, 8))]
    FeatureHeads(*whole)
    whole[2] = np.full((3, 8, 4), np.nan, np.float32)
    with pytest.raises(ValueError, match="numbers"):
        FeatureHeads(*whole)
