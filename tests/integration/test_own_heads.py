"""A head in the verifier's own process: whatever it drafts and is told, no token changes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from coppice.client import Options
from coppice.core.errors import IncompatibleError
from coppice.draft_models.eagle.sequence import EagleSequence
from tests.eagle_checkpoints import eagle_settings, eagle_tensors, write_eagle, write_tiny_eagle
from tests.integration.test_block_drafters import check_tokens, client_of
from tests.integration.test_eagle_drafters import KIND, LAYERS, OPTIONS, load, nans, noise, none, too_many, too_short
from tests.integration.test_traversal import CONTEXT, PROMPT, VOCAB, Pair
from tests.tiny_checkpoint import write_tiny_llama
from verifier_svc.config import VerifierConfig
from verifier_svc.engine import sequence
from verifier_svc.engine.pass_cost import PassCost
from verifier_svc.extras.head.head import HeadSettings
from verifier_svc.model.loading import load_probed_target

pytestmark = pytest.mark.timeout(300)


class UnknownCost(PassCost):
    """Never known: a draft is made in every round."""

    def add(self, num_rows: int, seconds: float) -> None:
        """Learn nothing."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    write_tiny_llama(directory, vocab_size=VOCAB, max_context_tokens=CONTEXT, num_hidden_layers=LAYERS)
    return directory


@pytest.fixture(scope="module")
def checkpoint(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("head")
    write_tiny_eagle(directory, target)
    return directory


def loaded(target: Path, head: Path, **settings: Any) -> Pair:
    config = VerifierConfig(
        model=str(target),
        device="cpu",
        threads=1,
        kv_cache_mib=8,
        eagle_head=str(head),
        prompt_lookup="off",
        **settings,
    )
    nobody: Any = None
    return Pair(*load_probed_target(config), nobody, nobody)


def always(head: HeadSettings | None) -> HeadSettings:
    """The same head, which drafts whatever that costs, nodes that are hardly likely as well."""
    assert head is not None
    return HeadSettings(head.head, head.max_nodes, head.max_prompt_features, num_threads=3, cost=UnknownCost())


@pytest.fixture(scope="module")
def pair(target: Path, checkpoint: Path) -> Pair:
    pair = loaded(target, checkpoint)
    return replace(pair, info=replace(pair.info, head=always(pair.info.head)))


async def test_tokens_are_those_of_the_target_alone_and_some_were_drafted(pair: Pair) -> None:
    async with client_of(pair) as client:
        assert KIND in (await client.model_info()).sources
        accepted = await check_tokens(client, KIND)
    assert accepted[KIND] >= 4


@pytest.mark.parametrize("garbage", [nans, noise, too_short, too_many, none])
async def test_garbage_states_change_no_token_and_stay_with_their_sequence(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, garbage: Any
) -> None:
    async with client_of(pair) as client:
        sound = await client.generate(PROMPT, replace(OPTIONS, speculation=KIND))
        off = await client.generate(PROMPT, replace(OPTIONS, speculation="off"))
        with monkeypatch.context() as patch:
            patch.setattr(sequence, "committed_features", garbage)
            bad = await asyncio.gather(*(client.generate(PROMPT, replace(OPTIONS, speculation=KIND)) for _ in range(3)))
        after = await client.generate(PROMPT, replace(OPTIONS, speculation=KIND))
    assert all(output.token_ids == off.token_ids for output in (sound, *bad, after))
    assert sound.speculation.draft_tokens > 0
    assert after.speculation.draft_tokens == sound.speculation.draft_tokens


async def test_a_head_that_fails_ends_its_drafts_and_no_request(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [replace(OPTIONS, seed=seed, speculation=KIND) for seed in range(4)]
    async with client_of(pair) as client:
        off = [await client.generate(PROMPT, replace(one, speculation="off")) for one in options]
        with monkeypatch.context() as patch:
            patch.setattr(EagleSequence, "draft", Mock(side_effect=KeyError("a bug")))
            on = await asyncio.gather(*(client.generate(PROMPT, one) for one in options))
        after = await client.generate(PROMPT, options[0])
    assert [one.token_ids for one in on] == [one.token_ids for one in off]
    assert not any(one.speculation.draft_tokens for one in on)
    assert after.speculation.draft_tokens > 0


async def test_many_at_once_and_requests_of_every_kind_have_their_own_drafts(pair: Pair) -> None:
    options = [
        Options(temperature=number % 3 / 2, seed=number, max_tokens=12 + number, ignore_eos=True, speculation=KIND)
        for number in range(8)
    ]
    async with client_of(pair) as client:
        on = await asyncio.gather(*(client.generate(PROMPT, one) for one in options))
        for one, output in zip(options, on, strict=True):
            off = await client.generate(PROMPT, replace(one, speculation="off"))
            assert output.token_ids == off.token_ids
            assert output.speculation.draft_tokens > 0


async def test_of_the_prompt_it_is_told_too_and_of_nothing_while_no_draft_may_pay(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    extend, see_prompt = EagleSequence.extend, EagleSequence.see_prompt

    def watched(one: EagleSequence, token_ids: Any, features: bytes = b"") -> None:
        given.append(len(features))
        extend(one, token_ids, features)

    def watched_prompt(one: EagleSequence, first_token: int, features: bytes) -> None:
        given.append(len(features))
        see_prompt(one, first_token, features)

    monkeypatch.setattr(EagleSequence, "extend", watched)
    monkeypatch.setattr(EagleSequence, "see_prompt", watched_prompt)
    size = 2 * pair.info.feature_size
    async with client_of(pair) as client:
        await client.generate(PROMPT, replace(OPTIONS, speculation=KIND))
        assert given[0] == (len(PROMPT) - 1) * size
        assert all(given)
        assert pair.info.head is not None
        for counted in pair.info.head.counted:
            monkeypatch.setattr(counted, "wants_features", False)
        given.clear()
        await client.generate(PROMPT, replace(OPTIONS, max_tokens=1, speculation=KIND))
        assert not any(given)


async def test_where_a_drafter_serves_it_does_not_draft(
    pair: Pair, target: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Mock(side_effect=sequence.OwnDrafts)
    monkeypatch.setattr(sequence, "OwnDrafts", opened)
    drafter = load(checkpoint, target)
    async with client_of(pair, drafter) as client:
        output = await client.generate(PROMPT, OPTIONS)
        assert output.speculation.draft_tokens > 0
        assert not opened.called
    async with client_of(pair) as client:
        await client.generate(PROMPT, OPTIONS)
    assert opened.called


MISFITS: dict[str, tuple[dict[str, Any], str, str]] = {
    "other layers": ({"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}, "", "states of the layers"),
    "another target": ({}, "other weights", "made for another target"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_head_that_does_not_fit_is_refused_at_start(target: Path, tmp_path: Path, name: str) -> None:
    changes, weights, words = MISFITS[name]
    settings = eagle_settings(target, 24, **changes)
    write_eagle(tmp_path, settings, eagle_tensors(settings), target=weights)
    with pytest.raises(IncompatibleError, match=words):
        loaded(target, tmp_path)


def test_a_head_is_not_combined_with_an_adapter(target: Path, checkpoint: Path) -> None:
    with pytest.raises(IncompatibleError, match="EAGLE_HEAD is for targets on a CPU"):
        loaded(target, checkpoint, space_adapter=str(checkpoint))
