"""Answers of a target on disk, with the states that they were drawn from: shards of a work directory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coppice.adapt.own_text import WrittenText
from coppice.core.errors import IncompatibleError
from coppice.training.state import whole_file

# One text of so many is held out, by its number.
HELD_OUT_ONE_IN = 50
# States of a token: after three of the decoder's layers, and after the last one.
NUM_STATES = 4


def is_held_out(number: int) -> bool:
    """Whether a text is for measurement only."""
    return number % HELD_OUT_ONE_IN == 0


def write_shard(texts: Sequence[WrittenText], hidden: int, path: Path) -> None:
    """Write texts with answers to `path` with suffixes .npy (states) and .npz (all else, written last).

    Features of a text are states [answer, 4, hidden] in bfloat16.
    """
    texts = [text for text in texts if text.answer]
    states = np.frombuffer(b"".join(text.features for text in texts), np.int16).reshape(-1, NUM_STATES, hidden)
    if len(states) != sum(len(text.answer) for text in texts):
        raise IncompatibleError("the target gave fewer states than tokens")
    with whole_file(path.with_suffix(".npy")) as file:
        np.save(file, states)
    with whole_file(path.with_suffix(".npz")) as file:
        np.savez(
            file,
            tokens=np.concatenate([np.zeros(0, np.uint32), *(np.array(t.prompt + t.answer, np.uint32) for t in texts)]),
            prompts=np.array([len(text.prompt) for text in texts], np.int64),
            answers=np.array([len(text.answer) for text in texts], np.int64),
            temperatures=np.array([text.temperature for text in texts], np.float32),
            numbers=np.array([text.number for text in texts], np.int64),
        )


def shards(directory: Path) -> list[Path]:
    """Finished shards, in order of their names, without suffixes."""
    return sorted(path.with_suffix("") for path in directory.glob("*.npz"))


def read_texts(shard: Path) -> Iterator[WrittenText]:
    """Texts of a shard, without their states."""
    with np.load(shard.with_suffix(".npz")) as index:
        tokens = index["tokens"].tolist()
        start = 0
        facts = zip(index["prompts"], index["answers"], index["temperatures"], index["numbers"], strict=True)
        for prompt, answer, temperature, number in facts:
            middle, end = start + int(prompt), start + int(prompt) + int(answer)
            yield WrittenText(int(number), tuple(tokens[start:middle]), tuple(tokens[middle:end]), float(temperature))
            start = end


class Window(NamedTuple):
    """Windows of the answers: tokens, number and place of their answer, all [B, L]; `states` [B, L, 4, hidden]."""

    token_ids: Tensor
    segments: Tensor
    places: Tensor
    states: Tensor


@dataclass(frozen=True, slots=True)
class AnswerStore:
    """All answers of one split, one after another; states are read from disk on demand."""

    token_ids: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    segments: npt.NDArray[np.int64]
    # For every token, its shard and row there.
    shard_of: npt.NDArray[np.int32]
    row_of: npt.NDArray[np.int32]
    states: tuple[npt.NDArray[np.int16], ...]

    @classmethod
    def open(cls, directory: Path, *, held_out: bool) -> AnswerStore:
        """Open the shards of a directory.

        Raises:
            IncompatibleError: there are no answers.
        """
        parts: list[list[npt.NDArray[np.int64]]] = [[], [], [], [], []]
        states = []
        count = 0
        for at, shard in enumerate(shards(directory)):
            states.append(np.load(shard.with_suffix(".npy"), mmap_mode="r"))
            row = 0
            for text in read_texts(shard):
                length = len(text.answer)
                if is_held_out(text.number) == held_out:
                    rows = np.arange(row, row + length)
                    new = np.array(text.answer), np.arange(length), np.full(length, count), np.full(length, at), rows
                    for part, one in zip(parts, new, strict=True):
                        part.append(one)
                    count += 1
                row += length
        if not count:
            raise IncompatibleError(f"there are no answers in {directory}")
        token_ids, places, segments, shard_of, row_of = (np.concatenate(part) for part in parts)
        return cls(token_ids, places, segments, shard_of.astype(np.int32), row_of.astype(np.int32), tuple(states))

    def __len__(self) -> int:
        return len(self.token_ids)

    def windows(self, starts: Sequence[int], length: int) -> Window:
        """Windows of `length` tokens from these places of the store."""
        rows = np.stack([np.arange(start, start + length) for start in starts])
        states = np.empty((rows.size, *self.states[0].shape[1:]), np.int16)
        flat = rows.ravel()
        for shard in np.unique(self.shard_of[flat]):
            chosen = self.shard_of[flat] == shard
            states[chosen] = self.states[shard][self.row_of[flat[chosen]]]
        found = torch.from_numpy(states).view(torch.bfloat16).unflatten(0, rows.shape)
        token_ids, segments, places = (
            torch.from_numpy(part[rows]) for part in (self.token_ids, self.segments, self.places)
        )
        return Window(token_ids, segments, places, found)

    def first_windows(self, most: int, length: int) -> list[Window]:
        """The first windows, one a batch, at most `most` of them; shorter ones if there is not one of `length`."""
        length = min(length, len(self))
        return [self.windows([start], length) for start in range(0, len(self) - length + 1, length)[:most]]

    def batch(self, seed: int, step: int, rows: int, length: int) -> Window:
        """Windows of a training step, each used once per pass over the store; a function of (seed, step).

        Raises:
            IncompatibleError: the store is shorter than a batch.
        """
        steps = (len(self) - length) // (rows * length)
        if steps < 1:
            raise IncompatibleError(f"{len(self)} tokens of answers are too few for a batch of {rows * length}")
        turn, place = divmod(step, steps)
        chance = np.random.default_rng([seed, turn])
        # Windows begin elsewhere in every pass.
        first = int(chance.integers(length))
        order = chance.permutation((len(self) - first) // length)
        chosen = order[place * rows : (place + 1) * rows]
        return self.windows((first + chosen * length).tolist(), length)
