"""Early pruning in the engine: whatever a head says, no token changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from coppice.core.draft_distribution import DraftDistribution
from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tokenizer import TargetTokenizer
from coppice.core.tree import chain
from tests.unit.verifier_svc.adapters import random_adapter
from tests.unit.verifier_svc.early_heads import THRESHOLDS, random_head
from tests.unit.verifier_svc.engine_harness import Harness
from tests.unit.verifier_svc.extras.redraft.test_redraft import SETTINGS
from tests.unit.verifier_svc.tiny_engine import (
    LIMITS,
    PROMPTS,
    SAMPLING,
    oracle_drafter,
    tiny_info,
    tiny_target,
)
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.kv_cache import KVCache
from verifier_svc.engine.pass_plan import PassPlan
from verifier_svc.engine.sequence import Draft, Sequence, SequenceKey, SequenceSpec
from verifier_svc.extras.pruning.layers import PrunedForward
from verifier_svc.extras.pruning.pace import COMPARE, ON, PruningSettings
from verifier_svc.extras.pruning.rows import candidates_of
from verifier_svc.model.target_model import TargetModel
from verifier_svc.stream.events import Event, OutcomeEvent

NewModel = Callable[[str], PreTrainedModel]
FORCED = PruningSettings(THRESHOLDS, free_rows=1, row_multiple=4, switch=ON)
STOPPING = StoppingOptions(max_tokens=40, ignore_eos=True)


@pytest.fixture(params=["llama", "gpt2"])
def target(request: pytest.FixtureRequest, new_model: NewModel) -> TargetModel:
    target = tiny_target(new_model(request.param))
    target.install_head(random_head(64))
    return target


@pytest.fixture
def engine(target: TargetModel) -> Iterator[Engine]:
    target.adapt(random_adapter(target.model, 3))
    info = replace(tiny_info(), pruning=FORCED, redraft=SETTINGS)
    engine = Engine(target, info, replace(LIMITS, free_rows=40), max_nodes=16)
    engine.start()
    yield engine
    engine.stop()
    assert target.cache.num_free_blocks == target.cache.num_blocks, "a block leaked"


@pytest.mark.parametrize("name", ["greedy", "T=0.7 top_p", "T=1", "T=1 penalties"])
def test_pruning_changes_no_token(name: str, engine: Engine) -> None:
    """The random head takes true tokens, too: those are lost, and drawn again. With log-probabilities and re-drafts."""
    harness = Harness(engine)
    sampling = {**SAMPLING, "T=1": SamplingParams(temperature=1.0, seed=8)}[name]
    plain = harness.generate(PROMPTS, sampling, STOPPING, top_log_probs=2)
    assert engine.counts.num_pruned_nodes == engine.counts.num_pruned_passes == 0
    outputs = [result.token_ids for result in plain]
    for redraft_nodes in (0, 7):
        drafter = oracle_drafter(outputs, seed=3)
        results = harness.generate(
            PROMPTS, sampling, STOPPING, drafter, 0.05, top_log_probs=2, redraft_nodes=redraft_nodes
        )
        assert [result.token_ids for result in results] == outputs
        assert [result.log_probs for result in results] == [result.log_probs for result in plain]
    counts = engine.counts
    assert (counts.num_pruned_nodes > 0) == (counts.num_pruned_passes > 0) == (name != "T=1 penalties")
    assert counts.num_draft_nodes > counts.num_pruned_nodes + counts.num_accepted_nodes
    assert counts.num_accepted_nodes > 0


class Oracle:
    """Instead of what a head would have learned: a node's score says whether its token will be drawn."""

    def __init__(self, target: TargetModel, texts: list[list[int]]) -> None:
        self._forward = target.forward_pruned
        self._texts = texts
        target.forward_pruned = self.forward  # type: ignore[method-assign]

    def forward(self, plan: PassPlan) -> tuple[Tensor, PrunedForward]:
        scores = []
        candidates = candidates_of(plan)
        for row, token in zip(candidates.rows, candidates.token_ids, strict=True):
            place = int(plan.positions[row])
            is_true = any(len(text) > place and text[place] == token for text in self._texts)
            scores.append(100.0 if is_true else -100.0)
        return self._forward(plan, torch.tensor(scores))


