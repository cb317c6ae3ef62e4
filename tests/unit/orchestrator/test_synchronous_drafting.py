"""Synchronous rounds as the orchestrator drives them: one draft per round, and the verifier told to wait for it."""

from __future__ import annotations

import pytest

from coppice.client import Options
from coppice.core.sampling import SamplingParams
from coppice.core.tree import TokenTree, chain
from orchestrator.peers.drafter_client import DrafterClient
from orchestrator.planner.base import FixedPlanner
from orchestrator.request.drafting import Drafting
from orchestrator.request.rounds import Outcome
from orchestrator.request.transcript import Transcript
from tests.conftest import StartFakes
from tests.fakes import FakeDrafter, FakeVerifier, perfect, wrong
from tests.toy_target import babble, plain

WAIT_US = 5_000_000
PROMPT = [ord(character) for character in "def "]
OPTIONS = Options(max_tokens=30, seed=7, temperature=1.0, ignore_eos=True)


class Asked(DrafterClient):
    """A drafter that is there until it is told to go."""

    is_there = True

    def __init__(self, kind: str) -> None:
        super().__init__("127.0.0.1:1", "fingerprint")
        self.kind = kind

    @property
    def connected(self) -> bool:
        return self.is_there


class Round:
    """A request behind three prompt tokens that two drafters follow, and what the verifier was sent for it."""

    def __init__(self, max_tokens: int = 20) -> None:
        self.transcript = Transcript([1, 2, 3], (), max_tokens, 100, (), ())
        self.a, self.b = Asked("a"), Asked("b")
        self.drafting = Drafting(
            (self.a, self.b),
            FixedPlanner(6, WAIT_US),
            self.transcript,
            SamplingParams(),
            None,
            False,
            50,
            synchronous=True,
        )
        self.drafting.open()
        self.linger_us = self.drafting.opening_linger_us()
        self.sent: list[tuple[int, list[tuple[int, ...]]]] = []
        self.drafting.opened(self._send)

    def _send(self, base: int, tree: TokenTree, budget: int, linger_us: int | None) -> None:
        self.sent.append((base, sorted(tree.paths())))
        self.linger_us = self.linger_us if linger_us is None else linger_us

    def commit(self, *token_ids: int) -> None:
        base = self.transcript.length
        self.transcript.append(token_ids)
        self.drafting.round_done(Outcome(base, token_ids, 0, 0, 0, 0, b"", 1, 1000, 0, 0))


async def test_the_verifier_has_one_draft_per_round_made_of_all_that_were_asked() -> None:
    one = Round()
    assert one.linger_us == WAIT_US
    one.drafting.on_tree("a", 3, (), chain([7, 8]))
    assert not one.sent
    one.drafting.on_tree("b", 3, (), chain([9]))
    assert one.sent == [(3, [(7,), (7, 8), (9,)])]


async def test_a_late_tree_and_what_a_round_leaves_over_serve_no_other_round() -> None:
    one = Round()
    for source in ("a", "b"):
        one.drafting.on_tree(source, 3, (), chain([7, 8, 9]))
    one.commit(7)
    one.drafting.on_tree("a", 3, (), chain([7, 8]))
    assert one.drafting.stale == {"missed": 1}
    assert len(one.sent) == 1
    one.drafting.on_tree("a", 4, (), chain([8]))
    one.drafting.on_tree("b", 4, (), chain([9]))
    assert one.sent[1:] == [(4, [(8,), (9,)])]


async def test_nobody_waits_for_a_drafter_that_is_gone() -> None:
    one = Round()
    one.drafting.on_tree("a", 3, (), chain([7]))
    one.b.is_there = False
    one.drafting.on_drafters_changed()
    assert one.sent == [(3, [(7,)])]
    one.a.is_there = False
    one.drafting.on_drafters_changed()
    assert one.linger_us == 0


@pytest.mark.parametrize("drafter", [FakeDrafter(), FakeDrafter(delay_s=0.02), FakeDrafter(propose=wrong(after=2))])
async def test_rounds_wait_for_their_drafts_and_the_tokens_are_those_of_plain_decoding(
    start_fakes: StartFakes, drafter: FakeDrafter
) -> None:
    verifier = FakeVerifier()
    async with start_fakes(verifier, drafter, rounds="synchronous") as (client, _):
        result = await client.generate(PROMPT, OPTIONS)
    assert list(result.token_ids) == plain(babble, PROMPT, 30, seed=7)
    assert verifier.opened[0].synchronous
    assert drafter.opened[0].synchronous
    # Each draft was for the coming round, and each round but the last has one of its own.
    lengths = [draft.base_length for draft in verifier.drafts]
    assert lengths == sorted(set(lengths))
    assert len(verifier.lingers_us) - 1 <= len(lengths) <= len(verifier.lingers_us)


async def test_a_drafter_that_dies_again_and_again_costs_speed_and_no_request(start_fakes: StartFakes) -> None:
    drafter = FakeDrafter(propose=perfect(), dies_after=2)
    async with start_fakes(FakeVerifier(), drafter, rounds="synchronous") as (client, _):
        result = await client.generate(PROMPT, OPTIONS)
    assert list(result.token_ids) == plain(babble, PROMPT, 30, seed=7)


async def test_a_silent_drafter_is_waited_for_as_long_as_the_setting_says(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier()
    async with start_fakes(verifier, FakeDrafter(silent=True), rounds="synchronous", synchronous_wait_s=0.05) as (
        client,
        _,
    ):
        result = await client.generate(PROMPT, Options(max_tokens=3, seed=7, temperature=1.0, ignore_eos=True))
    assert list(result.token_ids) == plain(babble, PROMPT, 3, seed=7)
    assert min(verifier.lingers_us[:2]) >= 50_000
