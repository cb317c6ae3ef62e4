"""The mistakes that other inference servers have had a CVE for, one test or more for each class.

`docs/security.md` lists the classes, with the tests elsewhere that belong to them.
"""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from coppice.core.chat import ChatTemplate
from coppice.core.errors import InvalidRequestError, UnsupportedError
from coppice.core.grammar import Grammar, GrammarKind
from coppice.core.tokenizer import TargetTokenizer
from coppice.net import rpc
from coppice.v1 import drafter_pb2, inference_pb2, sampling_pb2, verifier_pb2
from drafter_svc.config import DrafterConfig
from orchestrator.api.tenant_usage import keep_limits
from orchestrator.api.tenants import Tenant
from orchestrator.api.validation import certain_tokens, validate, wanted_outputs
from orchestrator.config import Config
from orchestrator.peers.verifier_client import VerifierInfo
from tests.conftest import StartFakes
from tests.fakes import FakeVerifier
from tests.toy_deployment import at_once
from tests.toy_target import CONTEXT, EOS, FINGERPRINT, MODEL, TOKENIZER_JSON, VOCAB
from verifier_svc.config import VerifierConfig
from verifier_svc.grammar.matcher import GrammarVocabulary

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "models"
INFO = VerifierInfo(
    model=MODEL,
    tokenizer_fingerprint=FINGERPRINT,
    vocab_size=VOCAB,
    max_context_tokens=CONTEXT,
    eos_token_ids=(EOS,),
    max_nodes=64,
    exactness=sampling_pb2.EXACTNESS_STRICT,
    version="",
    shared_block_tokens=16,
)
TOKENIZER = TargetTokenizer(TOKENIZER_JSON)
Request = inference_pb2.GenerateRequest
LIMITED = Tenant("stranger", has_token=True, max_tokens=100, max_priority=0)


async def take(request: Request) -> None:
    """All that the public API looks at before anything is allocated for a request."""
    wanted_outputs(request, 16)
    certain_tokens(request, CONTEXT)
    await validate(request, INFO, TOKENIZER, ChatTemplate(""), frozenset({"small-lm"}), ["small-lm"], at_once)


MANY = 400_000
OVERSIZED: dict[str, Request] = {
    "token_ids": Request(token_ids=inference_pb2.TokenIds(ids=[1] * MANY)),
    "resume_token_ids": Request(prompt="x", resume_token_ids=[1] * MANY),
    "sampling.logit_bias": Request(
        prompt="x", sampling=sampling_pb2.SamplingParams(logit_bias=dict.fromkeys(range(MANY), 1.0))
    ),
    "sampling.allowed_token_ids": Request(
        prompt="x", sampling=sampling_pb2.SamplingParams(allowed_token_ids=[1] * MANY)
    ),
    "sampling.bad_token_ids": Request(prompt="x", sampling=sampling_pb2.SamplingParams(bad_token_ids=[1] * MANY)),
    "stopping.stop_strings": Request(prompt="x", stopping=sampling_pb2.StoppingOptions(stop_strings=["x"] * MANY)),
    "stopping.stop_token_ids": Request(prompt="x", stopping=sampling_pb2.StoppingOptions(stop_token_ids=[1] * MANY)),
    "speculation.sources": Request(
        prompt="x", speculation=inference_pb2.SpeculationPolicy(sources=["small-lm"] * MANY)
    ),
    "messages": Request(
        messages=inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="user", content="x")] * MANY)
    ),
    "messages.tools": Request(
        messages=inference_pb2.ChatMessages(
            messages=[inference_pb2.ChatMessage(role="user", content="x")], tools=["{}"] * MANY
        )
    ),
    "messages.tool_calls": Request(
        messages=inference_pb2.ChatMessages(
            messages=[inference_pb2.ChatMessage(role="user", tool_calls=[inference_pb2.ToolCall(name="f")] * MANY)]
        )
    ),
    "prompt": Request(prompt="x" * (4 * MANY)),
    "cache_salt": Request(prompt="x", cache_salt="x" * MANY),
    "sampling.grammar.regex": Request(
        prompt="x", sampling=sampling_pb2.SamplingParams(grammar=sampling_pb2.Grammar(regex="x" * MANY))
    ),
}


# Lists that are all there is of an input.
WHOLE_INPUTS = ("coppice.v1.TokenIds.ids", "coppice.v1.ChatMessages.messages")


def repeated_fields(descriptor: Descriptor, prefix: str = "") -> Iterator[str]:
    for field in descriptor.fields:
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if field.is_repeated or is_map:
            yield prefix.removesuffix(".") if field.full_name in WHOLE_INPUTS else f"{prefix}{field.name}"
        elif field.message_type is not None:
            yield from repeated_fields(field.message_type, f"{prefix}{field.name}.")


