"""Speculation policies and budgets: they decide what is drafted, and nothing else."""

from __future__ import annotations

from coppice.lab.conformance.catalogue import Group
from coppice.lab.conformance.checks import ask_same, require, require_drafter
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.errors import SkippedError
from coppice.lab.conformance.requests import AUTO, FORCED, OFF, varied
from coppice.v1.inference_pb2 import GenerateRequest, SpeculationPolicy

GROUP = Group("speculation")

TOKENS = 32
# Beyond it, every budget would take too long; the largest is tried as well.
MAX_BUDGETS = 16
# The source that drafts what was said before, and nothing else.
MEMORY = "cache"


def requests(deployment: Deployment) -> list[GenerateRequest]:
    return [deployment.request(max_tokens=TOKENS, temperature=temperature, seed=91) for temperature in (0.0, 1.0)]


@GROUP.case("off-drafts-nothing")
async def off(deployment: Deployment) -> None:
    for request in requests(deployment):
        request = varied(request, mode=OFF)
        counts = (await deployment.ask(request)).speculation
        got = (counts.rounds, counts.draft_tokens, counts.accepted_tokens, dict(counts.sources))
        require(got == (TOKENS, 0, 0, {}), f"rounds, drafts, accepted and sources are {got}", request)


@GROUP.case("a-budget-of-0-drafts-nothing")
async def no_budget(deployment: Deployment) -> None:
    for request in requests(deployment):
        expected = await deployment.plain(request)
        request = varied(request, mode=FORCED, max_nodes=0)
        drafted = (await ask_same(deployment, request, expected)).speculation.draft_tokens
        require(drafted == 0, f"{drafted} draft tokens were verified", request)


@GROUP.case("forced-drafts-are-verified-and-accepted")
async def forced(deployment: Deployment) -> None:
    """Without it, the comparisons of on and off would prove little."""
    require_drafter(deployment)
    requests = deployment.requests(max_tokens=TOKENS, mode=FORCED)
    counts = [(await deployment.ask(request)).speculation for request in requests]
    drafted = sum(one.draft_tokens for one in counts)
    if not drafted and list(deployment.info.sources) == [MEMORY]:
        raise SkippedError("there is no drafter but memory, and nothing was repeated")
    require(drafted > 0, "no draft token was verified")
    if not sum(one.accepted_tokens for one in counts):
        raise SkippedError("the drafters guessed nothing right, so that no accepted block was tested")


@GROUP.case("every-mode-gives-the-same-answer")
async def modes(deployment: Deployment) -> None:
    for request in requests(deployment):
        expected = await deployment.plain(request)
        for mode in (SpeculationPolicy.MODE_UNSPECIFIED, AUTO, FORCED):
            await ask_same(deployment, varied(request, mode=mode), expected)


@GROUP.case("every-budget-gives-the-same-answer")
async def budgets(deployment: Deployment) -> None:
    require_drafter(deployment)
    most = deployment.info.max_nodes
    for request in requests(deployment):
        expected = await deployment.plain(request)
        for nodes in sorted({*range(1, min(most, MAX_BUDGETS) + 1), most}):
            await ask_same(deployment, varied(request, mode=FORCED, max_nodes=nodes), expected)


@GROUP.case("budgets-are-kept")
async def kept(deployment: Deployment) -> None:
    require_drafter(deployment)
    for request in requests(deployment):
        for nodes in (1, 3, 2**31):
            budgeted = varied(request, mode=FORCED, max_nodes=nodes)
            counts = (await deployment.ask(budgeted)).speculation
            most = min(nodes, deployment.info.max_nodes) * counts.rounds
            reason = f"{counts.draft_tokens} draft tokens in {counts.rounds} rounds"
            require(counts.draft_tokens <= most, reason, budgeted)


@GROUP.case("every-drafter-alone-gives-the-same-answer")
async def each_source(deployment: Deployment) -> None:
    require_drafter(deployment)
    for request in requests(deployment):
        expected = await deployment.plain(request)
        for source in deployment.info.sources:
            alone = varied(request, mode=FORCED, sources=[source])
            answer = await ask_same(deployment, alone, expected)
            others = set(answer.speculation.sources) - {source}
            require(not others, f"{sorted(others)} drafted, too", alone)
