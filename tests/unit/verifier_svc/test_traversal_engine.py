"""Traversal verification as the verifier runs it, from the messages of its door to the engine's outcome.

Exact enumeration: every tree that the drafter can draw, every turn that a round can take, with its probability. The
oracle draws token by token from a law that is written down again here, slowly.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from coppice.chance import Chance, Purpose, UniformChance, uniforms
from coppice.draft_distribution import DraftDistribution, truncated
from coppice.errors import UnsupportedError
from coppice.grammar import Grammar, GrammarKind
from coppice.sampling import SamplingParams, StoppingOptions
from coppice.tree import EMPTY_TREE, TokenTree, chain
from coppice.v1 import sampling_pb2, verifier_pb2
from coppice.wire import sampling_to_proto, stopping_to_proto, tree_to_proto
from drafter_svc.tree_sampler import Path, sample_tree
from tests.unit.verifier_svc.byte_tokenizer import byte_level_tokenizer
from tests.unit.verifier_svc.enumeration import every_outcome
from tests.unit.verifier_svc.toy_pass import Language, ToyTarget, toy_info
from verifier_svc import sequence as sequence_module
from verifier_svc.engine import Engine
from verifier_svc.events import DraftRejection, Event, OutcomeEvent
from verifier_svc.scheduler import SchedulerLimits
from verifier_svc.sequence import RoundOutcome, SequenceKey
from verifier_svc.service import VerifierServicer
from verifier_svc.token_choice import Logits, TokenChooser

VOCAB = 3
EOS = 2
PROMPT = (0, 1)
MAX_NODES = 6
# Tokens of which the joint law is compared: a block of two draft tokens and a bonus token at most.
LENGTH = 3
TOLERANCE = 1e-12
TRAVERSAL = sampling_pb2.ACCEPTANCE_RULE_TRAVERSAL
Law = dict[tuple[int, ...], float]
Alter = Callable[[TokenTree], TokenTree]


@functools.cache
def raw_logits(context: tuple[int, ...]) -> Logits:
    """The target's logits."""
    return np.random.default_rng([17, len(context), *context]).normal(0, 1.5, VOCAB).astype(np.float32)


def draft_logits(context: tuple[int, ...]) -> Logits:
    """The drafter's: like the target's, and wrong by about as much."""
    noise = np.random.default_rng([18, len(context), *context]).normal(0, 1.0, VOCAB)
    return raw_logits(context) + noise.astype(np.float32)


class Door:
    """The verifier's door and engine without a network: messages in, events out, one pass at a time."""

    def __init__(self, language: Language = raw_logits, context: int = 12, num_blocks: int = 2) -> None:
        info = toy_info(VOCAB, byte_level_tokenizer([b"a", b"b", b"c"]), (EOS,), context)
        target: Any = ToyTarget(language, num_blocks)
        self.engine = Engine(target, info, SchedulerLimits(4, 4, prefill_chunk=16), MAX_NODES)
        self._servicer = VerifierServicer(self.engine, info, MAX_NODES)
        self._events: list[Event] = []
        self.engine.attach(0, self._events.extend)
        self._outbox: asyncio.Queue[Any] = asyncio.Queue()
        self._number = 0

    def open(
        self, sampling: SamplingParams, stopping: StoppingOptions, num_resumed: int = 0, **fields: object
    ) -> SequenceKey:
        self._number += 1
        key = SequenceKey(0, self._number)
        message = verifier_pb2.OpenSequence(
            prompt_token_ids=PROMPT,
            sampling=sampling_to_proto(sampling),
            stopping=stopping_to_proto(stopping),
            acceptance=TRAVERSAL,
            resumed_tokens=num_resumed,
            **fields,
        )
        self._servicer._carry_out(key, verifier_pb2.VerifyRequest(open=message), self._outbox)
        return key

    def draft(self, key: SequenceKey, base_length: int, tree: TokenTree, budget: int = 0) -> None:
        message = verifier_pb2.Draft(base_length=base_length, tree=tree_to_proto(tree), budget=budget)
        self._servicer._carry_out(key, verifier_pb2.VerifyRequest(draft=message), self._outbox)

    def step(self) -> list[Event]:
        """What one turn of the engine says, and what the door has refused."""
        # A turn waits for a command when nothing runs.
        self.engine._commands.put(lambda: None)
        self.engine._step()
        said, self._events[:] = list(self._events), []
        while not self._outbox.empty():
            said += self._outbox.get_nowait()
        return said

    def round(self, key: SequenceKey) -> RoundOutcome:
        """The outcome of the sequence's next round."""
        [outcome] = [event.outcome for event in self.step() if isinstance(event, OutcomeEvent)]
        return outcome

    def close(self, key: SequenceKey) -> None:
        self.engine.close(key)


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    yield door
    door.step()
    cache = door.engine._target.cache
    assert cache.num_free_blocks == cache.num_blocks, "a block leaked"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Chance]:
    """The chance that rounds of acceptance use is the last of this list."""
    chances: list[Chance] = []

    def told_chance(seed: int, position: int, purpose: Purpose) -> Chance:
        assert (seed, purpose) == (7, Purpose.ACCEPTANCE)
        assert position == len(PROMPT)
        return chances[-1]

    monkeypatch.setattr(sequence_module, "seeded_chance", told_chance)
    return chances


