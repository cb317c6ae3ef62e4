"""Seeds: the output is a function of prompt, parameters and seed."""

from __future__ import annotations

from coppice.lab.conformance.catalogue import Group
from coppice.lab.conformance.checks import (
    ask_same,
    ask_tokens,
    require,
    same_with_and_without_speculation,
)
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.requests import build, varied
from coppice.v1.inference_pb2 import TokenIds

GROUP = Group("seeds")

TOKENS = 24
SEEDS = (0, 1, 2, 12345, 2**63, 2**64 - 1)


@GROUP.case("same-seed-same-answer")
async def same_seed(deployment: Deployment) -> None:
    for seed in SEEDS:
        request = deployment.request(max_tokens=TOKENS, temperature=1.0, seed=seed)
        await ask_same(deployment, request, await deployment.ask(request))


@GROUP.case("with-and-without-speculation")
async def speculation(deployment: Deployment) -> None:
    request = deployment.requests(max_tokens=TOKENS, temperature=1.0)[1]
    requests = [varied(request, seed=seed) for seed in SEEDS]
    await same_with_and_without_speculation(deployment, requests)


@GROUP.case("other-seeds-differ")
async def other_seeds(deployment: Deployment) -> None:
    # So hot that even a target that is sure of itself does not say the same twice.
    request = deployment.request(max_tokens=TOKENS, temperature=5.0)
    answers = {(await deployment.ask(varied(request, seed=seed))).token_ids for seed in SEEDS}
    require(len(answers) == len(SEEDS), f"{len(SEEDS)} seeds gave {len(answers)} answers", request)


@GROUP.case("seed-in-use-is-returned")
async def returned(deployment: Deployment) -> None:
    for seed in SEEDS:
        request = build(deployment.prompts[0], max_tokens=1, temperature=1.0, seed=seed)
        answer = await deployment.ask(request)
        require(answer.seed == seed, f"the answer names seed {answer.seed}", request)


@GROUP.case("unset-seeds-are-drawn-anew")
async def unset(deployment: Deployment) -> None:
    request = build(deployment.prompts[0], max_tokens=1, temperature=1.0)
    seeds = {(await deployment.ask(request)).seed for _ in range(4)}
    require(len(seeds) == 4, f"4 requests without a seed had {len(seeds)} seeds", request)


@GROUP.case("returned-seed-repeats-the-answer")
async def repeats(deployment: Deployment) -> None:
    request = deployment.request(max_tokens=TOKENS, temperature=1.0)
    for _ in range(3):
        drawn = await deployment.ask(request)
        await ask_same(deployment, varied(request, seed=drawn.seed), drawn)


@GROUP.case("noise-depends-on-the-position-alone")
async def position(deployment: Deployment) -> None:
    """What was output by one call and what was its prompt is the same to the next token."""
    prompt = deployment.prompts[0]
    request = deployment.request(max_tokens=TOKENS, temperature=1.0, seed=3)
    whole = await deployment.plain(request)
    for split in (1, TOKENS // 2, TOKENS - 1):
        moved = varied(request, token_ids=TokenIds(ids=(*prompt, *whole.token_ids[:split])), max_tokens=TOKENS - split)
        await ask_tokens(deployment, moved, whole.token_ids[split:])
