"""Drafting ahead: trees behind likely outcomes of the tree that is being verified, in short steps, within bounds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from coppice.checkpoints.bundled import MODELS
from coppice.core.sampling import SamplingParams
from coppice.core.tokenizer import TargetTokenizer, load_tokenizer_json
from coppice.core.tree import ROOT, TokenTree, chain
from coppice.draft_models.kernels.base import Rows
from coppice.search.tree_limits import TreeLimits
from drafter_svc.acceptance_map import AcceptanceMap
from drafter_svc.config import DrafterConfig
from drafter_svc.drafters.base import DrafterInfo
from drafter_svc.drafters.small_lm.drafter import SmallLm, SmallLmSequence, load
from drafter_svc.model.checkpoint import Calibration
from drafter_svc.model.llama_forward import LlamaForward
from drafter_svc.model.tree_cache import FloatArray
from drafter_svc.search.draft_ahead import AHEAD_LIMITS, drafts_ahead
from drafter_svc.session import Session, SessionOpening, SessionOutcome

VOCAB = 61
PROMPT = (5, 9, 2, 44, 17)
# Enough passes for every search to be complete: a tree then depends on the committed tokens alone.
COMPLETE = TreeLimits(max_nodes=10, max_steps=99)


class CountingForward(LlamaForward):
    """Counts passes."""

    passes = 0

    def run(self, store: Any, rows: Rows) -> FloatArray:
        self.passes += 1
        return super().run(store, rows)


def make_drafter(model: LlamaForCausalLM, ahead_steps: int) -> tuple[SmallLm, CountingForward]:
    forward = CountingForward(model)
    info = DrafterInfo("small-lm", "test", "", VOCAB, 64)
    return SmallLm(forward, info, Calibration(((0.0, 0.8),)), COMPLETE, ahead_steps), forward


def prepare_fully(sequence: Any) -> None:
    while sequence.prepare():
        pass


def random_tree(rng: np.random.Generator, nodes: int, vocab: int) -> TokenTree:
    chosen: dict[tuple[int, int], None] = {}
    while len(chosen) < nodes:
        chosen[int(rng.integers(-1, len(chosen))), int(rng.integers(vocab))] = None
    parents, tokens = zip(*chosen, strict=True)
    return TokenTree(tokens, parents, (0.0,) * nodes)


@pytest.mark.parametrize("seed", range(8))
def test_drafts_are_what_was_found_after_tokens_that_leave_the_tree_the_likeliest_first(seed: int) -> None:
    rng = np.random.default_rng(seed)
    found, expected = random_tree(rng, 30, 4), random_tree(rng, 8, 4)
    found = replace(found, log_probs=tuple(np.log(rng.random(30)).tolist()))
    drafts = drafts_ahead(found, expected)
    assert drafts
    paths = dict(zip(found.paths(), found.path_log_probs, strict=True))
    kept = set(expected.paths())
    for path in paths:
        # A path has a draft where it leaves the expected tree with its last token, and more was found after it.
        leaves = path not in kept and (len(path) == 1 or path[:-1] in kept)
        has_more = any(other[:-1] == path for other in paths)
        assert (path in {draft.assumed for draft in drafts}) == (leaves and has_more)
    for draft in drafts:
        assert draft.log_prob == paths[draft.assumed]
        assert {(*draft.assumed, *path) for path in draft.tree.paths()} == {
            path for path in paths if path[: len(draft.assumed)] == draft.assumed and path != draft.assumed
        }
    assert [draft.log_prob for draft in drafts] == sorted((draft.log_prob for draft in drafts), reverse=True)


def followed(sequence: SmallLmSequence, tree: TokenTree) -> dict[tuple[int, ...], TokenTree]:
    sequence.expect(tree)
    prepare_fully(sequence)
    return {draft.assumed: draft.tree for draft in sequence.ahead()}


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids="temperature {}".format)
def test_a_tree_behind_an_outcome_is_one_that_would_be_drafted_once_it_is_known(
    llama: LlamaForCausalLM, temperature: float
) -> None:
    drafter, _ = make_drafter(llama, ahead_steps=8)
    fresh, _ = make_drafter(llama, ahead_steps=0)
    sampling = SamplingParams(temperature=temperature, seed=4)
    committed, sequence = list(PROMPT), drafter.open(PROMPT, sampling)
    for turn in range(4):
        tree = sequence.draft(10)
        # Whatever was drafted ahead, and whether it came true, drafts are those of a sequence that did not.
        expected = fresh.open(committed, sampling).draft(10)
        assert (tree.token_ids, tree.parents) == (expected.token_ids, expected.parents)
        drafts = followed(sequence, tree)
        assert drafts
        for assumed in drafts:
            # An accepted path, and a token that is no child where it ends.
            assert len(tree.descend(assumed[:-1])) or assumed[:-1] in set(tree.paths()) or len(assumed) == 1
            assert assumed not in set(tree.paths())
        for assumed, ahead in itertools.islice(drafts.items(), 3):
            behind = fresh.open([*committed, *assumed], sampling)
            behind.draft(10)
            known = behind._read()
            expected_log_probs = dict(zip(known.token_ids, known.log_probs, strict=True))
            for token, parent, log_prob in zip(ahead.token_ids, ahead.parents, ahead.log_probs, strict=True):
                assert parent != ROOT or log_prob == pytest.approx(expected_log_probs[token], abs=1e-3)
        # The likeliest comes true, or one that nobody thought of.
        outcome = next(iter(drafts)) if turn % 2 == 0 else (60, 3)
        sequence.extend(outcome)
        committed += outcome


def test_an_outcome_that_was_drafted_for_needs_fewer_passes(llama: LlamaForCausalLM) -> None:
    passes = {}
    for steps in (0, 8):
        drafter, forward = make_drafter(llama, 8)
        sequence = drafter.open(PROMPT, SamplingParams(temperature=1.0, seed=4))
        tree = sequence.draft(10)
        outcome = next(iter(followed(drafter.open(PROMPT, SamplingParams(temperature=1.0, seed=4)), tree)), None)
        outcome = next(iter(followed(sequence, tree))) if steps else outcome
        before = forward.passes
        sequence.extend(outcome or (1,))
        sequence.draft(10)
        passes[steps] = forward.passes - before
    assert passes[8] < passes[0]


def test_steps_are_single_passes_of_bounded_number_and_width(llama: LlamaForCausalLM) -> None:
    drafter, forward = make_drafter(llama, ahead_steps=8)
    sequence = drafter.open(PROMPT, SamplingParams(temperature=1.0, seed=4))
    tree = sequence.draft(10)
    before = forward.passes
    sequence.expect(tree)
    passes, rows = before, sequence.num_cached
    while sequence.prepare():
        assert forward.passes <= passes + 1
        assert sequence.num_cached <= rows + AHEAD_LIMITS.width
        passes, rows = forward.passes, sequence.num_cached
    assert 2 < forward.passes - before <= 8
    drafts = sequence.ahead()
    assert drafts
    assert sequence.ahead() == ()
    assert sum(len(draft.tree) for draft in drafts) <= AHEAD_LIMITS.max_nodes
    # An outcome that comes before the trees are made finds none.
    sequence.extend((3,))
    sequence.expect(sequence.draft(10))
    assert sequence.prepare()
    sequence.extend((4,))
    assert sequence.ahead() == ()
    assert not sequence.prepare()


@pytest.mark.parametrize("tree", [chain([60] * 40), chain(range(30)), random_tree(np.random.default_rng(1), 40, 61)])
def test_expected_trees_that_make_no_sense_do_no_harm(llama: LlamaForCausalLM, tree: TokenTree) -> None:
    drafter, forward = make_drafter(llama, ahead_steps=4)
    fresh, _ = make_drafter(llama, ahead_steps=0)
    sequence = drafter.open(PROMPT, SamplingParams())
    sequence.draft(10)
    before = forward.passes
    followed(sequence, tree)
    assert forward.passes - before <= 4
    sequence.extend((7,))
    assert sequence.draft(10).token_ids == fresh.open([*PROMPT, 7], SamplingParams()).draft(10).token_ids


def test_nothing_is_read_beyond_the_context(llama: LlamaForCausalLM) -> None:
    drafter, _ = make_drafter(llama, ahead_steps=8)
    prompt = tuple(token % VOCAB for token in range(62))
    sequence = drafter.open(prompt, SamplingParams())
    for _ in range(3):
        tree = sequence.draft(10)
        for assumed, ahead in followed(sequence, tree).items():
            assert len(assumed) + ahead.depth <= 64 - sequence._context.size + 1
        sequence.extend((1,))


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_session_drafts_ahead_for_its_own_length_alone_and_never_where_rounds_wait(
    llama: LlamaForCausalLM, *, synchronous: bool
) -> None:
    drafter, forward = make_drafter(llama, ahead_steps=8)
    sampling = SamplingParams(temperature=1.0, seed=4)
    session = Session(drafter, SessionOpening(PROMPT, sampling, 10, is_synchronous=synchronous), AcceptanceMap())
    assert not session.expect(len(PROMPT), chain([1]))
    draft = session.advance()
    assert draft is not None
    before = forward.passes
    assert not session.expect(draft.base_length - 1, draft.tree)
    assert not session.prepare()
    assert session.ahead() is None
    assert forward.passes == before
    assert session.expect(draft.base_length, draft.tree) != synchronous
    prepare_fully(session)
    assert (session.ahead() is None) == synchronous
    session.expect(draft.base_length, draft.tree)
    session.post(SessionOutcome(draft.base_length, draft.tree.token_ids[:1], b"", None))
    # The outcome is there, and not taken in yet.
    assert session.ahead() is None
    assert not session.expect(draft.base_length, draft.tree)


def texts() -> Iterator[tuple[list[int], list[int]]]:
    """Prompts, and what the bundled target says behind them, greedily."""
    tokenizer = TargetTokenizer(load_tokenizer_json(MODELS / "target"))
    target: Any = AutoModelForCausalLM.from_pretrained(str(MODELS / "target")).eval()
    for prompt in (
        "import json\n\ndef load(path):\n",
        "The library of the town was ",
        "class Queue:\n    def put(",
    ):
        tokens = tokenizer.encode(prompt)
        ids = torch.tensor([tokens])
        with torch.no_grad():
            output = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=56,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=1,
            )
        yield list(tokens), output[0].tolist()


def test_four_of_five_outcomes_of_the_bundled_pair_are_drafted_for() -> None:
    drafter: Any = load(DrafterConfig(model=str(MODELS / "small-lm"), device="cpu", draft_ahead="on"))
    num_rounds = num_hits = 0
    for prompt, text in texts():
        sequence, length = drafter.open(prompt, SamplingParams(temperature=0.0)), len(prompt)
        while True:
            tree = sequence.draft(6)
            drafts = followed(sequence, tree)
            size = 1
            while length + size < len(text) and len(tree.descend(text[length : length + size])):
                size += 1
            outcome = text[length : length + size]
            while tuple(outcome) in set(tree.paths()) and length + len(outcome) < len(text):
                outcome = text[length : length + len(outcome) + 1]
            if length + len(outcome) >= len(text):
                break
            num_rounds += 1
            num_hits += tuple(outcome) in drafts
            sequence.extend(outcome)
            length += len(outcome)
    assert num_rounds >= 20
    assert num_hits >= 0.8 * num_rounds