def test_every_list_that_a_request_may_have_is_tried() -> None:
    assert set(repeated_fields(Request.DESCRIPTOR)) <= OVERSIZED.keys()


@pytest.mark.parametrize("field", OVERSIZED)
async def test_what_is_too_large_is_refused_before_it_is_copied(field: str) -> None:
    request = OVERSIZED[field]
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError) as caught:
            await take(request)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.field == field
    # A pointer to each entry would be eight times as much; of texts Python makes one string to look at.
    assert peak < (5 * MANY if isinstance(getattr(request, field, None), str) or "grammar" in field else MANY)


EXTREMES: dict[int, list[Any]] = {
    FieldDescriptor.CPPTYPE_UINT32: [0, 1, 2**31 - 1, 2**31, 2**32 - 1],
    FieldDescriptor.CPPTYPE_UINT64: [0, 1, 2**63 - 1, 2**63, 2**64 - 1],
    FieldDescriptor.CPPTYPE_INT32: [0, -1, 2**31 - 1, -(2**31)],
    FieldDescriptor.CPPTYPE_INT64: [0, -1, 2**63 - 1, -(2**63)],
    FieldDescriptor.CPPTYPE_ENUM: [0, -1, 1, 77, 2**31 - 1],
    FieldDescriptor.CPPTYPE_FLOAT: [0.0, -0.0, -1.0, 1e-45, 3e38, float("inf"), float("-inf"), float("nan")],
    FieldDescriptor.CPPTYPE_DOUBLE: [0.0, -0.0, -1.0, 5e-324, 1e308, float("inf"), float("-inf"), float("nan")],
    FieldDescriptor.CPPTYPE_STRING: ["", "\x00", "\uffff", "é" * 40, "../../etc", "%s{0}${x}"],
    FieldDescriptor.CPPTYPE_BOOL: [False, True],
}


def set_extreme(message: Message, field: FieldDescriptor, value: Any) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        getattr(message, field.name)[2**32 - 1] = value
    elif field.is_repeated:
        getattr(message, field.name).append(value)
    else:
        setattr(message, field.name, value)


def extremes(request: Request, message: Message) -> Iterator[Request]:
    """The request with one field of a message of it at one of its extremes."""
    for field in message.DESCRIPTOR.fields:
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if field.message_type is not None and not is_map:
            child = getattr(message, field.name)
            if field.is_repeated:
                child = child.add()
            child.SetInParent()
            yield from extremes(request, child)
            message.ClearField(field.name)
            continue
        kind = field.message_type.fields_by_name["value"].cpp_type if is_map else field.cpp_type
        for value in EXTREMES[kind]:
            set_extreme(message, field, value)
            yield request
            message.ClearField(field.name)


async def test_every_field_at_its_extremes_is_taken_or_refused_by_name() -> None:
    """Numbers that overflow, infinities, none at all: never any other error, whatever else the request says."""
    num_refused = num_taken = 0
    fields = set()
    for base in (Request(prompt="x"), Request(prompt="x", num_outputs=2), Request()):
        request = Request()
        request.CopyFrom(base)
        for one in extremes(request, request):
            tried = Request()
            tried.CopyFrom(one)
            if base.prompt and not tried.WhichOneof("input"):
                tried.prompt = "x"
            try:
                keep_limits(tried, LIMITED)
                await take(tried)
            except InvalidRequestError as error:
                num_refused += 1
                fields.add(error.field)
            except UnsupportedError:
                num_refused += 1
            else:
                num_taken += 1
    assert num_refused > 100
    assert len(fields) > 20
    assert all(fields)
    assert num_taken > 100


