"""Several outputs of one request: each is what a request of its own gets with the seed that the contract gives it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from coppice.completion import Completion
from coppice.lab.conformance.catalogue import Group
from coppice.lab.conformance.checks import (
    ask_same,
    begins_wrongly,
    counts_make_output,
    ends_wrongly,
    require,
    require_outputs,
    same_answer,
    same_tokens,
)
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.requests import FORCED, OFF, varied
from coppice.v1.inference_pb2 import GenerateRequest, GenerateResponse

GROUP = Group("outputs")

TOKENS = 24
SEVERAL = 4
SEED = 2**64 - 111


def seed_of(first: int, index: int) -> int:
    """The seed of an output, as the contract has it."""
    return (first + index * 0x9E3779B97F4A7C15) & (2**64 - 1)


def several(deployment: Deployment, **knobs: Any) -> GenerateRequest:
    """A request for several outputs; skip where the deployment gives fewer."""
    require_outputs(deployment, SEVERAL)
    usual = {"max_tokens": TOKENS, "temperature": 1.0, "seed": SEED, "num_outputs": SEVERAL, "mode": FORCED}
    return deployment.request(**{**usual, **knobs})


async def each_as_its_own_request(deployment: Deployment, request: GenerateRequest) -> tuple[Completion, ...]:
    outputs = await deployment.outputs(request)
    wanted = request.num_outputs
    require(len(outputs) == wanted, f"{len(outputs)} outputs, not {wanted}", request)
    for index, output in enumerate(outputs):
        seed = seed_of(request.sampling.seed, index)
        require(output.seed == seed, f"output {index} has the seed {output.seed}, not {seed}", request)
        alone = varied(request, num_outputs=1, seed=seed)
        same_answer(await deployment.plain(alone), output, alone)
    return outputs


@GROUP.case("each-is-that-of-a-request-with-its-seed")
async def sampled(deployment: Deployment) -> None:
    for mode in (FORCED, OFF):
        outputs = await each_as_its_own_request(deployment, several(deployment, mode=mode, top_log_probs=2))
        require(len({output.token_ids for output in outputs}) > 1, "all outputs are alike at temperature 1")


@GROUP.case("at-temperature-0-all-are-alike")
async def greedy(deployment: Deployment) -> None:
    request = several(deployment, temperature=0.0)
    outputs = await each_as_its_own_request(deployment, request)
    require(len({output.token_ids for output in outputs}) == 1, "outputs differ at temperature 0", request)


@GROUP.case("with-every-parameter-together")
async def parameters(deployment: Deployment) -> None:
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    request = several(deployment, top_k=50, top_p=0.95, min_p=0.01, **penalties)
    await each_as_its_own_request(deployment, request)


@GROUP.case("each-ends-where-it-ends")
async def ends(deployment: Deployment) -> None:
    request = several(deployment)
    whole = await each_as_its_own_request(deployment, request)
    for output in whole[:2]:
        token = output.token_ids[TOKENS // 2]
        await each_as_its_own_request(deployment, varied(request, stop_token_ids=[token]))
        if piece := output.text[len(output.text) // 2 :][:3]:
            await each_as_its_own_request(deployment, varied(request, stop_strings=[piece]))


@GROUP.case("a-seed-that-is-drawn-is-the-first-output-s")
async def drawn(deployment: Deployment) -> None:
    request = several(deployment)
    request.sampling.ClearField("seed")
    outputs = await deployment.outputs(request)
    first = outputs[0].seed
    for index, output in enumerate(outputs):
        repeated = varied(request, num_outputs=1, seed=seed_of(first, index))
        require(output.seed == repeated.sampling.seed, f"output {index} has the seed {output.seed}", request)
        same_answer(await deployment.plain(repeated), output, repeated)


@GROUP.case("each-counts-its-own-tokens")
async def usage(deployment: Deployment) -> None:
    """And the prompt's, which all of them have."""
    request = several(deployment)
    token = (await deployment.plain(varied(request, num_outputs=1))).token_ids[TOKENS // 2]
    request = varied(request, stop_token_ids=[token])
    for index, output in enumerate(await deployment.outputs(request)):
        counted = (output.usage.prompt_tokens, output.usage.completion_tokens)
        wanted = (len(deployment.prompts[0]), len(output.token_ids))
        require(counted == wanted, f"output {index} counts {counted} tokens, not {wanted}", request)
        counts_make_output(output, request, f"output {index}: ")


@GROUP.case("messages-name-their-output")
async def messages(deployment: Deployment) -> None:
    request = several(deployment)
    by_output: defaultdict[int, list[GenerateResponse]] = defaultdict(list)
    for message in await deployment.messages(request):
        by_output[message.output_index].append(message)
    require(sorted(by_output) == [*range(SEVERAL)], f"messages name the outputs {sorted(by_output)}", request)
    for index, own in by_output.items():
        wrong = [*begins_wrongly(own), *ends_wrongly(own)]
        require(not wrong, f"output {index}: {', '.join(wrong)}", request)
        alone = varied(request, num_outputs=1, seed=seed_of(SEED, index))
        tokens = tuple(token for message in own for token in message.token_ids)
        expected = (await deployment.plain(alone)).token_ids
        same_tokens(expected, tokens, request, own[-1].speculation.near_ties)


@GROUP.case("as-many-as-there-may-be")
async def most(deployment: Deployment) -> None:
    request = several(deployment, num_outputs=deployment.info.max_outputs, max_tokens=8)
    await each_as_its_own_request(deployment, request)


@GROUP.case("one-is-as-none-asked-for")
async def one(deployment: Deployment) -> None:
    request = several(deployment, num_outputs=1)
    silent = varied(request)
    silent.ClearField("num_outputs")
    await ask_same(deployment, request, await deployment.plain(silent))
