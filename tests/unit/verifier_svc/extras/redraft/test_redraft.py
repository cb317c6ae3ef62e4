"""The target drafts for itself: no token changes, and what its masks say is used."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tree import EMPTY_TREE, TokenTree, chain
from coppice.search.transition_scores import TransitionScores
from tests.unit.verifier_svc.adapters import random_adapter
from tests.unit.verifier_svc.engine_harness import Harness
from tests.unit.verifier_svc.tiny_engine import (
    LIMITS,
    PROMPTS,
    SAMPLING,
    VOCAB,
    oracle_drafter,
    tiny_info,
    tiny_target,
)
from verifier_svc.engine.draft_counts import DraftOrigin
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.mailbox import Mailbox
from verifier_svc.engine.pass_plan import PassPlan, Segment
from verifier_svc.extras.redraft.groups import MaskShape
from verifier_svc.extras.redraft.redraft import SOURCE, Redrafter, RedraftPace, RedraftSettings, redraft_tree
from verifier_svc.model.pass_curve import PassCurve
from verifier_svc.model.target_model import TargetModel
from verifier_svc.verify.token_choice import TokenChooser

SETTINGS = RedraftSettings(
    MaskShape(3, 3), 7, 40, ((0.0, (1.0,)), (1.0, (1.0,))), min_probability=0.1, curve=PassCurve.line(0.03)
)


class Oracle:
    """Instead of what an adapter would have learned: a mask's logits are those of the target's own coming tokens.

    The tokens of the outputs are known from plain decoding; masks are told by their place in the text.
    """

    def __init__(self, target: TargetModel, texts: Sequence[Sequence[int]]) -> None:
        self._forward = target.forward
        self._target = target
        self._texts = texts
        self.is_wrong = False
        target.forward = self.forward  # type: ignore[method-assign]

    def forward(self, plan: PassPlan) -> Tensor:
        logits = self._forward(plan).clone()
        if plan.mask_places is None:
            return logits
        for segment, (first, _last) in zip(plan.segments, plan.logit_ranges, strict=True):
            text = self._text(plan.token_ids[segment.start], segment)
            for row in range(segment.start + segment.num_pending - 1, segment.stop):
                if plan.mask_places[row] >= 0:
                    index = first + row - segment.start - segment.num_pending + 1
                    following = int(plan.positions[row]) + 1
                    logits[index] = -20.0
                    if following < len(text):
                        logits[index, (text[following] + self.is_wrong) % VOCAB] = 20.0
        return logits

    def _text(self, token: int, segment: Segment) -> Sequence[int]:
        start = int(segment.positions[0])
        [text] = [text for text in self._texts if start < len(text) and text[start] == token]
        return text


@pytest.fixture
def target(new_model: Callable[[str], PreTrainedModel]) -> TargetModel:
    return tiny_target(new_model("llama"))


@pytest.fixture
def engine(target: TargetModel) -> Iterator[Engine]:
    target.adapt(random_adapter(target.model, 3))
    info = replace(tiny_info(), redraft=SETTINGS)
    engine = Engine(target, info, replace(LIMITS, free_rows=40), max_nodes=16)
    engine.start()
    yield engine
    engine.stop()
    assert target.cache.num_free_blocks == target.cache.num_blocks, "a block leaked"


@pytest.mark.parametrize("name", SAMPLING)
def test_re_drafts_change_no_token(name: str, engine: Engine) -> None:
    harness = Harness(engine)
    sampling, stopping = SAMPLING[name], StoppingOptions(max_tokens=40, ignore_eos=True)
    plain = [result.token_ids for result in harness.generate(PROMPTS, sampling, stopping)]
    assert engine.counts.num_masks == 0
    alone = harness.generate(PROMPTS, sampling, stopping, redraft_nodes=7)
    assert [result.token_ids for result in alone] == plain
    assert engine.counts.num_masks > 0
    assert engine.counts.rounds_by_origin[DraftOrigin.REDRAFT] > 0
    drafter = oracle_drafter(plain, seed=3)
    beside = harness.generate(PROMPTS, sampling, stopping, drafter=drafter, linger_s=0.05, redraft_nodes=7)
    assert [result.token_ids for result in beside] == plain


@pytest.mark.parametrize("name", ["greedy", "T=0.7 top_p", "T=1 penalties"])
def test_what_masks_say_is_the_next_rounds_draft(name: str, target: TargetModel, engine: Engine) -> None:
    harness = Harness(engine)
    sampling, stopping = SAMPLING[name], StoppingOptions(max_tokens=33, ignore_eos=True)
    [plain] = harness.generate([PROMPTS[0]], sampling, stopping)
    oracle = Oracle(target, [[*PROMPTS[0], *plain.token_ids]])
    [fast] = harness.generate([PROMPTS[0]], sampling, stopping, redraft_nodes=7)
    assert fast.token_ids == plain.token_ids
    # The first round, then four tokens a round: three masks' and the round's own; the last masks have less room.
    assert plain.rounds == 33
    assert fast.rounds == 9
    assert fast.accepted == 24
    counts = engine.counts
    assert counts.rounds_by_origin[DraftOrigin.REDRAFT] == 8
    assert counts.accepted_by_origin[DraftOrigin.REDRAFT] == 24
    assert counts.num_redraft_nodes == 24
    oracle.is_wrong = True
    [slow] = harness.generate([PROMPTS[0]], sampling, stopping, redraft_nodes=7)
    assert slow.token_ids == plain.token_ids


def test_sequences_that_did_not_ask_cost_nothing(engine: Engine) -> None:
    harness = Harness(engine)
    harness.generate(PROMPTS, stopping=StoppingOptions(max_tokens=12))
    harness.generate(PROMPTS, stopping=StoppingOptions(max_tokens=12), redraft_nodes=7, synchronous=True)
    assert engine.counts.num_masks == engine.counts.num_redraft_nodes == 0


def test_re_drafts_that_are_never_right_are_given_up(target: TargetModel, engine: Engine) -> None:
    harness = Harness(engine)
    stopping = StoppingOptions(max_tokens=120, ignore_eos=True)
    [plain] = harness.generate([PROMPTS[0]], stopping=stopping)
    Oracle(target, [[*PROMPTS[0], *plain.token_ids]]).is_wrong = True
    harness.generate([PROMPTS[0]], stopping=stopping, redraft_nodes=7)
    # Sixteen rounds bring the running mean below what a re-draft has to gain.
    assert 16 <= engine.counts.rounds_by_origin[DraftOrigin.REDRAFT] <= 20


def test_a_re_draft_s_nodes_are_verified_as_far_as_they_are_worth_their_rows() -> None:
    """Four rows are one block, and the next four take as long as half of it."""
    curve = PassCurve.of_sizes([4, 8], [1.0, 1.5])
    settings = replace(SETTINGS, shape=MaskShape(1, 1), curve=curve)
    tree = chain([5, 6, 7, 8], [math.log(share) for share in (0.9, 0.8, 0.6, 0.2)])
    # At first a re-draft is believed to gain one token: two tokens in the 1.5 of a pass with all four nodes and a mask.
    # Three of them and no more than that one mask: 0.9 + 0.72 + 0.43 - 1.5 * 1.33 against 0.9 + 0.72 - 1.33.
    assert Redrafter(settings, 7, 0.0).worth_verifying(tree) == tree.prune(2)
    certain = chain([5, 6, 7, 8])
    assert Redrafter(settings, 7, 0.0).worth_verifying(certain) == certain
    assert Redrafter(None, 7, 0.0).worth_verifying(tree) == tree


def test_re_drafts_that_are_never_worth_a_row_are_given_up() -> None:
    redrafter = Redrafter(replace(SETTINGS, curve=PassCurve.line(9.0)), 7, 0.0)
    for _ in range(16):
        assert redrafter.shape is not None
        assert redrafter.worth_verifying(chain([5, 6])) == EMPTY_TREE
    assert redrafter.shape is None, "their masks cost something, too"


def test_whoever_gains_too_little_pauses_and_tries_again() -> None:
    pace = RedraftPace()
    rounds = 0
    while pace.pays:
        pace.verified(0)
        rounds += 1
    assert rounds == 16
    for _ in range(32):
        assert not pace.pays
        pace.round_over()
    assert pace.pays
    pace.verified(0)
    assert not pace.pays


def test_guesses_carry_the_noise_that_the_target_will_draw_with() -> None:
    """A guess from the target's own logits is the target's own token, whatever the parameters."""
    logits = np.random.default_rng(8).normal(0, 2, (4, VOCAB)).astype(np.float32)
    for sampling in (SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01, seed=5)):
        chooser = TokenChooser(sampling, VOCAB, prompt=(1, 2))
        drawn = [chooser.choose(row, 2 + place) for place, row in enumerate(logits)]
        scores = chooser.guess_scores(logits, 2)
        assert scores.argmax(-1).tolist() == drawn
        tree = redraft_tree(scores, range(len(scores)), 7, SETTINGS, sampling.temperature, 5)
        assert 0 < len(tree) <= 5
        assert tree.token_ids[0] == drawn[0]
        assert tree.source_names == (SOURCE,)


def test_a_transition_makes_the_likeliest_paths_those_of_scores_that_know_the_token_before() -> None:
    """Against the list of all paths."""
    size, depths, last = 6, 3, 4
    rng = np.random.default_rng(9)
    scores = rng.normal(0, 2, (depths, size)).astype(np.float32)
    tables = [torch.from_numpy(rng.normal(0, 1, (size, 2))).bfloat16().float().numpy() for _ in range(2)]
    pairs = tables[0] @ tables[1].T
    settings = replace(SETTINGS, transition=TransitionScores(*tables))
    sigma = 1.5
    settings = replace(settings, sigmas=((0.0, (sigma,)),))
    values: dict[tuple[int, ...], float] = {}
    for length in range(1, depths + 1):
        for path in itertools.product(range(size), repeat=length):
            before = (last, *path)
            value = 0.0
            for depth, token in enumerate(path):
                row = (scores[depth] + pairs[before[depth]]).astype(np.float64) / sigma
                value += row[token] - np.log(np.exp(row).sum())
            values[path] = value
    likeliest = sorted(values, key=lambda path: -values[path])[:7]
    tree = redraft_tree(scores, range(len(scores)), last, settings, 0.0, 7)
    kept = [path for path in likeliest if values[path] >= math.log(0.1)]
    paths = dict(zip(tree.paths(), tree.path_log_probs, strict=True))
    assert 2 < len(kept) < 7
    assert set(paths) == set(kept)
    assert paths == pytest.approx({path: values[path] for path in kept}, abs=1e-4)
    assert set(paths) != set(redraft_tree(scores, range(len(scores)), last, SETTINGS, 0.0, 7).paths())


def test_a_better_draft_takes_a_re_drafts_place() -> None:
    mailbox = Mailbox()
    mailbox.put_redraft(chain([5, 6]))
    assert mailbox.origin is DraftOrigin.REDRAFT
    assert not mailbox.is_fresh
    mailbox.put(3, EMPTY_TREE, [1, 2, 3])
    assert (mailbox.tree, mailbox.is_fresh, mailbox.origin) == (chain([5, 6]), True, DraftOrigin.REDRAFT)
    mailbox.put(3, chain([7]), [1, 2, 3])
    assert (mailbox.tree, mailbox.origin) == (chain([7]), DraftOrigin.FRESH)
    mailbox.put_redraft(chain([5, 6]))
    assert mailbox.tree == chain([7])
    mailbox.advance([8], [1, 2, 3, 8])
    mailbox.put_redraft(chain([5, 6, 7]))
    mailbox.advance([5], [1, 2, 3, 8, 5])
    assert (mailbox.tree, mailbox.origin) == (chain([6, 7]), DraftOrigin.LEFT_OVER)
    mailbox.put_redraft(chain([9]))
    assert mailbox.origin is DraftOrigin.LEFT_OVER
    mailbox.put_redraft(chain([9, 9, 9]))
    assert mailbox.origin is DraftOrigin.REDRAFT


def test_a_drafter_with_nothing_to_say_leaves_the_round_to_a_re_draft() -> None:
    mailbox = Mailbox()
    mailbox.put(3, EMPTY_TREE, [1, 2])
    mailbox.advance([3], [1, 2, 3])
    mailbox.put_redraft(chain([5]))
    assert (mailbox.tree, mailbox.is_fresh, mailbox.origin) == (chain([5]), True, DraftOrigin.REDRAFT)


def test_masks_that_say_nothing_are_given_up_too(target: TargetModel, engine: Engine) -> None:
    """Every token is as likely as any other: no node is worth a row."""
    harness = Harness(engine)
    forward = target.forward

    def flat(plan: PassPlan) -> Tensor:
        logits = forward(plan).clone()
        if plan.mask_places is not None:
            # Of the one sequence: its root's row comes first, then masks alone, for there is never a draft.
            logits[1 : plan.logit_ranges[0][1]] = 0.0
        return logits

    target.forward = flat  # type: ignore[method-assign]
    harness.generate([PROMPTS[0]], stopping=StoppingOptions(max_tokens=60, ignore_eos=True), redraft_nodes=7)
    assert engine.counts.num_redraft_nodes == 0
    # Three masks in the first of sixteen rounds, one in the last of them, and in one of about 32 further ones.
    assert engine.counts.num_masks in range(20, 40)


def test_an_ahead_draft_is_kept_before_a_re_draft() -> None:
    mailbox = Mailbox()
    ahead: TokenTree = chain([4])
    mailbox.put(4, ahead, [1, 2])
    mailbox.advance([3, 9], [1, 2, 3, 9])
    mailbox.put_redraft(chain([5, 6, 7]))
    assert (mailbox.tree, mailbox.origin) == (ahead, DraftOrigin.AHEAD)
