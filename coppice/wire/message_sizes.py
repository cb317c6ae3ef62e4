"""Limits on the fields of a message, checked in its bytes before it is parsed.

A parser makes something of every entry of a list: a message of a few MiB can hold a million strings, each of which
takes many times its own length in memory. Only the lengths of fields are looked at, and those of a message's parts
where they have a limit, so that little is gone through.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import Message

from coppice.core.errors import InvalidRequestError
from coppice.core.grammar import MAX_GRAMMAR_BYTES
from coppice.core.sampling import MAX_STOP_STRING_BYTES, MAX_STOP_STRINGS, MAX_TOKEN_LIST

# Of a smaller message nothing is looked at: what can be made of it is little, too.
LARGE_BYTES = 64 * 1024
# Most bytes of a tag and a length together, of an id, and of an entry of a list of ids, which need not be packed.
HEAD_BYTES = 10
ID_BYTES = 5
LISTED_ID_BYTES = ID_BYTES + 1
# A float that is not alone in a list, and all numbers of a message that are in none.
FLOAT_BYTES = 5
SCALAR_BYTES = 256
SAMPLING_BYTES = (
    (HEAD_BYTES + LISTED_ID_BYTES + FLOAT_BYTES) * MAX_TOKEN_LIST  # logit_bias
    + 2 * LISTED_ID_BYTES * MAX_TOKEN_LIST
    + MAX_GRAMMAR_BYTES
    + SCALAR_BYTES
)
STOPPING_BYTES = (
    (HEAD_BYTES + MAX_STOP_STRING_BYTES) * MAX_STOP_STRINGS + LISTED_ID_BYTES * MAX_TOKEN_LIST + SCALAR_BYTES
)
# A tree has some tens of nodes, of about 20 bytes each, or 200 where they carry distributions.
TREE_BYTES = 1024 * 1024
# A message has some tens of fields, and each that is looked at takes time.
MAX_FIELDS = 4096
# So many fields of a part that is too large are looked at to say which of them it is.
_MOST_LOOKED_AT = 2048
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5


@dataclass
class _MessagePart:
    """A message or one of its fields: the most bytes that it may have, None for any number, and its own fields."""

    name: str
    descriptor: Any  # google.protobuf.descriptor.Descriptor, or None for what is no message
    most: int | None = None
    parts: dict[int, _MessagePart] = field(default_factory=dict)


class MessageSizes:
    """The most bytes of a message's fields, by path such as `open.sampling`; what has no limit is not looked at.

    At the levels that are looked at there may be MAX_FIELDS fields. A list that is packed, as encoders do, is one; of a
    list that is not each entry is one.
    """

    def __init__(self, kind: type[Message], most_bytes: Mapping[str, int]) -> None:
        self._whole = _MessagePart("", kind.DESCRIPTOR)
        for path, most in most_bytes.items():
            part = self._whole
            for name in path.split("."):
                found = part.descriptor.fields_by_name[name]
                full_name = f"{part.name}.{name}".lstrip(".")
                part = part.parts.setdefault(found.number, _MessagePart(full_name, found.message_type))
            part.most = most

    def check(self, data: bytes) -> None:
        """Look at a message of more than LARGE_BYTES bytes.

        Raises:
            InvalidRequestError: a field is larger than it may be, or there are too many, or the bytes are no message.
        """
        if len(data) <= LARGE_BYTES:
            return
        try:
            _Scan(data).go_through(self._whole, 0, len(data))
        except IndexError:
            raise InvalidRequestError("request", "is no message of this method") from None


class _Scan:
    """One message; reading beyond its end is an IndexError."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._num_fields = 0
        # A field may come more than once, and all of it counts.
        self._bytes: Counter[str] = Counter()

    def go_through(self, part: _MessagePart, at: int, end: int) -> None:
        while at < end:
            self._num_fields += 1
            if self._num_fields > MAX_FIELDS:
                raise InvalidRequestError(part.name or "request", f"has more than {MAX_FIELDS} fields")
            number, begin, at = self._field(at, end)
            own = part.parts.get(number)
            if own is None or begin == at:
                continue
            self._bytes[own.name] += at - begin
            if own.most is not None and self._bytes[own.name] > own.most:
                text = f"is too large: {own.name} has {self._bytes[own.name]} bytes, at most {own.most} are allowed"
                raise InvalidRequestError(self._largest(own, begin, at), text)
            if own.parts:
                self.go_through(own, begin, at)

    def _field(self, at: int, end: int) -> tuple[int, int, int]:
        """Number, and begin and end of the content, of the field at `at`; only what has a length has a content."""
        tag, at = self._varint(at)
        kind = tag & 7
        begin = at
        if kind == _DELIMITED:
            size, begin = self._varint(at)
            at = begin + size
        elif kind == _VARINT:
            _, at = self._varint(at)
            begin = at
        elif kind in (_FIXED32, _FIXED64):
            at = begin = at + (4 if kind == _FIXED32 else 8)
        else:  # a group, which no message of ours has
            raise IndexError
        if at > end:
            raise IndexError
        return tag >> 3, begin, at

    def _varint(self, at: int) -> tuple[int, int]:
        byte = self._data[at]
        at += 1
        if byte < 0x80:
            return byte, at
        value, shift = byte & 0x7F, 7
        while True:
            byte = self._data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
            if shift > 63:
                raise IndexError

    def _largest(self, part: _MessagePart, at: int, end: int) -> str:
        """The field of a part that takes most of it, as far as it is looked at."""
        if part.descriptor is None:
            return part.name
        sizes: Counter[int] = Counter()
        for _ in range(_MOST_LOOKED_AT):
            if at >= end:
                break
            before = at
            number, _, at = self._field(at, end)
            sizes[number] += at - before
        found = part.descriptor.fields_by_number.get(sizes.most_common(1)[0][0])
        return part.name if found is None else f"{part.name}.{found.name}"


class SizeChecks(grpc.aio.ServerInterceptor):
    """Checks the messages of methods before they are parsed.

    `sizes` are by the method's full name, such as "/coppice.v1.InferenceService/Generate". What is refused reaches a
    method with one request as an InvalidRequestError in place of it (`unreadable.check_request`), and is raised where a
    method reads the messages of a stream.
    """

    def __init__(self, sizes: Mapping[str, MessageSizes]) -> None:
        self._sizes = dict(sizes)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Once per call, not per message."""
        handler = await continuation(handler_call_details)
        sizes = self._sizes.get(handler_call_details.method)
        if handler is None or sizes is None:
            return handler
        read = _checked if handler.request_streaming else _checked_or_error
        return handler._replace(request_deserializer=functools.partial(read, sizes, handler.request_deserializer))


def _checked(sizes: MessageSizes, read: Callable[[bytes], Any], data: bytes) -> Any:
    sizes.check(data)
    return read(data)


def _checked_or_error(sizes: MessageSizes, read: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return _checked(sizes, read, data)
    except InvalidRequestError as error:
        return error