def slow_law(output: Sequence[int], params: SamplingParams, stopping: StoppingOptions, num_resumed: int) -> list[float]:
    """The target's law behind some output: one token after another, in the order that `sampling.proto` gives."""
    prompt, resumed = PROMPT[: len(PROMPT) - num_resumed], PROMPT[len(PROMPT) - num_resumed :]
    said = [*resumed, *output]
    scores = [np.float32(value) for value in raw_logits((*PROMPT, *output))]
    ends = {EOS, *stopping.stop_token_ids}
    for token in range(VOCAB):
        if token in prompt or token in said:
            penalty = np.float32(params.repetition_penalty)
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        scores[token] -= np.float32(params.presence_penalty) * np.float32(token in said)
        scores[token] -= np.float32(params.frequency_penalty) * np.float32(said.count(token))
        scores[token] += np.float32(params.logit_bias.get(token, 0.0))
        is_allowed = not params.allowed_token_ids or token in params.allowed_token_ids
        if not is_allowed or token in params.bad_token_ids or (len(said) < stopping.min_tokens and token in ends):
            scores[token] = np.float32(-np.inf)
    scaled = [float(score) / params.temperature for score in scores]
    ranked = sorted(range(VOCAB), key=lambda token: -scaled[token])
    kept = [token for token in ranked if scaled[token] > -np.inf]
    if params.top_k:
        kept = kept[: params.top_k]
    weight = {token: float(np.exp(scaled[token] - scaled[ranked[0]])) for token in kept}
    total, before = sum(weight.values()), 0.0
    nucleus = []
    for token in kept:
        if before < params.top_p * total:
            nucleus.append(token)
        before += weight[token]
    kept = [token for token in nucleus if weight[token] >= params.min_p]
    total = sum(weight[token] for token in kept)
    return [weight[token] / total if token in kept else 0.0 for token in range(VOCAB)]


def plain_law(params: SamplingParams, stopping: StoppingOptions, num_resumed: int, output: tuple[int, ...] = ()) -> Law:
    """The law of what token by token decoding says behind some output, LENGTH tokens of it or up to its end."""
    ended = output and (output[-1] == EOS or output[-1] in stopping.stop_token_ids)
    if ended or len(output) == min(LENGTH, (stopping.max_tokens or LENGTH) - num_resumed):
        return {output: 1.0}
    law: Counter[tuple[int, ...]] = Counter()
    for token, probability in enumerate(slow_law(output, params, stopping, num_resumed)):
        if probability > 0:
            for longer, share in plain_law(params, stopping, num_resumed, (*output, token)).items():
                law[longer] += probability * share
    return law


def draw(params: SamplingParams, widths: Sequence[int], max_tokens: int, chance: Chance) -> TokenTree:
    """A tree as drafters draw it."""

    def predict(paths: Sequence[Path]) -> list[DraftDistribution]:
        return [truncated(draft_logits((*PROMPT, *path)), params.temperature, max_tokens, 2) for path in paths]

    return sample_tree(widths, predict, chance).token_tree("toy")


