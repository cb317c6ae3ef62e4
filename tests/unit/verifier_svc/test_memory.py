"""What products of matrices leave in memory."""

from __future__ import annotations

import torch
from torch import nn

from tests.allocations import allocated_mib
from verifier_svc.packed_linear import PackedLinear
from verifier_svc.pass_plan import ROW_MULTIPLE

MAX_MIB = 1.0
SIZES = range(ROW_MULTIPLE, 257, ROW_MULTIPLE)


def test_a_pass_with_as_many_rows_as_an_earlier_one_leaves_nothing() -> None:
    """Machine code is kept for every size, once: memory grows with the sizes that passes have had, not with passes."""
    linear = PackedLinear(nn.Linear(64, 32))
    with torch.inference_mode():
        for count in SIZES:
            linear(torch.zeros(count, 64))
        before = allocated_mib()
        for count in (*SIZES, *SIZES):
            linear(torch.zeros(count, 64))
    assert allocated_mib() - before < MAX_MIB
