"""The drafter behind a real server: every message and every error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coppice.core.sampling import SamplingParams
from coppice.core.tokenizer import fingerprint
from coppice.core.tree import TokenTree, chain
from coppice.net import rpc
from coppice.v1 import drafter_pb2 as pb
from coppice.v1 import drafter_pb2_grpc, sampling_pb2
from coppice.wire.convert import sampling_to_proto
from drafter_svc.acceptance_map import AcceptanceMap
from drafter_svc.config import DrafterConfig
from drafter_svc.drafters.base import Drafter, DraftSequence
from drafter_svc.drafters.registry import load_drafter
from drafter_svc.model import checkpoint as drafter_checkpoint
from drafter_svc.model.model_thread import ModelThread
from drafter_svc.model.prefix_blocks import PIECE_ROWS
from drafter_svc.service import SERVICE_NAME, DrafterService
from tests.integration.draft_peer import PROMPT, TIMEOUT_S, Peer, Stub
from tests.tiny_drafter import write_tiny_drafter

VOCAB = 53
CONTEXT = 48
MAX_NODES = 10
MAX_SEQUENCES = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("drafter")
    write_tiny_drafter(directory, vocab_size=VOCAB, max_context_tokens=CONTEXT)
    return directory


@pytest.fixture(scope="module")
def drafter(checkpoint: Path) -> Drafter:
    # One tree per outcome: drafting ahead would add others, at times that nobody can foresee.
    config = DrafterConfig(
        model=str(checkpoint),
        device="cpu",
        max_nodes=MAX_NODES,
        draft_min_gain=0.0,
        draft_min_probability=0.0,
        draft_ahead_steps=0,
    )
    with pytest.MonkeyPatch.context() as patch:
        # Where inputs are rounded, too, what a prompt leaves in the cache depends on how it was cut into passes.
        patch.setattr(drafter_checkpoint, "compiled_ways", lambda: ["w8"])
        drafter = load_drafter(config)
    # As the service does before it says that it is ready: what is compiled now keeps no test waiting.
    drafter.warm_up()
    return drafter


async def serving(drafter: Drafter, *, calibrates: bool = False) -> AsyncIterator[Stub]:
    """A stub for a server of this drafter, which sends the drafter's own probabilities unless it `calibrates`."""
    thread = ModelThread()
    thread.start()
    server = rpc.Server([SERVICE_NAME])
    acceptance = AcceptanceMap(is_applied=calibrates)
    service = DrafterService(drafter, thread, MAX_NODES, MAX_SEQUENCES, acceptance=acceptance)
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(service, server.grpc)
    port = await server.start("127.0.0.1:0")
    async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
        yield drafter_pb2_grpc.DrafterServiceStub(channel)
    await server.stop(0)
    await asyncio.to_thread(thread.stop)


@pytest.fixture
async def stub(drafter: Drafter) -> AsyncIterator[Stub]:
    async for stub in serving(drafter):
        yield stub


@pytest.fixture
async def peer(stub: Stub) -> Peer:
    return Peer(stub)


def expected_tree(drafter: Drafter, committed: tuple[int, ...], sampling: SamplingParams, max_nodes: int) -> TokenTree:
    return drafter.open(committed, sampling).draft(max_nodes)


def assert_same(tree: TokenTree, expected: TokenTree) -> None:
    assert (tree.token_ids, tree.parents, tree.source_names) == (
        expected.token_ids,
        expected.parents,
        ("small-lm",),
    )
    assert tree.log_probs == pytest.approx(expected.log_probs, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids="temperature {}".format)
async def test_trees_follow_the_committed_tokens(peer: Peer, drafter: Drafter, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=2**63 + 5)
    message = pb.OpenDraft(prompt_token_ids=PROMPT, sampling=sampling_to_proto(sampling), max_nodes=8)
    await peer.send(1, open=message)
    committed = PROMPT
    for _ in range(4):
        tree = await peer.tree(1, len(committed))
        assert_same(tree, expected_tree(drafter, committed, sampling, 8))
        outcome = (*tree.token_ids[:1], 7)
        await peer.commit(1, len(committed), *outcome)
        committed += outcome
    await peer.tree(1, len(committed))
    await peer.send(1, close=pb.CloseDraft())
    assert await peer.finish() == []


async def test_calibration_changes_the_probabilities_that_are_sent_and_no_tree(drafter: Drafter) -> None:
    sampling = SamplingParams(temperature=1.0, seed=3)
    message = pb.OpenDraft(prompt_token_ids=PROMPT, sampling=sampling_to_proto(sampling), max_nodes=8)
    committed, num_changed = PROMPT, 0
    async for stub in serving(drafter, calibrates=True):
        peer = Peer(stub)
        await peer.send(1, open=message)
        for _ in range(4):
            tree = await peer.tree(1, len(committed))
            expected = expected_tree(drafter, committed, sampling, 8)
            assert (tree.token_ids, tree.parents) == (expected.token_ids, expected.parents)
            num_changed += tree.log_probs != pytest.approx(expected.log_probs, abs=1e-4)
            # Nothing that was drafted is ever right.
            wrong = next(token for token in range(VOCAB) if token not in tree.token_ids)
            await peer.commit(1, len(committed), wrong)
            committed += (wrong,)
        await peer.finish()
    assert num_changed == 3