def law_of_rounds(
    door: Door,
    told: list[Chance],
    params: SamplingParams,
    stopping: StoppingOptions,
    widths: Sequence[int] = (2, 1),
    max_tokens: int = VOCAB,
    num_resumed: int = 0,
    alter: Alter = lambda tree: tree,
) -> tuple[Law, float]:
    """The law of a first round's tokens, continued by the oracle, and its accepted nodes on average."""
    law: Counter[tuple[int, ...]] = Counter()
    accepted = 0.0
    for tree, tree_weight in every_outcome(functools.partial(draw, params, widths, max_tokens)):
        sent = alter(tree)

        def run(chance: Chance, sent: TokenTree = sent) -> RoundOutcome:
            told.append(chance)
            key = door.open(params, stopping, num_resumed)
            door.draft(key, len(PROMPT), sent)
            outcome = door.round(key)
            door.close(key)
            return outcome

        for outcome, weight in every_outcome(run):
            assert outcome.draft_nodes > 0
            assert len(outcome.token_ids) - len(outcome.accepted_nodes) in ((0, 1) if outcome.finish else (1,))
            accepted += tree_weight * weight * len(outcome.accepted_nodes)
            rest = {outcome.token_ids: 1.0}
            if outcome.finish is None:
                rest = plain_law(params, stopping, num_resumed, outcome.token_ids)
            for output, share in rest.items():
                law[output] += tree_weight * weight * share
    assert sum(law.values()) == pytest.approx(1, abs=TOLERANCE)
    return law, accepted


def distance(one: Law, other: Law) -> float:
    return sum(abs(one.get(output, 0.0) - other.get(output, 0.0)) for output in {*one, *other}) / 2


ENDLESS = StoppingOptions(max_tokens=8, ignore_eos=False)
# Numbers that cross the wire's single precision unchanged.
CASES: dict[str, dict[str, Any]] = {
    "T=1": {},
    "T=0.625, top-p": {"temperature": 0.625, "top_p": 0.875},
    "T=1.5, top-k": {"temperature": 1.5, "top_k": 2},
    "min-p": {"min_p": 0.375},
    "penalties": {"repetition_penalty": 1.375, "presence_penalty": 0.625, "frequency_penalty": 0.75},
    "bias": {"logit_bias": {1: 1.5}, "bad_token_ids": (0,)},
    "allowed": {"allowed_token_ids": (0, 1)},
}
STOPS = {
    "EOS": ENDLESS,
    "a stop token": StoppingOptions(max_tokens=8, stop_token_ids=(1,)),
    "no EOS at first": StoppingOptions(max_tokens=8, min_tokens=2),
    "three tokens": StoppingOptions(max_tokens=3),
    "two tokens": StoppingOptions(max_tokens=2),
}


@pytest.mark.parametrize("name", CASES)
def test_a_round_keeps_the_targets_law_with_every_sampling_parameter(name: str, door: Door, told: list[Chance]) -> None:
    params = SamplingParams(**{"temperature": 1.0, "seed": 7, **CASES[name]})
    law, accepted = law_of_rounds(door, told, params, ENDLESS)
    assert distance(law, plain_law(params, ENDLESS, 0)) < TOLERANCE
    assert accepted > 0.2


@pytest.mark.parametrize("name", STOPS)
def test_a_round_keeps_the_law_of_outputs_that_end(name: str, door: Door, told: list[Chance]) -> None:
    params = SamplingParams(temperature=1.0, presence_penalty=0.5, seed=7)
    law, accepted = law_of_rounds(door, told, params, STOPS[name])
    assert distance(law, plain_law(params, STOPS[name], 0)) < TOLERANCE
    assert accepted > 0.2


@pytest.mark.parametrize(("widths", "max_tokens"), [((1, 1), 3), ((2,), 2), ((3,), 3), ((1, 2), 2), ((2, 2), 2)])
def test_a_round_keeps_the_law_whatever_the_shape_and_the_truncation(
    widths: tuple[int, ...], max_tokens: int, door: Door, told: list[Chance]
) -> None:
    params = SamplingParams(temperature=1.0, seed=7)
    law, _ = law_of_rounds(door, told, params, ENDLESS, widths, max_tokens)
    assert distance(law, plain_law(params, ENDLESS, 0)) < TOLERANCE


def test_a_resumed_output_keeps_the_law_of_its_own_history(door: Door, told: list[Chance]) -> None:
    params = SamplingParams(temperature=1.0, presence_penalty=1.0, frequency_penalty=0.5, seed=7)
    law, _ = law_of_rounds(door, told, params, ENDLESS, num_resumed=1)
    assert distance(law, plain_law(params, ENDLESS, 1)) < TOLERANCE
    assert distance(law, plain_law(params, ENDLESS, 0)) > 0.01


def reweighted(tree: TokenTree) -> TokenTree:
    """The tree as if it had been drawn from milder distributions than it was."""
    milder = [
        one and DraftDistribution(one.token_ids, tuple(weight**0.25 for weight in one.weights))
        for one in tree.distributions
    ]
    return TokenTree(
        tree.token_ids, tree.parents, tree.log_probs, tree.source_names, tree.sources, distributions=tuple(milder)
    )


