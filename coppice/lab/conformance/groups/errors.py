"""Wrong requests: INVALID_ARGUMENT, and the field that is wrong."""

from __future__ import annotations

from collections.abc import Callable

from coppice.lab.conformance.catalogue import Group
from coppice.lab.conformance.checks import ask_same, refusal, refused_naming
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.requests import build, varied
from coppice.v1.inference_pb2 import GenerateRequest

GROUP = Group("errors")

NAN = float("nan")
INFINITE = float("inf")
UNKNOWN = 77
# More than any limit of the contract allows: stop strings, bytes of a stop string, of an id and of a salt.
TOO_MANY, TOO_LONG = 17, "x" * 257


def usual(deployment: Deployment) -> GenerateRequest:
    return build(deployment.prompts[0], max_tokens=4)


def knob(**knobs: object) -> Callable[[Deployment], GenerateRequest]:
    """A usual request with one thing wrong."""
    return lambda deployment: varied(usual(deployment), **knobs)


def outside(name: str) -> Callable[[Deployment], GenerateRequest]:
    """A usual request with a token id that is just outside of the vocabulary."""
    return lambda deployment: varied(usual(deployment), **{name: [deployment.info.vocab_size]})


WRONG: dict[str, tuple[str, Callable[[Deployment], GenerateRequest]]] = {
    "no-input": ("prompt", lambda deployment: GenerateRequest()),
    "an-empty-text": ("prompt", lambda deployment: build("")),
    # As many bytes as any deployment reads: gRPC refuses larger messages, and names no field.
    "a-text-beyond-the-context": ("prompt", lambda deployment: build("x " * 16 * deployment.info.max_context_tokens)),
    "no-token-ids": ("token_ids", lambda deployment: build([])),
    "a-token-outside-the-vocabulary": (
        "token_ids",
        lambda deployment: build([*deployment.prompts[0], deployment.info.vocab_size]),
    ),
    "tokens-that-leave-no-room": (
        "token_ids",
        lambda deployment: build(
            (deployment.prompts[0] * deployment.info.max_context_tokens)[: deployment.info.max_context_tokens]
        ),
    ),
    "a-resumed-token-outside-the-vocabulary": ("resume_token_ids", outside("resume_token_ids")),
    "more-resumed-tokens-than-max-tokens": (
        "resume_token_ids",
        lambda deployment: varied(usual(deployment), resume_token_ids=deployment.prompts[0][:5]),
    ),
    "a-sampled-output-resumed-without-its-seed": (
        "sampling.seed",
        lambda deployment: varied(usual(deployment), resume_token_ids=deployment.prompts[0][:1], temperature=1.0),
    ),
    "a-temperature-below-0": ("sampling.temperature", knob(temperature=-0.5)),
    "a-temperature-that-is-no-number": ("sampling.temperature", knob(temperature=NAN)),
    "an-infinite-temperature": ("sampling.temperature", knob(temperature=INFINITE)),
    "a-top-p-of-0": ("sampling.top_p", knob(top_p=0.0)),
    "a-top-p-above-1": ("sampling.top_p", knob(top_p=1.5)),
    "a-min-p-below-0": ("sampling.min_p", knob(min_p=-0.1)),
    "a-min-p-above-1": ("sampling.min_p", knob(min_p=1.5)),
    "a-repetition-penalty-of-0": ("sampling.repetition_penalty", knob(repetition_penalty=0.0)),
    "a-presence-penalty-above-2": ("sampling.presence_penalty", knob(presence_penalty=2.5)),
    "a-frequency-penalty-below-minus-2": ("sampling.frequency_penalty", knob(frequency_penalty=-2.5)),
    "a-bias-outside-the-vocabulary": (
        "sampling.logit_bias",
        lambda deployment: varied(usual(deployment), logit_bias={deployment.info.vocab_size: 1.0}),
    ),
    "a-bias-above-100": ("sampling.logit_bias", knob(logit_bias={0: 101.0})),
    "a-bias-that-is-no-number": ("sampling.logit_bias", knob(logit_bias={0: NAN})),
    "an-allowed-token-outside-the-vocabulary": ("sampling.allowed_token_ids", outside("allowed_token_ids")),
    "a-bad-token-outside-the-vocabulary": ("sampling.bad_token_ids", outside("bad_token_ids")),
    "max-tokens-of-0": ("stopping.max_tokens", knob(max_tokens=0)),
    "min-tokens-above-max-tokens": ("stopping.min_tokens", knob(min_tokens=5)),
    "an-empty-stop-string": ("stopping.stop_strings", knob(stop_strings=[""])),
    "too-many-stop-strings": ("stopping.stop_strings", knob(stop_strings=["x"] * TOO_MANY)),
    "a-stop-string-that-is-too-long": ("stopping.stop_strings", knob(stop_strings=[TOO_LONG])),
    "a-stop-token-outside-the-vocabulary": ("stopping.stop_token_ids", outside("stop_token_ids")),
    "an-unknown-drafter": ("speculation.sources", knob(sources=["no such drafter"])),
    "an-unknown-mode": ("speculation.mode", knob(mode=UNKNOWN)),
    "an-unknown-acceptance-rule": ("speculation.acceptance", knob(acceptance=UNKNOWN)),
    "an-unknown-exactness": ("speculation.exactness", knob(exactness=UNKNOWN)),
    "21-likeliest-tokens": ("response.top_log_probs", knob(top_log_probs=21)),
    "no-output": ("num_outputs", knob(num_outputs=0)),
    "too-many-outputs": (
        "num_outputs",
        lambda deployment: varied(usual(deployment), num_outputs=deployment.info.max_outputs + 1),
    ),
    "several-outputs-that-are-resumed": (
        "num_outputs",
        lambda deployment: varied(usual(deployment), num_outputs=2, resume_token_ids=deployment.prompts[0][:1]),
    ),
    "an-id-that-is-too-long": ("request_id", knob(request_id=TOO_LONG)),
    "a-salt-that-is-too-long": ("cache_salt", knob(cache_salt=TOO_LONG)),
}


async def refused(deployment: Deployment, field: str, wrong: Callable[[Deployment], GenerateRequest]) -> None:
    await refused_naming(deployment, wrong(deployment), field)


for name, (field, wrong) in WRONG.items():
    GROUP.add(name, refused, field, wrong)


@GROUP.case("a-refusal-disturbs-nobody")
async def next_request(deployment: Deployment) -> None:
    request = deployment.request(max_tokens=16)
    expected = await deployment.plain(request)
    for _ in range(8):
        await refusal(deployment, varied(request, temperature=-1.0))
    await ask_same(deployment, request, expected)
