"""A target that two processes hold together, on real sockets: the tokens are one process's, and no end is a hang."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed
from transformers import LlamaForCausalLM
from transformers.utils.import_utils import is_accelerate_available

from coppice.checkpoints.bundled import MODELS
from coppice.core.tree import TokenTree
from coppice.net import rpc
from coppice.v1 import sampling_pb2, verifier_pb2_grpc
from coppice.v1 import verifier_pb2 as pb
from coppice.wire.convert import tree_to_proto
from tests.tiny_checkpoint import write_tiny_llama
from verifier_svc.app import run_verifier
from verifier_svc.config import CONFIGURATION_ERROR, WORKER_LOST, VerifierConfig
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.scheduler import SchedulerLimits
from verifier_svc.model.loading import load_probed_target
from verifier_svc.service import VerifierServicer

# Even: transformers 5.17 cuts the output layer into equal parts only.
VOCAB = 62
PROMPT = (4, 8, 15, 16, 23)
LONG_PROMPT = tuple(range(3, 60)) + tuple(range(50, 10, -1))
TOKENS = 24
SAMPLING = {
    "greedy": sampling_pb2.SamplingParams(temperature=0.0),
    "seeded": sampling_pb2.SamplingParams(temperature=1.0, seed=3),
}
# On a busy machine; a quiet one takes a tenth of it.
START_S = 300.0
ANSWER_S = 60.0
LINGER_US = 50_000_000

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (distributed.is_available() and distributed.is_gloo_available()), reason="this PyTorch has no gloo"
    ),
    pytest.mark.skipif(not is_accelerate_available(), reason="transformers cuts weights only where accelerate is"),
    pytest.mark.skipif(torch.accelerator.is_available(), reason="transformers would put the parts on the accelerator"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama whose wide weights keep logits well apart."""
    directory = tmp_path_factory.mktemp("target")
    write_tiny_llama(directory, vocab_size=VOCAB, max_context_tokens=256)
    return directory


@dataclass
class Service:
    """A verifier process. `lines` are what it has said on stderr so far."""

    process: asyncio.subprocess.Process
    lines: list[str]
    reader: asyncio.Task[None]
    address: str = ""

    @property
    def worker(self) -> int:
        """The process id of rank 1."""
        [found] = [match for line in self.lines if (match := re.search(r"rank 1 is process (\d+)", line))]
        return int(found[1])

    async def ended(self, timeout_s: float = ANSWER_S) -> tuple[int, str]:
        """Its exit code and all that it said, once it has ended by itself."""
        async with asyncio.timeout(timeout_s):
            code = await self.process.wait()
            await self.reader
        return code, "\n".join(self.lines)