def test_a_head_that_knows_loses_nothing(target: TargetModel, engine: Engine) -> None:
    harness = Harness(engine)
    [plain] = harness.generate(PROMPTS[:1], SAMPLING["greedy"], STOPPING)
    text = [*PROMPTS[0], *plain.token_ids]
    Oracle(target, [text])
    taken: list[tuple[int, int]] = []
    finish_round = Sequence.finish_round

    def spy(self: Sequence, *arguments: object) -> object:
        outcome = finish_round(self, *arguments)  # type: ignore[arg-type]
        if outcome is not None:
            taken.append((outcome.pruned_nodes, outcome.draft_nodes))
        return outcome

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sequence, "finish_round", spy)
        [pruned] = harness.generate(PROMPTS[:1], SAMPLING["greedy"], STOPPING, oracle_drafter([plain.token_ids], 5))
    assert pruned.token_ids == plain.token_ids
    assert engine.counts.num_pruned_nodes == sum(gone for gone, _ in taken) > 0
    assert engine.counts.num_draft_nodes == sum(nodes for _, nodes in taken)
    # The same drafts, and every token of theirs that was right was accepted.
    engine.passes._pace = None
    [whole] = harness.generate(PROMPTS[:1], SAMPLING["greedy"], STOPPING, oracle_drafter([plain.token_ids], 5))
    assert (whole.accepted, whole.rounds) == (pruned.accepted, pruned.rounds)


def test_sampled_trees_are_never_pruned(target: TargetModel) -> None:
    info = replace(tiny_info(), pruning=FORCED)
    tokenizer = TargetTokenizer(info.tokenizer_json)
    distribution = DraftDistribution((5, 6), (0.5, 0.5))
    for traverses in (False, True):
        spec = SequenceSpec((1, 2), SamplingParams(temperature=1.0), STOPPING, traverses=traverses)
        sequence = Sequence(spec, info, tokenizer, max_nodes=16, opened_s=0.0)
        sequence.start(KVCache(4), 0.0)
        tree = replace(chain([5]), distributions=(distribution, None)) if traverses else chain([5])
        sequence.submit(Draft(2, tree))
        rows = sequence.next_rows(2, 16)
        assert len(rows.tree) == 1
        assert (rows.draw_rule is None) is traverses


def test_a_sampled_tree_is_verified_in_a_pass_that_others_nodes_leave(target: TargetModel) -> None:
    Oracle(target, [])  # which prunes all that may be
    engine = Engine(target, replace(tiny_info(), pruning=FORCED), LIMITS, max_nodes=16)
    events: list[Event] = []
    engine.attach(0, events.extend)
    specs = {
        1: SequenceSpec((5, 6, 7), SamplingParams(temperature=1.0, seed=3), STOPPING, traverses=True, linger_s=5.0),
        2: SequenceSpec((8, 9), SamplingParams(temperature=0.7, seed=4), STOPPING, linger_s=5.0),
    }
    distribution = DraftDistribution((5, 6), (0.5, 0.5))
    trees = {1: replace(chain([5]), distributions=(distribution, None)), 2: chain([40, 41, 42, 43], [-5.0] * 4)}
    for number, spec in specs.items():
        engine.open(SequenceKey(0, number), spec)
    engine.step()
    for event in events[:]:
        if isinstance(event, OutcomeEvent):
            draft = Draft(event.outcome.base_length + 1, trees[event.sequence_id])
            engine.submit(SequenceKey(0, event.sequence_id), draft)
    events.clear()
    engine._take_commands()
    engine.step()
    outcomes = {event.sequence_id: event.outcome for event in events if isinstance(event, OutcomeEvent)}
    assert [(outcomes[number].draft_nodes, outcomes[number].pruned_nodes) for number in specs] == [(1, 0), (4, 4)]
    engine.detach(0)
    engine._take_commands()
    assert target.cache.num_free_blocks == target.cache.num_blocks


def test_passes_that_are_compared_run_both_ways_each_first_in_its_turn(target: TargetModel) -> None:
    engine = Engine(target, replace(tiny_info(), pruning=replace(FORCED, switch=COMPARE)), LIMITS, max_nodes=16)
    ran: list[tuple[bool, PassPlan]] = []
    whole, pruned = target.forward, target.forward_pruned

    def forward(plan: PassPlan) -> Tensor:
        ran.append((False, plan))
        return whole(plan)

    def forward_pruned(plan: PassPlan) -> tuple[Tensor, PrunedForward]:
        ran.append((True, plan))
        return pruned(plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "forward", forward)
        patch.setattr(target, "forward_pruned", forward_pruned)
        engine.start()
        harness = Harness(engine)
        sampling = SamplingParams(temperature=1.0, seed=8)
        plain = harness.generate(PROMPTS, sampling, STOPPING)
        assert not any(was_pruned for was_pruned, _ in ran)
        ran.clear()
        outputs = [result.token_ids for result in plain]
        drafted = harness.generate(PROMPTS, sampling, STOPPING, oracle_drafter(outputs, seed=3), 0.05)
        engine.stop()
    # The random head would have lost true tokens: rounds go on as if nothing had been pruned.
    assert [result.token_ids for result in drafted] == outputs
    assert engine.counts.num_pruned_nodes == 0
    pruned_first = [one for (one, plan), (_, other) in pairwise(ran) if plan is other]
    assert len(pruned_first) > 4
    assert all(one != other for one, other in pairwise(pruned_first))
    times = engine.passes.pruning_times
    assert times[True].num_rows == times[False].num_rows > 0
    assert target.cache.num_free_blocks == target.cache.num_blocks
