"""What a request may ask for: every limit has its status and names its field; text, stops and resuming."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest

from coppice.client import Client, Options, RequestFailedError, build_request
from coppice.core.log_probs import MAX_TOP_LOG_PROBS
from coppice.v1 import inference_pb2, sampling_pb2
from orchestrator.api.validation import certain_tokens
from tests.conftest import StartFakes
from tests.fakes import FakeDrafter, FakeVerifier, perfect
from tests.toy_target import CONTEXT, EOS, VOCAB, babble, plain, script

Request = inference_pb2.GenerateRequest
Policy = inference_pb2.SpeculationPolicy
TRAVERSAL = sampling_pb2.ACCEPTANCE_RULE_TRAVERSAL
INVALID, UNIMPLEMENTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED


@pytest.fixture
async def client(start_fakes: StartFakes) -> AsyncIterator[Client]:
    async with start_fakes(FakeVerifier(), FakeDrafter()) as (client, _):
        yield client


def sampled(**values: object) -> Request:
    return Request(prompt="x", sampling=sampling_pb2.SamplingParams(**values))


def stopped(**values: object) -> Request:
    return Request(prompt="x", stopping=sampling_pb2.StoppingOptions(**values))


def drafted(**values: object) -> Request:
    return Request(prompt="x", speculation=Policy(**values))


def ids(*values: int) -> inference_pb2.TokenIds:
    return inference_pb2.TokenIds(ids=values)


WRONG: list[tuple[str, Request]] = [
    ("prompt", Request()),
    ("prompt", Request(prompt="")),
    ("prompt", Request(prompt="x" * CONTEXT)),
    ("prompt", Request(prompt="x" * 512 * (CONTEXT + 1))),
    ("prompt", Request(prompt="x" * (CONTEXT - 10), resume_token_ids=[1] * 11)),
    ("token_ids", Request(token_ids=ids())),
    ("token_ids", Request(token_ids=ids(1, VOCAB))),
    ("token_ids", Request(token_ids=ids(*[1] * CONTEXT))),
    ("resume_token_ids", Request(prompt="x", resume_token_ids=[VOCAB])),
    (
        "resume_token_ids",
        Request(prompt="x", resume_token_ids=[1, 2], stopping=sampling_pb2.StoppingOptions(max_tokens=1)),
    ),
    ("sampling.seed", Request(prompt="x", resume_token_ids=[1], sampling=sampling_pb2.SamplingParams(temperature=1))),
    ("sampling.temperature", sampled(temperature=-0.1)),
    ("sampling.temperature", sampled(temperature=float("nan"))),
    ("sampling.top_p", sampled(top_p=0)),
    ("sampling.top_p", sampled(top_p=1.5)),
    ("sampling.min_p", sampled(min_p=2)),
    ("sampling.repetition_penalty", sampled(repetition_penalty=0)),
    ("sampling.presence_penalty", sampled(presence_penalty=3)),
    ("sampling.frequency_penalty", sampled(frequency_penalty=-3)),
    ("sampling.logit_bias", sampled(logit_bias={VOCAB: 1.0})),
    ("sampling.logit_bias", sampled(logit_bias={1: 101.0})),
    ("sampling.allowed_token_ids", sampled(allowed_token_ids=[VOCAB])),
    ("sampling.bad_token_ids", sampled(bad_token_ids=[VOCAB])),
    ("sampling.grammar", sampled(grammar=sampling_pb2.Grammar())),
    ("sampling.grammar.regex", sampled(grammar=sampling_pb2.Grammar(regex=""))),
    ("sampling.grammar.regex", sampled(grammar=sampling_pb2.Grammar(regex="x" * 65537))),
    ("sampling.grammar.json_schema", sampled(grammar=sampling_pb2.Grammar(json_schema=""))),
    ("stopping.max_tokens", stopped(max_tokens=0)),
    ("stopping.min_tokens", stopped(max_tokens=2, min_tokens=3)),
    ("stopping.stop_strings", stopped(stop_strings=[""])),
    ("stopping.stop_strings", stopped(stop_strings=["x"] * 17)),
    ("stopping.stop_token_ids", stopped(stop_token_ids=[VOCAB])),
    (
        "response.top_log_probs",
        Request(prompt="x", response=inference_pb2.ResponseOptions(top_log_probs=MAX_TOP_LOG_PROBS + 1)),
    ),
    ("num_outputs", Request(prompt="x", num_outputs=0)),
    ("num_outputs", Request(prompt="x", num_outputs=17)),
    ("num_outputs", Request(prompt="x", num_outputs=2**32 - 1)),
    ("num_outputs", Request(prompt="x", num_outputs=2, resume_token_ids=[1])),
    ("speculation.sources", drafted(sources=["nobody"])),
    ("speculation.mode", drafted(mode=77)),
    ("speculation.exactness", drafted(exactness=77)),
    ("speculation.acceptance", drafted(acceptance=77)),
    ("speculation.denoising.steps", drafted(denoising=sampling_pb2.Denoising(steps=65))),
    ("speculation.denoising.block_tokens", drafted(denoising=sampling_pb2.Denoising(block_tokens=65))),
    ("request_id", Request(prompt="x", request_id="é" * 65)),
    ("cache_salt", Request(prompt="x", cache_salt="é" * 65)),
]


@pytest.mark.parametrize(
    ("field", "request_message"), WRONG, ids=[f"{n}-{field}" for n, (field, _) in enumerate(WRONG)]
)
async def test_a_wrong_request_is_told_which_field_is_wrong(
    client: Client, field: str, request_message: Request
) -> None:
    with pytest.raises(RequestFailedError) as caught:
        await client.send(request_message)
    assert caught.value.code == INVALID
    assert caught.value.fields == (field,)
    assert field in caught.value.details


@pytest.mark.parametrize(
    ("request_message", "tokens"),
    [
        (stopped(max_tokens=9, ignore_eos=True), 9),
        (stopped(max_tokens=9), 1),
        (stopped(min_tokens=7), 7),
        # What ends with the context takes no longer than that.
        (stopped(max_tokens=10**6, ignore_eos=True), CONTEXT - 1),
        (Request(token_ids=ids(*[1] * 20), stopping=sampling_pb2.StoppingOptions(min_tokens=10**6)), CONTEXT - 20),
        (Request(token_ids=ids(*[1] * CONTEXT)), 1),
    ],
)
def test_an_output_has_at_least_what_was_asked_for_and_fits(request_message: Request, tokens: int) -> None:
    assert certain_tokens(request_message, CONTEXT) == tokens


async def test_an_unknown_source_is_told_which_are_connected(client: Client) -> None:
    with pytest.raises(RequestFailedError, match="'nobody' is not a drafter here; connected: small-lm"):
        await client.send(drafted(sources=["nobody"]))


async def test_what_is_not_offered_is_unimplemented(client: Client) -> None:
    """By a verifier that lists no rules, as those of before there was a second one."""
    with pytest.raises(RequestFailedError, match="does not offer TRAVERSAL") as caught:
        await client.send(drafted(acceptance=TRAVERSAL))
    assert caught.value.code == UNIMPLEMENTED
    follow = sampling_pb2.ACCEPTANCE_RULE_SAMPLE_AND_FOLLOW
    assert list((await client.model_info()).acceptance_rules) == [follow]
    completion = await client.generate("x", Options(max_tokens=4, seed=1, acceptance="sample-and-follow"))
    assert list(completion.token_ids) == plain(babble, b"x", 4, seed=1)


async def test_drafters_are_told_how_a_request_wants_blocks_denoised(start_fakes: StartFakes) -> None:
    drafter = FakeDrafter(propose=perfect(depth=2))
    async with start_fakes(FakeVerifier(), drafter) as (client, _):
        await client.generate("x", Options(max_tokens=4, denoising_steps=3))
        await client.generate("x", Options(max_tokens=4, denoising_steps=2, block_tokens=5))
        await client.generate("x", Options(max_tokens=4))
    asked = [(opened.denoising.steps, opened.denoising.block_tokens) for opened in drafter.opened]
    assert asked == [(3, 0), (2, 5), (0, 0)]
    assert not drafter.opened[-1].HasField("denoising")


def test_a_rule_that_there_is_none_of_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="acceptance must be one of sample-and-follow, traversal, got 'typical'"):
        Options(acceptance="typical")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_of_the_drafters_that_sample_one_is_picked_and_its_trees_have_to_be_samples(
    start_fakes: StartFakes, temperature: float
) -> None:
    rules = (sampling_pb2.ACCEPTANCE_RULE_SAMPLE_AND_FOLLOW, TRAVERSAL)
    verifier = FakeVerifier(acceptance_rules=rules)
    drafters = [
        FakeDrafter(kind="a", acceptance_rules=rules, acceptance_by_rank=(0.5,)),
        FakeDrafter(kind="b", acceptance_rules=rules, acceptance_by_rank=(0.8,)),
        FakeDrafter(kind="c", acceptance_by_rank=(0.9,)),
    ]
    async with start_fakes(verifier, *drafters) as (client, _):
        options = Options(max_tokens=6, seed=1, temperature=temperature, acceptance="traversal")
        completion = await client.generate("x", options)
    # What the fakes propose was not drawn: dropped above temperature 0, and as good as any at 0.
    assert list(completion.token_ids) == plain(babble, b"x", 6, seed=1)
    assert [one.acceptance for one in verifier.opened] == [TRAVERSAL]
    if temperature:
        assert [[one.acceptance for one in drafter.opened] for drafter in drafters] == [[], [TRAVERSAL], []]
        assert completion.speculation.draft_tokens == 0
    else:
        assert [len(drafter.opened) for drafter in drafters] == [1, 1, 1]


async def test_more_tokens_than_the_context_has_room_for_end_with_the_context(client: Client) -> None:
    prompt = [1] * (CONTEXT - 5)
    completion = await client.generate(prompt, Options(max_tokens=50, seed=3))
    assert list(completion.token_ids) == plain(babble, prompt, 5, seed=3)
    assert completion.finish_reason == "context_length"


async def test_text_and_token_ids_can_be_switched_off(client: Client) -> None:
    request = build_request("ab", Options(max_tokens=5, seed=1))
    request.response.text = False
    no_text = await client.send(request)
    request.response.text, request.response.token_ids = True, False
    no_ids = await client.send(request)
    assert (no_text.text, len(no_text.token_ids)) == ("", 5)
    assert (len(no_ids.text), no_ids.token_ids) == (5, ())
    assert no_ids.usage.completion_tokens == 5


async def test_the_first_message_has_the_id_and_the_seed_and_the_last_alone_the_rest(client: Client) -> None:
    request = build_request("ab", Options(max_tokens=30, seed=5))
    request.request_id = "mine"
    messages = [message async for message in client._stub.Generate(request, timeout=10)]
    assert (messages[0].request_id, messages[0].seed) == ("mine", 5)
    assert not any(message.request_id for message in messages[1:])
    assert not any(message.HasField("finished") or message.HasField("usage") for message in messages[:-1])
    assert messages[-1].HasField("speculation")
    assert messages[-1].HasField("timing")


SAID = "naïve 😀 text, then STOP and more"
PROMPT = "say: "


@pytest.mark.parametrize("depth", [0, 1, 3, 6], ids="drafts of {}".format)
@pytest.mark.parametrize("stop", ["STOP", "xt, th", "😀", "S", "absent"])
async def test_text_ends_before_a_stop_string_across_token_and_round_boundaries(
    start_fakes: StartFakes, stop: str, depth: int
) -> None:
    target = script(SAID, len(PROMPT))
    drafter = FakeDrafter(propose=perfect(target, depth))
    async with start_fakes(FakeVerifier(target=target), drafter, linger_ms=100) as (client, _):
        completion = await client.generate(PROMPT, Options(stop=(stop,)))
    before, found, _ = SAID.partition(stop)
    assert completion.text == before
    if found:
        assert (completion.finish_reason, completion.stop_match) == ("stop", stop)
        assert bytes(completion.token_ids).decode() == before + stop
    else:
        assert (completion.finish_reason, completion.stop_match) == ("eos", None)
        assert completion.token_ids[-1] == EOS


async def test_a_stop_token_ends_the_output_and_is_not_in_its_text(start_fakes: StartFakes) -> None:
    target = script("one, two", len(PROMPT))
    request = build_request(PROMPT)
    request.stopping.stop_token_ids.append(ord(","))
    async with start_fakes(FakeVerifier(target=target), FakeDrafter(propose=perfect(target))) as (client, _):
        completion = await client.send(request)
    assert completion.text == "one"
    assert bytes(completion.token_ids) == b"one,"
    assert (completion.finish_reason, completion.stop_match) == ("stop", ",")


@pytest.mark.parametrize("cut", [1, 3, 4, 8, 12, 22])
@pytest.mark.parametrize("depth", [0, 3], ids="drafts of {}".format)
async def test_an_interrupted_output_is_resumed_without_lost_or_repeated_tokens_or_text(
    start_fakes: StartFakes, cut: int, depth: int
) -> None:
    target = script(SAID, len(PROMPT))
    verifier = FakeVerifier(target=target)
    async with start_fakes(verifier, FakeDrafter(propose=perfect(target, depth)), linger_ms=100) as (client, _):
        received, text = await interrupted(client, cut)
        rest = await client.generate(PROMPT, Options(resume_token_ids=tuple(received), stop=("STOP",)))
        whole = await client.generate(PROMPT, Options(stop=("STOP",)))
    assert (*received, *rest.token_ids) == whole.token_ids
    assert text + rest.text == whole.text == SAID.partition("STOP")[0]
    assert rest.usage.completion_tokens == len(rest.token_ids)
    assert verifier.opened[1].resumed_tokens == len(received)


async def interrupted(client: Client, cut: int) -> tuple[list[int], str]:
    """Tokens and text of a call that breaks off after at least `cut` tokens."""
    received: list[int] = []
    text = ""
    stream = client.stream(PROMPT, Options(stop=("STOP",)))
    chunks = aiter(stream)
    while len(received) < cut:
        chunk = await anext(chunks)
        received.extend(chunk.token_ids)
        text += chunk.text
    stream.cancel()
    return received, text


async def test_resuming_what_had_ended_already_only_finishes_it(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier(target=script("a STOP", len(PROMPT)))
    async with start_fakes(verifier) as (client, _):
        by_eos = await client.generate(PROMPT, Options(resume_token_ids=(*b"a STOP", EOS)))
        by_text = await client.generate(PROMPT, Options(resume_token_ids=tuple(b"a STOP"), stop=("STOP",)))
        by_length = await client.generate(PROMPT, Options(resume_token_ids=tuple(b"a ST"), max_tokens=4))
        to_the_brim = tuple(b"a" * (CONTEXT - len(PROMPT)))
        by_context = await client.generate(PROMPT, Options(resume_token_ids=to_the_brim))
    assert (by_length.finish_reason, by_length.token_ids, by_length.text) == ("length", (), "")
    assert (by_context.finish_reason, by_context.token_ids) == ("context_length", ())
    assert (by_eos.finish_reason, by_eos.token_ids, by_eos.text) == ("eos", (), "")
    assert (by_text.finish_reason, by_text.stop_match, by_text.text) == ("stop", "STOP", "")
    assert not verifier.opened


async def test_the_verifier_reads_the_grammar_and_drafters_are_not_sent_it(start_fakes: StartFakes) -> None:
    verifier, drafter = FakeVerifier(), FakeDrafter()
    async with start_fakes(verifier, drafter) as (client, _):
        await client.generate("x", Options(max_tokens=3, temperature=0.5, seed=1, json_schema={"const": 1}))
        await client.generate("x", Options(max_tokens=3, temperature=0.5, seed=1, regex="1"))
    assert [one.sampling.grammar.json_schema for one in verifier.opened] == ['{"const": 1}', ""]
    assert [one.sampling.grammar.regex for one in verifier.opened] == ["", "1"]
    assert [one.sampling.temperature for one in drafter.opened] == [0.5, 0.5]
    assert not any(one.sampling.HasField("grammar") for one in drafter.opened)
