"""Requests from names and values, whatever part of the message holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message

from coppice.v1.inference_pb2 import GenerateRequest, SpeculationPolicy, TokenIds

Prompt = str | Sequence[int]

OFF = SpeculationPolicy.MODE_OFF
AUTO = SpeculationPolicy.MODE_AUTO
FORCED = SpeculationPolicy.MODE_FORCED


def build(prompt: Prompt, **knobs: Any) -> GenerateRequest:
    """A request for a prompt, given as text or as token ids; knobs as in `varied`."""
    request = GenerateRequest()
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.token_ids.CopyFrom(TokenIds(ids=prompt))
    return varied(request, **knobs)


def varied(request: GenerateRequest, **knobs: Any) -> GenerateRequest:
    """A copy with other values of some fields: of the request itself or of one of its parts.

    Raises ValueError if no part has a field of that name.
    """
    copy = GenerateRequest()
    copy.CopyFrom(request)
    for name, value in knobs.items():
        part = _holder(copy, name)
        part.ClearField(name)
        part.MergeFrom(type(part)(**{name: value}))
        # A part whose only value is a default must still be there.
        if part is not copy:
            part.SetInParent()
    return copy


def described(request: GenerateRequest) -> str:
    """The request on one line, as JSON that gRPC tools take."""
    return MessageToJson(request, indent=None, preserving_proto_field_name=True, ensure_ascii=False)


def _holder(request: GenerateRequest, name: str) -> Message:
    parts = (request, request.sampling, request.stopping, request.speculation, request.response)
    for part in parts:
        if name in part.DESCRIPTOR.fields_by_name:
            return part
    raise ValueError(f"no part of a request has a field {name}")
