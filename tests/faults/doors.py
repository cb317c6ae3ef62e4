"""The three services in this process, small enough to be fuzzed: a toy or tiny random models behind real doors."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from drafter_svc.config import DrafterConfig
from drafter_svc.drafters.registry import load_drafter
from drafter_svc.model.model_thread import ModelThread
from drafter_svc.service import DrafterService
from orchestrator.app import running
from orchestrator.config import Config
from tests.fakes import FakeDrafter, FakeVerifier, serving
from tests.faults.fuzz import DrafterDoor, PublicDoor, VerifierDoor
from tests.faults.hostile_peers import HostileDrafter, HostileVerifier, PeersDoor, UnexpectedErrors
from tests.tiny_checkpoint import tiny_llama
from tests.toy_target import EOS, TOKENIZER_JSON, VOCAB
from verifier_svc.config import VerifierConfig
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.scheduler import SchedulerLimits
from verifier_svc.model.loading import load_probed_target
from verifier_svc.service import VerifierServicer

CONTEXT = 64
MAX_NODES = 8


def write_checkpoint(directory: Path, context: int = CONTEXT, seed: int = 0) -> None:
    """A tiny random model of bytes that both a verifier, with grammars, and a drafter can load."""
    tiny_llama(vocab_size=VOCAB, max_context_tokens=context, seed=seed, eos_token_id=EOS).save_pretrained(directory)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_buffer(TOKENIZER_JSON)).save_pretrained(directory)
    (directory / "drafter.json").write_text(json.dumps({"sigmas": {"0": 0.7}, "acceptance_by_rank": [0.5, 0.25]}))


@contextlib.asynccontextmanager
async def public_door() -> AsyncIterator[PublicDoor]:
    """A whole orchestrator, on back ends without a model."""
    async with contextlib.AsyncExitStack() as stack:
        peers = FakeVerifier(pass_s=0.0), FakeDrafter()
        verifier, drafter = [await stack.enter_async_context(serving(peer)) for peer in peers]
        config = Config(
            verifier_address=verifier,
            drafter_addresses=(drafter,),
            connect_timeout_s=10.0,
            grace_s=0.0,
            watch_rounds=True,
        )
        orchestrator = await stack.enter_async_context(running(config))
        yield PublicDoor(orchestrator.service, *peers)


@contextlib.asynccontextmanager
async def peers_door() -> AsyncIterator[PeersDoor]:
    """A whole orchestrator, on a verifier and a drafter that are hostile at times."""
    verifier, drafter, errors = HostileVerifier(pass_s=0.0, reroots=True), HostileDrafter(), UnexpectedErrors()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(errors.watching())
        addresses = [await stack.enter_async_context(serving(peer)) for peer in (verifier, drafter)]
        config = Config(
            verifier_address=addresses[0], drafter_addresses=(addresses[1],), connect_timeout_s=10.0, grace_s=0.0
        )
        orchestrator = await stack.enter_async_context(running(config))
        yield PeersDoor(orchestrator, verifier, drafter, errors)


@contextlib.asynccontextmanager
async def verifier_door(checkpoint: Path) -> AsyncIterator[VerifierDoor]:
    """A whole verifier whose queue and cache are short."""
    torch.set_num_threads(1)
    target, info = load_probed_target(VerifierConfig(model=str(checkpoint), device="cpu", threads=1, kv_cache_mib=1))
    engine = Engine(target, info, SchedulerLimits(max_sequences=3, max_queued=3, prefill_chunk=16), MAX_NODES)
    engine.start()
    try:
        yield VerifierDoor(engine, VerifierServicer(engine, info, MAX_NODES))
    finally:
        await asyncio.to_thread(engine.stop)


@contextlib.asynccontextmanager
async def drafter_door(checkpoint: Path) -> AsyncIterator[DrafterDoor]:
    """A whole drafter that holds few sequences."""
    torch.set_num_threads(1)
    drafter = load_drafter(DrafterConfig(model=str(checkpoint), device="cpu", max_nodes=MAX_NODES))
    thread = ModelThread()
    thread.start()
    try:
        yield DrafterDoor(DrafterService(drafter, thread, MAX_NODES, max_sequences=3))
    finally:
        await asyncio.to_thread(thread.stop)
