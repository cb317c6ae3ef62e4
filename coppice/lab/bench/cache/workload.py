"""Prompts as users of one assistant send them (few long beginnings, many endings), and the phases that send them.

Every phase finds in the cache what those before it have left there.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.lab.bench.prompts import Prompt

# What a prompt's ending is to those that were sent before it.
NEW = "new"
REPEATED = "repeated"
EDITED = "edited"

# Pieces of which a system prompt is made; with prompts of our own it has some 450 tokens.
SYSTEM_PIECES = 2
# Of an ending, so that most of a prompt is its system prompt.
MAX_ENDING_CHARS = 300

_NAME = re.compile(r"\b[A-Za-z_]\w{2,}\b")


@dataclass(frozen=True, slots=True)
class CachePrompt(Prompt):
    """A prompt, and what its ending is: `NEW`, `REPEATED` after another system prompt, or `EDITED`."""

    kind: str


@dataclass(frozen=True, slots=True)
class CacheWorkload:
    """Prompts that are sent again and again, and `shifted` ones that have only pieces in common with those."""

    first: tuple[CachePrompt, ...]
    shifted: tuple[CachePrompt, ...]

    @property
    def prompts(self) -> tuple[CachePrompt, ...]:
        return (*self.first, *self.shifted)


def num_pieces(num_systems: int, num_endings: int) -> int:
    """Prompts that a workload is made of."""
    return num_systems * (SYSTEM_PIECES + num_endings + 1)


def make_workload(prompts: Sequence[Prompt], num_systems: int, num_endings: int) -> CacheWorkload:
    """`num_endings` prompts after each of `num_systems` system prompts; and shifted ones, three after each.

    A shifted prompt has the system prompt with an ending that was not sent before, with one that was sent after another
    system prompt, and with one that was sent after this one but has another name in it. Raises BenchmarkError if there
    are fewer prompts than `num_pieces` says.
    """
    if len(prompts) < (needed := num_pieces(num_systems, num_endings)):
        raise BenchmarkError(f"{num_systems} system prompts x {num_endings} endings need {needed} prompts")
    pieces = iter(prompts)
    systems = [_system([next(pieces) for _ in range(SYSTEM_PIECES)]) for _ in range(num_systems)]
    endings = [[next(pieces) for _ in range(num_endings)] for _ in range(num_systems)]
    first = [_prompt(systems[at], ending, NEW) for at in range(num_systems) for ending in endings[at]]
    shifted = []
    for at in range(num_systems):
        # Of one system prompt alone, this is a repeated request.
        elsewhere = endings[(at + 1) % num_systems][0]
        shifted.append(_prompt(systems[at], next(pieces), NEW))
        shifted.append(_prompt(systems[at], elsewhere, REPEATED))
        shifted.append(_prompt(systems[at], endings[at][-1], EDITED))
    return CacheWorkload(tuple(first), tuple(shifted))


def edited(text: str) -> str:
    """The text with the name that occurs in it most called something else; unchanged where it has no name."""
    names = Counter(name for name in _NAME.findall(text) if not keyword.iskeyword(name))
    if not names:
        return text
    [(name, _)] = names.most_common(1)
    return re.sub(rf"\b{name}\b", f"{name}_2", text)


def ending_of(text: str) -> str:
    """The last lines of a text, at most `MAX_ENDING_CHARS`; the end of its last line where that alone is longer."""
    earliest = len(text) - MAX_ENDING_CHARS
    if earliest <= 0:
        return text
    return text[text.find("\n", earliest - 1) + 1 or earliest :]


def _system(pieces: Sequence[Prompt]) -> str:
    return "".join(f"{piece.text}\n\n\n" for piece in pieces)


def _prompt(system: str, piece: Prompt, kind: str) -> CachePrompt:
    ending = ending_of(piece.text)
    return CachePrompt(system + (edited(ending) if kind == EDITED else ending), piece.origin, kind)


OFF = "off"
COLD = "cold"
FILL = "fill"
AGAIN = "again"
SHIFTED = "shifted"
SECOND = "second"
KILLED = "killed"

EXPLANATIONS = {
    OFF: "speculation off, nothing remembered and nothing shared",
    COLD: "every prompt under a salt of its own: nothing of any other request is known",
    FILL: "the prompts for the first time, all under one salt",
    AGAIN: "the same requests again",
    SHIFTED: "the same system prompts with new, repeated and edited endings",
    SECOND: "all of them in a second orchestrator, which knows of them through Redis alone",
    KILLED: "the prompts for the first time under another salt; Redis is killed in the middle and comes back empty",
}


@dataclass(frozen=True, slots=True)
class Phase:
    """Prompts of the workload, by number, in turn through one orchestrator."""

    name: str
    prompts: range
    # Whose requests find what: of the cold phase every request's own.
    salt: str = ""
    in_second: bool = False
    kills_redis: bool = False

    def salt_of(self, session: str, prompt: int) -> str:
        return f"{session} {self.salt or prompt}"


def phases(workload: CacheWorkload, with_redis: bool) -> tuple[Phase, ...]:
    """All phases in order; without a Redis, those that one orchestrator can show by itself."""
    num_first, num_all = len(workload.first), len(workload.first) + len(workload.shifted)
    first, shifted = range(num_first), range(num_first, num_all)
    alone = (
        Phase(COLD, range(num_all)),
        Phase(FILL, first, "shared"),
        Phase(AGAIN, first, "shared"),
        Phase(SHIFTED, shifted, "shared"),
    )
    if not with_redis:
        return alone
    return (
        *alone,
        Phase(SECOND, range(num_all), "shared", in_second=True),
        Phase(KILLED, first, "killed", kills_redis=True),
    )
