"""Long sequences: what is left out of them, and that drafts are those of a sequence that never had it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from coppice.core.sampling import SamplingParams
from coppice.settings import ConfigError
from drafter_svc.config import DrafterConfig
from drafter_svc.drafters.block.block_lm import BlockLm
from drafter_svc.drafters.small_lm.drafter import SmallLm
from drafter_svc.model.draft_context import LEAST_CONTEXT, SINKS, STEP_SHARE, DraftContext
from drafter_svc.model.prefix_blocks import PIECE_ROWS, PrefixBlocks
from tests.tiny_checkpoint import tiny_llama
from tests.unit.drafter_svc.drafters.block import test_block_lm
from tests.unit.drafter_svc.drafters.small_lm import test_small_lm

MAX_CONTEXT = 24
VOCAB = 56


@given(
    st.integers(LEAST_CONTEXT, 40),
    st.lists(st.integers(0, 90), min_size=1, max_size=12),
)
@settings(max_examples=60)
def test_first_and_latest_tokens_are_known(most: int, sizes: list[int]) -> None:
    """Whatever comes at a time; what a cache that reads it has is what is known."""
    tokens = list(range(1 + sum(sizes)))
    start = 1 + sizes[0]
    context = DraftContext(tokens[:start], most)
    read = context.unread.copy()
    context.unread.clear()
    for size in (0, *sizes[1:]):
        before = context.size
        is_cut = context.extend(tokens[start : start + size])
        start += size
        assert is_cut == (before + size > most)
        read = context.unread.copy() if is_cut else [*read, *context.unread]
        context.unread.clear()
        assert context.length == start
        assert context.size == len(read) <= most
        if is_cut:
            step = int(STEP_SHARE * most)
            # It is a grid's, whose step is what a further cut leaves out, and there is room before that comes.
            assert (start - context.size + SINKS) % step == 0
            assert step // 2 <= most - context.size < step // 2 + step
        if context.size == context.length:
            assert read == tokens[:start]
        else:
            assert read == [*tokens[:SINKS], *tokens[start - len(read) + SINKS : start]]
    # Once it is full, something is left out for good.
    assert (context.size == context.length) == (start <= most)


def test_without_a_limit_it_grows_with_the_sequence() -> None:
    context = DraftContext(range(1000))
    assert not context.extend([7] * 5000)
    assert (context.size, context.length) == (6000, 6000)
    with pytest.raises(ValueError, match="at least 16"):
        DraftContext([1], LEAST_CONTEXT - 1)


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    # No more positions than a pruned sequence takes, trees aside: one that is read whole would fail.
    return tiny_llama(vocab_size=61, max_context_tokens=MAX_CONTEXT + 8, seed=1)


def small_lm(model: LlamaForCausalLM, most: int) -> SmallLm:
    whole = test_small_lm.make_drafter(model)
    return SmallLm(whole._forward, whole.info, whole._calibration, whole._limits, max_context=most)


Opened = Callable[[LlamaForCausalLM, int, Sequence[int], SamplingParams], Any]
KINDS: dict[str, Opened] = {
    "small-lm": lambda model, most, prompt, sampling: small_lm(model, most).open(prompt, sampling),
    "sampled": lambda model, most, prompt, sampling: small_lm(model, most).open_sampled(prompt, sampling),
    **{
        kind: lambda model, most, prompt, sampling, kind=kind: test_block_lm.make_drafter(
            model, kind, max_context=most
        ).open(prompt, sampling)
        for kind in test_block_lm.KINDS
    },
}


# Trees are drawn above temperature 0 alone.
CASES = [(kind, temperature) for kind in KINDS for temperature in (0.0, 1.0) if temperature or kind != "sampled"]


@pytest.mark.parametrize(("kind", "temperature"), CASES)
def test_drafts_are_those_of_a_sequence_that_never_had_what_is_left_out(
    llama: LlamaForCausalLM, kind: str, temperature: float
) -> None:
    """At the places of the whole sequence, whose noise is that of its own positions."""
    sampling = SamplingParams(temperature=temperature, seed=3)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, 70).tolist()
    sequence = KINDS[kind](llama, MAX_CONTEXT, tokens, sampling)
    num_cuts, size = 0, sequence._context.size
    for _ in range(12):
        tree = sequence.draft(8)
        assert len(tree) == 8
        known = [*tokens[:SINKS], *tokens[len(tokens) - (sequence._context.size - SINKS) :]]
        fresh = KINDS[kind](llama, 0, known, sampling)
        fresh._context.length, fresh._context._num_left_out = len(tokens), len(tokens) - len(known)
        expected = fresh.draft(8)
        assert (tree.token_ids, tree.parents) == (expected.token_ids, expected.parents)
        assert tree.log_probs == pytest.approx(expected.log_probs, abs=1e-3)
        committed = [tree.token_ids[0], *rng.integers(0, VOCAB, 2).tolist()]
        sequence.extend(committed)
        tokens += committed
        num_cuts += sequence._context.size < size + 3
        size = sequence._context.size
        sequence.prepare()
    assert num_cuts >= 3


@pytest.mark.parametrize("kind", ["small-lm", *test_block_lm.KINDS])
def test_long_prompts_that_begin_alike_share_what_is_left_of_their_beginning(kind: str) -> None:
    """Where their latest tokens begin is the same, so that the second reads from where they differ; the same bits."""
    most = 3 * PIECE_ROWS
    model = tiny_llama(vocab_size=61, max_context_tokens=2 * most, seed=1)
    rng = np.random.default_rng(0)
    system = rng.integers(0, VOCAB, 2 * most).tolist()
    first, second = ([*system, *rng.integers(0, VOCAB, length).tolist()] for length in (40, 30))
    shared = with_prefixes(model, kind, most)
    shared.open(first, SamplingParams()).draft(8)
    assert shared.prefixes.num_reused_tokens == 0
    tree = shared.open(second, SamplingParams()).draft(8)
    # Two whole pieces lie before the tokens in which they differ.
    assert shared.prefixes.num_reused_tokens == 2 * PIECE_ROWS
    alone = with_prefixes(model, kind, most).open(second, SamplingParams()).draft(8)
    assert (tree.token_ids, tree.parents, tree.log_probs) == (alone.token_ids, alone.parents, alone.log_probs)


def with_prefixes(model: LlamaForCausalLM, kind: str, most: int) -> SmallLm | BlockLm:
    prefixes = PrefixBlocks(1 << 20)
    if kind != "small-lm":
        return test_block_lm.make_drafter(model, kind, prefixes=prefixes, max_context=most)
    whole = test_small_lm.make_drafter(model)
    return SmallLm(whole._forward, whole.info, whole._calibration, whole._limits, prefixes=prefixes, max_context=most)


def test_the_limit_is_what_was_asked_for_or_what_the_checkpoint_is_good_for() -> None:
    config = DrafterConfig(model="model")
    assert config.context_tokens(512, 2048) == 512
    # An eighth of the positions is left for trees.
    assert config.context_tokens(0, 2048) == config.context_tokens(4096, 2048) == 1792
    assert config.context_tokens(0, 18) == 0
    chosen = DrafterConfig(model="model", draft_context=100)
    assert [chosen.context_tokens(512, positions) for positions in (2048, 64)] == [100, 56]
    with pytest.raises(ConfigError, match="DRAFT_CONTEXT must be 0 or at least 16"):
        DrafterConfig(model="model", draft_context=15)
