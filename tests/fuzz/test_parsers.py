"""Seeds of the guided fuzz, and what comes of changing them, do what they may; a parser that fails is found."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from tests.faults.messages import mangled_bytes
from tests.fuzz.guided import PARSERS as NAMES
from tests.fuzz.parsers import PARSERS, ParserError, Run, joined, parted


@pytest.fixture
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.mark.parametrize("name", NAMES)
def test_seeds_and_changed_ones_are_taken_or_refused(name: str, run: Run) -> None:
    parser, chance = PARSERS[name](random.Random(1), run), random.Random(2)
    assert len(parser.seeds) > 100
    for one in parser.seeds:
        parser.take(one)
        parser.take(mangled_bytes(one, chance))
    parser.take(b"")


def test_what_no_input_may_cause_is_found(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    def fails(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("tests.fuzz.parsers.wanted_outputs", fails)
    monkeypatch.setattr("orchestrator.peers.drafter_client.wire.tree_from_proto", fails)
    for name, error in (("orchestrator", KeyError), ("answers", ParserError)):
        made = PARSERS[name](random.Random(1), run)
        with pytest.raises(error, match="a bug"):
            list(map(made.take, made.seeds))


def test_messages_of_an_input_are_found_again() -> None:
    messages = [b"", b"a", b"b" * 300]
    assert list(parted(joined(messages))) == messages
    assert list(parted(joined(messages)[:-1])) == [b"", b"a", b"b" * 299]
