"""Messages that nobody should send: made from a seed, with every field's awkward values, or mutated valid ones."""

from __future__ import annotations

import math
import random
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from coppice.v1 import drafter_pb2, inference_pb2, sampling_pb2, tree_pb2, verifier_pb2

Wire = TypeVar("Wire", bound=Message)

PROMPT = (4, 8, 15, 16, 23)
# Sequences that streams speak of: few, so that ids come twice and messages meet what is open.
SEQUENCE_IDS = (0, 1, 2, 3, 2**64 - 1)
_DEPTH = 5
_SMALL = (0, 1, 2, 3, 5, 7, 8, 16, 60, 61, 64, 100)
_UNSIGNED = (*_SMALL, 255, 256, 257, 65_536, 2**31 - 1, 2**31, 2**32 - 1)
_SIGNED = (*_SMALL, -1, -2, -7, -(2**31), 2**31 - 1)
_LONG = (*_UNSIGNED, 2**63, 2**64 - 1)
_FLOATS = (0.0, -0.0, 0.5, 0.9, 1.0, 2.0, -1.0, 1e-30, 3e38, -3e38, math.nan, math.inf, -math.inf)
_TEXTS = (
    "",
    "a",
    "def f(x):",
    "\0",
    "\U0001f333 \u202e",
    "x" * 300,
    '{"type": "object"}',
    "[a-z]{3}",
    "((",
    "a" * 20_000,
)
_GRAMMARS = (
    "[a-z]+",
    "(",
    "(a{1000}){1000}",
    "{}",
    '{"type": "string"}',
    '{"$ref": "#"}',
    '{"type": "nothing"}',
    "[" * 400,
    "\0",
    '{"minItems": -1}',
    '{"enum": []}',
)
_KINDS = {
    FieldDescriptor.CPPTYPE_UINT32: _UNSIGNED,
    FieldDescriptor.CPPTYPE_INT32: _SIGNED,
    FieldDescriptor.CPPTYPE_UINT64: _LONG,
    FieldDescriptor.CPPTYPE_INT64: _SIGNED,
    FieldDescriptor.CPPTYPE_FLOAT: _FLOATS,
    FieldDescriptor.CPPTYPE_DOUBLE: _FLOATS,
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    # Enums of proto3 are open: any number arrives as it is.
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 3, 99, -1, 2**31 - 1),
}


def random_message(kind: type[Wire], chance: random.Random) -> Wire:
    """A message with some of its fields set to anything that the wire can carry."""
    message = kind()
    _fill(message, chance, _DEPTH)
    return message


def mutated(valid: Wire, chance: random.Random) -> Wire:
    """A valid message with one to three things wrong with it, or right by luck."""
    message = type(valid)()
    message.CopyFrom(valid)
    for _ in range(chance.randint(1, 3)):
        _edit(message, chance)
    return message


def mangled(valid: Wire, chance: random.Random) -> Wire | None:
    """What a receiver reads from a message whose bytes were changed; None where that is no message."""
    data = mangled_bytes(valid.SerializeToString(), chance)
    try:
        return type(valid).FromString(data)
    except DecodeError:
        return None


def mangled_bytes(data: bytes, chance: random.Random) -> bytes:
    """Bytes with some changed, missing, or more of them."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) + 1)
        choice = chance.randrange(4)
        if choice == 0 and at < len(changed):
            changed[at] = chance.randrange(256)
        elif choice == 1:
            del changed[at : at + chance.randint(1, 8)]
        elif choice == 2:
            changed[at:at] = chance.randbytes(chance.randint(1, 8))
        else:
            changed[at:at] = changed[: chance.randint(0, 32)]
    return bytes(changed)


def hostile(kind: type[Wire], chance: random.Random) -> Wire | None:
    """One message of the given kind: made up, mutated, mangled or valid; None where its bytes cannot be read."""
    valid = valid_message(kind, chance)
    choice = chance.random()
    if choice < 0.25:
        return random_message(kind, chance)
    if choice < 0.75:
        return mutated(valid, chance)
    return mangled(valid, chance) if choice < 0.9 else valid


def valid_message(kind: type[Wire], chance: random.Random) -> Wire:
    """One that a peer of ours may send, more or less where it belongs."""
    message: Wire = _VALID[kind](chance)
    return message


def _fill(message: Message, chance: random.Random, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if chance.random() < 0.5:
            _set(message, field, chance, depth)


def _set(message: Message, field: Any, chance: random.Random, depth: int) -> None:
    """Give a field a value, or several."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        for _ in range(_count(chance, depth)):
            getattr(message, field.name)[chance.choice(_UNSIGNED)] = chance.choice(_FLOATS)
    elif field.is_repeated:
        for _ in range(_count(chance, depth)):
            if field.message_type is None:
                getattr(message, field.name).append(_value(field, chance))
            elif depth:
                _fill(getattr(message, field.name).add(), chance, depth - 1)
    elif field.message_type is None:
        setattr(message, field.name, _value(field, chance))
    elif depth:
        child = getattr(message, field.name)
        child.SetInParent()
        _fill(child, chance, depth - 1)


