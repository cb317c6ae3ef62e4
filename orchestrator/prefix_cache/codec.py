"""Values of the prefix cache as bytes: a version, a kind, numbers of seven bits per byte, and a checksum.

Whatever else a key may hold is refused, and then counts as nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from orchestrator.prefix_cache.values import Continuations, InvalidValueError, PrefixStatistics
from orchestrator.request.statistics import SourceTotals

VERSION = 1
# Statistics of kind 2 had no gain.
_CONTINUATIONS, _STATISTICS = 1, 3
_CHECKSUM_BYTES = 4
# Counts of statistics before those of its sources.
_NUM_COUNTS = 6
# Seven bytes hold every number that we write.
_MOST_SHIFT = 42


def encode_continuations(tree: Continuations) -> bytes:
    """A tree as bytes; about four per node."""
    numbers = [len(tree.token_ids)]
    # Most parents are the node before.
    for node, (token, parent, count) in enumerate(zip(tree.token_ids, tree.parents, tree.counts, strict=True)):
        numbers += [token, node - 1 - parent, count]
    return _sealed(_CONTINUATIONS, numbers)


def decode_continuations(value: bytes) -> Continuations:
    """Bytes as a tree.

    Raises:
        InvalidValueError: they are none.
    """
    numbers = _opened(_CONTINUATIONS, value)
    size = numbers[0] if numbers else -1
    if len(numbers) != 1 + 3 * size:
        raise InvalidValueError(f"{len(numbers)} numbers for {size} nodes")
    parents = tuple(node - 1 - distance for node, distance in enumerate(numbers[2::3]))
    return Continuations(tuple(numbers[1::3]), parents, tuple(numbers[3::3]))


def encode_statistics(statistics: PrefixStatistics) -> bytes:
    """Statistics as bytes."""
    numbers = [statistics.rounds, statistics.tokens, statistics.guess_hits, statistics.guess_expectation_milli]
    numbers += [statistics.asked_rounds, statistics.gain_milli]
    for name, source in statistics.sources.items():
        text = name.encode()
        numbers += [len(text), *text, source.proposed, source.accepted]
    return _sealed(_STATISTICS, numbers)


def decode_statistics(value: bytes) -> PrefixStatistics:
    """Bytes as statistics.

    Raises:
        InvalidValueError: they are none.
    """
    numbers = _opened(_STATISTICS, value)
    if len(numbers) < _NUM_COUNTS:
        raise InvalidValueError("too short")
    sources: dict[str, SourceTotals] = {}
    at = _NUM_COUNTS
    while at < len(numbers):
        end = at + 1 + numbers[at]
        if end + 2 > len(numbers):
            raise InvalidValueError("too short")
        sources[_text(numbers[at + 1 : end])] = SourceTotals(numbers[end], numbers[end + 1])
        at = end + 2
    rounds, tokens, hits, expectation_milli, asked_rounds, gain_milli = numbers[:_NUM_COUNTS]
    return PrefixStatistics(rounds, tokens, hits, expectation_milli, sources, asked_rounds, gain_milli)


def _text(numbers: Sequence[int]) -> str:
    try:
        return bytes(numbers).decode()
    except ValueError as error:
        raise InvalidValueError("a name is no text") from error


def _sealed(kind: int, numbers: Iterable[int]) -> bytes:
    sealed = bytearray((VERSION, kind))
    for number in numbers:
        while number >= 0x80:
            sealed.append(number & 0x7F | 0x80)
            number >>= 7
        sealed.append(number)
    return bytes(sealed) + zlib.crc32(sealed).to_bytes(_CHECKSUM_BYTES, "little")


def _opened(kind: int, value: bytes) -> list[int]:
    sealed, checksum = value[:-_CHECKSUM_BYTES], value[-_CHECKSUM_BYTES:]
    if tuple(sealed[:2]) != (VERSION, kind):
        raise InvalidValueError("another version or kind")
    if zlib.crc32(sealed).to_bytes(_CHECKSUM_BYTES, "little") != checksum:
        raise InvalidValueError("a wrong checksum")
    numbers: list[int] = []
    number = shift = 0
    for byte in sealed[2:]:
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            numbers.append(number)
            number = shift = 0
        elif (shift := shift + 7) > _MOST_SHIFT:
            raise InvalidValueError("a number is too large")
    if shift:
        raise InvalidValueError("too short")
    return numbers
