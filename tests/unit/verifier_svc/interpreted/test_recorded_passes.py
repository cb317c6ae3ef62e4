"""Whole models on the Triton kernel, recorded and replayed: a replay knows nothing but what is in its tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from coppice.core.tree import TokenTree
from tests.unit.verifier_svc.interpreted.tape import TapeCapture
from tests.unit.verifier_svc.oracles import plain_logits, random_tree
from tests.unit.verifier_svc.tiny_engine import VOCAB
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.kernels.triton.attention import TritonKernel
from verifier_svc.model.pass_graphs import PassGraphs
from verifier_svc.model.target_model import TargetModel


# GPT-2 looks at its input ids on the host where it has a padding token: it runs as it did without recordings.
@pytest.mark.parametrize(("family", "num_replays"), [("mistral", 3), ("gpt2", 0)])
def test_replayed_trees_get_the_logits_of_plain_forwards(
    family: str,
    num_replays: int,
    new_model: Callable[[str], PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, plain = new_model(family), new_model(family)
    kernel, capture = TritonKernel(torch.device("cpu"), programs=2), TapeCapture()
    capture.record_launches(monkeypatch)
    target = TargetModel(model, exact=False, num_blocks=8, kernel=kernel)
    target.record_passes(PassGraphs(kernel, capture, (16,)))
    generator = np.random.default_rng(4)
    caches = [SequenceCache(target.cache, 128) for _ in range(2)]
    contexts: list[list[int]] = [[], []]
    pending = [generator.integers(0, VOCAB, size).tolist() for size in (5, 3)]
    for sizes in ((3, 4), (9, 1), (2, 11)):
        trees = [random_tree(generator, VOCAB, size) for size in sizes]
        work = [SequenceRows(*share) for share in zip(caches, pending, trees, strict=True)]
        plan = target.plan(work)
        logits = target.forward(plan)
        for index, (first, last) in enumerate(plan.logit_ranges):
            contexts[index] += pending[index]
            paths = [(), *trees[index].paths()]
            expected = torch.stack([plain_logits(plain, [*contexts[index], *path]) for path in paths])
            assert torch.allclose(logits[first:last], expected, atol=2e-4)
            kept = accept(caches[index], len(pending[index]), trees[index], int(generator.integers(sizes[index])))
            contexts[index] += kept
            pending[index] = [int(generator.integers(VOCAB))]
    assert capture.num_replays == num_replays
    assert ("passes are not recorded" in caplog.text) == (num_replays == 0)
    assert target.bytes_per_slot == kept_bytes(model)


def kept_bytes(model: PreTrainedModel) -> int:
    """Bytes of a token's keys and values in all layers, in single precision."""
    config = model.config
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    return config.num_hidden_layers * 2 * kv_heads * config.hidden_size // config.num_attention_heads * 4


def accept(cache: SequenceCache, num_pending: int, tree: TokenTree, node: int) -> list[int]:
    """Commit the path of a node; returns its tokens."""
    path = tree.path(node)
    cache.keep([*range(num_pending), *(num_pending + step for step in path)])
    return [tree.token_ids[step] for step in path]