def _value(field: Any, chance: random.Random) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return chance.randbytes(chance.choice((0, 1, 64, 4096)))
        return chance.choice(_GRAMMARS if field.containing_type.name == "Grammar" else _TEXTS)
    return chance.choice(_KINDS[field.cpp_type])


def _count(chance: random.Random, depth: int) -> int:
    """How many entries: mostly few, sometimes far too many, but not of lists in lists: no door takes such sizes."""
    if depth < _DEPTH - 1:
        return chance.choice((0, 1, 2, 3))
    return chance.choice((0, 1, 2, 3, 8, 8, 70)) if chance.random() < 0.98 else chance.choice((500, 5000))


def _edit(message: Message, chance: random.Random) -> None:
    """Change one thing, at any depth."""
    inner = [value for field, value in message.ListFields() if field.message_type and not field.is_repeated]
    if inner and chance.random() < 0.7:
        _edit(chance.choice(inner), chance)
        return
    if not message.DESCRIPTOR.fields:
        return
    set_ones = [field for field, _ in message.ListFields()]
    field: Any = chance.choice(set_ones if set_ones and chance.random() < 0.7 else message.DESCRIPTOR.fields)
    if field.is_repeated and len(getattr(message, field.name)) and not field.message_type:
        _edit_list(getattr(message, field.name), field, chance)
    elif chance.random() < 0.25:
        message.ClearField(field.name)
    else:
        _set(message, field, chance, _DEPTH)


def _edit_list(values: Any, field: Any, chance: random.Random) -> None:
    """Parents become cycles, ids leave the vocabulary, lengths no longer fit."""
    choice = chance.randrange(5)
    at = chance.randrange(len(values))
    if choice == 0:
        values[at] = _value(field, chance)
    elif choice == 1:
        del values[at]
    elif choice == 2:
        values.insert(at, values[-1])
    elif choice == 3:
        values.reverse()
    else:
        values.extend(list(values) * chance.choice((1, 3, 30)))


