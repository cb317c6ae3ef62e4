"""Size limits on fields of a message, checked in its bytes before parsing.

Parsers create an object per list entry: a message of a few MiB can hold a million strings, which take many times their
length in memory. Only lengths of fields are read, and those of nested fields with a limit.
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

# Smaller messages are not checked: their objects are few.
LARGE_BYTES = 64 * 1024
# Most bytes of a tag plus length, of an id, and of an entry of an unpacked list of ids.
HEAD_BYTES = 10
ID_BYTES = 5
LISTED_ID_BYTES = ID_BYTES + 1
# A float outside a list, and all scalar fields of a message together.
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
# Trees have a few dozen nodes of about 20 bytes, or 200 with distributions.
TREE_BYTES = 1024 * 1024
# Messages have a few dozen fields; each one read takes time.
MAX_FIELDS = 4096
# Fields read of an oversized part to name the largest.
_MOST_LOOKED_AT = 2048
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5


@dataclass
class _MessagePart:
    """A message or field: its size limit in bytes (None: none), and its nested fields."""

    name: str
    descriptor: Any  # google.protobuf.descriptor.Descriptor, or None for a scalar field
    most: int | None = None
    parts: dict[int, _MessagePart] = field(default_factory=dict)


class MessageSizes:
    """Size limits by path, such as `open.sampling`; fields without a limit are not read.

    At most MAX_FIELDS fields are allowed on the levels read: a packed list counts as one, an unpacked list as one per
    entry.
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
        """Check a message of more than LARGE_BYTES bytes.

        Raises:
            InvalidRequestError: a field is too large, there are too many fields, or the bytes are not a message.
        """
        if len(data) <= LARGE_BYTES:
            return
        try:
            _Scan(data).go_through(self._whole, 0, len(data))
        except IndexError:
            raise InvalidRequestError("request", "is not a message of this method") from None


class _Scan:
    """Reader of one message; reading beyond its end raises IndexError."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._num_fields = 0
        # Sizes by field, summed over repetitions.
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
        """Number of the field at `at`, and start and end of its content (empty unless length-delimited)."""
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
        else:  # a group, which our messages do not use
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
        """Largest field of a part, among the first ones."""
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
    """Checks messages of methods before they are parsed.

    `sizes` are keyed by full method name, such as "/coppice.v1.InferenceService/Generate". A refused unary request
    reaches the method as an InvalidRequestError in place of the message (see `unreadable.check_request`); a refused
    message of a stream is raised where it is read.
    """

    def __init__(self, sizes: Mapping[str, MessageSizes]) -> None:
        self._sizes = dict(sizes)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler's deserializer."""
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
