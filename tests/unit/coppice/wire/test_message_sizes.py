"""Messages whose fields are too large are refused by their bytes, whatever they would become."""

from __future__ import annotations

import pytest

from coppice.core.errors import InvalidRequestError
from coppice.v1 import inference_pb2, sampling_pb2, verifier_pb2
from coppice.wire.message_sizes import LARGE_BYTES, MAX_FIELDS, MessageSizes

Request = inference_pb2.GenerateRequest
SIZES = MessageSizes(Request, {"prompt": 200_000, "sampling": 90_000, "stopping": 10_000, "resume_token_ids": 200_000})
NESTED = MessageSizes(verifier_pb2.VerifyRequest, {"open.sampling": 90_000, "open.prompt_token_ids": 200_000})


def stopping(number: int) -> sampling_pb2.StoppingOptions:
    return sampling_pb2.StoppingOptions(stop_strings=["x"] * number)


@pytest.mark.parametrize(
    "request_message",
    [
        Request(prompt="x" * 150_000, stopping=stopping(3000)),
        Request(token_ids=inference_pb2.TokenIds(ids=[7] * 300_000)),
        Request(prompt="x", resume_token_ids=[7] * 100_000, priority=-1),
    ],
)
def test_what_keeps_the_limits_may_be_read(request_message: Request) -> None:
    data = request_message.SerializeToString()
    assert len(data) > LARGE_BYTES
    SIZES.check(data)


@pytest.mark.parametrize(
    ("request_message", "name"),
    [
        (Request(prompt="x" * 200_001), "prompt"),
        (Request(prompt="x", stopping=stopping(100_000)), "stopping.stop_strings"),
        (
            Request(sampling=sampling_pb2.SamplingParams(logit_bias=dict.fromkeys(range(20_000), 1.0))),
            "sampling.logit_bias",
        ),
        (
            Request(sampling=sampling_pb2.SamplingParams(grammar=sampling_pb2.Grammar(regex="x" * 100_000))),
            "sampling.grammar",
        ),
        (Request(resume_token_ids=[7] * 200_001), "resume_token_ids"),
    ],
)
def test_a_field_that_is_too_large_is_named(request_message: Request, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="at most") as caught:
        SIZES.check(request_message.SerializeToString())
    assert caught.value.field == name


def test_a_small_message_is_not_looked_at() -> None:
    SIZES.check(Request(prompt="x", stopping=stopping(20_000)).SerializeToString())
    SIZES.check(b"\xff" * LARGE_BYTES)


def test_pieces_of_a_field_count_together() -> None:
    """A parser merges them."""
    piece = Request(stopping=stopping(2_000)).SerializeToString()
    with pytest.raises(InvalidRequestError) as caught:
        SIZES.check(piece * 20)
    assert caught.value.field == "stopping.stop_strings"


def test_parts_with_limits_are_gone_through() -> None:
    sampling = sampling_pb2.SamplingParams(bad_token_ids=[7] * 95_000)
    opening = verifier_pb2.OpenSequence(prompt_token_ids=[1] * 100_000, sampling=sampling)
    with pytest.raises(InvalidRequestError) as caught:
        NESTED.check(verifier_pb2.VerifyRequest(sequence_id=1, open=opening).SerializeToString())
    assert caught.value.field == "open.sampling.bad_token_ids"
    opening.sampling.Clear()
    NESTED.check(verifier_pb2.VerifyRequest(sequence_id=1, open=opening).SerializeToString())


@pytest.mark.parametrize("entry", [b"\x40\x01", b"\x78\x01", b"\x7a\x00", b"\x7d\0\0\0\0", b"\x79" + bytes(8)])
def test_there_are_only_so_many_fields(entry: bytes) -> None:
    """Of a list that is not packed, of fields that nobody knows: to go through a million takes long."""
    padding = Request(prompt="x" * LARGE_BYTES).SerializeToString()
    SIZES.check(entry * (MAX_FIELDS - 1) + padding)
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_FIELDS} fields") as caught:
        SIZES.check(entry * MAX_FIELDS + padding)
    assert caught.value.field == "request"


@pytest.mark.parametrize(
    "end",
    [
        b"\x0b\x0c",  # a group
        b"\x0e",  # a kind of field that there is not
        b"\x12\x05x",  # cut off
        b"\x2a\xff\xff\xff\xff\x0f",  # longer than the message
        b"\x12",
        b"\x80",
        b"\x08" + b"\xff" * 11,
        b"\x7d\0",
    ],
)
def test_bytes_that_are_no_message_are_refused(end: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="is not a message of this method"):
        SIZES.check(Request(prompt="x" * LARGE_BYTES).SerializeToString() + end)