BOMBS = [
    "(((((a{1,99}){1,99}){1,99}){1,99}){1,99}){1,99}",
    "(a|a?)+" * 200,
    "((a*)*)*b",
    "[ab]*a[ab]{900}",
    "(" * 20_000 + "a" + ")" * 20_000,
    "|".join(f"a{{{n}}}b" for n in range(1, 400)),
]


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary((MODELS / "target" / "tokenizer.json").read_bytes(), 4096, [0])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("pattern", BOMBS, ids=lambda pattern: pattern[:12])
def test_a_regular_expression_that_explodes_costs_a_bounded_number_of_steps(
    pattern: str, vocabulary: GrammarVocabulary
) -> None:
    try:
        state = vocabulary.begin(vocabulary.compile(Grammar(GrammarKind.REGEX, pattern)), [], [0])
        for _ in range(20):
            [token, *_] = state.allowed.nonzero()[0].tolist() or [None]
            if token is None or token == 0:
                break
            state.push(token)
    except InvalidRequestError as error:
        assert error.field == "sampling.grammar.regex"  # noqa: PT017 both ends are right


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "schema",
    [
        '{"properties":{"a":' * 3_000 + "{}" + "}}" * 3_000,
        '{"anyOf":[' * 3_000 + "{}" + "]}" * 3_000,
        '{"$defs":{"a":{"allOf":[{"$ref":"#/$defs/a"},{"$ref":"#/$defs/a"}]}},"$ref":"#/$defs/a"}',
        '{"type":"string","minLength":4000000000,"maxLength":4000000000}',
        '{"type":"array","minItems":4000000000}',
        '{"enum":[' + ",".join(map(str, range(9_000))) + "]}",
    ],
    ids=["deep", "wide", "circular", "long", "many", "enum"],
)
def test_a_schema_that_explodes_is_compiled_or_refused(schema: str, vocabulary: GrammarVocabulary) -> None:
    try:
        vocabulary.begin(vocabulary.compile(Grammar(GrammarKind.JSON_SCHEMA, schema)), [], [0])
    except InvalidRequestError as error:
        assert error.field == "sampling.grammar.json_schema"  # noqa: PT017 both ends are right


def test_no_message_has_a_field_that_names_something_to_fetch() -> None:
    """No address, no path, no picture: there is nothing to send a server of ours after."""
    fetched = re.compile(r"ur[il]|path|file|host|image|audio|media|webhook|callback|template|tensor|embed")
    names = [
        field.full_name
        for file in (inference_pb2, sampling_pb2, verifier_pb2, drafter_pb2)
        for message in file.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
    ]
    assert len(names) > 100
    found = [name for name in names if fetched.search(name.rpartition(".")[2])]
    # The checkpoint's own, which its verifier tells the orchestrator.
    assert found == ["coppice.v1.GetTokenizerResponse.chat_template"]


def test_no_serving_code_fetches_and_templates_are_filled_in_a_sandbox() -> None:
    libraries = re.compile(r"\s*(import|from) (jinja2|urllib\.request|urllib3|requests|httpx|aiohttp|http\.client)\b")
    for folder in ("coppice", "orchestrator", "verifier_svc", "drafter_svc"):
        # The sandbox; its own tests try to leave it. At start the proxy is looked up, through which models are fetched.
        own = {ROOT / "coppice" / "core" / "chat.py", ROOT / "coppice" / "checkpoints" / "hub.py"}
        apart = {*own, *(ROOT / "coppice" / "lab").rglob("*.py")}
        for path in set((ROOT / folder).rglob("*.py")) - apart:
            text = path.read_text()
            assert "apply_chat_template" not in text, path
            assert not [line for line in text.splitlines() if libraries.match(line)], path


@pytest.mark.parametrize(
    "config", [Config(verifier_address="v:1"), VerifierConfig(model="m"), DrafterConfig(model="m")]
)
def test_services_listen_where_nobody_else_reaches_them_unless_told_otherwise(config: Any) -> None:
    assert rpc.is_loopback(config.listen_address)


@pytest.mark.parametrize(
    ("address", "is_loopback"),
    [
        ("127.0.0.1:1", True),
        ("127.8.8.8:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("unix:/x", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.1.2.3:1", False),
        ("127.example.org:1", False),
    ],
)
def test_a_loopback_address_is_told_from_others(address: str, is_loopback: bool) -> None:
    assert rpc.is_loopback(address) == is_loopback


async def test_metadata_without_end_is_refused(start_fakes: StartFakes) -> None:
    async with (
        start_fakes(FakeVerifier()) as (client, orchestrator),
        rpc.open_channel(orchestrator.address) as channel,
    ):
        call = channel.unary_unary("/coppice.v1.InferenceService/GetModelInfo")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"", metadata=(("x-large", "x" * 100_000),), timeout=10)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        # Others go on.
        assert (await client.model_info()).model == MODEL


async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []

    def encode(text: str, *, adds_special: bool = True) -> list[int]:
        encoded.append(text)
        return [1] * CONTEXT

    monkeypatch.setattr(TOKENIZER, "encode", encode)
    with pytest.raises(InvalidRequestError, match=r"prompt: at least [0-9]+ tokens leave no room in the context"):
        await take(Request(prompt="a" * (2 * CONTEXT)))
    assert not encoded
    with pytest.raises(InvalidRequestError, match=f"prompt: {CONTEXT} tokens leave no room in the context"):
        await take(Request(prompt="a"))
    assert encoded == ["a"]