@contextlib.asynccontextmanager
async def started(model: Path, **settings: str) -> AsyncIterator[Service]:
    """A verifier process, which need not be ready, and is killed in the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "verifier_svc",
        env={
            **os.environ,
            "MODEL": str(model),
            "DEVICE": "cpu",
            # As transformers computes, on every machine.
            "DTYPE": "float32",
            "THREADS": "1",
            "KV_CACHE_MIB": "8",
            "GRACE_S": "1",
            **settings,
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    lines: list[str] = []
    service = Service(process, lines, asyncio.create_task(read(process.stderr, lines)))
    try:
        yield service
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await asyncio.wait_for(service.reader, ANSWER_S)


async def read(stream: asyncio.StreamReader | None, lines: list[str]) -> None:
    """Collect lines until the stream ends."""
    assert stream is not None
    while line := await stream.readline():
        lines.append(line.decode().rstrip())


@contextlib.asynccontextmanager
async def running(model: Path, **settings: str) -> AsyncIterator[Service]:
    """A verifier process that serves."""
    async with started(model, **settings) as service:
        assert service.process.stdout is not None
        async with asyncio.timeout(START_S):
            words = (await service.process.stdout.readline()).decode().split()
        assert words[:1] == ["ready"], service.lines
        service.address = words[1]
        yield service


@contextlib.asynccontextmanager
async def one_process(model: Path) -> AsyncIterator[str]:
    """The address of a verifier that holds the whole target, here."""
    torch.set_num_threads(1)
    target, info = load_probed_target(
        VerifierConfig(model=str(model), device="cpu", dtype="float32", threads=1, kv_cache_mib=8)
    )
    engine = Engine(target, info, SchedulerLimits(max_sequences=4, max_queued=4, prefill_chunk=64), max_nodes=64)
    engine.start()
    server = rpc.Server(["coppice.v1.VerifierService"])
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(VerifierServicer(engine, info, 64), server.grpc)
    port = await server.start("127.0.0.1:0")
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
        await asyncio.to_thread(engine.stop)


async def generate(
    address: str,
    prompt: Sequence[int],
    sampling: sampling_pb2.SamplingParams,
    continuation: Sequence[int] = (),
) -> tuple[list[int], int]:
    """Tokens of one sequence, and its rounds; drafts trees around a continuation where one is given."""
    async with rpc.open_channel(address) as channel:
        call = verifier_pb2_grpc.VerifierServiceStub(channel).Verify(timeout=ANSWER_S)
        opening = pb.OpenSequence(
            prompt_token_ids=prompt,
            sampling=sampling,
            stopping=sampling_pb2.StoppingOptions(max_tokens=TOKENS, ignore_eos=True),
            linger_us=LINGER_US if continuation else 0,
        )
        await call.write(pb.VerifyRequest(sequence_id=1, open=opening))
        tokens: list[int] = []
        rounds = 0
        async for response in call:
            if response.WhichOneof("event") == "finished":
                break
            assert response.WhichOneof("event") in ("load", "outcome"), response
            if response.WhichOneof("event") == "load":
                continue
            tokens += response.outcome.token_ids
            rounds += 1
            if continuation:
                base = response.outcome.base_length + len(response.outcome.token_ids)
                draft = pb.Draft(base_length=base, tree=tree_to_proto(tree_around(continuation[len(tokens) :][:4])))
                await call.write(pb.VerifyRequest(sequence_id=1, draft=draft))
        call.cancel()
        return tokens, rounds


async def free_kv_blocks(address: str) -> int:
    """What is free of the cache during a server's first pass, over a few tokens."""
    async with rpc.open_channel(address) as channel:
        call = verifier_pb2_grpc.VerifierServiceStub(channel).Verify(timeout=ANSWER_S)
        opening = pb.OpenSequence(prompt_token_ids=PROMPT, stopping=sampling_pb2.StoppingOptions(max_tokens=TOKENS))
        await call.write(pb.VerifyRequest(sequence_id=1, open=opening))
        async for response in call:
            if response.WhichOneof("event") == "load":
                call.cancel()
                return int(response.load.free_kv_blocks)
    raise AssertionError("the server reported no load")


def tree_around(path: Sequence[int]) -> TokenTree:
    """A tree in which every node of the path comes after a sibling that is wrong, so that accepted rows move."""
    tokens: list[int] = []
    parents: list[int] = []
    for token in path:
        above = len(tokens) - 1
        tokens += [(token + 1) % VOCAB, token]
        parents += [above, above]
    return TokenTree(tuple(tokens), tuple(parents), (-1.0,) * len(tokens))


def by_transformers(model: Path, prompt: Sequence[int]) -> list[int]:
    """The oracle: transformers' own greedy generation by one process."""
    target = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    target.generation_config.eos_token_id = None
    ids = torch.tensor([list(prompt)])
    rows = target.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
    )
    continuation: list[int] = rows[0, len(prompt) :].tolist()
    return continuation


