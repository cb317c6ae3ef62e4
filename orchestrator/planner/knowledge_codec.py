"""Knowledge of a planner as bytes: a version, a kind, the sources' names, numbers of single precision, and a checksum.

Whatever else a key may hold is refused.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Iterator

from orchestrator.planner.knowledge import GAP_FEATURES, MISSED_FEATURES, PASS_FEATURES, Knowledge
from orchestrator.planner.regression import Evidence
from orchestrator.planner.value_model import DEEPEST, NUM_BINS, SourceEvidence, TreeEvidence

VERSION = 1
# Kinds of the prefix cache's values are lower.
_KNOWLEDGE = 16
_CHECKSUM_BYTES = 4


def encode_knowledge(knowledge: Knowledge) -> bytes:
    """Knowledge as bytes: some 500, and 130 per source."""
    names = [name.encode() for name in knowledge.trees.sources]
    numbers = [*knowledge.gains, knowledge.context]
    for evidence in (*knowledge.costs, *knowledge.missed):
        numbers += [evidence.weight, *evidence.products, *evidence.moments]
    numbers += [knowledge.trees.num_trees, *knowledge.trees.nodes]
    for source in knowledge.trees.sources.values():
        numbers += [*source.promised, *source.accepted]
    sealed = bytes((VERSION, _KNOWLEDGE, len(names))) + b"".join(bytes((len(name),)) + name for name in names)
    sealed += struct.pack(f"<{len(numbers)}f", *numbers)
    return sealed + zlib.crc32(sealed).to_bytes(_CHECKSUM_BYTES, "little")


def decode_knowledge(value: bytes) -> Knowledge:
    """Bytes as knowledge.

    Raises:
        ValueError: they are none.
    """
    sealed, checksum = value[:-_CHECKSUM_BYTES], value[-_CHECKSUM_BYTES:]
    if len(sealed) < 3 or tuple(sealed[:2]) != (VERSION, _KNOWLEDGE):
        raise ValueError("another version or kind")
    if zlib.crc32(sealed).to_bytes(_CHECKSUM_BYTES, "little") != checksum:
        raise ValueError("a wrong checksum")
    names, at = [], 3
    for _ in range(sealed[2]):
        end = at + 1 + (sealed[at] if at < len(sealed) else 0)
        names.append(sealed[at + 1 : end].decode())
        at = end
    if len(sealed) < at or (len(sealed) - at) % 4:
        raise ValueError("no whole numbers")
    numbers = iter(struct.unpack(f"<{(len(sealed) - at) // 4}f", sealed[at:]))
    knowledge = _read(numbers, names)
    if next(numbers, None) is not None:
        raise ValueError("too long")
    return knowledge


def _read(numbers: Iterator[float], names: list[str]) -> Knowledge:
    gains, context = _take(numbers, 3), _take(numbers, 1)[0]
    costs = (_evidence(numbers, PASS_FEATURES), _evidence(numbers, GAP_FEATURES))
    missed = (_evidence(numbers, MISSED_FEATURES), _evidence(numbers, MISSED_FEATURES))
    num_trees, nodes = _take(numbers, 1)[0], _take(numbers, NUM_BINS)
    sources = {name: SourceEvidence(_take(numbers, DEEPEST), _take(numbers, DEEPEST)) for name in names}
    return Knowledge(costs, missed, TreeEvidence(num_trees, nodes, sources), (gains[0], gains[1], gains[2]), context)


def _evidence(numbers: Iterator[float], size: int) -> Evidence:
    weight = _take(numbers, 1)[0]
    return Evidence(weight, _take(numbers, size * (size + 1) // 2), _take(numbers, size))


def _take(numbers: Iterator[float], count: int) -> tuple[float, ...]:
    taken = tuple(itertools.islice(numbers, count))
    if len(taken) < count:
        raise ValueError("too short")
    return taken
