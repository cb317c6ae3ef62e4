"""An eagle drafter behind real services in one process: whatever it is streamed, no token changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from google.rpc import code_pb2
from transformers import LlamaForCausalLM

from coppice.client import Client, Options
from coppice.core.errors import IncompatibleError
from coppice.core.feature_layers import MOST_PROMPT_FEATURES, default_feature_layers
from coppice.draft_models.eagle.sequence import EagleSequence
from coppice.net import rpc
from coppice.v1 import drafter_pb2 as pb
from coppice.v1 import drafter_pb2_grpc, features_pb2, verifier_pb2, verifier_pb2_grpc
from drafter_svc.config import DrafterConfig
from drafter_svc.drafters.base import Drafter
from drafter_svc.drafters.registry import load_drafter
from orchestrator.app import running
from orchestrator.config import Config
from tests.eagle_checkpoints import eagle_settings, eagle_tensors, write_eagle, write_tiny_eagle
from tests.integration import draft_peer, verify_peer
from tests.integration.test_block_drafters import check_tokens
from tests.integration.test_traversal import CONTEXT, PROMPT, VOCAB, Pair, serving_drafter, serving_target
from tests.tiny_checkpoint import write_tiny_llama
from verifier_svc.config import VerifierConfig
from verifier_svc.engine import sequence
from verifier_svc.engine.features import committed_features
from verifier_svc.engine.kv_cache import HalfArray
from verifier_svc.engine.prompt_states import PromptStates
from verifier_svc.model.loading import load_probed_target
from verifier_svc.verify.acceptance import Acceptance

pytestmark = pytest.mark.timeout(300)
KIND, LAYERS = "eagle", 8
OPTIONS = Options(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    write_tiny_llama(directory, vocab_size=VOCAB, max_context_tokens=CONTEXT, num_hidden_layers=LAYERS)
    return directory


@pytest.fixture(scope="module")
def pair(target: Path) -> Pair:
    loaded: Any = load_probed_target(VerifierConfig(model=str(target), device="cpu", threads=1, kv_cache_mib=8))
    nobody: Any = None
    return Pair(*loaded, nobody, nobody)


def load(directory: Path, target: Path) -> Drafter:
    config = DrafterConfig(
        model=str(directory),
        drafter_kind=KIND,
        device="cpu",
        target_model=str(target),
        eagle_min_probability=0.0,
        eagle_min_gain=0.0,
    )
    return load_drafter(config)


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    directory = tmp_path_factory.mktemp("drafter")
    write_tiny_eagle(directory, target)
    drafter = load(directory, target)
    drafter.warm_up()
    return drafter


def config_of(verifier: str, *drafters: str, **settings: Any) -> Config:
    return Config(
        verifier_address=verifier,
        drafter_addresses=drafters,
        linger_ms=2000.0,
        grace_s=0.0,
        planner="fixed",
        cache_drafter=False,
        **settings,
    )


@contextlib.asynccontextmanager
async def client_of(pair: Pair, *drafters: Drafter) -> AsyncIterator[Client]:
    async with contextlib.AsyncExitStack() as stack:
        verifier = await stack.enter_async_context(serving_target(pair))
        addresses = [await stack.enter_async_context(serving_drafter(drafter)) for drafter in drafters]
        orchestrator = await stack.enter_async_context(running(config_of(verifier, *addresses)))
        yield await stack.enter_async_context(Client(orchestrator.address))


class Watched:
    """What a drafter's sequences are given, by wrapping `extend` and `see_prompt`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[tuple[int, int]] = []
        self.of_prompts: list[tuple[int, int]] = []
        extend, see_prompt = EagleSequence.extend, EagleSequence.see_prompt

        def watched(one: EagleSequence, token_ids: Any, features: bytes = b"") -> None:
            self.given.append((len(token_ids), len(features)))
            extend(one, token_ids, features)

        def watched_prompt(one: EagleSequence, first_token: int, features: bytes) -> None:
            self.of_prompts.append((first_token, len(features)))
            see_prompt(one, first_token, features)

        monkeypatch.setattr(EagleSequence, "extend", watched)
        monkeypatch.setattr(EagleSequence, "see_prompt", watched_prompt)


