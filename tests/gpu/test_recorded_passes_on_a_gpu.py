"""Passes as CUDA graphs: the same as kernel by kernel, and no token other than plain decoding's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny_checkpoint import write_tiny_llama
from tests.unit.verifier_svc.greedy_trees import greedy_by_trees
from tests.unit.verifier_svc.oracles import random_tree
from tests.unit.verifier_svc.tiny_engine import VOCAB
from verifier_svc.config import VerifierConfig
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.model.loading import load_probed_target
from verifier_svc.model.pass_graphs import Capture, PassGraphs
from verifier_svc.model.target_model import TargetModel

pytestmark = pytest.mark.gpu
triton_attention = pytest.importorskip("verifier_svc.kernels.triton.attention", reason="Triton is not installed")

NewCapture = Callable[[], Capture]
NewModel = Callable[[str], PreTrainedModel]
# Sizes of the passes below, and others that they have to be told from.
BUCKETS = (1, 8, 16, 32)


def recorded_target(model: PreTrainedModel, capture: Capture) -> tuple[TargetModel, PassGraphs]:
    kernel = triton_attention.TritonKernel(next(model.parameters()).device)
    target = TargetModel(model, exact=False, num_blocks=32, kernel=kernel)
    graphs = PassGraphs(kernel, capture, BUCKETS)
    target.record_passes(graphs)
    return target, graphs


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gpt_neox"])
def test_graphs_give_the_logits_of_passes_kernel_by_kernel(
    family: str, new_model: NewModel, device: torch.device, new_capture: NewCapture
) -> None:
    models = [new_model(family).to(device) for _ in range(2)]  # type: ignore[arg-type]
    plain = TargetModel(models[0], exact=False, num_blocks=32, kernel=triton_attention.TritonKernel(device))
    recorded, graphs = recorded_target(models[1], new_capture())
    generator = np.random.default_rng(0)
    caches = [[SequenceCache(target.cache, 256) for _ in range(2)] for target in (plain, recorded)]
    pending = [generator.integers(0, VOCAB, size).tolist() for size in (9, 2)]
    for sizes in ((3, 4), (1, 1), (8, 2), (20, 1), (2, 2)):
        trees = [random_tree(generator, VOCAB, size) for size in sizes]
        logits = []
        for target, own in zip((plain, recorded), caches, strict=True):
            logits.append(
                target.forward(target.plan([SequenceRows(*s) for s in zip(own, pending, trees, strict=True)]))
            )
            for index, (cache, tree) in enumerate(zip(own, trees, strict=True)):
                path = tree.path(len(tree) - 1)
                cache.keep([*range(len(pending[index])), *(len(pending[index]) + node for node in path)])
        assert torch.allclose(*logits, atol=1e-4)
        pending = [[int(generator.integers(VOCAB))] for _ in sizes]
    assert graphs.num_recordings >= 3


def test_speculation_changes_no_token(new_model: NewModel, device: torch.device, new_capture: NewCapture) -> None:
    """Greedy, in single precision, against transformers; half of the drafts hold the right path among decoys."""
    model, plain = (new_model("llama").to(device) for _ in range(2))  # type: ignore[arg-type]
    target, graphs = recorded_target(model, new_capture())
    prompt = np.random.default_rng(1).integers(3, VOCAB, 20).tolist()
    expected = greedy(plain, prompt, 40)
    said, num_passes = greedy_by_trees(target, prompt, expected, VOCAB)
    assert said[: len(expected)] == expected
    assert num_passes < len(expected)
    assert graphs.num_recordings >= 1


def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens, one plain forward each."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids = torch.tensor([tokens], device=next(model.parameters()).device)
            tokens.append(int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_a_checkpoint_is_served_by_recorded_triton_passes(
    device: torch.device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_llama(tmp_path, vocab_size=94, max_context_tokens=128)
    with caplog.at_level("INFO"):
        load_probed_target(VerifierConfig(model=str(tmp_path), device=device.type, kv_cache_mib=8))
    assert "attention runs in Triton" in caplog.text
    assert "not recorded" not in caplog.text
    assert "recorded a pass of 256 rows" in caplog.text
