"""A verifier with a tiny random model and a drafter without one, as real servers in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import torch

from coppice.core.sampling import SamplingParams
from coppice.net import rpc
from coppice.net.stream_observer import StreamObserver
from coppice.obs.timeline import Timeline
from coppice.v1 import drafter_pb2_grpc, verifier_pb2_grpc
from drafter_svc.drafters.base import Drafter, DrafterInfo
from drafter_svc.model.model_thread import ModelThread
from drafter_svc.service import SERVICE_NAME, DrafterService
from tests.integration.test_drafter_metrics import ChainDrafter, ChainSequence
from tests.tiny_checkpoint import tiny_llama
from tests.unit.verifier_svc.test_preemption import INFO
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.scheduler import SchedulerLimits
from verifier_svc.model.target_model import TargetModel
from verifier_svc.service import VerifierServicer

MAX_NODES = 8

Observe = Sequence[Callable[[], StreamObserver]]


class PatientSequence(ChainSequence):
    """Takes every token in."""

    def extend(self, token_ids: Sequence[int], features: bytes = b"") -> None: ...


class PatientDrafter(ChainDrafter):
    """Always drafts the same, for the verifier's tokenizer."""

    info = DrafterInfo("chain", "none", INFO.tokenizer_fingerprint, INFO.vocab_size, INFO.max_context_tokens)

    def open(self, prompt: Sequence[int], sampling: SamplingParams, cache_salt: str = "") -> PatientSequence:
        return PatientSequence()


@contextlib.asynccontextmanager
async def tiny_verifier(observe: Observe, timeline: Timeline | None = None) -> AsyncIterator[str]:
    """A verifier; the address is the one to call."""
    torch.set_num_threads(1)
    model = tiny_llama(vocab_size=INFO.vocab_size, max_context_tokens=INFO.max_context_tokens, eos_token_id=0)
    target, limits = TargetModel(model, exact=True, num_blocks=20), SchedulerLimits(8, 8, prefill_chunk=64)
    engine = Engine(target, INFO, limits, MAX_NODES, timeline=timeline)
    engine.start()
    server = rpc.Server(["coppice.v1.VerifierService"])
    servicer = VerifierServicer(engine, INFO, MAX_NODES, "", observe)
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server.grpc)
    yield f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    await server.stop(0)
    await asyncio.to_thread(engine.stop)


@contextlib.asynccontextmanager
async def tiny_drafter(
    observe: Observe, timeline: Timeline | None = None, drafter: Drafter | None = None
) -> AsyncIterator[str]:
    """A drafter; the address is the one to call."""
    thread = ModelThread()
    thread.start()
    server = rpc.Server([SERVICE_NAME])
    service = DrafterService(drafter or PatientDrafter(), thread, MAX_NODES, 8, observe, timeline)
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(service, server.grpc)
    yield f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    await server.stop(0)
    await asyncio.to_thread(thread.stop)
