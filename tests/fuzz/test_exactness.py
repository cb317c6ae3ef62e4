"""A slice of the fuzz, and faults that it has to find. `make fuzz` runs it in full."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fuzz import exactness
from tests.fuzz.__main__ import TINY_CONTEXT, TINY_TARGETS, TINY_VOCAB
from tests.fuzz.exactness import RESTARTS, FuzzPlan, fuzz, missing
from tests.tiny_checkpoint import write_tiny_llama
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.model.target_model import TargetInfo, TargetModel

# On a busy machine; a quiet one takes a tenth of it.
pytestmark = pytest.mark.timeout(600)

Loaded = tuple[TargetModel, TargetInfo]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fuzz")
    write_tiny_llama(directory, vocab_size=TINY_VOCAB, max_context_tokens=TINY_CONTEXT)
    return directory


def test_a_crowd_gets_the_tokens_and_the_bits_that_each_gets_alone(checkpoint: Path) -> None:
    counts = fuzz(FuzzPlan(checkpoint, num_tokens=2000, num_changes=150, num_cases=9, threads=1))
    assert counts["tokens"] == counts["greedy tokens"] + counts["sampled tokens"] >= 2000
    assert counts["accepted"] > 300
    assert counts["joins"] == counts["leaves"] + counts["cancels"]
    assert counts["blocks that came back"] == counts["blocks"]
    assert counts["tokens that transformers says, too"] > 50
    assert not missing(counts)


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_a_crowd_around_the_length_where_rope_factors_change_does_too(rope_type: str, tmp_path: Path) -> None:
    context, rope = TINY_TARGETS[rope_type]
    write_tiny_llama(tmp_path, vocab_size=TINY_VOCAB, max_context_tokens=context, rope_parameters=rope)
    counts = fuzz(FuzzPlan(tmp_path, num_tokens=2000, num_changes=150, num_cases=18, threads=1))
    assert counts["blocks that came back"] == counts["blocks"]
    assert counts["tokens that transformers says, too"] > 100
    assert (counts[RESTARTS] > 10) == (rope_type == "longrope")


def test_a_kernel_that_treats_many_rows_differently_is_found_out(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_bits(_module: object, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + 1e-6) if output.shape[1] >= 20 else output

    def disturb(target: TargetModel) -> None:
        target.model.model.norm.register_forward_hook(other_bits)

    monkeypatch.setattr(exactness, "load_probed_target", _loading_and_then(disturb))
    with pytest.raises(AssertionError, match="logits of sequence"):
        fuzz(FuzzPlan(checkpoint, num_tokens=2000, num_changes=1, num_cases=3, threads=1))


def test_a_block_that_does_not_come_back_is_found_out(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = SequenceCache.release

    def forgetful(cache: SequenceCache) -> None:
        cache._num_blocks = max(0, cache._num_blocks - (cache.length > 64))
        release(cache)

    def disturb(target: TargetModel) -> None:
        monkeypatch.setattr(SequenceCache, "release", forgetful)

    monkeypatch.setattr(exactness, "load_probed_target", _loading_and_then(disturb))
    with pytest.raises(AssertionError):
        fuzz(FuzzPlan(checkpoint, num_tokens=2000, num_changes=1, num_cases=3, threads=1))


def _loading_and_then(disturb: Callable[[TargetModel], None]) -> Callable[..., Loaded]:
    load = exactness.load_probed_target

    def loaded(config: Any) -> Loaded:
        target, info = load(config)
        disturb(target)
        return target, info

    return loaded
