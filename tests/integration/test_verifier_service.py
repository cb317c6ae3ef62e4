"""The verifier behind a real server: rounds, and errors that name their field."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from google.rpc import code_pb2
from tokenizers import Tokenizer

from coppice.core.log_probs import MAX_TOP_LOG_PROBS
from coppice.core.tree import TokenTree
from coppice.net import rpc
from coppice.v1 import sampling_pb2, tree_pb2, verifier_pb2_grpc
from coppice.v1 import verifier_pb2 as pb
from coppice.wire.convert import tree_to_proto
from tests.integration.verify_peer import PROMPT, TIMEOUT_S, Peer, Stub
from tests.tiny_checkpoint import write_tiny_llama
from verifier_svc.config import VerifierConfig
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.kv_cache import BLOCK_SIZE
from verifier_svc.engine.scheduler import SchedulerLimits
from verifier_svc.model.loading import load_probed_target
from verifier_svc.model.row_multiple import FINE_MULTIPLES
from verifier_svc.model.target_model import TargetInfo, TargetModel
from verifier_svc.service import VerifierServicer

VOCAB = 61
CONTEXT = 64
MAX_NODES = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("verifier")
    write_tiny_llama(directory, vocab_size=VOCAB, max_context_tokens=CONTEXT)
    return directory


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> tuple[TargetModel, TargetInfo]:
    torch.set_num_threads(1)
    return load_probed_target(VerifierConfig(model=str(checkpoint), device="cpu", kv_cache_mib=1))


@pytest.fixture
async def stub(loaded: tuple[TargetModel, TargetInfo]) -> AsyncIterator[Stub]:
    target, info = loaded
    engine = Engine(target, info, SchedulerLimits(max_sequences=4, max_queued=4, prefill_chunk=16), MAX_NODES)
    engine.start()
    server = rpc.Server(["coppice.v1.VerifierService"])
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(VerifierServicer(engine, info, MAX_NODES), server.grpc)
    port = await server.start("127.0.0.1:0")
    async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
        yield verifier_pb2_grpc.VerifierServiceStub(channel)
    await server.stop(0)
    # The streams' handlers end soon after the server; each takes its sequences with it.
    async with asyncio.timeout(TIMEOUT_S):
        while target.cache.num_free_blocks < target.cache.num_blocks:  # noqa: ASYNC110 nothing to wait on
            await asyncio.sleep(0.01)
    await asyncio.to_thread(engine.stop)


async def test_drafts_save_rounds_and_change_no_token(stub: Stub) -> None:
    sampling = sampling_pb2.SamplingParams(temperature=1.0, seed=3)
    plain = Peer(stub)
    await plain.open(sampling=sampling)
    expected, plain_rounds = await plain.run()
    assert len(expected) == plain_rounds == 12
    drafted = Peer(stub)
    await drafted.open(sampling=sampling, linger_us=5_000_000)
    tokens, rounds = await drafted.run(drafts=expected)
    assert tokens == expected
    assert rounds <= 4


@pytest.mark.parametrize("number", [None, 0, 3, 20])
async def test_outcomes_carry_the_log_probabilities_that_were_asked_for(number: int | None, stub: Stub) -> None:
    peer = Peer(stub)
    await peer.open(top_log_probs=number)
    outcome = (await peer.next()).outcome
    assert len(outcome.log_probs) == (number is not None)
    assert len(outcome.top_token_ids) == len(outcome.top_log_probs) == (number or 0)
    if number:
        # Greedy decoding says the likeliest.
        assert outcome.top_token_ids[0] == outcome.token_ids[0]
        assert outcome.top_log_probs[0] == outcome.log_probs[0] < 0
        assert list(outcome.top_log_probs) == sorted(outcome.top_log_probs, reverse=True)


async def test_describe_and_tokenizer(stub: Stub, loaded: tuple[TargetModel, TargetInfo]) -> None:
    described = await stub.Describe(pb.VerifierServiceDescribeRequest(), timeout=TIMEOUT_S)
    assert (described.vocab_size, described.max_context_tokens, described.max_nodes) == (VOCAB, CONTEXT, MAX_NODES)
    assert list(described.eos_token_ids) == [2]
    assert described.exactness == sampling_pb2.EXACTNESS_STRICT
    assert described.shared_block_tokens == BLOCK_SIZE
    assert described.row_multiple in FINE_MULTIPLES
    assert len(described.instance_id) == 16
    assert sampling_pb2.ACCEPTANCE_RULE_TRAVERSAL in described.acceptance_rules
    tokenizer = await stub.GetTokenizer(pb.GetTokenizerRequest(), timeout=TIMEOUT_S)
    assert tokenizer.tokenizer_fingerprint == described.tokenizer_fingerprint
    assert Tokenizer.from_buffer(tokenizer.tokenizer_json).get_vocab_size() == VOCAB


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"prompt": ()}, code_pb2.INVALID_ARGUMENT, "prompt_token_ids"),
        ({"prompt": (4, VOCAB)}, code_pb2.INVALID_ARGUMENT, "prompt_token_ids"),
        ({"prompt": (4,) * CONTEXT}, code_pb2.INVALID_ARGUMENT, "prompt_token_ids"),
        ({"resumed_tokens": 5}, code_pb2.INVALID_ARGUMENT, "resumed_tokens"),
        (
            {"sampling": sampling_pb2.SamplingParams(temperature=-1)},
            code_pb2.INVALID_ARGUMENT,
            "sampling.temperature",
        ),
        (
            {"sampling": sampling_pb2.SamplingParams(bad_token_ids=[VOCAB])},
            code_pb2.INVALID_ARGUMENT,
            "sampling.bad_token_ids",
        ),
        (
            {"stopping": sampling_pb2.StoppingOptions(stop_strings=[""])},
            code_pb2.INVALID_ARGUMENT,
            "stopping.stop_strings",
        ),
        ({"top_log_probs": MAX_TOP_LOG_PROBS + 1}, code_pb2.INVALID_ARGUMENT, "top_log_probs"),
        (
            {
                "acceptance": sampling_pb2.ACCEPTANCE_RULE_TRAVERSAL,
                "sampling": sampling_pb2.SamplingParams(temperature=1, grammar=sampling_pb2.Grammar(regex="a")),
            },
            code_pb2.UNIMPLEMENTED,
            "",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_bad_input_names_its_field_and_others_go_on(
    fields: dict[str, object], code: int, field: str, stub: Stub
) -> None:
    peer = Peer(stub)
    await peer.open(1, **fields)  # type: ignore[arg-type]
    error = await peer.error()
    assert (error.code, error.field) == (code, field)
    await peer.open(2)
    tokens, _ = await peer.run(sequence_id=2)
    assert len(tokens) == 12


@pytest.mark.parametrize(
    "tree",
    [
        tree_pb2.TokenTree(token_ids=[1, 2], parents=[-1, 1]),
        tree_pb2.TokenTree(token_ids=[1, 2], parents=[-1]),
        tree_pb2.TokenTree(token_ids=[1, 1], parents=[-1, -1]),
        tree_pb2.TokenTree(token_ids=[VOCAB], parents=[-1]),
        tree_pb2.TokenTree(token_ids=[1], parents=[-1], log_probs=[0.5]),
    ],
    ids=["parent after child", "lengths differ", "twins", "foreign token", "probability above one"],
)
async def test_a_malformed_tree_is_rejected_and_costs_no_request(tree: tree_pb2.TokenTree, stub: Stub) -> None:
    peer = Peer(stub)
    await peer.open(linger_us=100_000)
    rejected = None
    tokens: list[int] = []
    while True:
        response = await peer.next()
        kind = response.WhichOneof("event")
        if kind == "finished":
            break
        if kind == "draft_rejected":
            rejected = response.draft_rejected
        else:
            tokens += response.outcome.token_ids
            await peer.draft(len(PROMPT) + len(tokens), tree)
    assert rejected is not None
    assert rejected.code == code_pb2.INVALID_ARGUMENT
    assert "tree" in rejected.field
    assert len(tokens) == 12


async def test_an_open_sequence_cannot_be_opened_again(stub: Stub) -> None:
    peer = Peer(stub)
    await peer.open(stopping=sampling_pb2.StoppingOptions(max_tokens=50, ignore_eos=True), linger_us=1_000_000)
    await peer.open()
    while True:
        response = await peer.next()
        if response.WhichOneof("event") == "error":
            break
    assert response.error.field == "sequence_id"


async def test_a_cancelled_stream_frees_its_sequences(stub: Stub) -> None:
    peer = Peer(stub)
    for sequence_id in range(3):
        await peer.open(sequence_id, linger_us=10_000_000)
    await peer.next()
    peer.call.cancel()
    after = Peer(stub)
    await after.open()
    assert len((await after.run())[0]) == 12
    # The fixture waits until every block is back.


async def test_over_budget_trees_are_pruned(stub: Stub) -> None:
    peer = Peer(stub)
    await peer.open(linger_us=5_000_000)
    first = (await peer.next()).outcome
    base = first.base_length + len(first.token_ids)
    wide = TokenTree(tuple(range(20)), (-1,) * 20, (-1.0,) * 20)
    await peer.draft(base, tree_to_proto(wide))
    assert (await peer.next()).outcome.draft_nodes == MAX_NODES


async def test_a_grammar_is_unimplemented_where_tokens_are_no_bytes_and_others_go_on(stub: Stub) -> None:
    peer = Peer(stub)
    grammar = sampling_pb2.SamplingParams(grammar=sampling_pb2.Grammar(regex="a"))
    await peer.open(sequence_id=7, sampling=grammar)
    error = await peer.error()
    assert error.code == code_pb2.UNIMPLEMENTED
    assert "not offered" in error.message
    await peer.open()
    assert len((await peer.run())[0]) == 12
