"""What products of matrices leave in memory."""

from __future__ import annotations

import torch

from coppice.kernels.cpu.packed_linear import ROW_STEP, make_linear
from tests.allocations import allocated_mib

MAX_MIB = 1.0


def test_products_of_any_number_of_rows_take_memory_for_few_sizes_and_are_right() -> None:
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    linear = make_linear(weight)
    with torch.inference_mode():
        for count in range(ROW_STEP, 8 * ROW_STEP + 1, ROW_STEP):
            linear(torch.zeros(count, 32))
        before = allocated_mib()
        for count in range(9, 8 * ROW_STEP + 1):
            rows = torch.randn(count, 32, generator=torch.Generator().manual_seed(count))
            torch.testing.assert_close(linear(rows), rows @ weight.T, atol=1e-4, rtol=1e-4)
        after = allocated_mib()
    assert after - before < MAX_MIB