async def test_tokens_are_those_of_the_target_alone_and_every_token_has_its_feature(
    pair: Pair, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    async with client_of(pair, drafter) as client:
        accepted = await check_tokens(client, KIND)
    assert accepted[KIND] >= 4
    size = 2 * pair.info.feature_size
    assert len(watched.given) > 10
    assert all(num_bytes == num_tokens * size for num_tokens, num_bytes in watched.given)
    # Of every token of a prompt but the first.
    assert set(watched.of_prompts) == {(1, (len(PROMPT) - 1) * size)}


def nans(states: HalfArray, accepted: Acceptance) -> bytes:
    return b"\xc0\x7f" * (states.shape[1] * len(accepted.token_ids))


def noise(states: HalfArray, accepted: Acceptance) -> bytes:
    return np.random.default_rng(0).bytes(2 * states.shape[1] * len(accepted.token_ids))


def too_short(states: HalfArray, accepted: Acceptance) -> bytes:
    return committed_features(states, accepted)[:-1]


def too_many(states: HalfArray, accepted: Acceptance) -> bytes:
    return 2 * committed_features(states, accepted) + bytes(2 * states.shape[1])


def none(states: HalfArray, accepted: Acceptance) -> bytes:
    return b""


@pytest.mark.parametrize("garbage", [nans, noise, too_short, too_many, none])
async def test_garbage_from_a_verifier_changes_no_token_and_stays_with_its_sequence(
    pair: Pair, drafter: Drafter, monkeypatch: pytest.MonkeyPatch, garbage: Any
) -> None:
    async with client_of(pair, drafter) as client:
        sound = await client.generate(PROMPT, replace(OPTIONS, speculation=KIND))
        off = await client.generate(PROMPT, replace(OPTIONS, speculation="off"))
        with monkeypatch.context() as patch:
            patch.setattr(sequence, "committed_features", garbage)
            bad = await asyncio.gather(*(client.generate(PROMPT, replace(OPTIONS, speculation=KIND)) for _ in range(3)))
        after = await client.generate(PROMPT, replace(OPTIONS, speculation=KIND))
    assert all(output.token_ids == off.token_ids for output in (sound, *bad, after))
    assert sound.speculation.draft_tokens > 0
    assert after.speculation.draft_tokens == sound.speculation.draft_tokens


PIECES: dict[str, list[tuple[int, bytes]]] = {
    "NaN": [(1, b"\xc0\x7f" * 4 * 96)],
    "noise": [(1, np.random.default_rng(0).bytes(4 * 2 * 96))],
    "another width": [(1, bytes(2 * 96 - 1)), (2, bytes(3))],
    "too many": [(1, bytes(3 << 20)), (3, bytes(2 * 96 * 10))],
    "of no token": [(0, bytes(2 * 96)), (2**32 - 1, bytes(2 * 96)), (99, b"")],
    "again and again": [(1, bytes(2 * 96 * 4))] * 20,
    "none": [],
}


@pytest.mark.parametrize("name", PIECES)
async def test_garbage_for_a_prompt_changes_no_token_and_stays_with_its_sequence(
    pair: Pair, drafter: Drafter, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert pair.info.feature_size == 96
    async with client_of(pair, drafter) as client:
        sound = await client.generate(PROMPT, replace(OPTIONS, speculation=KIND))
        off = await client.generate(PROMPT, replace(OPTIONS, speculation="off"))
        with monkeypatch.context() as patch:
            patch.setattr(PromptStates, "pieces", lambda *_: iter(PIECES[name]))
            bad = await asyncio.gather(*(client.generate(PROMPT, replace(OPTIONS, speculation=KIND)) for _ in range(3)))
        after = await client.generate(PROMPT, replace(OPTIONS, speculation=KIND))
    assert all(output.token_ids == off.token_ids for output in (sound, *bad, after))
    # The drafter stays.
    assert all(2 * output.speculation.draft_tokens > sound.speculation.draft_tokens for output in (*bad, after))


async def test_features_of_a_prompt_for_nobody_are_ignored(pair: Pair, drafter: Drafter) -> None:
    async with serving_drafter(drafter) as address, rpc.open_channel(address) as channel:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        described = await stub.Describe(pb.DrafterServiceDescribeRequest())
        assert described.max_prompt_features == MOST_PROMPT_FEATURES
        peer = draft_peer.Peer(stub)
        message = features_pb2.PromptFeatures(first_token=1, features=bytes(2 * pair.info.feature_size))
        await peer.send(7, prompt_features=message)
        await peer.open(1)
        await peer.send(1, prompt_features=message)
        assert len((await peer.tree(1, len(PROMPT))).token_ids) == 0
        await peer.commit(1, len(PROMPT), 7, features=bytes(2 * pair.info.feature_size))
        assert len((await peer.tree(1, len(PROMPT) + 1)).token_ids) > 0
        # No tree of its own.
        await peer.send(1, prompt_features=message)
        assert await peer.finish() == []


@pytest.mark.parametrize("num_bytes", [0, 1, 3, 127])
async def test_without_features_of_the_last_token_a_tree_is_empty_and_the_next_one_is_not(
    pair: Pair, drafter: Drafter, num_bytes: int
) -> None:
    async with serving_drafter(drafter) as address, rpc.open_channel(address) as channel:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        described = await stub.Describe(pb.DrafterServiceDescribeRequest())
        assert (described.kind, described.needs_features) == (KIND, True)
        assert described.feature_size == pair.info.feature_size
        assert tuple(described.feature_layers) == pair.info.feature_layers
        peer = draft_peer.Peer(stub)
        await peer.open(1)
        assert len((await peer.tree(1, len(PROMPT))).token_ids) == 0
        await peer.commit(1, len(PROMPT), 7, 8, features=bytes(num_bytes))
        assert len((await peer.tree(1, len(PROMPT) + 2)).token_ids) == 0
        # Of the last token alone.
        await peer.commit(1, len(PROMPT) + 2, 7, 8, features=bytes(2 * pair.info.feature_size))
        assert len((await peer.tree(1, len(PROMPT) + 4)).token_ids) > 0
        assert await peer.finish() == []


@contextlib.asynccontextmanager
async def verifier_peer(pair: Pair) -> AsyncIterator[tuple[verify_peer.Peer, verify_peer.Stub]]:
    async with serving_target(pair) as address, rpc.open_channel(address) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        yield verify_peer.Peer(stub), stub


async def test_a_token_s_feature_is_two_bytes_for_each_of_its_numbers_on_the_wire(pair: Pair, target: Path) -> None:
    """Counted on the messages themselves; and what they hold is transformers' own hidden state."""
    sizes: dict[bool, int] = {}
    async with verifier_peer(pair) as (peer, stub):
        described = await stub.Describe(verifier_pb2.VerifierServiceDescribeRequest())
        assert described.feature_layer_size == described.hidden_size == pair.info.hidden_size
        assert described.feature_size == 3 * described.hidden_size == pair.info.feature_size
        assert tuple(described.feature_layers) == default_feature_layers(LAYERS)
        for wants in (False, True):
            await peer.open(sequence_id=1 + wants, want_features=wants, max_prompt_features=512)
            features, tokens, sizes[wants], of_prompt = b"", list[int](), 0, list[verifier_pb2.VerifyResponse]()
            while (response := await peer.next()).WhichOneof("event") != "finished":
                if response.WhichOneof("event") == "prompt_features":
                    of_prompt.append(response)
                    continue
                # What takes other bytes from run to run.
                response.outcome.pass_us = response.outcome.bubble_us = response.outcome.linger_us = 0
                response.sequence_id = 1
                sizes[wants] += response.ByteSize()
                features += response.outcome.features
                tokens += response.outcome.token_ids
    assert len(tokens) == 12
    assert len(features) == len(tokens) * 2 * pair.info.feature_size
    # Beside the numbers, a tag and a length for each field, and longer lengths around it.
    assert 0 < sizes[True] - sizes[False] - len(features) <= 8 * len(tokens)
    model = LlamaForCausalLM.from_pretrained(target).eval()
    with torch.inference_mode():
        output = model(torch.tensor([[*verify_peer.PROMPT, *tokens]]), output_hidden_states=True)
        states = torch.cat([output.hidden_states[layer][0] for layer in default_feature_layers(LAYERS)], -1)
    found = torch.frombuffer(bytearray(features), dtype=torch.bfloat16).view(len(tokens), -1).float()
    assert torch.allclose(found, states[len(verify_peer.PROMPT) - 1 : -1], atol=0.02, rtol=0.01)
    [message] = of_prompt
    assert message.prompt_features.first_token == 1
    found = torch.frombuffer(bytearray(message.prompt_features.features), dtype=torch.bfloat16).float()
    assert torch.allclose(found.view(4, -1), states[:4], atol=0.02, rtol=0.01)


async def test_a_verifier_that_gives_none_says_so_and_others_of_its_sequences_go_on(pair: Pair) -> None:
    async with verifier_peer(replace(pair, info=replace(pair.info, feature_size=0))) as (peer, stub):
        described = await stub.Describe(verifier_pb2.VerifierServiceDescribeRequest())
        assert described.feature_size == 0
        await peer.open(sequence_id=1, want_features=True)
        error = await peer.error()
        assert error.code == code_pb2.UNIMPLEMENTED
        assert "want_features" in error.message
        await peer.open(sequence_id=2)
        tokens, _ = await peer.run(sequence_id=2)
        assert len(tokens) == 12


MISFITS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "none offered": ({}, {"feature_size": 0, "feature_layers": ()}, "verifier gives none"),
    "another width": (
        {"target_hidden_size": 20},
        {},
        "hidden states, 60 numbers per token of layers",
    ),
    "other layers": (
        {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]},
        {},
        "96 numbers per token of layers 1, 4, 6, ",
    ),
    "another target": ({}, {"weights_fingerprint": "another"}, "made for a target with the weights "),
}


