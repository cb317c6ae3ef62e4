"""Ranks that compute a pass together: what rank 0 planned is what all of them run."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from coppice.core.errors import IncompatibleError
from coppice.core.tree import TokenTree
from tests.unit.verifier_svc.tiny_engine import VOCAB
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.kernels.cpu.attention import CompiledKernel
from verifier_svc.model.parallel.pass_message import PassStep, decode, encode
from verifier_svc.model.parallel.sharded_target import Ranks, ShardedTarget, refuse_uneven_heads
from verifier_svc.model.target_model import TargetModel

NewModel = Callable[[str], PreTrainedModel]
TREE = TokenTree((5, 6, 7, 8), (-1, 0, 0, 2), (0.0,) * 4)


def random_passes(target: TargetModel, seed: int) -> list[tuple[PassStep, torch.Tensor]]:
    """Steps and logits of a few passes over two sequences, whose accepted paths leave rows out."""
    generator = np.random.default_rng(seed)
    caches = [SequenceCache(target.cache, 256) for _ in range(2)]
    pending = [generator.integers(0, VOCAB, size).tolist() for size in (70, 3)]
    passes = []
    for _ in range(4):
        plan = target.plan(
            [
                SequenceRows(caches[0], pending[0], TREE),
                SequenceRows(caches[1], pending[1], wants_logits=bool(generator.integers(2))),
            ]
        )
        step = PassStep(plan, *target.cache.take_moves())
        passes.append((step, target.run(step.plan, step.sources, step.destinations)))
        # The path 0, 2 leaves node 1 out, so that row 2 moves.
        caches[0].keep([*range(len(pending[0])), len(pending[0]), len(pending[0]) + 2])
        caches[1].keep(range(len(pending[1])))
        pending = [[8], generator.integers(0, VOCAB, 2).tolist()]
    return passes


@pytest.mark.parametrize("kernel", [CompiledKernel, None], ids=["compiled", "tensor operations"])
def test_whoever_is_sent_every_pass_computes_the_same_logits(kernel: type | None, new_model: NewModel) -> None:
    first, second = (
        TargetModel(new_model("llama"), exact=True, num_blocks=8, kernel=kernel and kernel()) for _ in range(2)
    )
    passes = random_passes(first, seed=3)
    assert any(len(step.sources) for step, _ in passes)
    for step, expected in passes:
        received = decode(bytearray(encode(step)))
        assert received.plan.logit_ranges == step.plan.logit_ranges
        assert received.plan.num_rows == step.plan.num_rows
        assert torch.equal(second.run(received.plan, received.sources, received.destinations), expected)


def test_a_round_is_a_small_message(new_model: NewModel) -> None:
    target = TargetModel(new_model("llama"), exact=True, num_blocks=8)
    # One sequence, one pending token and four nodes.
    assert len(encode(random_passes(target, seed=1)[-1][0])) < 600


def test_others_run_what_rank_0_brings_and_not_their_own(new_model: NewModel) -> None:
    leader = TargetModel(new_model("llama"), exact=True, num_blocks=8)
    [(step, expected), *_] = random_passes(leader, seed=5)
    ranks = Ranks(2, share=lambda _: step, meet=lambda: None, fail=pytest.fail)
    other = ShardedTarget(new_model("llama"), exact=True, num_blocks=8, ranks=ranks)
    own = other.plan([SequenceRows(SequenceCache(other.cache, 64), [1, 2])])
    assert torch.equal(other.forward(own), expected)


@pytest.mark.parametrize("kind", [RuntimeError, OSError, MemoryError, IncompatibleError, ValueError])
def test_a_pass_that_breaks_off_is_told_to_the_ranks(kind: type[Exception], new_model: NewModel) -> None:
    told: list[str] = []
    ranks = Ranks(2, share=lambda step: step, meet=lambda: None, fail=told.append)
    model = new_model("llama")
    target = ShardedTarget(model, exact=True, num_blocks=8, ranks=ranks)
    plan = target.plan([SequenceRows(SequenceCache(target.cache, 64), [1, 2])])

    def lost(*_: object) -> None:
        raise kind("connection closed by peer")

    model.model.layers[1].register_forward_hook(lost)
    with pytest.raises(kind):
        target.forward(plan)
    assert told == ["a pass failed: connection closed by peer"]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "words"),
    [
        (4, 4, 3, "4 attention heads"),
        (6, 2, 3, "2 key/value heads"),
        (4, None, 8, "4 attention heads"),
        (8, 1, 2, "1 key/value heads"),
    ],
)
def test_heads_that_do_not_divide_are_refused(heads: int, kv_heads: int | None, size: int, words: str) -> None:
    config = SimpleNamespace(num_attention_heads=heads)
    if kv_heads is not None:
        config.num_key_value_heads = kv_heads
    with pytest.raises(IncompatibleError, match=f"TENSOR_PARALLEL is {size}.*{words}"):
        refuse_uneven_heads(config, size)


@pytest.mark.parametrize(("kv_heads", "size"), [(2, 2), (4, 2), (4, 4), (1, 1)])
def test_heads_that_divide_are_not(kv_heads: int, size: int) -> None:
    refuse_uneven_heads(SimpleNamespace(num_attention_heads=4, num_key_value_heads=kv_heads), size)
