"""Traversal verification as the verifier runs it, from the messages of its door to the engine's outcome.

Exact enumeration: every tree that the drafter can draw, every turn that a round can take, with its probability. The
oracle draws token by token from a law that is written down again here, slowly.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from coppice.core.chance import Chance
from coppice.core.draft_distribution import DraftDistribution
from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tree import TokenTree
from tests.unit.verifier_svc.enumeration import every_outcome
from tests.unit.verifier_svc.traversal_door import ENDLESS, EOS, PROMPT, VOCAB, Door, draw, raw_logits
from verifier_svc.engine.round_outcome import RoundOutcome

# Tokens of which the joint law is compared: a block of two draft tokens and a bonus token at most.
LENGTH = 3
TOLERANCE = 1e-12
Law = dict[tuple[int, ...], float]
Alter = Callable[[TokenTree], TokenTree]


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
