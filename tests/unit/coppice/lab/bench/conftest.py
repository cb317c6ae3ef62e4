"""A tiny random target and a server that behaves like ours on top of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM

from coppice.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2, tree_pb2
from tests.tiny_checkpoint import tiny_llama

CONTEXT = 96
# What the fake server says of every round: three nodes drafted as a chain, one of them accepted.
TOKENS_PER_ROUND = 2


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a byte-level tokenizer, as a checkpoint directory."""
    directory = tmp_path_factory.mktemp("tiny-target")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    # Every second token is an EOS: whoever stops at one is found out.
    eos = list(range(0, 256, 2))
    model = tiny_llama(vocab_size=256, max_context_tokens=CONTEXT, initializer_range=0.5, eos_token_id=eos)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


class FakeInference(inference_pb2_grpc.InferenceServiceServicer):
    """Greedy decoding by the slow obvious loop, whatever the policy; `corrupts` makes speculation change a token.

    With `once` it takes each cache salt once: a prompt that comes again with its salt has been read already.
    """

    def __init__(self, model_dir: Path, *, corrupts: bool = False, once: bool = False) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._corrupts = corrupts
        self._once = once
        self._salts: set[str] = set()
        # Outputs by prompt: benchmarks ask for the same again and again.
        self._said: dict[tuple[int, ...], list[int]] = {}

    def GetModelInfo(  # noqa: N802
        self, request: inference_pb2.GetModelInfoRequest, context: grpc.ServicerContext
    ) -> inference_pb2.GetModelInfoResponse:
        return inference_pb2.GetModelInfoResponse(
            model="tiny", max_context_tokens=CONTEXT, max_nodes=20, dtype="float32"
        )

    def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        if request.sampling.temperature > 1.5:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "too hot")
        assert request.stopping.ignore_eos
        if self._once and (not request.cache_salt or request.cache_salt in self._salts):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this cache salt has come before")
        self._salts.add(request.cache_salt)
        num_tokens = request.stopping.max_tokens
        speculates = request.speculation.mode != inference_pb2.SpeculationPolicy.MODE_OFF
        given = self._greedy(list(request.token_ids.ids), num_tokens)
        if speculates and self._corrupts:
            given[-1] ^= 1
        for token in given:
            yield inference_pb2.GenerateResponse(token_ids=[token])
        yield _last_message(num_tokens, speculates)

    def _greedy(self, token_ids: list[int], num_tokens: int) -> list[int]:
        said = self._said.get(tuple(token_ids), [])
        with torch.inference_mode():
            while len(said) < num_tokens:
                logits = self._model(input_ids=torch.tensor([token_ids + said])).logits[0, -1]
                said = [*said, int(logits.argmax())]
        self._said[tuple(token_ids)] = said
        return said[:num_tokens]


def _last_message(num_tokens: int, speculates: bool) -> inference_pb2.GenerateResponse:
    rounds = num_tokens // TOKENS_PER_ROUND if speculates else num_tokens
    stats = inference_pb2.SpeculationStats(rounds=rounds)
    if speculates:
        stats.draft_tokens, stats.accepted_tokens = 3 * rounds, rounds
        stats.rounds_drafted_by_depth[:] = [rounds, rounds, rounds]
        stats.rounds_accepted_by_depth[:] = [rounds]
        stats.sources.add(source="small-lm", proposed=3 * rounds, accepted=rounds)
        stats.origins.add(
            origin=tree_pb2.DRAFT_ORIGIN_FRESH, rounds=rounds, draft_tokens=3 * rounds, accepted_tokens=rounds
        )
    timing = inference_pb2.Timing(forward_ms=1.0, linger_ms=0.5, bubble_ms=rounds / 4)
    timing.passes.add(rows=4 if speculates else 1, count=rounds, total_ms=1.0)
    finished = inference_pb2.Finished(reason=sampling_pb2.FINISH_REASON_LENGTH)
    return inference_pb2.GenerateResponse(finished=finished, speculation=stats, timing=timing)


def _serve(servicer: FakeInference) -> Iterator[str]:
    with ThreadPoolExecutor(max_workers=2) as workers:
        server = grpc.server(workers)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(grace=None).wait()


@pytest.fixture(scope="module")
def server(tiny_target: Path) -> Iterator[str]:
    """The address of a server whose speculation changes nothing."""
    yield from _serve(FakeInference(tiny_target))


@pytest.fixture(scope="module")
def corrupting_server(tiny_target: Path) -> Iterator[str]:
    """The address of a server whose speculation changes the last token."""
    yield from _serve(FakeInference(tiny_target, corrupts=True))


@pytest.fixture(scope="module")
def once_server(tiny_target: Path) -> Iterator[str]:
    """The address of a server that refuses a cache salt that it has had, or none."""
    yield from _serve(FakeInference(tiny_target, once=True))
