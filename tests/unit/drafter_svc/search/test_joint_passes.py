"""Drafts of several sequences in one pass: the same as one after another, and one that fails is its own affair."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from coppice.core.sampling import SamplingParams
from coppice.core.tree import TokenTree
from coppice.draft_models.kernels.base import Rows
from coppice.search.tree_limits import TreeLimits
from drafter_svc.drafters.base import DrafterInfo, DraftSequence, JointDrafter
from drafter_svc.drafters.block.block_lm import BlockLm
from drafter_svc.drafters.block.checkpoint import BlockCalibration
from drafter_svc.drafters.small_lm.drafter import SmallLm
from drafter_svc.model.checkpoint import Calibration
from drafter_svc.model.hf_forward import CachedForward
from drafter_svc.model.llama_forward import KvStore, LlamaForward
from drafter_svc.model.tree_cache import FloatArray, TreeCache
from drafter_svc.search.joint_passes import JointPasses, joined
from tests.unit.drafter_svc.drafters.block.test_block_lm import CONTEXT, KINDS, MASKS, MODEL_VOCAB, SIGMAS, VOCAB
from tests.unit.drafter_svc.test_forward import LLAMAS, make_llama

ROUNDS = 4
PROMPTS = ((5, 9, 2, 44, 17), (3,), tuple(range(20, 50)), (8, 8, 1))
NODES = 12


class CountingForward(LlamaForward):
    """Counts passes by the number of their sequences."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(make_llama(**{"vocab_size": MODEL_VOCAB, "max_position_embeddings": 2 * CONTEXT, **changes}))
        self.sizes: list[int] = []

    def run_many(self, passes: Sequence[tuple[KvStore, Rows]]) -> list[FloatArray]:
        self.sizes.append(len(passes))
        return super().run_many(passes)


def small_lm(forward: Any) -> SmallLm:
    info = DrafterInfo("small-lm", "test", "", MODEL_VOCAB, 0)
    return SmallLm(forward, info, Calibration(((0.0, 0.8),)), TreeLimits(NODES, width=3, max_steps=5))


def block_lm(kind: str) -> Callable[[Any], BlockLm]:
    def make(forward: Any) -> BlockLm:
        info = DrafterInfo(kind.split()[0], "test", "", VOCAB, 0)
        return BlockLm(forward, info, BlockCalibration(len(MASKS), 6, SIGMAS), KINDS[kind], TreeLimits(NODES))

    return make


DRAFTERS: dict[str, Callable[[Any], SmallLm | BlockLm]] = {"small-lm": small_lm} | {
    kind: block_lm(kind) for kind in KINDS
}


def opened(drafter: SmallLm | BlockLm) -> list[DraftSequence]:
    return [
        drafter.open(prompt, SamplingParams(temperature=number % 2, seed=number))
        for number, prompt in enumerate(PROMPTS)
    ]


def commit(sequence: DraftSequence, tree: TokenTree, number: int) -> None:
    """Some of what was drafted, or something else, by turns."""
    sequence.extend([*tree.token_ids[: number % 2], 7 + number], b"")


@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafts_made_together_are_those_made_one_after_another(kind: str) -> None:
    alone, together = DRAFTERS[kind](CountingForward()), DRAFTERS[kind](JointPasses(CountingForward(), 4))
    assert isinstance(together, JointDrafter)
    assert together.joint is not None
    assert alone.joint is None
    one_by_one, at_once = opened(alone), opened(together)
    for number in range(ROUNDS):
        expected = [sequence.draft(NODES) for sequence in one_by_one]
        found: dict[int, TokenTree] = {}

        def draft(index: int, found: dict[int, TokenTree] = found) -> Callable[[], None]:
            def job() -> None:
                found[index] = at_once[index].draft(NODES)

            return job

        together.joint.together([draft(index) for index in range(len(at_once))])
        for index, tree in enumerate(expected):
            assert (found[index].token_ids, found[index].parents) == (tree.token_ids, tree.parents)
            assert found[index].log_probs == pytest.approx(tree.log_probs, abs=1e-4)
            commit(one_by_one[index], tree, number + index)
            commit(at_once[index], tree, number + index)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_there_are_as_many_passes_as_the_draft_with_most_of_them_needs(kind: str) -> None:
    alone_passes = []
    for number in range(len(PROMPTS)):
        forward = CountingForward()
        opened(DRAFTERS[kind](forward))[number].draft(NODES)
        alone_passes.append(len(forward.sizes))
    forward = CountingForward()
    joint = JointPasses(forward, 4)
    sequences = opened(DRAFTERS[kind](joint))
    joint.together([lambda one=sequence: one.draft(NODES) for sequence in sequences])
    assert len(forward.sizes) == max(alone_passes)
    assert sum(forward.sizes) == sum(alone_passes)
    assert forward.sizes[0] == len(PROMPTS)
    assert joint.num_joint == sum(size > 1 for size in forward.sizes)


