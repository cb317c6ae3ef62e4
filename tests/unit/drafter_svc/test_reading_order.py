"""Who reads first: short prompts before long ones, drafts between pieces, and nobody is left out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from coppice.core.errors import InvalidRequestError
from coppice.core.sampling import SamplingParams
from coppice.core.tree import TokenTree, chain
from coppice.v1 import drafter_pb2 as pb
from coppice.v1 import sampling_pb2
from drafter_svc.drafters.base import DrafterInfo
from drafter_svc.model.model_thread import JOBS_PER_PIECE, ModelThread
from drafter_svc.model.prefix_blocks import PrefixBlocks
from drafter_svc.service import DrafterService, DraftStream

INFO = DrafterInfo("slow", "none", "", vocab_size=100, max_length=100)
CLOSING, UNREADABLE = 98, 99


class PieceSequence:
    """Its prompt's tokens are pieces; `log` has the prompt's first token for each piece read, negative for a draft."""

    def __init__(self, prompt: Sequence[int], log: list[int], on_closing: Callable[[], None]) -> None:
        self._name = prompt[0]
        self._left = list(prompt[1:])
        self._log = log
        self._on_closing = on_closing

    def extend(self, token_ids: Sequence[int], features: bytes) -> None: ...

    def read(self, max_pieces: int) -> int:
        for _ in range(min(max_pieces, len(self._left))):
            if (piece := self._left.pop()) == UNREADABLE:
                raise InvalidRequestError("prompt", "unreadable")
            if piece == CLOSING:
                self._on_closing()
            self._log.append(self._name)
        return len(self._left)

    def draft(self, max_nodes: int, row_multiple: int = 1) -> TokenTree:
        assert not self._left
        self._log.append(-self._name)
        return chain([1])

    def prepare(self) -> bool:
        return False


class PieceDrafter:
    info = INFO
    prefixes = PrefixBlocks(0)

    def __init__(self, on_closing: Callable[[], None]) -> None:
        self.log: list[int] = []
        self._on_closing = on_closing

    def open(self, prompt: Sequence[int], sampling: SamplingParams, cache_salt: str = "") -> PieceSequence:
        return PieceSequence(prompt, self.log, self._on_closing)

    def warm_up(self) -> None: ...


def opening(name: int, num_pieces: int, at: int = 0, piece: int = 1) -> pb.DraftRequest:
    """The last pieces are read first: `piece` is the one with `at` others before it in the prompt."""
    prompt = [name, *[1] * num_pieces]
    if num_pieces:
        prompt[1 + at] = piece
    message = pb.OpenDraft(prompt_token_ids=prompt, sampling=sampling_pb2.SamplingParams(), max_nodes=4)
    return pb.DraftRequest(sequence_id=name, open=message)


async def conversation(
    *requests: pb.DraftRequest, closing: int | None = None
) -> tuple[list[int], list[pb.DraftResponse]]:
    """What is read and drafted, in order, when all requests are there before the model thread begins; and the answers.

    A sequence may be closed while its piece `CLOSING` is read. The peer then says nothing more, and everything it asked
    for is answered.
    """
    loop, reached, handled = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def on_closing() -> None:
        loop.call_soon_threadsafe(reached.set)
        assert handled.wait(10)

    drafter, thread, answers = PieceDrafter(on_closing), ModelThread(), []

    async def write(response: pb.DraftResponse) -> None:
        answers.append(response)

    async def said() -> AsyncIterator[pb.DraftRequest]:
        for request in requests:
            yield request
        thread.start()
        if closing is not None:
            await reached.wait()
            yield pb.DraftRequest(sequence_id=closing, close=pb.CloseDraft())
            handled.set()

    stream = DraftStream(DrafterService(drafter, thread, 8, 100), write)
    async with asyncio.timeout(20):
        await stream.converse(said())
    await stream.close()
    await asyncio.to_thread(thread.stop)
    return drafter.log, answers


async def test_the_shortest_rest_is_read_first_and_drafted_for_at_once() -> None:
    log, answers = await conversation(opening(1, 5), opening(2, 2), opening(3, 3), opening(4, 0))
    assert log == [-4, 2, 2, -2, 3, 3, 3, -3, 1, 1, 1, 1, 1, -1]
    assert [answer.sequence_id for answer in answers] == [4, 2, 3, 1]
    assert all(answer.tree.draft_us >= 0 for answer in answers)


async def test_drafts_go_between_pieces_but_pieces_have_their_turn() -> None:
    log, _ = await conversation(opening(1, 3), *[opening(name, 0) for name in range(2, 12)])
    # The first job finds out that there is something to read.
    assert log == [-2, -3, -4, -5, 1, -6, -7, -8, -9, 1, -10, -11, 1, -1]
    assert JOBS_PER_PIECE == 4


async def test_a_sequence_that_is_closed_or_fails_while_it_reads_is_read_no_further_and_nobody_waits_for_it() -> None:
    log, answers = await conversation(
        opening(1, 4, piece=UNREADABLE), opening(2, 5, at=2, piece=CLOSING), opening(3, 6), closing=2
    )
    assert log == [1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3, 3, -3]
    assert [(answer.sequence_id, answer.WhichOneof("event")) for answer in answers] == [(1, "error"), (3, "tree")]


@pytest.mark.parametrize("num_pieces", [2, 5, 9], ids="{} pieces".format)
def test_a_stream_of_short_readings_cannot_keep_a_long_one_from_its_turn(num_pieces: int) -> None:
    thread, done, read = ModelThread(), threading.Event(), []

    def submit(name: str, came: int, left: int) -> None:
        def piece() -> None:
            read.append(name)
            if left > 1:
                submit(name, came, left - 1)
            if name == "short" and len(read) < 100:
                submit("short", thread.num_pieces, 1)
            elif len(read) == 100:
                done.set()

        thread.submit_piece(piece, came, left)

    def begin() -> None:
        submit("long", 0, num_pieces)
        submit("short", 0, 1)

    thread.submit(begin)
    thread.start()
    assert done.wait(10)
    thread.stop()
    # Each that comes goes first until as many were read as the long one is longer by.
    assert read.index("long") == num_pieces - 1
    assert "short" not in read[read.index("long") :][:num_pieces]