async def test_sequences_share_a_stream_without_touching_each_other(peer: Peer, drafter: Drafter) -> None:
    await peer.open(1)
    await peer.open(2, (9, 9, 1))
    assert_same(await peer.tree(1, 5), expected_tree(drafter, PROMPT, SamplingParams(), 8))
    assert_same(await peer.tree(2, 3), expected_tree(drafter, (9, 9, 1), SamplingParams(), 8))
    await peer.commit(1, 5, 30)
    assert_same(await peer.tree(1, 6), expected_tree(drafter, (*PROMPT, 30), SamplingParams(), 8))


async def test_an_outcome_can_change_the_budget_which_the_service_caps(peer: Peer, drafter: Drafter) -> None:
    await peer.open(1, max_nodes=3)
    assert len(await peer.tree(1, 5)) == 3
    await peer.commit(1, 5, 6, max_nodes=1000)
    assert len(await peer.tree(1, 6)) == MAX_NODES
    await peer.commit(1, 6, 6)
    assert len(await peer.tree(1, 7)) == MAX_NODES


async def test_a_budget_of_zero_asks_for_no_tree(peer: Peer, drafter: Drafter) -> None:
    await peer.open(1, max_nodes=0)
    await peer.commit(1, 5, 6)
    await peer.commit(1, 6, 7, max_nodes=4)
    assert_same(await peer.tree(1, 7), expected_tree(drafter, (*PROMPT, 6, 7), SamplingParams(), 4))
    assert await peer.finish() == []


async def test_expectations_are_accepted(peer: Peer) -> None:
    await peer.open(1)
    await peer.tree(1, 5)
    await peer.send(1, expect=pb.Expect(base_length=5))
    await peer.commit(1, 5, 6)
    await peer.tree(1, 6)


async def test_behind_more_tokens_than_it_has_positions_for_drafts_go_on(peer: Peer) -> None:
    length = CONTEXT - 3
    await peer.open(1, (3,) * length)
    for token in range(12):
        assert len(await peer.tree(1, length)) == 8
        await peer.commit(1, length, token)
        length += 1
    assert len(await peer.tree(1, length)) == 8
    await peer.open(2, tuple(range(20)) * 50)
    assert len(await peer.tree(2, 1000)) == 8


@pytest.mark.parametrize(
    ("prompt", "sampling", "field"),
    [
        ((), {}, "open.prompt_token_ids"),
        ((1, VOCAB), {}, "open.prompt_token_ids"),
        (PROMPT, {"temperature": -1.0}, "sampling.temperature"),
        (PROMPT, {"top_p": 0.0}, "sampling.top_p"),
        (PROMPT, {"bad_token_ids": [VOCAB]}, "open.sampling.bad_token_ids"),
        (PROMPT, {"logit_bias": {VOCAB: 1.0}}, "open.sampling.logit_bias"),
    ],
    ids=["empty prompt", "foreign token", "temperature", "top_p", "bad token", "bias"],
)
async def test_an_opening_that_cannot_be_taken_ends_that_sequence_alone(
    peer: Peer, prompt: tuple[int, ...], sampling: dict[str, object], field: str
) -> None:
    await peer.open(1)
    await peer.tree(1, 5)
    await peer.open(2, prompt, **sampling)
    code, message = await peer.error(2)
    assert code == "INVALID_ARGUMENT"
    assert message.startswith(f"{field}: ")
    await peer.commit(1, 5, 6)
    await peer.tree(1, 6)


async def test_an_opening_with_more_denoising_than_there_is_ends_that_sequence_alone(peer: Peer) -> None:
    await peer.send(
        2, open=pb.OpenDraft(prompt_token_ids=PROMPT, max_nodes=4, denoising=sampling_pb2.Denoising(steps=65))
    )
    assert await peer.error(2) == ("INVALID_ARGUMENT", "speculation.denoising.steps: must be in [0, 64], got 65")
    # Who denoises nothing ignores it.
    await peer.send(
        1, open=pb.OpenDraft(prompt_token_ids=PROMPT, max_nodes=4, denoising=sampling_pb2.Denoising(steps=9))
    )
    await peer.tree(1, len(PROMPT))


@pytest.mark.parametrize(
    ("base_length", "token", "field"),
    [(4, 1, "outcome.base_length"), (6, 1, "outcome.base_length"), (5, VOCAB, "outcome.token_ids")],
    ids=["behind", "ahead", "foreign token"],
)
async def test_an_outcome_that_does_not_fit_ends_its_sequence(
    peer: Peer, base_length: int, token: int, field: str
) -> None:
    await peer.open(1)
    await peer.tree(1, 5)
    await peer.commit(1, base_length, token)
    code, message = await peer.error(1)
    assert code == "INVALID_ARGUMENT"
    assert message.startswith(f"{field}: ")
    await peer.commit(1, 5, 6)
    assert (await peer.error(1))[0] == "NOT_FOUND"
    await peer.send(1, close=pb.CloseDraft())
    await peer.open(1)
    await peer.tree(1, 5)


