"""Values of the prefix cache as bytes: a version, a kind, numbers of seven bits per byte, and a checksum.

Whatever else a key may hold is refused, and then counts as nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from orchestrator.prefix_cache.continuations import MAX_NODES, Continuations, InvalidValueError
from orchestrator.prefix_cache.prefix_statistics import MAX_SOURCES, PrefixStatistics
from orchestrator.statistics import SourceCounts

VERSION = 1
_CONTINUATIONS, _STATISTICS = 1, 2
_CHECKSUM_BYTES = 4
# Ten bytes of seven bits hold every number that we write.
_MOST_BYTES = 10


def encode_continuations(tree: Continuations) -> bytes:
    """A tree as bytes; about four per node."""
    numbers = [len(tree.token_ids)]
    # Most parents are the node before.
    for node, (token, parent, count) in enumerate(zip(tree.token_ids, tree.parents, tree.counts, strict=True)):
        numbers += [token, node - 1 - parent, count]
    return _sealed(_CONTINUATIONS, _packed(numbers))


def decode_continuations(value: bytes) -> Continuations:
    """Bytes as a tree.

    Raises:
        InvalidValueError: they are none.
    """
    reader = _Reader(_opened(_CONTINUATIONS, value))
    size = reader.number()
    if size > MAX_NODES:
        raise InvalidValueError(f"{size} nodes")
    nodes = [(reader.number(), node - 1 - reader.number(), reader.number()) for node in range(size)]
    reader.end()
    token_ids, parents, counts = zip(*nodes, strict=True) if nodes else ((), (), ())
    return Continuations(token_ids, parents, counts)


def encode_statistics(statistics: PrefixStatistics) -> bytes:
    """Statistics as bytes."""
    counts = (statistics.rounds, statistics.tokens, statistics.guess_hits, statistics.guess_expectation_milli)
    parts = [_packed((*counts, len(statistics.sources)))]
    for name, source in statistics.sources.items():
        text = name.encode()
        parts += [_packed((len(text),)), text, _packed((source.proposed, source.accepted))]
    return _sealed(_STATISTICS, b"".join(parts))


def decode_statistics(value: bytes) -> PrefixStatistics:
    """Bytes as statistics.

    Raises:
        InvalidValueError: they are none.
    """
    reader = _Reader(_opened(_STATISTICS, value))
    rounds, tokens, hits, expectation_milli, size = (reader.number() for _ in range(5))
    if size > MAX_SOURCES:
        raise InvalidValueError(f"{size} sources")
    sources = {reader.text(): SourceCounts(reader.number(), reader.number()) for _ in range(size)}
    reader.end()
    return PrefixStatistics(rounds, tokens, hits, expectation_milli, sources)


def _packed(numbers: Iterable[int]) -> bytes:
    packed = bytearray()
    for number in numbers:
        while number >= 0x80:
            packed.append(number & 0x7F | 0x80)
            number >>= 7
        packed.append(number)
    return bytes(packed)


def _sealed(kind: int, body: bytes) -> bytes:
    sealed = bytes((VERSION, kind)) + body
    return sealed + zlib.crc32(sealed).to_bytes(_CHECKSUM_BYTES, "little")


def _opened(kind: int, value: bytes) -> bytes:
    sealed, checksum = value[:-_CHECKSUM_BYTES], value[-_CHECKSUM_BYTES:]
    if tuple(sealed[:2]) != (VERSION, kind):
        raise InvalidValueError("another version or kind")
    if zlib.crc32(sealed).to_bytes(_CHECKSUM_BYTES, "little") != checksum:
        raise InvalidValueError("a wrong checksum")
    return sealed[2:]


class _Reader:
    """Takes numbers and texts off bytes."""

    def __init__(self, body: Sequence[int]) -> None:
        self._body = bytes(body)
        self._at = 0

    def number(self) -> int:
        number = 0
        for shift in range(0, 7 * _MOST_BYTES, 7):
            if self._at >= len(self._body):
                raise InvalidValueError("too short")
            byte = self._body[self._at]
            self._at += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
        raise InvalidValueError("a number is too large")

    def text(self) -> str:
        size = self.number()
        taken = self._body[self._at : self._at + size]
        self._at += size
        try:
            return taken.decode()
        except UnicodeDecodeError as error:
            raise InvalidValueError("a name is no text") from error

    def end(self) -> None:
        if self._at != len(self._body):
            raise InvalidValueError("too long or too short")
