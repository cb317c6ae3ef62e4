"""Messages are followed however their bytes are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.net.frames import DATA, HEADERS, ProtocolError, header_frames, without_padding
from coppice.net.guard.streams import PREFIX_BYTES, SMALL_BYTES, Messages, MessageTooLargeError


def encoded(sizes: list[int]) -> bytes:
    return b"".join(b"\0" + size.to_bytes(4, "big") + b"x" * size for size in sizes)


@given(sizes=st.lists(st.integers(0, 300), max_size=6), cuts=st.lists(st.integers(0, 2000), max_size=12))
def test_messages_are_counted_however_they_are_cut(sizes: list[int], cuts: list[int]) -> None:
    data = encoded(sizes)
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    messages = Messages(300)
    for first, last in itertools.pairwise(places):
        messages.add(data[first:last])
    assert messages.num_complete == len(sizes)
    assert messages.size == 0


def test_a_message_that_is_too_large_is_told_by_its_length_alone() -> None:
    messages = Messages(300)
    messages.add(encoded([300]))
    messages.add(b"\0\0\0\1")
    with pytest.raises(MessageTooLargeError):
        messages.add(b"\x2d")
    assert messages.size == 301


def test_bytes_of_large_messages_are_counted_but_not_of_one_that_is_too_large() -> None:
    messages = Messages(10_000)
    messages.add(encoded([SMALL_BYTES, SMALL_BYTES + 7, 10_000]))
    assert messages.num_large_bytes == SMALL_BYTES + 7 + 10_000
    before = messages.num_large_bytes
    with pytest.raises(MessageTooLargeError):
        messages.add(b"\0\xff\xff\xff\xff")
    assert messages.num_large_bytes == before


def test_bytes_of_large_messages_are_known_before_they_are_consumed() -> None:
    messages = Messages(1 << 20)
    assert messages.large_bytes(encoded([100] * 100)) == 0
    assert messages.large_bytes(encoded([100, 9_000, 100])) == 9_000
    data = encoded([100_000])
    assert messages.large_bytes(data[:16_000]) == 16_000 - PREFIX_BYTES
    assert messages.num_begun == 0
    messages.add(data[:100])
    # Within one, whatever the size of its pieces.
    assert messages.large_bytes(data[100:200]) == 100
    assert Messages(5_000).large_bytes(encoded([4_500, 9_000])) == 4_500


@given(payload=st.binary(max_size=40), padding=st.integers(0, 20))
def test_padding_and_priority_are_taken_off(payload: bytes, padding: int) -> None:
    padded = bytes((padding,)) + payload + b"\0" * padding
    assert without_padding(DATA, 0x8, padded) == payload
    assert without_padding(HEADERS, 0x28, bytes((padding,)) + b"\0" * 5 + payload + b"\0" * padding) == payload


@pytest.mark.parametrize("payload", [b"", b"\x05abcd", b"\xff"])
def test_more_padding_than_payload_is_no_frame(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        without_padding(DATA, 0x8, payload)


@given(value=st.binary(max_size=40_000))
def test_header_blocks_are_read_by_others_as_they_were_written(value: bytes) -> None:
    from hpack import Decoder

    written = header_frames(7, [(b":path", b"/a/b"), (b"x-bin", value)], ends_stream=False)
    block, at = b"", 0
    while at < len(written):
        length = int.from_bytes(written[at : at + 3], "big")
        assert length <= 16384
        block += written[at + 9 : at + 9 + length]
        at += 9 + length
    assert Decoder(100_000).decode(block, raw=True) == [(b":path", b"/a/b"), (b"x-bin", value)]
