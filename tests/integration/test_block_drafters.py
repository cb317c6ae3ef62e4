"""Drafters of blocks behind real services in one process: alone, together or bad, they change no token."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from coppice.client import Client, Options
from coppice.core.errors import IncompatibleError
from coppice.core.sampling import SamplingParams
from drafter_svc.config import DrafterConfig
from drafter_svc.drafters.base import Drafter, JointDrafter, SamplingDrafter
from drafter_svc.drafters.registry import load_drafter
from drafter_svc.model import checkpoint as drafter_checkpoint
from orchestrator.app import running
from orchestrator.config import Config
from tests.integration.test_traversal import CONTEXT, PROMPT, VOCAB, Pair, serving_drafter, serving_target
from tests.tiny_blocks import block_calibration, write_tiny_block_drafter
from tests.tiny_checkpoint import tiny_llama, write_tiny_llama
from verifier_svc.config import VerifierConfig
from verifier_svc.model.loading import load_probed_target

# The target's attention may have to be compiled first.
pytestmark = pytest.mark.timeout(300)
KINDS = ("semi-ar", "diffusion")
# Spoiled ones are drafters whose first child is wrong, too.
DRAFTERS = {
    "semi-ar": ("semi-ar", {}, 0.0),
    "diffusion": ("diffusion", {}, 0.0),
    "diffusion in 3 steps": ("diffusion", {"diffusion_steps": 3, "diffusion_block": 4}, 0.0),
    "spoiled semi-ar": ("semi-ar", {}, 0.3),
    "spoiled diffusion": ("diffusion", {}, 0.3),
}
SAMPLING = {
    "greedy": Options(temperature=0.0),
    "T=0.7 top_p": Options(temperature=0.7, top_p=0.9, seed=11),
    "T=1": Options(temperature=1.0, seed=12),
    "T=1 top_k": Options(temperature=1.0, top_k=20, seed=13),
}


@pytest.fixture(scope="module", autouse=True)
def _uncompiled() -> Any:
    """What is compiled is tested where it is; here it would only take time."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter_checkpoint, "compiled_ways", list)
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    write_tiny_llama(directory, vocab_size=VOCAB, max_context_tokens=CONTEXT)
    return directory


@pytest.fixture(scope="module")
def pair(target: Path) -> Any:
    loaded: Any = load_probed_target(VerifierConfig(model=str(target), device="cpu", threads=1, kv_cache_mib=8))
    nobody: Any = None
    return Pair(*loaded, nobody, nobody)


def load(directory: Path, kind: str, **settings: Any) -> Drafter:
    config = DrafterConfig(
        model=str(directory),
        drafter_kind=kind,
        device="cpu",
        draft_min_probability=0.0,
        draft_ahead_steps=0,
        **settings,
    )
    return load_drafter(config)


@contextlib.asynccontextmanager
async def client_of(pair: Pair, *drafters: Drafter, rounds: str = "asynchronous") -> AsyncIterator[Client]:
    async with contextlib.AsyncExitStack() as stack:
        verifier = await stack.enter_async_context(serving_target(pair))
        for drafter in drafters:
            # As the service does before it says that it is ready: what is compiled now keeps no round waiting.
            drafter.warm_up()
        addresses = [await stack.enter_async_context(serving_drafter(drafter)) for drafter in drafters]
        config = Config(
            verifier_address=verifier,
            drafter_addresses=tuple(addresses),
            linger_ms=2000.0,
            grace_s=0.0,
            planner="fixed",
            cache_drafter=False,
            rounds=rounds,
        )
        orchestrator = await stack.enter_async_context(running(config))
        yield await stack.enter_async_context(Client(orchestrator.address))


async def check_tokens(client: Client, sources: str) -> dict[str, int]:
    """Compare with plain decoding; returns accepted tokens by source."""
    accepted: dict[str, int] = {}
    for name, sampling in SAMPLING.items():
        options = replace(sampling, max_tokens=24, ignore_eos=True)
        on = await client.generate(PROMPT, replace(options, speculation=sources))
        off = await client.generate(PROMPT, replace(options, speculation="off"))
        assert on.token_ids == off.token_ids, name
        assert on.speculation.draft_tokens > 0
        for source, counts in on.speculation.sources.items():
            accepted[source] = accepted.get(source, 0) + counts.accepted
    return accepted


@pytest.mark.parametrize("name", DRAFTERS)
async def test_tokens_are_those_of_the_target_alone(pair: Pair, target: Path, tmp_path: Path, name: str) -> None:
    kind, settings, noise = DRAFTERS[name]
    write_tiny_block_drafter(tmp_path, target, kind, noise)
    async with client_of(pair, load(tmp_path, kind, **settings)) as client:
        accepted = await check_tokens(client, kind)
        if not noise:
            # The first token of a block is the target's own guess.
            assert accepted[kind] >= 24


