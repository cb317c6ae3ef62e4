"""Learned state of a planner as plain data and bytes, from which another planner can start."""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.planner.regression import Evidence
from orchestrator.planner.value_model import DEEPEST, NUM_BINS, SourceEvidence, TreeEvidence

MAX_SOURCES = 16
MAX_SOURCE_BYTES = 64
# Features of the regressions: pass, gap, and missed passes.
PASS_FEATURES, GAP_FEATURES, MISSED_FEATURES = 5, 4, 2
VERSION = 1
# Lower kinds are values of the prefix cache.
_KNOWLEDGE = 16
_CHECKSUM_BYTES = 4


@dataclass(frozen=True)
class Knowledge:
    """Costs, missed passes, values and usual gains; fields as in their models.

    All are means and weights of a machine, a target and its drafters, without prompt contents. `gains` are relative to
    a usual draft: of all requests, greedy ones and others; `context` is the mean committed length.

    Raises:
        ValueError: wrong features, too many sources, or impossible numbers.
    """

    costs: tuple[Evidence, Evidence]
    missed: tuple[Evidence, Evidence]
    trees: TreeEvidence
    gains: tuple[float, float, float]
    context: float

    def __post_init__(self) -> None:
        sizes = tuple(len(one.moments) for one in (*self.costs, *self.missed))
        if sizes != (PASS_FEATURES, GAP_FEATURES, MISSED_FEATURES, MISSED_FEATURES):
            raise ValueError(f"regressions of {sizes} features")
        if not all(0 <= number < math.inf for number in (*self.gains, self.context)):
            raise ValueError("a gain or context out of bounds")
        names = self.trees.sources
        if len(names) > MAX_SOURCES or not all(0 < len(name.encode()) <= MAX_SOURCE_BYTES for name in names):
            raise ValueError("too many sources, or too long names")


def encode_knowledge(knowledge: Knowledge) -> bytes:
    """Serialize, in about 500 bytes plus 130 per source."""
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
    """Deserialize.

    Raises:
        ValueError: invalid bytes.
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
