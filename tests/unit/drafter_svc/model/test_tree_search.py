"""A whole search in one compiled call finds the tree that the search step by step finds."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from transformers import LlamaForCausalLM

from coppice.core.sampling import SamplingParams
from coppice.core.tree import ROOT
from coppice.draft_models.kernels.base import Rows, WholeSearch
from coppice.draft_models.kernels.cpu.tree_search import CompiledLlama
from coppice.search.tree_limits import Children, TreeLimits
from drafter_svc.drafters.base import DrafterInfo
from drafter_svc.drafters.small_lm.drafter import SmallLm
from drafter_svc.model.checkpoint import Calibration
from drafter_svc.model.llama_forward import FEW_ROWS, KvStore, LlamaForward, compiled_ways
from drafter_svc.model.prefix_blocks import PIECE_ROWS, PrefixBlocks
from drafter_svc.model.tree_cache import TreeCache
from tests.tiny_checkpoint import tiny_llama

# The first test compiles, and may have to share its core.
pytestmark = pytest.mark.timeout(400)

VOCAB = 61
CONTEXT = 64
LIMITS = {
    "one node": TreeLimits(max_nodes=1, max_steps=3),
    "as served": TreeLimits(max_nodes=11, max_steps=12, min_step_gain=0.2, min_path_log_prob=math.log(0.04)),
    "wide": TreeLimits(max_nodes=40, width=FEW_ROWS, max_steps=5),
    "narrow and deep": TreeLimits(max_nodes=9, width=1, max_steps=9),
    "no steps": TreeLimits(max_nodes=9, max_steps=0),
}


class StepByStep(LlamaForward):
    """The same pass without the whole search."""

    def search(self, store: KvStore, search: WholeSearch) -> None:
        """Searches go step by step here."""


def sequences(llama: LlamaForCausalLM, limits: TreeLimits, ahead_steps: int = 0) -> Iterator[SmallLm]:
    for kind in (LlamaForward, StepByStep):
        forward = kind(llama, compiled_ways()[0])
        info = DrafterInfo("small-lm", "test", "", VOCAB, CONTEXT)
        yield SmallLm(forward, info, Calibration(((0.0, 0.8),)), limits, ahead_steps)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every whole search."""
    seen: list[int] = []
    search = CompiledLlama.search

    def counted(self: CompiledLlama, kv: np.ndarray, length: int, request: WholeSearch) -> object:
        found = search(self, kv, length, request)
        seen.append(len(found.row_token_ids))
        return found

    monkeypatch.setattr(CompiledLlama, "search", counted)
    return seen


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS.keys())
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0], ids="temperature {}".format)
@pytest.mark.parametrize("row_multiple", [1, 4], ids="rows in multiples of {}".format)
def test_the_trees_are_the_same_round_by_round(
    llama: LlamaForCausalLM, limits: TreeLimits, temperature: float, row_multiple: int, searches: list[int]
) -> None:
    rng = np.random.default_rng(5)
    sampling = SamplingParams(temperature=temperature, seed=11)
    whole, step_by_step = (drafter.open((5, 9, 2), sampling) for drafter in sequences(llama, limits))
    length, drafts = 3, 0
    # On into the end of the context, where depth is bounded.
    while length < CONTEXT:
        tree = whole.draft(limits.max_nodes, row_multiple)
        assert tree == step_by_step.draft(limits.max_nodes, row_multiple)
        drafts += 1
        path = tree.path(int(rng.integers(-1, len(tree)))) if len(tree) else ()
        # Now and then the outcome ends with a token that the search has read.
        outcome = [tree.token_ids[node] for node in path] + [int(rng.integers(VOCAB))] * int(rng.random() < 0.7)
        outcome = outcome or [1]
        length += len(outcome)
        for sequence in (whole, step_by_step):
            sequence.extend(outcome)
            if rng.random() < 0.5:
                sequence.prepare()
    assert len(searches) > drafts / 3, "most drafts are whole searches"


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids="temperature {}".format)
@pytest.mark.parametrize("num_unread", [1, 2, 5, FEW_ROWS, FEW_ROWS + 1], ids="{} unread".format)
def test_unread_tokens_are_read_by_the_search_itself_while_they_are_few(
    llama: LlamaForCausalLM, temperature: float, num_unread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LIMITS["as served"]
    whole, step_by_step = (
        drafter.open((5, 9, 2), SamplingParams(temperature=temperature, seed=11))
        for drafter in sequences(llama, limits)
    )
    rng = np.random.default_rng(num_unread)
    reads: list[int] = []
    run = LlamaForward.run

    def counted(self: LlamaForward, store: KvStore, rows: Rows) -> np.ndarray:
        if type(self) is LlamaForward:
            reads.append(len(rows.token_ids))
        return run(self, store, rows)

    monkeypatch.setattr(LlamaForward, "run", counted)
    for with_met in (False, True, False):
        tree = whole.draft(limits.max_nodes)
        assert tree == step_by_step.draft(limits.max_nodes)
        reads.clear()
        # What no drafted child is, so that nothing behind it was read.
        stranger = next(token for token in range(VOCAB) if token not in tree.token_ids)
        met = [tree.token_ids[0]] if with_met else []
        outcome = [*met, stranger, *rng.integers(VOCAB, size=num_unread - 1).tolist()]
        for sequence in (whole, step_by_step):
            sequence.extend(outcome)
        tree = whole.draft(limits.max_nodes)
        assert tree == step_by_step.draft(limits.max_nodes)
        assert whole.draft(limits.max_nodes) == tree, "the root's children stay known"
        assert reads == ([] if num_unread <= FEW_ROWS else [num_unread])


def test_children_behind_the_rows_of_a_search_are_those_that_it_found(llama: LlamaForCausalLM) -> None:
    limits = TreeLimits(max_nodes=12, width=3, max_steps=4, max_depth=9)
    cache = TreeCache(LlamaForward(llama, compiled_ways()[0]))
    root = Children((3, 8), (-0.5, -1.0))
    cache.extend((5, 9, 2))
    found = cache.search(WholeSearch((), root, np.empty((0, VOCAB), np.float32), np.float32(0.8), limits, 4))
    assert found is not None
    rows = [cache.find(*key) for key in zip(found.row_parents.tolist(), found.row_token_ids.tolist(), strict=True)]
    assert rows == list(range(len(found.row_parents)))
    noted = [cache.children(row) for row in range(cache.num_rows)]
    assert [list(children.token_ids) for children in noted] == found.child_token_ids.tolist()
    # A row that has children of its own: they are renumbered, and what was noted behind them goes with them.
    top = next(row for row, parent in enumerate(found.row_parents) if parent != ROOT)
    parent = int(found.row_parents[top])
    followed = cache.follow([int(found.row_token_ids[parent])])
    assert followed == (1, noted[parent])
    below = cache.find(ROOT, int(found.row_token_ids[top]))
    assert below is not None
    assert cache.children(below) == noted[top]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0, top_k=9),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(repetition_penalty=1.2),
        SamplingParams(logit_bias={4: 2.0}),
    ],
    ids=str,
)
def test_other_ways_of_scoring_go_step_by_step(
    llama: LlamaForCausalLM, sampling: SamplingParams, searches: list[int]
) -> None:
    drafter, _ = sequences(llama, LIMITS["as served"])
    assert len(drafter.open((5, 9, 2), sampling).draft(11)) > 0
    assert searches == []


