"""Answers of a target on disk, with the states that they and their prompts have: shards of a work directory."""

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
from coppice.checkpoints.writing import whole_file
from coppice.core.errors import IncompatibleError
from coppice.core.feature_layers import MOST_PROMPT_FEATURES

# One text of so many is held out, by its number.
HELD_OUT_ONE_IN = 50
_PROMPTS = ".prompts.npy"
# States of a prompt's row, which is read only: after three of the decoder's layers. An answer's has one more, after the
# last layer.
NUM_READ = 3
NUM_STATES = 4


def is_held_out(number: int) -> bool:
    """Whether a text is for measurement only."""
    return number % HELD_OUT_ONE_IN == 0


def write_shard(texts: Sequence[WrittenText], hidden: int, path: Path) -> None:
    """Write texts with answers to `path` with the suffixes .npy, .prompts.npy (states) and .npz (all else, at last).

    Features of a text are states [answer, 4, hidden] in bfloat16, those of its prompt's last tokens [seen, 4, hidden].

    Raises:
        IncompatibleError: there are fewer states than tokens.
    """
    texts = [text for text in texts if text.answer]
    states = np.frombuffer(b"".join(text.features for text in texts), np.int16).reshape(-1, NUM_STATES, hidden)
    prompts = np.frombuffer(b"".join(text.prompt_features for text in texts), np.int16).reshape(-1, NUM_STATES, hidden)
    numbers = sum(len(text.answer) for text in texts), sum(len(_seen(text)) for text in texts)
    if (len(states), len(prompts)) != numbers:
        raise IncompatibleError("the target gave fewer states than tokens")
    with whole_file(path.with_suffix(".npy")) as file:
        np.save(file, states)
    with whole_file(path.with_suffix(_PROMPTS)) as file:
        np.save(file, prompts[:, :NUM_READ])
    with whole_file(path.with_suffix(".npz")) as file:
        np.savez(
            file,
            tokens=np.concatenate([np.zeros(0, np.uint32), *(np.array(t.prompt + t.answer, np.uint32) for t in texts)]),
            prompts=np.array([len(text.prompt) for text in texts], np.int64),
            answers=np.array([len(text.answer) for text in texts], np.int64),
            temperatures=np.array([text.temperature for text in texts], np.float32),
            numbers=np.array([text.number for text in texts], np.int64),
        )


def _seen(text: WrittenText) -> tuple[int, ...]:
    """Tokens of a prompt that have features, as a verifier sends them."""
    return text.prompt[1:][-MOST_PROMPT_FEATURES:]


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


class TextRows(NamedTuple):
    """Rows of texts: a token, and the states that it was drawn from.

    Tokens, number of their answer, and place in their text, all [B, L]; `states` [B, L, S, hidden] are S of each row.
    The number of an answer is -1 for padding.
    """

    token_ids: Tensor
    segments: Tensor
    places: Tensor
    states: Tensor


class Window(NamedTuple):
    """Windows of the answers, with 4 states, and what is before each answer: prompts and rows cut off, with 3."""

    answers: TextRows
    before: TextRows


class _Rows(NamedTuple):
    """Rows of one window, [L] each."""

    token_ids: npt.NDArray[np.int64]
    segments: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    states: npt.NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer: its first place in the store, the tokens of its prompt that have features, and these."""

    first: int
    prompt: npt.NDArray[np.int64]
    prompt_states: npt.NDArray[np.int16]


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
    answers: tuple[_Answer, ...]

    @classmethod
    def open(cls, directory: Path, *, held_out: bool) -> AnswerStore:
        """Open the shards of a directory.

        Raises:
            IncompatibleError: there are no answers.
        """
        parts: list[list[npt.NDArray[np.int64]]] = [[], [], [], [], []]
        states, answers, total = [], list[_Answer](), 0
        for at, shard in enumerate(shards(directory)):
            states.append(np.load(shard.with_suffix(".npy"), mmap_mode="r"))
            prompt_states = np.load(shard.with_suffix(_PROMPTS), mmap_mode="r")
            row = prompt_row = 0
            for text in read_texts(shard):
                length, prompt = len(text.answer), np.array(_seen(text), np.int64)
                if is_held_out(text.number) == held_out:
                    segment, rows = np.full(length, len(answers)), np.arange(row, row + length)
                    new = np.array(text.answer), len(prompt) + np.arange(length), segment, np.full(length, at), rows
                    for part, one in zip(parts, new, strict=True):
                        part.append(one)
                    answers.append(_Answer(total, prompt, prompt_states[prompt_row : prompt_row + len(prompt)]))
                    total += length
                row, prompt_row = row + length, prompt_row + len(prompt)
        if not answers:
            raise IncompatibleError(f"there are no answers in {directory}")
        token_ids, places, segments, shard_of, row_of = (np.concatenate(part) for part in parts)
        of_rows = shard_of.astype(np.int32), row_of.astype(np.int32)
        return cls(token_ids, places, segments, *of_rows, tuple(states), tuple(answers))

    def __len__(self) -> int:
        return len(self.token_ids)

    def windows(self, starts: Sequence[int], length: int) -> Window:
        """Windows of `length` tokens from these places of the store."""
        answers = [self._part(start, start + length) for start in starts]
        return Window(_stacked(answers), _stacked([self._before(start, start + length) for start in starts]))

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

    def _part(self, first: int, last: int) -> _Rows:
        """Rows of tokens [first, last) of the store."""
        states = np.empty((last - first, *self.states[0].shape[1:]), np.int16)
        shard_of, row_of = self.shard_of[first:last], self.row_of[first:last]
        for shard in np.unique(shard_of):
            chosen = shard_of == shard
            states[chosen] = self.states[shard][row_of[chosen]]
        return _Rows(self.token_ids[first:last], self.segments[first:last], self.places[first:last], states)

    def _before(self, first: int, last: int) -> _Rows:
        """Rows that tokens [first, last) of the store see beside each other."""
        parts = []
        for number in range(self.segments[first], self.segments[last - 1] + 1):
            answer = self.answers[number]
            count = len(answer.prompt)
            states = np.asarray(answer.prompt_states)
            parts.append(_Rows(answer.prompt, np.full(count, number), np.arange(count), states))
            if answer.first < first:
                cut = self._part(answer.first, first)
                parts.append(cut._replace(states=cut.states[:, :NUM_READ]))
        return _Rows(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _stacked(windows: Sequence[_Rows]) -> TextRows:
    """Rows of several windows, padded to the longest."""
    most = max(len(rows.token_ids) for rows in windows)
    shape = len(windows), most
    token_ids, places, segments = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, -1)
    states = np.zeros((*shape, *windows[0].states.shape[1:]), np.int16)
    for at, rows in enumerate(windows):
        count = len(rows.token_ids)
        for table, part in zip((token_ids, segments, places, states), rows, strict=True):
            table[at, :count] = part
    found = torch.from_numpy(states).view(torch.bfloat16)
    return TextRows(torch.from_numpy(token_ids), torch.from_numpy(segments), torch.from_numpy(places), found)