def test_a_drafter_that_sends_another_distribution_than_it_drew_from_is_found_out(
    door: Door, told: list[Chance]
) -> None:
    params = SamplingParams(temperature=1.0, seed=7)
    law, _ = law_of_rounds(door, told, params, ENDLESS, alter=reweighted)
    assert distance(law, plain_law(params, ENDLESS, 0)) > 0.03


def some_tree(params: SamplingParams, position: int = 0, widths: tuple[int, ...] = (2, 1)) -> TokenTree:
    return draw(params, widths, VOCAB, UniformChance(uniforms(params.seed, position, Purpose.DRAFT)))


def coupled_token(params: SamplingParams) -> int:
    """What a plain round says first."""
    return TokenChooser(params, VOCAB, prompt=PROMPT).choose(raw_logits(PROMPT), len(PROMPT))


@pytest.mark.parametrize("seed", range(6))
def test_a_round_without_its_tree_is_a_plain_one(seed: int, door: Door) -> None:
    """Nothing came, it came for another length, it is larger than the budget: all of it or nothing."""
    params = SamplingParams(temperature=1.0, seed=seed)
    tree = some_tree(params)
    ways: list[tuple[int, TokenTree, int]] = [
        (len(PROMPT), EMPTY_TREE, 0),
        (len(PROMPT) - 1, tree, 0),
        (len(PROMPT) + 1, tree, 0),
        (len(PROMPT), tree, len(tree) - 1),
        (len(PROMPT), some_tree(params, widths=(3, 2)), 0),
    ]
    for base_length, sent, budget in ways:
        key = door.open(params, ENDLESS)
        door.draft(key, base_length, sent, budget)
        outcome = door.round(key)
        door.close(key)
        assert (outcome.token_ids, outcome.draft_nodes) == ((coupled_token(params),), 0)
        assert outcome.stale_drafts == (base_length != len(PROMPT))


def test_a_tree_that_finds_no_room_in_the_cache_is_dropped_whole(door: Door) -> None:
    params = SamplingParams(temperature=1.0, seed=3)
    sequence_key = door.open(params, ENDLESS)
    tree = some_tree(params)
    door.draft(sequence_key, len(PROMPT), tree)
    door.engine._take_commands()
    door.engine._scheduler.admit(0.0)
    sequence = door.engine._scheduler.find(sequence_key)
    assert sequence is not None
    assert len(sequence.next_rows(len(PROMPT), len(tree) - 1).tree) == 0
    assert sequence.next_rows(len(PROMPT), len(tree)).tree.distributions == tree.distributions
    door.close(sequence_key)


def test_nothing_of_a_tree_outlives_its_round(door: Door) -> None:
    params = SamplingParams(temperature=1.0, seed=5)
    key = door.open(params, StoppingOptions(max_tokens=8, ignore_eos=True))
    door.draft(key, len(PROMPT), some_tree(params))
    first = door.round(key)
    door.draft(key, len(PROMPT), some_tree(params))
    second = door.round(key)
    assert first.draft_nodes == 4
    assert (second.base_length, second.draft_nodes) == (len(PROMPT) + len(first.token_ids), 0)
    assert second.stale_drafts == 1
    door.close(key)


def test_one_seed_and_the_same_drafts_give_the_same_rounds(door: Door) -> None:
    blocks = set()
    for seed in range(40):
        params = SamplingParams(temperature=1.0, seed=seed)
        tree = draw(params, (2, 1), VOCAB, UniformChance(iter([0.2, 0.7, 0.4, 0.6])))
        outcomes = []
        for _ in range(2):
            key = door.open(params, ENDLESS)
            door.draft(key, len(PROMPT), tree)
            outcomes.append(door.round(key).token_ids)
            door.close(key)
        assert outcomes[0] == outcomes[1]
        blocks.add(outcomes[0])
    assert len(blocks) > 2


def test_log_probabilities_are_those_of_the_committed_tokens(door: Door, told: list[Chance]) -> None:
    params = SamplingParams(temperature=0.75, seed=7)
    tree = some_tree(params)

    def run(chance: Chance) -> RoundOutcome:
        told.append(chance)
        key = door.open(params, ENDLESS, top_log_probs=1)
        door.draft(key, len(PROMPT), tree)
        outcome = door.round(key)
        door.close(key)
        return outcome

    lengths = set()
    for outcome, _ in every_outcome(run):
        lengths.add(len(outcome.token_ids))
        for place, (token, found) in enumerate(zip(outcome.token_ids, outcome.log_probs, strict=True)):
            row = raw_logits((*PROMPT, *outcome.token_ids[:place])).astype(np.float64)
            expected = row - np.log(np.exp(row).sum())
            assert found.log_prob == pytest.approx(expected[token], abs=1e-9)
            assert found.top_token_ids == (int(row.argmax()),)
    assert lengths == {1, 2, 3}


