"""Every sampling parameter, with and without speculation, on every prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coppice.lab.conformance.catalogue import Group
from coppice.lab.conformance.checks import same_with_and_without_speculation
from coppice.lab.conformance.deployment import Deployment

GROUP = Group("lossless")

TOKENS = 32
Knobs = Callable[[Deployment], dict[str, Any]]


def sampled(**knobs: Any) -> Knobs:
    """Knobs with a temperature of 1 and a seed."""
    return lambda deployment: {"temperature": 1.0, "seed": 11, **knobs}


def likely(deployment: Deployment) -> list[int]:
    """Tokens that the target has drawn before, in a fixed order."""
    return sorted({token for prompt in deployment.prompts for token in prompt})


def biased(deployment: Deployment) -> dict[str, Any]:
    return {"logit_bias": {token: (-3.0, 1.5, 4.0)[index % 3] for index, token in enumerate(likely(deployment))}}


def allowed(deployment: Deployment) -> dict[str, Any]:
    return {"allowed_token_ids": likely(deployment)}


def banned(deployment: Deployment) -> dict[str, Any]:
    return {"bad_token_ids": likely(deployment)[::2]}


def held_off(deployment: Deployment) -> dict[str, Any]:
    return {"min_tokens": 12, "stop_token_ids": likely(deployment)[::3], "ignore_eos": False}


def together(deployment: Deployment) -> dict[str, Any]:
    truncation = {"top_k": 50, "top_p": 0.95, "min_p": 0.01}
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    return {**biased(deployment), **banned(deployment), **held_off(deployment), **truncation, **penalties}


def at(temperature: float, knobs: Knobs) -> Knobs:
    return lambda deployment: {"temperature": temperature, "seed": 12, **knobs(deployment)}


KNOBS: dict[str, Knobs] = {
    "temperature-0.3": sampled(temperature=0.3),
    "temperature-1": sampled(),
    "temperature-2": sampled(temperature=2.0),
    "top-k": sampled(top_k=5),
    "top-p": sampled(top_p=0.8),
    "min-p": sampled(min_p=0.1),
    "truncations-together": sampled(top_k=20, top_p=0.9, min_p=0.02, temperature=1.3),
    "repetition-penalty": sampled(repetition_penalty=1.3),
    "presence-penalty": sampled(presence_penalty=1.0),
    "frequency-penalty": sampled(frequency_penalty=0.7),
    "rewards-for-repeating": sampled(presence_penalty=-1.0, frequency_penalty=-0.5, repetition_penalty=0.9),
    "penalties-at-temperature-0": sampled(
        temperature=0.0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5
    ),
    "logit-bias": at(1.0, biased),
    "logit-bias-at-temperature-0": at(0.0, biased),
    "allowed-token-ids": at(1.0, allowed),
    "allowed-token-ids-at-temperature-0": at(0.0, allowed),
    "bad-token-ids": at(1.0, banned),
    "bad-token-ids-at-temperature-0": at(0.0, banned),
    "min-tokens": at(1.0, held_off),
    "min-tokens-at-temperature-0": at(0.0, held_off),
    "everything-together": at(0.9, together),
    "everything-together-at-temperature-0": at(0.0, together),
}


async def check(deployment: Deployment, knobs: Knobs) -> None:
    requests = deployment.requests(max_tokens=TOKENS, **knobs(deployment))
    await same_with_and_without_speculation(deployment, requests)


for name, knobs in KNOBS.items():
    GROUP.add(name, check, knobs)
