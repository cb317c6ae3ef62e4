"""Accounting: every count is that of something that can be counted from outside."""

from __future__ import annotations

from coppice.completion import Completion
from coppice.lab.conformance.catalogue import Group
from coppice.lab.conformance.checks import ask_tokens, counts_make_output, require
from coppice.lab.conformance.deployment import OPENINGS, Deployment
from coppice.lab.conformance.requests import FORCED, OFF, build, varied
from coppice.v1.inference_pb2 import GenerateRequest

GROUP = Group("usage")

TOKENS = 24


def requests(deployment: Deployment) -> list[GenerateRequest]:
    return [
        varied(request, temperature=temperature, mode=mode)
        for request in deployment.requests(max_tokens=TOKENS, seed=31)
        for temperature in (0.0, 1.0)
        for mode in (FORCED, OFF)
    ]


async def answers(deployment: Deployment) -> list[tuple[GenerateRequest, Completion]]:
    return [(request, await deployment.ask(request)) for request in requests(deployment)]


@GROUP.case("completion-tokens-are-those-delivered")
async def completion_tokens(deployment: Deployment) -> None:
    for request, answer in await answers(deployment):
        counts = (answer.usage.completion_tokens, len(answer.token_ids))
        require(counts == (TOKENS, TOKENS), f"{counts[0]} are counted, {counts[1]} were delivered", request)


@GROUP.case("completion-tokens-up-to-a-stop")
async def stopped(deployment: Deployment) -> None:
    for request in requests(deployment):
        whole = (await deployment.plain(request)).token_ids
        request = varied(request, stop_token_ids=[whole[TOKENS // 2]])
        wanted = whole.index(whole[TOKENS // 2]) + 1
        answer = await ask_tokens(deployment, request, whole[:wanted])
        counts = (answer.usage.completion_tokens, len(answer.token_ids))
        require(counts == (wanted, wanted), f"{counts[0]} are counted, {counts[1]} were delivered", request)


@GROUP.case("prompt-tokens-are-those-sent")
async def prompt_tokens(deployment: Deployment) -> None:
    prompt = deployment.prompts[0]
    for length in range(1, len(prompt) + 1):
        request = build(prompt[:length], max_tokens=1)
        counted = (await deployment.ask(request)).usage.prompt_tokens
        require(counted == length, f"{counted} are counted, {length} were sent", request)


@GROUP.case("prompt-tokens-of-a-longer-text-are-no-fewer")
async def text_prompts(deployment: Deployment) -> None:
    for opening in OPENINGS:
        counts = []
        for repeats in (1, 2, 4):
            request = build(opening * repeats, max_tokens=1)
            counts.append((await deployment.ask(request)).usage.prompt_tokens)
        require(0 < counts[0] < counts[1] < counts[2], f"1, 2 and 4 times a text have {counts} tokens", request)


@GROUP.case("resumed-tokens-are-not-counted-again")
async def resumed(deployment: Deployment) -> None:
    prompt = deployment.prompts[0]
    request = deployment.request(max_tokens=TOKENS)
    whole = (await deployment.plain(request)).token_ids
    for split in (1, TOKENS // 2, TOKENS - 1):
        request = varied(request, resume_token_ids=whole[:split], mode=FORCED)
        usage = (await deployment.ask(request)).usage
        counts = (usage.prompt_tokens, usage.completion_tokens)
        wanted = (len(prompt), TOKENS - split)
        require(counts == wanted, f"prompt and completion have {counts}, not {wanted} tokens", request)


@GROUP.case("rounds-and-accepted-tokens-make-the-output")
async def rounds(deployment: Deployment) -> None:
    for request, answer in await answers(deployment):
        counts_make_output(answer, request)


@GROUP.case("no-more-is-accepted-than-drafted")
async def drafted(deployment: Deployment) -> None:
    for request, answer in await answers(deployment):
        counts = answer.speculation
        reason = f"{counts.accepted_tokens} accepted of {counts.draft_tokens}"
        require(counts.accepted_tokens <= counts.draft_tokens, reason, request)
        for name, source in counts.sources.items():
            reason = f"{name}: {source.accepted} accepted of {source.proposed}"
            require(source.accepted <= source.proposed, reason, request)


@GROUP.case("sources-account-for-every-draft-token")
async def sources(deployment: Deployment) -> None:
    """A node that several sources propose counts for each."""
    for request, answer in await answers(deployment):
        counts = answer.speculation
        proposed = sum(source.proposed for source in counts.sources.values())
        reason = f"the sources proposed {proposed} of {counts.draft_tokens} draft tokens"
        require(proposed >= counts.draft_tokens, reason, request)
        unknown = set(counts.sources) - set(deployment.info.sources)
        require(not unknown, f"GetModelInfo does not name {sorted(unknown)}", request)


@GROUP.case("depths-account-for-every-accepted-token")
async def depths(deployment: Deployment) -> None:
    for request, answer in await answers(deployment):
        counts = answer.speculation
        accepted, reached = counts.rounds_accepted_by_depth, counts.rounds_drafted_by_depth
        reason = f"depths {accepted} for {counts.accepted_tokens} accepted tokens"
        require(sum(accepted) == counts.accepted_tokens, reason, request)
        holds = len(accepted) <= len(reached) and all(map(int.__le__, accepted, reached))
        require(holds, f"accepted by depth {accepted}, drafted {reached}", request)


@GROUP.case("times-are-in-order")
async def times(deployment: Deployment) -> None:
    for request, answer in await answers(deployment):
        timing = answer.timing
        got = f"queue {timing.queue_ms:.2f}, first token {timing.ttft_ms:.2f}, total {timing.total_ms:.2f} ms"
        require(0 <= timing.queue_ms <= timing.total_ms and 0 < timing.ttft_ms <= timing.total_ms, got, request)
