"""What only a CUDA device can show. Elsewhere these tests are skipped, and say so; `make gpu` runs them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.unit.verifier_svc.conftest import new_model  # noqa: F401 a fixture
from verifier_svc.model.pass_graphs import Capture, CudaCapture


@pytest.fixture
def device() -> torch.device:
    """The device, or a reason to skip."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return torch.device("cuda")


@pytest.fixture
def new_capture(device: torch.device) -> Callable[[], Capture]:
    """Makes what records passes."""
    return CudaCapture
