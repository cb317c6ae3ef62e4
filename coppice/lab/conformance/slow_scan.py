"""The end of an output by repeated scans of the unstopped output: the slow, obvious version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coppice.completion import Completion
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.errors import SkippedError
from coppice.lab.conformance.requests import varied
from coppice.v1.inference_pb2 import GenerateRequest

# What a decoder shows for a character that is not complete.
INCOMPLETE = "\ufffd"


@dataclass(frozen=True)
class Known:
    """An output that no stop ends; `texts[n]` is the text of its first n tokens, each the answer to its own request."""

    request: GenerateRequest
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]

    @property
    def text(self) -> str:
        return self.texts[-1]

    def windows(self, size: int) -> list[str]:
        """Every piece of `size` characters, wherever tokens begin and end; none with an incomplete character."""
        pieces = [self.text[start : start + size] for start in range(len(self.text) - size + 1)]
        return [piece for piece in dict.fromkeys(pieces) if INCOMPLETE not in piece]


def spread(pieces: list[str], most: int) -> list[str]:
    """At most so many of the pieces, from beginning to end. Raises SkippedError if there are none."""
    if not pieces:
        raise SkippedError("the known output has too little text that is complete")
    return pieces[:: -(-len(pieces) // most)]


@dataclass(frozen=True)
class Cut:
    """What is left of an output that a stop ends: tokens, text, and the stop string that was found."""

    num_tokens: int
    text: str
    match: str


async def known(deployment: Deployment, request: GenerateRequest, length: int) -> Known:
    """The plain output of a request at every length up to `length`."""
    answers: list[Completion] = [
        await deployment.plain(varied(request, max_tokens=count)) for count in range(1, length + 1)
    ]
    return Known(request, answers[-1].token_ids, ("", *(answer.text for answer in answers)))


async def known_sampled(deployment: Deployment, length: int) -> Known:
    """An output at temperature 1."""
    return await known(deployment, deployment.requests(temperature=1.0, seed=21)[1], length)


def cut_at_strings(output: Known, stops: Sequence[str], min_tokens: int = 0) -> Cut | None:
    """Where the first stop string is complete; the longest of those that end together. None where there is none.

    Those that are complete in the text of the first `min_tokens` tokens do not count.
    """
    # What is incomplete of a character there is completed by a later token, whose text it is.
    exempt = len(output.texts[min_tokens].rstrip(INCOMPLETE))
    for num_tokens, text in enumerate(output.texts):
        for end in range(exempt + 1 if min_tokens else 0, len(text) + 1):
            if ended := [stop for stop in stops if text[:end].endswith(stop)]:
                match = max(ended, key=len)
                return Cut(num_tokens, text[: end - len(match)], match)
    return None


def cut_at_token(output: Known, token: int) -> Cut:
    """Where a token occurs first; it stays in the tokens but not in the text."""
    first = output.token_ids.index(token)
    return Cut(first + 1, output.texts[first], "")
