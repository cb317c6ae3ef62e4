"""Training computes in bfloat16 only where that is not emulated."""

from __future__ import annotations

import pytest
import torch

from coppice.training.precision import training_dtype


@pytest.mark.parametrize(("avx512_bf16", "amx"), [(True, False), (False, True)])
def test_a_processor_that_multiplies_bfloat16_uses_it(
    monkeypatch: pytest.MonkeyPatch, avx512_bf16: bool, amx: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert training_dtype() is torch.bfloat16


def test_others_compute_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert training_dtype() is torch.float32
    assert training_dtype("cuda") is torch.bfloat16
