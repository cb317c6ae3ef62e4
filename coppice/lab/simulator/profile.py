"""A profile: a machine's times and recorded texts, as `coppice bench profile` writes it and the simulator reads it."""

from __future__ import annotations

import base64
import binascii
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from pydantic import TypeAdapter

from coppice.core.errors import InvalidTreeError
from coppice.core.tree import TokenTree
from coppice.lab.simulator.machine import Machine

# The drafter's own limit: a path less likely than this is not worth a row.
LEAST_PROBABILITY = 0.12


class Text(Protocol):
    """One output. Positions count its tokens from 0. `prompt`: the tokens before it, empty where they are not known."""

    @property
    def prompt(self) -> tuple[int, ...]: ...

    def said(self, first: int, last: int) -> list[int]:
        """Tokens from one position to before another."""
        ...

    def draft(self, position: int, max_nodes: int, row_multiple: int) -> TokenTree:
        """A drafter's tree after the tokens before a position."""
        ...


@dataclass(frozen=True)
class Trace:
    """A greedy output that was recorded: its tokens, and after the first n of them the drafter's tree, for each n.

    `prompt`: the tokens before it, or none where they were not recorded. Raises ValueError if there is no token, or not
    one tree for each, or the prompt has another length.
    """

    num_prompt: int
    token_ids: tuple[int, ...]
    trees: tuple[TokenTree, ...]
    prompt: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.token_ids or len(self.token_ids) != len(self.trees):
            raise ValueError("a trace needs one tree for each of its tokens, and one token at least")
        if self.num_prompt < 1:
            raise ValueError("a trace needs a prompt")
        if self.prompt and len(self.prompt) != self.num_prompt:
            raise ValueError(f"a prompt of {len(self.prompt)} tokens is said to have {self.num_prompt}")


class TracedText:
    """A recorded output; one that is longer than the record begins it again."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    @property
    def prompt(self) -> tuple[int, ...]:
        return self._trace.prompt

    def said(self, first: int, last: int) -> list[int]:
        """Tokens from one position to before another."""
        tokens = self._trace.token_ids
        return [tokens[position % len(tokens)] for position in range(first, last)]

    def draft(self, position: int, max_nodes: int, row_multiple: int) -> TokenTree:
        """The recorded tree, cut as a drafter with a lower budget cuts its own.

        Nodes that only fill up rows were recorded, too; they are left out where there is nothing to fill.
        """
        trees = self._trace.trees
        tree = trees[position % len(trees)]
        least = math.log(LEAST_PROBABILITY) - 1e-6
        num_worth = min(max_nodes, sum(value >= least for value in tree.path_log_probs))
        rows = -(-(1 + num_worth) // row_multiple) * row_multiple
        return tree.prune(min(rows - 1, max_nodes))


# One array after the other: the size of each tree, then of all nodes token ids, parents and log-probabilities.
_SIZE, _TOKEN, _PARENT, _LOG_PROB = np.dtype("<u2"), np.dtype("<u4"), np.dtype("<i2"), np.dtype("<f2")
_LONGEST_TRACE_BYTES = 1 << 24
_MACHINE = TypeAdapter(Machine)


class ProfileError(ValueError):
    """A profile that cannot be used; the message names what is wrong."""


@dataclass(frozen=True)
class Profile:
    """A machine, and outputs that were recorded there."""

    machine: Machine
    traces: tuple[Trace, ...]

    def __post_init__(self) -> None:
        if not self.traces:
            raise ValueError("a profile needs one trace at least")


def read_profile(path: Path) -> Profile:
    """The profile in a file. Raises ProfileError if it cannot be read, or is no profile."""
    try:
        return profile_from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path.name}: {error}") from error


def profile_to_json(profile: Profile) -> dict[str, Any]:
    traces = [_trace_to_json(trace) for trace in profile.traces]
    return {**_MACHINE.dump_python(profile.machine, mode="json"), "traces": traces}


def profile_from_json(record: Mapping[str, Any]) -> Profile:
    """The other way round; what else the file holds is not looked at.

    Raises ProfileError if something is missing or is not what it should be.
    """
    try:
        machine = _MACHINE.validate_python({one.name: record[one.name] for one in fields(Machine)})
        return Profile(machine, tuple(_trace_from_json(trace) for trace in record["traces"]))
    except KeyError as error:
        raise ProfileError(f"not a profile: {error.args[0]} is missing") from error
    except (TypeError, ValueError, InvalidTreeError) as error:
        raise ProfileError(f"not a profile: {error}") from error


def _trace_to_json(trace: Trace) -> dict[str, Any]:
    sizes = np.array([len(tree) for tree in trace.trees], _SIZE)
    token_ids = np.array([token for tree in trace.trees for token in tree.token_ids], _TOKEN)
    parents = np.array([parent for tree in trace.trees for parent in tree.parents], _PARENT)
    log_probs = np.array([value for tree in trace.trees for value in tree.log_probs], _LOG_PROB)
    packed = b"".join(array.tobytes() for array in (sizes, token_ids, parents, log_probs))
    return {
        "num_prompt": trace.num_prompt,
        "prompt": list(trace.prompt),
        "token_ids": list(trace.token_ids),
        "trees": base64.b64encode(zlib.compress(packed, 9)).decode(),
    }


def _trace_from_json(record: Mapping[str, Any]) -> Trace:
    token_ids = tuple(map(int, record["token_ids"]))
    prompt = tuple(map(int, record["prompt"]))
    return Trace(int(record["num_prompt"]), token_ids, _trees(record["trees"], len(token_ids)), prompt)


def _trees(text: str, count: int) -> tuple[TokenTree, ...]:
    """Trees of a trace; a ValueError where the bytes are not those of so many."""
    try:
        packed = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), _LONGEST_TRACE_BYTES)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"trees: {error}") from error
    sizes = np.frombuffer(packed[: count * _SIZE.itemsize], _SIZE)
    num_nodes, node_bytes = int(sizes.sum()), sum(kind.itemsize for kind in (_TOKEN, _PARENT, _LOG_PROB))
    if len(sizes) != count or len(packed) != count * _SIZE.itemsize + num_nodes * node_bytes:
        raise ValueError("trees: not as many bytes as nodes need")
    arrays, at = [], count * _SIZE.itemsize
    for kind in (_TOKEN, _PARENT, _LOG_PROB):
        arrays.append(np.frombuffer(packed, kind, num_nodes, at).tolist())
        at += num_nodes * kind.itemsize
    ends = np.cumsum(sizes).tolist()
    return tuple(
        TokenTree(*(tuple(values[end - size : end]) for values in arrays))
        for size, end in zip(sizes.tolist(), ends, strict=True)
    )
