"""Values of the prefix cache as bytes: a version, a kind, LEB128 varints, and a checksum.

Anything else under a key is invalid and counts as missing.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable

from orchestrator.prefix_cache.values import Continuations, InvalidValueError, PrefixStatistics

VERSION = 1
# Kinds 2 and 3 were older forms of statistics.
_CONTINUATIONS, _STATISTICS = 1, 4
_CHECKSUM_BYTES = 4
# Seven bytes of seven bits hold all numbers.
_MOST_SHIFT = 42


def encode_continuations(tree: Continuations) -> bytes:
    """Encode a tree, in about four bytes per node."""
    numbers = [len(tree.token_ids)]
    # The parent is usually the previous node.
    for node, (token, parent, count) in enumerate(zip(tree.token_ids, tree.parents, tree.counts, strict=True)):
        numbers += [token, node - 1 - parent, count]
    return _sealed(_CONTINUATIONS, numbers)


def decode_continuations(value: bytes) -> Continuations:
    """Decode a tree.

    Raises:
        InvalidValueError: the bytes are not a valid tree.
    """
    numbers = _opened(_CONTINUATIONS, value)
    size = numbers[0] if numbers else -1
    if len(numbers) != 1 + 3 * size:
        raise InvalidValueError(f"{len(numbers)} numbers for {size} nodes")
    parents = tuple(node - 1 - distance for node, distance in enumerate(numbers[2::3]))
    return Continuations(tuple(numbers[1::3]), parents, tuple(numbers[3::3]))


def encode_statistics(statistics: PrefixStatistics) -> bytes:
    """Encode statistics."""
    return _sealed(_STATISTICS, dataclasses.astuple(statistics))


def decode_statistics(value: bytes) -> PrefixStatistics:
    """Decode statistics.

    Raises:
        InvalidValueError: the bytes are not valid statistics.
    """
    numbers = _opened(_STATISTICS, value)
    if len(numbers) != len(dataclasses.fields(PrefixStatistics)):
        raise InvalidValueError(f"{len(numbers)} counts")
    return PrefixStatistics(*numbers)


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
