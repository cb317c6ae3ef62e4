"""A deployment's description of itself, against its behaviour."""

from __future__ import annotations

import grpc

from coppice.client import RequestFailedError
from coppice.lab.conformance.catalogue import Group
from coppice.lab.conformance.checks import require
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.requests import build
from coppice.v1 import sampling_pb2
from coppice.v1.inference_pb2 import GetModelInfoResponse

GROUP = Group("info")


async def asked(deployment: Deployment) -> GetModelInfoResponse:
    return await deployment.client.model_info(deployment.timeout_s)


@GROUP.case("is-complete")
async def complete(deployment: Deployment) -> None:
    info = await asked(deployment)
    numbers = ("vocab_size", "max_context_tokens")
    missing = [name for name in ("model", "version", "tokenizer_fingerprint", *numbers) if not getattr(info, name)]
    require(not missing, f"GetModelInfo has no {', '.join(missing)}")
    known = (sampling_pb2.EXACTNESS_STRICT, sampling_pb2.EXACTNESS_FAST)
    require(info.exactness in known, f"exactness is {info.exactness}")
    outside = [token for token in info.eos_token_ids if token >= info.vocab_size]
    require(not outside, f"the end tokens {outside} are outside of the vocabulary")


@GROUP.case("does-not-change")
async def stable(deployment: Deployment) -> None:
    first, second = await asked(deployment), await asked(deployment)
    # Drafters come and go.
    first.ClearField("sources")
    second.ClearField("sources")
    require(first == second, f"GetModelInfo says {first} and then {second}")


@GROUP.case("the-vocabulary-ends-where-it-says")
async def vocabulary(deployment: Deployment) -> None:
    last = deployment.info.vocab_size - 1
    await deployment.ask(build([*deployment.prompts[0], last], max_tokens=1))
    request = build(deployment.prompts[0], max_tokens=2, ignore_eos=True, allowed_token_ids=[last])
    answer = await deployment.ask(request)
    require(answer.token_ids == (last, last), f"the output is {answer.token_ids}", request)


@GROUP.case("its-mode-can-be-asked-for")
async def exactness(deployment: Deployment) -> None:
    """What GetModelInfo promises is not refused; strict mode is refused where it is not promised."""
    request = build(deployment.prompts[0], max_tokens=1, exactness=sampling_pb2.EXACTNESS_STRICT)
    try:
        await deployment.client.send(request, deployment.timeout_s)
    except RequestFailedError as error:
        refused = error.code == grpc.StatusCode.UNIMPLEMENTED and not deployment.is_strict
        require(refused, f"strict mode is refused: {error}", request)
    else:
        require(deployment.is_strict, "strict mode is granted, but not promised", request)