@pytest.mark.parametrize("name", MISFITS)
async def test_a_drafter_that_does_not_fit_is_refused_at_connect(
    pair: Pair, target: Path, tmp_path: Path, name: str
) -> None:
    settings_changes, changes, words = MISFITS[name]
    settings = eagle_settings(target, 24, **settings_changes)
    write_eagle(tmp_path, settings, eagle_tensors(settings), target=pair.info.weights_fingerprint)
    assert pair.info.weights_fingerprint
    pair = replace(pair, info=replace(pair.info, lookup=None, **changes))
    async with contextlib.AsyncExitStack() as stack:
        verifier = await stack.enter_async_context(serving_target(pair))
        address = await stack.enter_async_context(serving_drafter(load(tmp_path, target)))
        with pytest.raises(IncompatibleError, match=words):
            async with running(config_of(verifier, address, require_drafters=True)):
                pass
        # Where drafters may be missing, it is, and the target goes on alone.
        orchestrator = await stack.enter_async_context(running(config_of(verifier, address)))
        client = await stack.enter_async_context(Client(orchestrator.address))
        output = await client.generate(PROMPT, OPTIONS)
        assert (len(output.token_ids), output.speculation.draft_tokens) == (24, 0)
        reason = "was made for another target" if name == "another target" else "needs other features than the target's"
        assert orchestrator.drafters.refusals() == [f"drafter {KIND}: {reason}"]


async def test_on_a_verifier_that_gives_none_requests_go_on_without_drafts(
    pair: Pair, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two replicas gives no features: a sequence that comes to it is not refused."""
    watched = Watched(monkeypatch)
    async with contextlib.AsyncExitStack() as stack:
        verifier = await stack.enter_async_context(serving_target(pair))
        address = await stack.enter_async_context(serving_drafter(drafter))
        orchestrator = await stack.enter_async_context(running(config_of(verifier, address)))
        client = await stack.enter_async_context(Client(orchestrator.address))
        [one] = orchestrator.verifiers.clients
        monkeypatch.setattr(one, "_info", replace(one.info, feature_size=0))
        on = await client.generate(PROMPT, replace(OPTIONS, speculation=KIND))
        off = await client.generate(PROMPT, replace(OPTIONS, speculation="off"))
    assert on.token_ids == off.token_ids
    assert on.speculation.draft_tokens == 0
    assert watched.given
    assert not any(num_bytes for _, num_bytes in watched.given)