def _tree(chance: random.Random) -> tree_pb2.TokenTree:
    count = chance.choice((1, 3, 6))
    is_deep = chance.random() < 0.5
    return tree_pb2.TokenTree(
        token_ids=[(7 * node + 3) % 61 for node in range(count)],
        parents=[node - 1 if is_deep else (node - 1) // 2 for node in range(count)],
        log_probs=[-0.25 * (node + 1) for node in range(count)],
        sources=[1] * count,
        source_names=["small-lm"],
    )


def _sampled_tree() -> tree_pb2.TokenTree:
    """Two draws of the root's children, from two tokens each."""
    return tree_pb2.TokenTree(
        token_ids=[3, 9],
        parents=[-1, -1],
        log_probs=[-0.7, -0.7],
        distribution_sizes=[2, 0, 0],
        distribution_token_ids=[3, 9],
        distribution_weights=[0.5, 0.5],
    )


def _sampling(chance: random.Random) -> sampling_pb2.SamplingParams:
    message = sampling_pb2.SamplingParams(temperature=chance.choice((0.0, 1.0)), seed=chance.randrange(100))
    if chance.random() < 0.3:
        message.top_k, message.top_p, message.repetition_penalty = 20, 0.9, 1.1
        message.logit_bias[7] = 2.0
    if chance.random() < 0.05:
        message.grammar.regex = "[a-z]{1,9}"
    return message


def _stopping(chance: random.Random) -> sampling_pb2.StoppingOptions:
    stop = ["zz"] if chance.random() < 0.3 else []
    return sampling_pb2.StoppingOptions(max_tokens=chance.randint(1, 12), stop_strings=stop)


def _acceptance(chance: random.Random) -> Any:
    return chance.choice(sampling_pb2.AcceptanceRule.values())


def _generate(chance: random.Random) -> inference_pb2.GenerateRequest:
    mode: Any = chance.randrange(4)
    request = inference_pb2.GenerateRequest(
        request_id=f"fuzz-{chance.randrange(1000)}",
        sampling=_sampling(chance),
        stopping=_stopping(chance),
        response=inference_pb2.ResponseOptions(text=True, token_ids=True, top_log_probs=2),
        speculation=inference_pb2.SpeculationPolicy(mode=mode, acceptance=_acceptance(chance)),
        resume_token_ids=[5] if chance.random() < 0.2 else [],
        priority=0,
        cache_salt="salt",
        num_outputs=chance.choice((1, 1, 2)),
    )
    if chance.random() < 0.5:
        request.prompt = "def add(a, b):"
    else:
        request.token_ids.ids.extend(PROMPT)
    return request


def _verify(chance: random.Random) -> verifier_pb2.VerifyRequest:
    request = verifier_pb2.VerifyRequest(sequence_id=chance.choice(SEQUENCE_IDS))
    choice = chance.random()
    if choice < 0.35:
        request.open.CopyFrom(
            verifier_pb2.OpenSequence(
                prompt_token_ids=PROMPT,
                sampling=_sampling(chance),
                stopping=_stopping(chance),
                acceptance=_acceptance(chance),
                linger_us=chance.choice((0, 0, 500)),
                resumed_tokens=chance.choice((0, 0, 1)),
                cache_salt="salt",
            )
        )
    elif choice < 0.85:
        tree = _sampled_tree() if chance.random() < 0.2 else _tree(chance)
        length, ahead = len(PROMPT) + chance.randrange(8), chance.random() < 0.2
        request.draft.CopyFrom(verifier_pb2.Draft(base_length=length, tree=tree, budget=8, ahead=ahead))
    else:
        request.close.SetInParent()
    return request


def _draft(chance: random.Random) -> drafter_pb2.DraftRequest:
    request = drafter_pb2.DraftRequest(sequence_id=chance.choice(SEQUENCE_IDS))
    choice = chance.random()
    if choice < 0.35:
        request.open.CopyFrom(
            drafter_pb2.OpenDraft(
                prompt_token_ids=PROMPT,
                sampling=_sampling(chance),
                max_nodes=chance.choice((0, 4, 8)),
                acceptance=_acceptance(chance),
                row_multiple=4,
            )
        )
    elif choice < 0.75:
        # The first one fits what has just been opened.
        length = len(PROMPT) + (0 if chance.random() < 0.6 else chance.randrange(8))
        request.outcome.CopyFrom(drafter_pb2.DraftOutcome(base_length=length, token_ids=[3, 5], max_nodes=6))
    elif choice < 0.85:
        request.expect.CopyFrom(drafter_pb2.Expect(base_length=len(PROMPT), tree=_tree(chance)))
    else:
        request.close.SetInParent()
    return request


def _verified(chance: random.Random) -> verifier_pb2.VerifyResponse:
    response = verifier_pb2.VerifyResponse(sequence_id=chance.choice(SEQUENCE_IDS))
    event = chance.choice(("outcome", "finished", "error", "load", "draft_rejected", "draining"))
    if event == "outcome":
        response.outcome.CopyFrom(
            verifier_pb2.Outcome(base_length=5, token_ids=[97, 98], accepted_nodes=[0], draft_nodes=3, pass_rows=4)
        )
    else:
        getattr(response, event).SetInParent()
    return response


def _drafted(chance: random.Random) -> drafter_pb2.DraftResponse:
    response = drafter_pb2.DraftResponse(sequence_id=chance.choice(SEQUENCE_IDS))
    length = len(PROMPT) + chance.randrange(8)
    if chance.random() < 0.3:
        for token_id in range(3, 3 + chance.randrange(4)):
            response.ahead.trees.add(
                base_length=length,
                tree=_tree(chance),
                assumed_token_ids=[5, token_id],
                outcome_log_prob=-chance.random(),
            )
        response.ahead.SetInParent()
        return response
    tree = _sampled_tree() if chance.random() < 0.2 else _tree(chance)
    response.tree.CopyFrom(drafter_pb2.DraftTree(base_length=length, tree=tree, draft_us=9))
    return response


def _tokenize(chance: random.Random) -> inference_pb2.TokenizeRequest:
    request = inference_pb2.TokenizeRequest(token_bytes=chance.random() < 0.5)
    if chance.random() < 0.5:
        request.prompt = "def add(a, b):"
    else:
        request.messages.messages.add(role="user", content="hello")
    return request


_VALID: dict[type[Message], Any] = {
    inference_pb2.GenerateRequest: _generate,
    inference_pb2.GetModelInfoRequest: lambda chance: inference_pb2.GetModelInfoRequest(),
    inference_pb2.TokenizeRequest: _tokenize,
    inference_pb2.DetokenizeRequest: lambda chance: inference_pb2.DetokenizeRequest(token_ids=PROMPT),
    inference_pb2.WatchRoundsRequest: lambda chance: inference_pb2.WatchRoundsRequest(request_id="fuzz-1"),
    verifier_pb2.VerifyRequest: _verify,
    verifier_pb2.VerifyResponse: _verified,
    drafter_pb2.DraftRequest: _draft,
    drafter_pb2.DraftResponse: _drafted,
}
