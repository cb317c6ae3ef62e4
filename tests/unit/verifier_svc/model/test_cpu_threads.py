"""Threads by the number of rows, and results that do not depend on them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.unit.verifier_svc.tiny_engine import VOCAB
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.kernels.cpu.packed_layers import pack_linears
from verifier_svc.model.cpu_threads import WIDE_PASS_ROWS, CpuThreads
from verifier_svc.model.target_model import TargetModel


def test_few_rows_get_half_of_the_cores_and_many_rows_all(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr("verifier_svc.model.cpu_threads.usable_cores", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    threads = CpuThreads(0)
    for rows in (1, 12, WIDE_PASS_ROWS, 500, 4):
        threads.set_for(rows)
    assert used == [4, 8, 4]
    threads = CpuThreads(3)
    for rows in (1, 500):
        threads.set_for(rows)
    assert used == [4, 8, 4, 3]


def test_compiled_layers_use_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifier_svc.model.cpu_threads.usable_cores", lambda: 4)
    before = torch.get_num_threads()
    try:
        threads = CpuThreads(0)
        threads.set_for(1)
        assert torch.get_num_threads() == 2
        threads.use_all_cores()
        threads.set_for(1)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_strict_logits_do_not_depend_on_the_number_of_threads(new_model: Callable[[str], PreTrainedModel]) -> None:
    model = new_model("llama")
    pack_linears(model)
    prompt = np.random.default_rng(0).integers(0, VOCAB, 90).tolist()
    results = []
    for requested in (1, 2):
        target = TargetModel(model, exact=True, num_blocks=16, threads=CpuThreads(requested))
        cache = SequenceCache(target.cache, 128)
        first = target.forward(target.plan([SequenceRows(cache, prompt)]))
        cache.keep(range(len(prompt)))
        second = target.forward(target.plan([SequenceRows(cache, [7])]))
        results.append((first, second))
    torch.set_num_threads(1)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
