"""Padding to fixed sizes, static inputs, and what happens when a pass cannot be recorded; without a GPU or Triton.

The stand-in for a recording runs the function again, on the tensors that it was given at first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.unit.verifier_svc.oracles import random_tree
from tests.unit.verifier_svc.tiny_engine import VOCAB
from verifier_svc.engine.kv_cache import KVCache, SequenceCache
from verifier_svc.engine.pass_plan import PassPlan, SequenceRows, plan_pass
from verifier_svc.kernels.base import AttentionRule
from verifier_svc.kernels.cpu.attention import CompiledKernel
from verifier_svc.kernels.cpu.packed_layers import pack_linears
from verifier_svc.model import loading
from verifier_svc.model.conformance_probe import ConformanceProbe
from verifier_svc.model.pass_graphs import BUCKETS, Outputs, PassGraphs
from verifier_svc.model.target_model import TargetModel

NewModel = Callable[[str], PreTrainedModel]
Replay = Callable[[], object]


class CPUKernel(CompiledKernel):
    """The CPU's kernel as one whose passes may be repeated: `begin` is called for every pass, recorded or not."""

    device = torch.device("cpu")

    def layout(self, plan: PassPlan) -> int:
        return max(len(segment.parents) for segment in plan.segments) > 4


class Repeating:
    """`Capture` that repeats the function, and counts."""

    def __init__(self) -> None:
        self.num_replays = 0

    def __call__(self, function: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        result = function()

        def replay() -> None:
            self.num_replays += 1
            for kept, repeated in zip(result, function(), strict=True):
                kept.copy_(repeated)

        return replay, result


class Deaf(Repeating):
    """A recording that does not see new inputs."""

    def __call__(self, function: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        return (lambda: None), function()


class Refusing(Repeating):
    """Nothing can be recorded."""

    def __call__(self, function: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        raise RuntimeError("operation not permitted when stream is capturing")


def new_target(model: PreTrainedModel) -> tuple[TargetModel, CPUKernel]:
    """A target whose rows have the same bits in any company, so that padding must not change one."""
    pack_linears(model)
    kernel = CPUKernel()
    return TargetModel(model, exact=True, num_blocks=32, kernel=kernel), kernel


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "opt"])
def test_recorded_passes_give_the_bits_of_passes_as_they_are(family: str, new_model: NewModel) -> None:
    capture = Repeating()
    plain, _ = new_target(new_model(family))
    recorded, kernel = new_target(new_model(family))
    graphs = PassGraphs(kernel, capture, (32, 16))
    recorded.record_passes(graphs)
    generator = np.random.default_rng(0)
    caches = [[SequenceCache(target.cache, 256) for _ in range(3)] for target in (plain, recorded)]
    pending = [generator.integers(0, VOCAB, size).tolist() for size in (3, 1, 4)]
    for sizes in ((3, 1, 2), (9, 4, 7), (1, 1, 1), (30, 20, 30), (2, 2, 2)):
        trees = [random_tree(generator, VOCAB, size) for size in sizes]
        logits = []
        for target, own in zip((plain, recorded), caches, strict=True):
            work = [SequenceRows(*share) for share in zip(own, pending, trees, strict=True)]
            logits.append(target.forward(target.plan(work)))
            for index, (cache, tree) in enumerate(zip(own, trees, strict=True)):
                path = tree.path(len(tree) - 1)
                cache.keep([*range(len(pending[index])), *(len(pending[index]) + node for node in path)])
        assert torch.equal(*logits)
        pending = [[int(generator.integers(VOCAB))] for _ in sizes]
    # The fourth pass is larger than every size.
    assert capture.num_replays == 4
    assert graphs.num_recordings == 2


def test_a_recording_is_used_again_and_forgotten_with_the_cache(new_model: NewModel) -> None:
    capture = Repeating()
    target, kernel = new_target(new_model("llama"))
    graphs = PassGraphs(kernel, capture, (4, 8))
    target.record_passes(graphs)
    target.record_now()
    assert (graphs.num_recordings, capture.num_replays) == (2, 2)
    assert target.cache.num_free_blocks == target.cache.num_blocks
    cache = SequenceCache(target.cache, 64)
    for tokens in ([5], [6, 7], [8, 9, 10, 11, 12]):
        target.forward(target.plan([SequenceRows(cache, tokens)]))
    assert (graphs.num_recordings, capture.num_replays) == (2, 5)
    target.resize_cache(8)
    assert graphs.num_recordings == 0


def test_parts_of_prompts_and_large_passes_are_not_padded(new_model: NewModel) -> None:
    graphs = PassGraphs(CPUKernel(), Repeating())
    cache = KVCache(32)
    for rows, expected in ((1, 1), (3, 4), (65, 96), (256, 256), (257, None)):
        plan = plan_pass([SequenceRows(SequenceCache(cache, 512), [1] * rows)], row_multiple=1)
        padded = graphs.padded(plan)
        assert (None if padded is None else len(padded.token_ids)) == expected
        assert padded is None or (len(padded.positions), padded.num_rows) == (expected, rows)
    unasked = SequenceRows(SequenceCache(cache, 512), [1, 2, 3], wants_logits=False)
    assert graphs.padded(plan_pass([unasked], row_multiple=1)) is None
    assert sorted(BUCKETS) == list(BUCKETS)


def test_what_cannot_be_recorded_runs_as_before_and_says_so_once(
    new_model: NewModel, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = new_target(new_model("llama"))
    target, kernel = new_target(new_model("llama"))
    target.record_passes(PassGraphs(kernel, Refusing()))
    for tokens in ([1, 2, 3], [4]):
        expected, got = (
            one.forward(one.plan([SequenceRows(SequenceCache(one.cache, 64), tokens)])) for one in (plain, target)
        )
        assert torch.equal(expected, got)
    assert caplog.text.count("passes are not recorded") == 1
    assert "operation not permitted" in caplog.text


@pytest.mark.parametrize(
    ("capture", "is_recorded"),
    [(Repeating(), True), (Deaf(), False), (Refusing(), False)],
    ids=["sound", "deaf", "refusing"],
)
def test_recordings_are_tried_before_they_serve(
    capture: Repeating, is_recorded: bool, new_model: NewModel, caplog: pytest.LogCaptureFixture
) -> None:
    model = new_model("llama")
    probe = ConformanceProbe(model, VOCAB)
    target, kernel = new_target(model)
    loading.record_passes(target, probe, kernel, capture)
    target.record_now()
    assert caplog.text.count("passes are not recorded") == (not is_recorded)
    assert probe.check(target) < 1e-3
    assert (capture.num_replays > 0) == is_recorded


class Broken(CPUKernel):
    """A kernel that is wrong, or that does not run."""

    def __init__(self, failure: Exception | None = None) -> None:
        super().__init__()
        self._failure = failure

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        if self._failure is not None:
            raise self._failure
        return super().attend(layer, query, key, value, rule) * 1.5


@pytest.mark.parametrize(
    "kernel",
    [Broken(), Broken(RuntimeError("out of resource")), Broken(FileNotFoundError("no compiler"))],
    ids=["wrong", "does not compile", "no compiler"],
)
def test_a_gpu_kernel_that_fails_the_probe_is_replaced(
    kernel: Broken, new_model: NewModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (extra `triton`; Linux on x86-64)")
    monkeypatch.setattr(loading, "compiled_kernel", lambda _model: None)
    monkeypatch.setattr(loading, "triton_kernel", lambda _model: kernel)
    model = new_model("llama")
    probe = ConformanceProbe(model, VOCAB)
    target = loading.probed(model, probe, exact=False, threads=None)
    assert "attention does not run in Triton" in caplog.text
    assert probe.check(target) < 1e-3


def test_a_gpu_kernel_that_passes_the_probe_serves_with_recordings_but_not_in_strict_mode(
    new_model: NewModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (extra `triton`; Linux on x86-64)")
    capture: Any = Repeating()
    monkeypatch.setattr(loading, "compiled_kernel", lambda _model: None)
    monkeypatch.setattr(loading, "triton_kernel", lambda _model: CPUKernel())
    monkeypatch.setattr(loading, "CudaCapture", lambda: capture)
    model = new_model("llama")
    probe = ConformanceProbe(model, VOCAB)
    with caplog.at_level("INFO"):
        loading.probed(model, probe, exact=True, threads=None)
        assert "Triton" not in caplog.text
        target = loading.probed(model, probe, exact=False, threads=None)
    assert "attention runs in Triton" in caplog.text
    before = capture.num_replays
    assert before > 0
    probe.check(target)
    assert capture.num_replays > before


def test_there_is_no_gpu_kernel_for_a_model_on_a_cpu(new_model: NewModel) -> None:
    assert loading.triton_kernel(new_model("llama")) is None