def test_steps_wider_than_the_compiled_pass_go_step_by_step(llama: LlamaForCausalLM, searches: list[int]) -> None:
    drafter, _ = sequences(llama, TreeLimits(max_nodes=20, width=FEW_ROWS + 1, max_steps=3))
    assert len(drafter.open((5, 9, 2), SamplingParams()).draft(20)) == 20
    assert searches == []


def test_drafting_ahead_goes_on_from_a_whole_search(llama: LlamaForCausalLM, searches: list[int]) -> None:
    grown = []
    for drafter in sequences(llama, LIMITS["as served"], ahead_steps=3):
        sequence = drafter.open((5, 9, 2), SamplingParams(temperature=1.0, seed=2))
        sequence.expect(sequence.draft(11))
        while sequence.prepare():
            pass
        grown.append([(draft.assumed, draft.tree.token_ids) for draft in sequence.ahead()])
    assert grown[0]
    assert grown[0] == grown[1]
    assert len(searches) == 1


@pytest.mark.parametrize("rest", [1, FEW_ROWS, FEW_ROWS + 1, PIECE_ROWS], ids="{} tokens read anew".format)
def test_what_others_have_read_of_a_prompt_changes_no_bit_of_a_tree(rest: int) -> None:
    context = 3 * PIECE_ROWS + 20
    forward = LlamaForward(tiny_llama(vocab_size=VOCAB, max_context_tokens=context), compiled_ways()[0])
    info = DrafterInfo("small-lm", "test", "", VOCAB, context)
    sharing, alone = (
        SmallLm(forward, info, Calibration(((0.0, 0.8),)), LIMITS["as served"], prefixes=PrefixBlocks(max_bytes))
        for max_bytes in (1 << 30, 0)
    )
    prompt = np.random.default_rng(rest).integers(0, VOCAB, 2 * PIECE_ROWS + rest).tolist()
    sharing.open([*prompt[: 2 * PIECE_ROWS], 1], SamplingParams()).draft(11)
    sequences = [drafter.open(prompt, SamplingParams(temperature=1.0, seed=3)) for drafter in (sharing, alone)]
    for _ in range(3):
        first, second = (sequence.draft(11) for sequence in sequences)
        assert (first.token_ids, first.parents, first.log_probs) == (second.token_ids, second.parents, second.log_probs)
        for sequence in sequences:
            sequence.extend([*first.token_ids[:1], 7])
    assert sharing.prefixes.num_reused_tokens == 2 * PIECE_ROWS
