"""Muon in float32 against torch's, which computes in bfloat16."""

from __future__ import annotations

import pytest
import torch

from coppice.training.loop import Float32Muon, orthogonalised

SHAPES = ((24, 24), (48, 16), (16, 48))
COEFFICIENTS = (3.4445, -4.775, 2.0315)


def matrices() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def test_steps_are_torchs_up_to_rounding() -> None:
    ours, theirs = matrices(), matrices()
    muon = Float32Muon(ours, weight_decay=0.05)
    reference = torch.optim.Muon(theirs, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        for optimizer in (muon, reference):
            optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        before = [one.detach().clone() for one in ours]
        muon.step()
        reference.step()
        for one, other, start in zip(ours, theirs, before, strict=True):
            assert (one - start).norm() > 0.01
            assert (one - other).norm() < 0.03 * (one - start).norm() * (step + 1)
    # A state that one of them has saved fits the other.
    muon.load_state_dict(reference.state_dict())


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonalised(matrix, COEFFICIENTS, 5, 1e-7))
    assert 0.3 < values.min() <= values.max() < 1.4


def test_a_parameter_without_gradient_stays() -> None:
    [one, *_] = matrices()
    before = one.detach().clone()
    Float32Muon([one], weight_decay=0.5).step()
    assert torch.equal(one, before)