@pytest.mark.parametrize("name", LLAMAS)
def test_logits_and_stores_of_a_joint_pass_are_those_of_passes_alone(name: str) -> None:
    forward = LlamaForward(make_llama(**LLAMAS[name]))
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 61, size).tolist() for size in (9, 1, 23)]
    stores = [[forward.new_store() for _ in prompts] for _ in range(2)]
    for of_kind in stores:
        for store, prompt in zip(of_kind, prompts, strict=True):
            forward.run(store, chain(prompt, 0, 1))
    for num_logits in (4, 2):
        rows = [chain(rng.integers(0, 61, 4).tolist(), store.length, num_logits) for store in stores[0]]
        expected = [forward.run(store, one) for store, one in zip(stores[0], rows, strict=True)]
        found = forward.run_many(list(zip(stores[1], rows, strict=True)))
        for one, other, alone, at_once in zip(expected, found, *stores, strict=True):
            assert other.shape == (num_logits, 61)
            assert other == pytest.approx(one, abs=1e-4)
            assert at_once.length == alone.length
            length = alone.length
            assert at_once.kv[:, :, :, :length].numpy() == pytest.approx(alone.kv[:, :, :, :length].numpy(), abs=1e-4)


def chain(token_ids: Sequence[int], before: int, num_logits: int) -> Rows:
    count = len(token_ids)
    mask = np.zeros((count, before + count), np.float32)
    mask[:, before:][np.triu_indices(count, 1)] = -np.inf
    return Rows(np.asarray(token_ids, np.int64), np.arange(before, before + count), mask, num_logits)


def read(joint: JointPasses[KvStore], done: list[str], name: str, times: int) -> Callable[[], None]:
    """A job of so many passes."""

    def job() -> None:
        cache = TreeCache(joint)
        for _ in range(times):
            cache.extend([1, 2])
        done.append(name)

    return job


def test_a_draft_that_fails_leaves_the_others_alone(caplog: pytest.LogCaptureFixture) -> None:
    joint, done = JointPasses(CountingForward(), 4), list[str]()

    def fails() -> None:
        TreeCache(joint).extend([1])
        raise RuntimeError("of one")

    with caplog.at_level(logging.ERROR):
        joint.together([read(joint, done, "first", 3), fails, read(joint, done, "last", 2)])
    assert done == ["last", "first"]
    assert "of one" in caplog.text


class Failing(CountingForward):
    """Fails late in passes with so many rows of a sequence or more, and in those for more sequences than `most`."""

    def __init__(self, num_rows: int, most: int = 4) -> None:
        super().__init__()
        self._num_rows, self._most = num_rows, most
        self._fails = False
        right = self._head

        def head(rows: Tensor) -> Tensor:
            if self._fails:
                raise MemoryError("no room")
            return right(rows)

        self._head = head

    def run_many(self, passes: Sequence[tuple[KvStore, Rows]]) -> list[FloatArray]:
        self._fails = len(passes) > self._most or any(len(rows.token_ids) >= self._num_rows for _, rows in passes)
        return super().run_many(passes)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_pass_that_fails_for_one_sequence_is_made_for_the_others(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = [sequence.draft(NODES) for sequence in opened(DRAFTERS[kind](CountingForward()))]
    joint = JointPasses(Failing(len(PROMPTS[2])), 4)
    sequences = opened(DRAFTERS[kind](joint))
    found: dict[int, TokenTree] = {}
    failed: list[int] = []

    def draft(index: int) -> Callable[[], None]:
        def job() -> None:
            try:
                found[index] = sequences[index].draft(NODES)
            except MemoryError:
                failed.append(index)

        return job

    joint.together([draft(index) for index in range(len(sequences))])
    assert failed == [2]
    assert sorted(found) == [0, 1, 3]
    assert "a joint pass of 4 drafts failed" in caplog.text
    for index, tree in found.items():
        assert (tree.token_ids, tree.parents) == (expected[index].token_ids, expected[index].parents)


def test_a_joint_pass_that_is_too_much_is_made_for_each_alone() -> None:
    joint, done = JointPasses(Failing(100, most=1), 4), list[str]()
    joint.together([read(joint, done, "first", 3), read(joint, done, "last", 2)])
    assert done == ["last", "first"]
    assert joint.num_joint == 0
    # And it is usable afterwards.
    TreeCache(joint).extend([1])


def test_as_many_are_joined_as_pay() -> None:
    class Timed(JointPasses[KvStore]):
        def _seconds(self, count: int, num_rows: int) -> float:
            # Half of a pass is reading the weights.
            return 0.5 + (0.5 if count <= 8 else 4.0) * count

    timed = Timed(CountingForward())
    assert timed.most == 1
    timed.measure(4)
    # Of 2, 1.5 is more than 0.9 x 1.5: not even two are.
    assert timed.most == 1

    class Free(JointPasses[KvStore]):
        def _seconds(self, count: int, num_rows: int) -> float:
            return 1.0 + (0.05 if count <= 8 else 0.9) * (count - 1)

    free = Free(CountingForward())
    free.measure(4)
    assert free.most == 8
    fixed = Free(CountingForward(), 3)
    fixed.measure(4)
    assert fixed.most == 3


@pytest.mark.parametrize("positions", [128, 6])
def test_passes_are_really_timed(positions: int) -> None:
    forward = CountingForward(max_position_embeddings=positions)
    joint = JointPasses(forward)
    joint.measure(4)
    assert joint.most >= 1
    assert 2 in forward.sizes
    assert joint.num_joint == 0


def test_what_cannot_be_joined_is_left_as_it_is() -> None:
    cached = CachedForward(make_llama(max_position_embeddings=2 * CONTEXT))
    assert joined(cached, 0) is cached
    lean = CountingForward()
    assert joined(lean, 1) is lean
    assert isinstance(joined(lean, 0), JointPasses)


def test_without_coroutines_drafts_are_made_one_after_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "greenlet", None)
    lean = CountingForward()
    assert joined(lean, 0) is lean
    assert "greenlet is not installed" in caplog.text