def test_a_tree_without_distributions_is_refused_and_the_sequence_goes_on(door: Door) -> None:
    params = SamplingParams(temperature=1.0, seed=2)
    key = door.open(params, ENDLESS)
    door.draft(key, len(PROMPT), chain([1, 0]))
    said = door.step()
    [rejection] = [event for event in said if isinstance(event, DraftRejection)]
    [outcome] = [event.outcome for event in said if isinstance(event, OutcomeEvent)]
    assert "needs the distributions" in str(rejection.error)
    assert (outcome.token_ids, outcome.draft_nodes) == ((coupled_token(params),), 0)
    door.close(key)


def test_a_distribution_outside_the_vocabulary_is_refused_at_the_door(door: Door) -> None:
    key = door.open(SamplingParams(temperature=1.0), ENDLESS)
    door.step()
    outside = DraftDistribution((0, VOCAB), (1.0, 1.0))
    door.draft(key, 3, TokenTree((0,), (-1,), (0.0,), distributions=(outside, None)))
    [rejection] = [event for event in door.step() if isinstance(event, DraftRejection)]
    assert rejection.error.field == "draft.tree.distribution_token_ids"
    door.close(key)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_is_refused_above_temperature_0(temperature: float, door: Door) -> None:
    params = SamplingParams(temperature=temperature, grammar=Grammar(GrammarKind.REGEX, "[ab]*"))
    if temperature:
        with pytest.raises(UnsupportedError, match="not offered together with acceptance TRAVERSAL"):
            door.open(params, ENDLESS)
    else:
        door.close(door.open(params, ENDLESS))


def test_at_temperature_0_drafts_are_followed_and_tokens_are_the_targets_own(door: Door) -> None:
    params = SamplingParams()
    expected: list[int] = []
    while len(expected) < 6:
        expected.append(int(raw_logits((*PROMPT, *expected)).argmax()))
    stopping = StoppingOptions(max_tokens=6, ignore_eos=True)
    key = door.open(params, stopping)
    drafted = TokenTree((expected[0], expected[1], 1 - expected[0] % 2), (-1, 0, 1), (0.0,) * 3)
    door.draft(key, len(PROMPT), drafted)
    first = door.round(key)
    said = list(first.token_ids)
    while len(said) < 6:
        said += door.round(key).token_ids
    assert said == expected
    assert len(first.accepted_nodes) >= 2


def test_sequences_that_make_room_for_each_other_go_on_where_they_were() -> None:
    """Every token's log-probability is that behind the tokens before it: no pass saw a row that was not accepted."""

    def forgetful(context: tuple[int, ...]) -> Logits:
        return raw_logits((len(context), *context[-3:]))

    def tree_behind(context: tuple[int, ...], seed: int) -> TokenTree:
        chance = UniformChance(uniforms(seed, len(context), Purpose.DRAFT))
        return sample_tree(
            (2, 1, 1), lambda paths: [truncated(forgetful((*context, *path)), 2.0, 3, 2) for path in paths], chance
        ).token_tree("toy")

    door = Door(forgetful, context=220, num_blocks=8)
    stopping = StoppingOptions(max_tokens=200, ignore_eos=True)
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(4)]
    keys = [door.open(one, stopping, top_log_probs=0) for one in params]
    said: dict[int, list[int]] = {key.sequence_id: [] for key in keys}
    unfinished, accepted = set(said), 0
    while unfinished:
        for event in door.step():
            if not isinstance(event, OutcomeEvent):
                continue
            number, outcome = event.sequence_id, event.outcome
            for token, found in zip(outcome.token_ids, outcome.log_probs, strict=True):
                row = forgetful((*PROMPT, *said[number])).astype(np.float64)
                assert found.log_prob == pytest.approx(row[token] - np.log(np.exp(row).sum()), abs=1e-9)
                said[number].append(token)
            accepted += len(outcome.accepted_nodes)
            if outcome.finish is not None:
                unfinished.discard(number)
                continue
            context = (*PROMPT, *said[number])
            door.draft(SequenceKey(0, number), len(context), tree_behind(context, number))
    assert [len(output) for output in said.values()] == [200] * 4
    assert door.engine.num_preemptions > 0
    assert accepted > 200
