"""What a drafter keeps of sequences that are gone: nothing, however many there were and however they ended."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from coppice.v1 import drafter_pb2 as pb
from drafter_svc.config import DrafterConfig
from drafter_svc.drafters.packed_linear import ROW_STEP, make_linear
from drafter_svc.drafters.registry import load_drafter
from drafter_svc.model_thread import ModelThread
from drafter_svc.service import DrafterService, DraftStream
from tests.allocations import allocated
from tests.tiny_drafter import write_tiny_drafter

VOCAB, CONTEXT, MAX_NODES, MAX_SEQUENCES = 53, 160, 10, 64
# Of one stream.
SEQUENCES = 8
STREAMS = 60
# An interpreter's own caches come and go; a thousandth of a MiB per sequence would be seen.
MAX_MIB, MAX_BLOCKS = 1.0, 1500
TIMEOUT_S = 60.0


async def converse(service: DrafterService, chance: random.Random) -> None:
    """A stream of some sequences, which are closed, or left open, or end with it in the middle of a draft."""
    trees: asyncio.Queue[pb.DraftResponse] = asyncio.Queue()
    events: asyncio.Queue[pb.DraftRequest] = asyncio.Queue()

    async def messages() -> AsyncIterator[pb.DraftRequest]:
        while True:
            yield await events.get()

    stream = DraftStream(service, trees.put)
    conversation = asyncio.create_task(stream.converse(messages()))
    lengths = {}
    for sequence_id in range(SEQUENCES):
        lengths[sequence_id] = chance.randrange(1, CONTEXT - 10)
        opening = pb.OpenDraft(
            prompt_token_ids=[chance.randrange(VOCAB) for _ in range(lengths[sequence_id])], max_nodes=MAX_NODES
        )
        opening.sampling.temperature, opening.sampling.seed = sequence_id % 2, chance.randrange(2**32)
        events.put_nowait(pb.DraftRequest(sequence_id=sequence_id, open=opening))
    for _ in range(2 * SEQUENCES):
        response = await asyncio.wait_for(trees.get(), TIMEOUT_S)
        tree, sequence_id = response.tree, response.sequence_id
        assert tree.base_length == lengths[sequence_id]
        tokens = [*tree.tree.token_ids[:2], chance.randrange(VOCAB)]
        lengths[sequence_id] += len(tokens)
        outcome = pb.DraftOutcome(base_length=tree.base_length, token_ids=tokens)
        events.put_nowait(pb.DraftRequest(sequence_id=sequence_id, outcome=outcome))
    for sequence_id in range(0, SEQUENCES, 3):
        events.put_nowait(pb.DraftRequest(sequence_id=sequence_id, close=pb.CloseDraft()))
    await asyncio.sleep(0)
    conversation.cancel()
    await asyncio.wait({conversation})
    await stream.close()


@pytest.mark.timeout(300)
async def test_sequences_that_are_gone_leave_no_memory_behind(tmp_path: Path) -> None:
    write_tiny_drafter(tmp_path, vocab_size=VOCAB, max_context_tokens=CONTEXT)
    drafter = load_drafter(DrafterConfig(model=str(tmp_path), device="cpu", max_nodes=MAX_NODES, prefix_mib=0))
    drafter.warm_up()
    thread = ModelThread()
    thread.start()
    service = DrafterService(drafter, thread, MAX_NODES, MAX_SEQUENCES)
    chance = random.Random(0)

    async def streams(number: int) -> None:
        for _ in range(number):
            await converse(service, chance)
        # The model thread lets go of what it had in hand.
        idle = asyncio.Event()
        loop = asyncio.get_running_loop()
        thread.submit(lambda: loop.call_soon_threadsafe(idle.set))
        await asyncio.wait_for(idle.wait(), TIMEOUT_S)
        assert service.num_sequences == 0

    try:
        await streams(STREAMS // 4)
        before = allocated()
        await streams(STREAMS)
        after = allocated()
    finally:
        await asyncio.to_thread(thread.stop)
    assert after.mib - before.mib < MAX_MIB
    assert after.blocks - before.blocks < MAX_BLOCKS


def test_products_of_any_number_of_rows_take_memory_for_few_sizes_and_are_right() -> None:
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    linear = make_linear(weight)
    with torch.inference_mode():
        for count in range(ROW_STEP, 8 * ROW_STEP + 1, ROW_STEP):
            linear(torch.zeros(count, 32))
        before = allocated()
        for count in range(9, 8 * ROW_STEP + 1):
            rows = torch.randn(count, 32, generator=torch.Generator().manual_seed(count))
            torch.testing.assert_close(linear(rows), rows @ weight.T, atol=1e-4, rtol=1e-4)
        after = allocated()
    assert after.mib - before.mib < MAX_MIB
