"""No service's log, at its most talkative, has anything of what clients send or get."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from coppice.client import Client, Options, RequestFailedError
from coppice.net import rpc
from coppice.obs.logs import JsonFormatter
from coppice.v1 import drafter_pb2_grpc, verifier_pb2_grpc
from drafter_svc.config import DrafterConfig
from drafter_svc.drafters.registry import load_drafter
from drafter_svc.model.model_thread import ModelThread
from drafter_svc.service import SERVICE_NAME, DrafterService
from orchestrator.app import running
from orchestrator.config import Config
from tests.tiny_checkpoint import ONE_LAYER, tiny_llama
from verifier_svc.config import VerifierConfig
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.scheduler import SchedulerLimits
from verifier_svc.model.loading import load_probed_target
from verifier_svc.service import VerifierServicer

MARK = "swordfish"
MAX_NODES, CONTEXT = 8, 256


def write_checkpoint(directory: Path, **sizes: int) -> Path:
    """A tiny model whose tokens are the bytes, so that it has grammars."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<eos>": 0} | {one: at for at, one in enumerate(alphabet, 1)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    model = tiny_llama(vocab_size=len(alphabet) + 1, max_context_tokens=CONTEXT, eos_token_id=0, **sizes)
    model.save_pretrained(directory)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)
    return directory


@pytest.fixture
async def address(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[str]:
    """All three services, in this process."""
    # Not all there is: the compiler's own would take minutes.
    for name in ("orchestrator", "coppice", "verifier_svc", "drafter_svc", "grpc", "asyncio"):
        caplog.set_level(logging.DEBUG, name)
    torch.set_num_threads(1)
    target, info = load_probed_target(
        VerifierConfig(model=str(write_checkpoint(tmp_path / "target")), device="cpu", kv_cache_mib=1)
    )
    engine = Engine(target, info, SchedulerLimits(max_sequences=4, max_queued=4, prefill_chunk=16), MAX_NODES)
    engine.start()
    verifying = rpc.Server(["coppice.v1.VerifierService"])
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(VerifierServicer(engine, info, MAX_NODES), verifying.grpc)
    drafter = load_drafter(
        DrafterConfig(model=str(write_checkpoint(tmp_path / "drafter", **ONE_LAYER)), device="cpu", max_nodes=MAX_NODES)
    )
    thread = ModelThread()
    thread.start()
    drafting = rpc.Server([SERVICE_NAME])
    service = DrafterService(drafter, thread, MAX_NODES, 4)
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(service, drafting.grpc)
    ports = [await server.start("127.0.0.1:0") for server in (verifying, drafting)]
    config = Config(
        verifier_address=f"127.0.0.1:{ports[0]}",
        drafter_addresses=(f"127.0.0.1:{ports[1]}",),
        grace_s=0.0,
        require_drafters=True,
    )
    async with running(config) as orchestrator:
        yield orchestrator.address
    await asyncio.gather(verifying.stop(0), drafting.stop(0))
    await asyncio.to_thread(thread.stop)
    await asyncio.to_thread(engine.stop)


async def test_what_clients_send_and_get_is_in_no_log(address: str, caplog: pytest.LogCaptureFixture) -> None:
    wanted = [
        Options(seed=1, temperature=1.0),
        Options(seed=2, stop=(MARK,), cache_salt=MARK),
        Options(regex=f"{MARK} [a-z ]*"),
        Options(json_schema={"const": MARK}),
        # Wrong, each in a place of its own, the grammars at the verifier.
        Options(regex=f"{MARK}("),
        Options(json_schema={"type": MARK}),
        Options(json_schema=f'{{"{MARK}": '),
        Options(stop=(MARK * 99,)),
        Options(cache_salt=MARK * 99),
        Options(speculation=MARK),
        Options(resume_token_ids=(3, 5, 7), regex=MARK),
    ]
    said, num_failed = [], 0
    async with Client(address) as client:
        for options in wanted:
            request = Options(**{**vars(options), "max_tokens": 24, "ignore_eos": not options.regex})
            try:
                said.append((await client.generate(f"The password is {MARK}. ", request, timeout_s=30)).text)
            except RequestFailedError:
                num_failed += 1
    # They did what is to be silent about.
    assert num_failed == 7
    assert said[2].startswith(MARK)
    assert MARK in said[3]
    records = [*caplog.get_records("setup"), *caplog.records]
    assert {"orchestrator", "verifier_svc", "drafter_svc"} <= {record.name.partition(".")[0] for record in records}
    logs = "\n".join(map(JsonFormatter().format, records))
    assert "output ended" in logs
    # Nor as token ids.
    ids = [1 + sorted(pre_tokenizers.ByteLevel.alphabet()).index(character) for character in MARK]
    for hidden in (MARK, "password", said[0][:12], said[0][-12:], ", ".join(map(str, ids))):
        assert json.dumps(hidden)[1:-1] not in logs