async def test_messages_for_a_sequence_that_is_not_open_are_answered(peer: Peer) -> None:
    await peer.commit(1, 5, 6)
    assert await peer.error(1) == ("NOT_FOUND", "sequence 1 is not open")
    # A hint is not answered.
    await peer.send(2, expect=pb.Expect(base_length=5))
    await peer.send(3)
    assert await peer.error(3) == ("INVALID_ARGUMENT", "event: must be set")
    await peer.send(4, close=pb.CloseDraft())
    assert await peer.finish() == []


async def test_a_sequence_cannot_be_opened_twice(peer: Peer) -> None:
    await peer.open(1)
    await peer.tree(1, 5)
    await peer.open(1)
    assert (await peer.error(1))[0] == "ALREADY_EXISTS"


async def test_sequences_are_limited_over_all_streams_and_freed_with_theirs(stub: Stub) -> None:
    first, second = Peer(stub), Peer(stub)
    for sequence_id in range(MAX_SEQUENCES):
        await first.open(sequence_id)
        await first.tree(sequence_id, 5)
    await second.open(1)
    assert (await second.error(1))[0] == "RESOURCE_EXHAUSTED"
    await first.send(0, close=pb.CloseDraft())
    await first.open(0)
    await first.tree(0, 5)
    await first.finish()
    await second.open(1)
    await second.tree(1, 5)


async def test_a_stream_that_is_cancelled_frees_its_sequences(stub: Stub) -> None:
    first, second = Peer(stub), Peer(stub)
    for sequence_id in range(MAX_SEQUENCES):
        await first.open(sequence_id)
        await first.tree(sequence_id, 5)
    first.call.cancel()
    async with asyncio.timeout(TIMEOUT_S):
        await second.open(1)
        while (await second.call.read()).WhichOneof("event") == "error":
            await second.open(1)


class BrokenSequence:
    def extend(self, token_ids: object, features: bytes) -> None: ...

    def read(self, max_pieces: int) -> int:
        return 0

    def draft(self, max_nodes: int, row_multiple: int = 1) -> TokenTree:
        raise RuntimeError("secret detail")

    def prepare(self) -> None: ...


class BrokenDrafter:
    """A drafter with a bug."""

    def __init__(self, drafter: Drafter) -> None:
        self.info = drafter.info
        self.prefixes = drafter.prefixes

    def open(self, prompt: object, sampling: object, cache_salt: str = "") -> DraftSequence:
        return BrokenSequence()

    def warm_up(self) -> None: ...


async def test_our_own_bug_ends_the_sequence_and_tells_no_details(drafter: Drafter) -> None:
    async for stub in serving(BrokenDrafter(drafter)):
        peer = Peer(stub)
        await peer.open(1)
        code, message = await peer.error(1)
        assert code == "INTERNAL"
        assert message.startswith("internal error, incident ")
        assert await peer.finish() == []


class RepeatingSequence(BrokenSequence):
    def draft(self, max_nodes: int, row_multiple: int = 1) -> TokenTree:
        return chain([0] * row_multiple)


class RepeatingDrafter(BrokenDrafter):
    """Drafts as many nodes as rows come together."""

    def open(self, prompt: object, sampling: object, cache_salt: str = "") -> DraftSequence:
        return RepeatingSequence()


async def test_the_multiple_of_rows_reaches_the_drafter_and_outcomes_change_it(drafter: Drafter) -> None:
    async for stub in serving(RepeatingDrafter(drafter)):
        peer = Peer(stub)
        await peer.open(1)
        await peer.send(2, open=pb.OpenDraft(prompt_token_ids=PROMPT, max_nodes=8, row_multiple=4))
        assert [len(await peer.tree(1, 5)), len(await peer.tree(2, 5))] == [1, 4]
        await peer.commit(2, 5, 6)
        assert len(await peer.tree(2, 6)) == 4
        await peer.commit(2, 6, 6, row_multiple=2)
        assert len(await peer.tree(2, 7)) == 2


async def test_describe_says_what_the_drafter_is(stub: Stub, checkpoint: Path) -> None:
    answer = await stub.Describe(pb.DrafterServiceDescribeRequest(), timeout=TIMEOUT_S)
    assert (answer.kind, answer.model, answer.vocab_size) == ("small-lm", str(checkpoint), VOCAB)
    assert answer.tokenizer_fingerprint == fingerprint((checkpoint / "tokenizer.json").read_bytes())
    assert not answer.needs_features
    assert answer.shared_block_tokens == PIECE_ROWS
    assert list(answer.acceptance_by_rank) == [0.5, 0.25]
    assert answer.version
