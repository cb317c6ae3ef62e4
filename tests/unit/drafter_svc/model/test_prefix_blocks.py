"""Prompts that begin alike are read once, and drafts are the same bits as if each had been read by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from transformers import LlamaForCausalLM

from coppice.core.sampling import SamplingParams
from coppice.core.tree import TokenTree
from coppice.draft_models.kernels.base import Rows
from coppice.search.tree_limits import TreeLimits
from drafter_svc.drafters.base import DrafterInfo, DraftSequence
from drafter_svc.drafters.small_lm.drafter import SmallLm
from drafter_svc.model.checkpoint import Calibration
from drafter_svc.model.hf_forward import CachedForward, PlainForward
from drafter_svc.model.llama_forward import LlamaForward
from drafter_svc.model.prefix_blocks import PIECE_ROWS, KvBlock, PrefixBlocks, PrefixKey
from drafter_svc.model.tree_cache import FloatArray, Forward
from tests.tiny_checkpoint import tiny_llama

VOCAB = 61
CONTEXT = 6 * PIECE_ROWS
PLENTY = 1 << 30
TEXT = tuple(np.random.default_rng(2).integers(0, VOCAB, CONTEXT).tolist())
ROUTES: dict[str, Callable[[LlamaForCausalLM], Forward[Any]]] = {
    "lean": LlamaForward,
    "cached": CachedForward,
    "plain": PlainForward,
}


@pytest.fixture(scope="module")
def long_llama() -> LlamaForCausalLM:
    return tiny_llama(vocab_size=VOCAB, max_context_tokens=CONTEXT, initializer_range=0.4)


def make_drafter(model: LlamaForCausalLM, max_bytes: int, route: str = "lean") -> SmallLm:
    return SmallLm(
        ROUTES[route](model),
        DrafterInfo("small-lm", "test", "", VOCAB, CONTEXT),
        Calibration(((0.0, 0.8),)),
        TreeLimits(max_nodes=6, max_steps=2),
        prefixes=PrefixBlocks(max_bytes),
    )


class CountingForward(LlamaForward):
    """Counts rows."""

    rows = 0

    def run(self, store: Any, rows: Rows) -> FloatArray:
        self.rows += len(rows.token_ids)
        return super().run(store, rows)


@dataclass
class Reader:
    """Opens sequences on a drafter without steps and counts the rows that their first draft computes."""

    drafter: SmallLm
    forward: CountingForward

    def read(self, prompt: Sequence[int], salt: str = "") -> int:
        before = self.forward.rows
        self.drafter.open(prompt, SamplingParams(), salt).draft(1)
        return self.forward.rows - before


def make_reader(model: LlamaForCausalLM, max_bytes: int = PLENTY) -> Reader:
    forward = CountingForward(model)
    info = DrafterInfo("small-lm", "test", "", VOCAB, CONTEXT)
    limits = TreeLimits(max_nodes=1, max_steps=0)
    return Reader(SmallLm(forward, info, Calibration(), limits, prefixes=PrefixBlocks(max_bytes)), forward)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("max_blocks", [1000, 3], ids="{} blocks".format)
def test_trees_are_the_same_bits_with_and_without_reuse(
    long_llama: LlamaForCausalLM, route: str, max_blocks: int
) -> None:
    """Random sequences side by side, that begin alike or not, are read in pieces, go on, or are left in the middle."""
    max_bytes = max_blocks * block_bytes(long_llama, route)
    drafters = [make_drafter(long_llama, max_bytes, route), make_drafter(long_llama, 0, route)]
    rng = np.random.default_rng(len(route) + max_blocks)
    running: list[list[DraftSequence]] = []
    num_drafts = 0
    for _ in range(40):
        chance = rng.random()
        if not running or chance < 0.4:
            prompt = [*TEXT[: rng.integers(1, 4 * PIECE_ROWS)], *rng.integers(0, VOCAB, rng.integers(0, 60)).tolist()]
            sampling = SamplingParams(temperature=float(rng.integers(0, 2)), seed=int(rng.integers(9)))
            salt = "ab"[rng.integers(2)]
            opens = [
                drafter.open_sampled if sampling.temperature and chance < 0.1 else drafter.open for drafter in drafters
            ]
            running.append([open_one(prompt, sampling, salt) for open_one in opens])
            continue
        pair = running[rng.integers(len(running))]
        if chance < 0.5:
            running.remove(pair)
        elif chance < 0.7:
            for sequence in pair:
                sequence.read(max_pieces=1)
        else:
            trees = [sequence.draft(6) for sequence in pair]
            assert bits(trees[0]) == bits(trees[1])
            num_drafts += 1
            outcome = [*trees[0].token_ids[:1], *rng.integers(0, VOCAB, rng.integers(1, 4)).tolist()]
            for sequence in pair:
                sequence.extend(outcome, b"")
    assert num_drafts > 5
    assert drafters[0].prefixes.num_reused_tokens > 0
    assert drafters[1].prefixes.num_reused_tokens == drafters[1].prefixes.num_bytes == 0
    assert 0 < drafters[0].prefixes.num_bytes <= max_bytes


def block_bytes(model: LlamaForCausalLM, route: str) -> int:
    drafter = make_drafter(model, PLENTY, route)
    drafter.open(TEXT[: PIECE_ROWS + 1], SamplingParams()).draft(1)
    return drafter.prefixes.num_bytes


def bits(tree: TokenTree) -> tuple[object, ...]:
    return tree.token_ids, tree.parents, tree.log_probs, tree.distributions


def test_of_a_prompt_that_begins_alike_only_the_rest_is_read(long_llama: LlamaForCausalLM) -> None:
    reader = make_reader(long_llama)
    prompt = TEXT[: 3 * PIECE_ROWS + 5]
    assert reader.read(prompt) == len(prompt)
    assert reader.read(prompt) == 5
    assert reader.read((*TEXT[: 2 * PIECE_ROWS + 9], 1, 2, 3)) == 12
    # The last token is always read: what follows it has to be known.
    assert reader.read(TEXT[: 3 * PIECE_ROWS]) == PIECE_ROWS
    assert reader.read((TEXT[0] + 1, *TEXT[1:PIECE_ROWS], 7)) == PIECE_ROWS + 1
    # The next turn of a conversation begins with the prompt of the one before.
    assert reader.read(TEXT[: 4 * PIECE_ROWS + 1]) == PIECE_ROWS + 1


def test_salts_share_nothing(long_llama: LlamaForCausalLM) -> None:
    reader = make_reader(long_llama)
    prompt = TEXT[: PIECE_ROWS + 1]
    assert [reader.read(prompt, salt) for salt in ("a", "b", "a", "", "b")] == [129, 129, 1, 129, 1]
    assert reader.drafter.prefixes.num_reused_tokens == 2 * PIECE_ROWS


def test_what_a_cancelled_sequence_has_read_is_of_use_and_so_is_what_others_read_meanwhile(
    long_llama: LlamaForCausalLM,
) -> None:
    reader = make_reader(long_llama)
    prompt = TEXT[: 4 * PIECE_ROWS + 2]
    cancelled, other = (reader.drafter.open(prompt, SamplingParams()) for _ in range(2))
    assert [cancelled.read(max_pieces) for max_pieces in (0, 1, 1)] == [4, 3, 2]
    assert reader.forward.rows == 2 * PIECE_ROWS
    assert other.read(0) == 2
    assert [other.read(1), cancelled.read(0), cancelled.read(1), other.read(0)] == [1, 1, 0, 0]
    assert reader.forward.rows == 4 * PIECE_ROWS
    other.draft(1)
    assert reader.forward.rows == len(prompt)


def test_outputs_are_not_shared_since_they_are_read_otherwise(long_llama: LlamaForCausalLM) -> None:
    reader = make_reader(long_llama)
    sequence = reader.drafter.open(TEXT[:100], SamplingParams())
    sequence.draft(1)
    sequence.extend(TEXT[100 : 3 * PIECE_ROWS])
    sequence.draft(1)
    assert reader.drafter.prefixes.num_bytes == 0
    assert reader.read(TEXT[: 2 * PIECE_ROWS]) == 2 * PIECE_ROWS


def test_beyond_the_context_nothing_is_read(long_llama: LlamaForCausalLM) -> None:
    reader = make_reader(long_llama)
    for open_one in (reader.drafter.open, reader.drafter.open_sampled):
        sequence = open_one(TEXT, SamplingParams(temperature=1.0))
        sequence.extend([1])
        assert sequence.read(max_pieces=9) == 0
        assert not sequence.prepare()
    assert reader.forward.rows == 0


def test_idle_time_reads_one_piece_at_a_time(long_llama: LlamaForCausalLM) -> None:
    reader = make_reader(long_llama)
    sequence = reader.drafter.open(TEXT[: 3 * PIECE_ROWS + 5], SamplingParams())
    rows = []
    while sequence.prepare():
        rows.append(reader.forward.rows)
    assert rows == [PIECE_ROWS, 2 * PIECE_ROWS]
    assert reader.forward.rows == 3 * PIECE_ROWS + 5


def test_the_beginning_left_longest_ago_is_forgotten_from_its_end() -> None:
    blocks = PrefixBlocks(max_bytes=50)
    pieces = [[number] * PIECE_ROWS for number in range(3)]

    def keep(salt: str) -> None:
        beginning = PrefixKey(blocks, salt)
        for number, piece in enumerate(pieces):
            if beginning.find(piece) is None:
                beginning.add(piece, KvBlock((salt, number), 10))

    def num_kept(salt: str) -> int:
        beginning = PrefixKey(blocks, salt)
        found = [beginning.find(piece) for piece in pieces]
        kept = [block.content for block in found if block is not None]
        assert kept == [(salt, number) for number in range(len(kept))]
        return len(kept)

    keep("a")
    keep("b")
    assert (blocks.num_bytes, num_kept("a"), num_kept("b")) == (50, 2, 3)
    keep("c")
    assert (blocks.num_bytes, num_kept("a"), num_kept("b"), num_kept("c")) == (50, 0, 2, 3)


def test_a_prompt_that_is_larger_than_the_memory_leaves_its_beginning() -> None:
    blocks = PrefixBlocks(max_bytes=25)
    beginning = PrefixKey(blocks, "")
    for number in range(5):
        beginning.add([number] * PIECE_ROWS, KvBlock(number, 10))
    again = PrefixKey(blocks, "")
    found = [again.find([number] * PIECE_ROWS) for number in range(3)]
    assert [block.content for block in found if block is not None] == [0, 1]
    assert found[2] is None
