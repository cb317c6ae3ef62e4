"""Draft-ahead through real services: whatever is drafted ahead, tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from coppice.client import Client, Options
from coppice.completion import Completion
from coppice.core.sampling import SamplingParams
from coppice.core.tree import ROOT, TokenTree, chain
from drafter_svc.drafters.base import AheadDraft
from orchestrator.app import running
from orchestrator.config import Config
from tests.tiny_services import PatientDrafter, PatientSequence, tiny_drafter, tiny_verifier

TOKENS = 40
PROMPT = (5, 6, 7)


class OracleSequence(PatientSequence):
    """Knows the output, and lies about what it drafts ahead as it is told to."""

    def __init__(self, text: Sequence[int], prompt: Sequence[int], lie: str) -> None:
        self._text = tuple(text)
        self._at = len(prompt) - len(PROMPT)
        self._lie = lie
        self.expected = None

    def extend(self, token_ids: Sequence[int], features: bytes = b"") -> None:
        self._at += len(token_ids)

    def draft(self, max_nodes: int, row_multiple: int = 1) -> TokenTree:
        # One node: nothing of a late tree is left, so that the next round waits for its own.
        return chain(self._text[self._at : self._at + 1])

    def ahead(self) -> tuple[AheadDraft, ...]:
        tree, self.expected = self.expected, None
        if tree is None:
            return ()
        end = self._at + 2
        assumed, rest = self._text[self._at : end], self._text[end : end + 3]
        match self._lie:
            case "wrong tokens":
                rest = tuple((token + 1) % 50 for token in rest)
            case "wrong outcome":
                assumed = tuple((token + 1) % 50 for token in assumed)
            case "no outcome":
                assumed = ()
            case "huge":
                children = (*rest[:1], *(token for token in range(40) if token not in rest[:1]))
                wide = TokenTree(children, (ROOT,) * len(children), (0.0,) * len(children))
                deep = (AheadDraft((*assumed, number), 0.0, chain([1] * 50)) for number in range(50))
                return (*deep, AheadDraft(assumed, 0.0, wide))
        return (AheadDraft(assumed, -0.1, chain(rest)),)


class OracleDrafter(PatientDrafter):
    info = replace(PatientDrafter.info, drafts_ahead=True)

    def __init__(self, text: Sequence[int], lie: str) -> None:
        self._text, self._lie = text, lie

    def open(self, prompt: Sequence[int], sampling: SamplingParams, cache_salt: str = "") -> OracleSequence:
        return OracleSequence(self._text, prompt, self._lie)


async def generate(verifier: str, drafters: tuple[str, ...], temperature: float) -> Completion:
    config = Config(
        verifier_address=verifier,
        drafter_addresses=drafters,
        connect_timeout_s=10.0,
        grace_s=0.0,
        planner="fixed",
        linger_ms=2000,
        cache_drafter=False,
    )
    async with running(config) as orchestrator, Client(orchestrator.address) as client:
        return await client.generate(
            list(PROMPT), Options(max_tokens=TOKENS, ignore_eos=True, temperature=temperature, seed=3)
        )


@pytest.mark.parametrize("lie", ["none", "wrong tokens", "wrong outcome", "no outcome", "huge"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_tokens_are_those_of_plain_decoding_whatever_is_drafted_ahead(lie: str, temperature: float) -> None:
    async with tiny_verifier([]) as verifier:
        plain = await generate(verifier, (), temperature)
        async with tiny_drafter([], drafter=OracleDrafter(plain.token_ids, lie)) as drafter:
            drafted = await generate(verifier, (drafter,), temperature)
    assert drafted.token_ids == plain.token_ids
    speculation = drafted.speculation
    hits = sum(speculation.draft_ahead_hits_by_rank)
    assert 0 < speculation.expected_outcomes <= speculation.rounds
    assert hits + speculation.outcomes_inside_expected <= speculation.expected_outcomes
    # Every round that verified what was drafted ahead followed an outcome that was drafted for, or one inside the
    # expected tree.
    if "ahead" in speculation.origins:
        inside = speculation.outcomes_inside_expected
        assert speculation.origins["ahead"].rounds <= hits + inside or lie == "no outcome"