async def test_two_processes_say_what_one_says(checkpoint: Path) -> None:
    cases = [(prompt, name) for prompt in (PROMPT, LONG_PROMPT) for name in SAMPLING]
    async with one_process(checkpoint) as address:
        blocks = await free_kv_blocks(address)
        expected = [(await generate(address, prompt, SAMPLING[name]))[0] for prompt, name in cases]
    async with running(checkpoint, TENSOR_PARALLEL="2") as service:
        # Each holds the keys and values of half of the heads, so that its memory holds twice the tokens.
        assert 2 * blocks <= await free_kv_blocks(service.address) <= 2 * blocks + 4
        for (prompt, name), tokens in zip(cases, expected, strict=True):
            assert len(tokens) == TOKENS
            assert (await generate(service.address, prompt, SAMPLING[name])) == (tokens, TOKENS)
            drafted, rounds = await generate(service.address, prompt, SAMPLING[name], continuation=tokens)
            assert drafted == tokens
            assert rounds < TOKENS / 3
            if name == "greedy":
                assert tokens == by_transformers(checkpoint, prompt)
        # Many at once share passes.
        together = await asyncio.gather(
            *(generate(service.address, prompt, SAMPLING[name]) for prompt, name in cases for _ in range(2))
        )
        assert [tokens for tokens, _ in together[::2]] == [tokens for tokens, _ in together[1::2]] == expected
        service.process.send_signal(signal.SIGTERM)
        code, said = await service.ended()
    assert code == 0, said
    assert not alive(service.worker)


async def test_the_bundled_target_in_two_parts_says_what_one_process_says_and_leaves_none_behind_when_killed() -> None:
    target = MODELS / "target"
    async with one_process(target) as address:
        expected = {name: (await generate(address, LONG_PROMPT, SAMPLING[name]))[0] for name in SAMPLING}
    assert expected["greedy"] == by_transformers(target, LONG_PROMPT)
    async with running(target, TENSOR_PARALLEL="2", EXACTNESS="fast") as service:
        for name, tokens in expected.items():
            assert (await generate(service.address, LONG_PROMPT, SAMPLING[name])) == (tokens, TOKENS)
            drafted, rounds = await generate(service.address, LONG_PROMPT, SAMPLING[name], continuation=tokens)
            assert drafted == tokens
            assert rounds < TOKENS / 3
        worker = service.worker
        assert alive(worker)
        service.process.kill()
        async with asyncio.timeout(ANSWER_S):
            while alive(worker):  # noqa: ASYNC110 it is not our child, so there is nothing to wait on
                await asyncio.sleep(0.05)


def test_heads_that_do_not_divide_are_refused_at_start(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any process is started."""
    monkeypatch.setattr("sys.setswitchinterval", lambda seconds: None)
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(SystemExit) as ended:
        run_verifier(VerifierConfig(model=str(checkpoint), device="cpu", threads=1, tensor_parallel=4))
    assert ended.value.code == CONFIGURATION_ERROR
    assert "TENSOR_PARALLEL is 4, but the target's 2 key/value heads do not divide" in caplog.text


async def test_what_is_wrong_with_a_part_rank_0_alone_says(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "damaged")
    weights = tmp_path / "damaged" / "model.safetensors"
    tensors = load_file(weights)
    # The last rows of a projection are in rank 1's part alone.
    tensors["model.layers.0.self_attn.q_proj.weight"][-1, -1] = float("nan")
    save_file(tensors, weights, {"format": "pt"})
    async with started(tmp_path / "damaged", TENSOR_PARALLEL="2") as service:
        code, said = await service.ended(START_S)
    assert code == CONFIGURATION_ERROR
    [line] = [line for line in said.splitlines() if " ERROR " in line]
    assert " rank " not in line
    assert "has NaN or infinity in 1 tensor (model.layers.0.self_attn.q_proj.weight)" in line
    assert "Traceback" not in said


async def test_a_worker_that_dies_ends_the_service(checkpoint: Path) -> None:
    async with running(checkpoint, TENSOR_PARALLEL="2", EXACTNESS="fast") as service:
        os.kill(service.worker, signal.SIGKILL)
        code, said = await service.ended()
    assert code == WORKER_LOST
    assert "rank 1 ended with exit code -9" in said


async def test_a_worker_that_hangs_ends_the_service_once_it_is_late(checkpoint: Path) -> None:
    lab = '{"collective_timeout_s": 12}'
    async with running(checkpoint, TENSOR_PARALLEL="2", EXACTNESS="fast", COPPICE_LAB=lab) as service:
        os.kill(service.worker, signal.SIGSTOP)
        with pytest.raises(grpc.aio.AioRpcError):
            await generate(service.address, PROMPT, SAMPLING["greedy"])
        code, said = await service.ended()
    assert code == WORKER_LOST
    assert "a pass failed" in said
    assert not alive(service.worker)


def alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