@pytest.mark.parametrize("kind", [*KINDS, "small-lm"])
async def test_drafts_made_together_change_no_token(pair: Pair, target: Path, tmp_path: Path, kind: str) -> None:
    """Many requests at once, of different lengths, whose drafts wait for one another."""
    if kind == "small-lm":
        drafter = load(target, kind, draft_batch=4)
    else:
        write_tiny_block_drafter(tmp_path, target, kind)
        drafter = load(tmp_path, kind, draft_batch=4)
    assert isinstance(drafter, JointDrafter)
    assert drafter.joint is not None
    async with client_of(pair, drafter) as client:
        sampled = [
            Options(temperature=number % 3 / 2, seed=number, max_tokens=12 + number, ignore_eos=True, speculation=kind)
            for number in range(8)
        ]
        on = await asyncio.gather(*(client.generate(PROMPT, options) for options in sampled))
        for options, output in zip(sampled, on, strict=True):
            off = await client.generate(PROMPT, replace(options, speculation="off"))
            assert output.token_ids == off.token_ids
            assert output.speculation.draft_tokens > 0
    assert drafter.joint.num_joint > 0


async def test_kinds_are_merged_and_still_change_no_token(pair: Pair, target: Path, tmp_path: Path) -> None:
    drafters = []
    for kind in KINDS:
        write_tiny_block_drafter(tmp_path / kind, target, kind)
        drafters.append(load(tmp_path / kind, kind))
    drafters.append(load(target, "small-lm"))
    # Synchronous: an asynchronous round goes without the tree that is late, which may be the same kind's every time.
    async with client_of(pair, *drafters, rounds="synchronous") as client:
        accepted = await check_tokens(client, "semi-ar,diffusion,small-lm")
        assert all(accepted[kind] > 0 for kind in (*KINDS, "small-lm"))


async def test_small_lms_of_two_kinds_serve_one_request(pair: Pair, target: Path, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, vocab_size=VOCAB, max_context_tokens=CONTEXT)
    tiny_llama(vocab_size=VOCAB, max_context_tokens=CONTEXT, seed=5).save_pretrained(tmp_path)
    other = load(tmp_path, "boost-2")
    assert other.info.kind == "boost-2"
    # Synchronous: a tree that is late every time would have no counts.
    async with client_of(pair, load(target, "small-lm"), other, rounds="synchronous") as client:
        options = Options(max_tokens=24, ignore_eos=True)
        on = await client.generate(PROMPT, replace(options, speculation="small-lm,boost-2"))
        off = await client.generate(PROMPT, replace(options, speculation="off"))
        assert on.token_ids == off.token_ids
        counts = on.speculation.sources
        assert counts["small-lm"].accepted > counts["boost-2"].accepted
        assert counts["boost-2"].proposed > 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_they_say_of_themselves(target: Path, tmp_path: Path, kind: str) -> None:
    write_tiny_block_drafter(tmp_path, target, kind)
    drafter = load(tmp_path, kind)
    assert drafter.info.kind == kind
    assert drafter.info.vocab_size == VOCAB
    assert drafter.info.tokenizer_fingerprint == load(target, "small-lm").info.tokenizer_fingerprint
    assert not isinstance(drafter, SamplingDrafter)
    assert len(drafter.open(PROMPT, SamplingParams()).draft(8)) == 8


def _without(key: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda content: {name: value for name, value in content.items() if name != key}


def _with(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda content: {**content, **changes}


@pytest.mark.parametrize(
    "change",
    [
        _without("kind"),
        _without("num_masks"),
        _without("block"),
        _without("sigmas"),
        _with(kind="small-lm"),
        _with(num_masks=0),
        _with(num_masks=64),
        _with(num_masks="many"),
        _with(block=0),
        _with(block=65),
        _with(sigmas={}),
        _with(sigmas={"0": []}),
        _with(sigmas={"0": [0.0]}),
        _with(sigmas={"0": [1.0], "1": [1.0, 2.0]}),
        _with(sigmas={"warm": [1.0]}),
        _with(sigmas={"0": 1.0}),
        _with(acceptance_by_rank=["often"]),
        lambda content: [content],
        lambda content: "",
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_calibration_that_makes_no_sense_is_refused(tmp_path: Path, kind: str, change: Callable[..., Any]) -> None:
    content = block_calibration(kind, 4)
    (tmp_path / "drafter.json").write_text(json.dumps(change(content)))
    with pytest.raises(IncompatibleError, match=r"drafter\.json"):
        load(tmp_path, kind)


def test_checkpoints_that_are_none_of_this_kind_are_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(IncompatibleError, match=r"no drafter\.json"):
        load(target, "semi-ar")
    write_tiny_block_drafter(tmp_path, target, "semi-ar")
    with pytest.raises(IncompatibleError, match="'semi-ar', not 'diffusion'"):
        load(tmp_path, "diffusion")
    with pytest.raises(IncompatibleError, match=r"drafter\.json"):
        load(tmp_path, "small-lm")
    # More masks than it has embeddings.
    (tmp_path / "drafter.json").write_text(json.dumps(block_calibration("semi-ar", 63)))
    LlamaForCausalLM.from_pretrained(target).save_pretrained(tmp_path)
    with pytest.raises(IncompatibleError, match="61 embeddings"):
        load(tmp_path, "semi-ar")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises((IncompatibleError, OSError)):
        load(tmp_path, "semi-ar")
