"""Products of experts in tiles on the device, and a mixture in strict mode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coppice.core.errors import IncompatibleError
from tests.families.checkpoints import FAMILIES
from tests.unit.verifier_svc.layers.test_experts import ROWS, gpt_oss, mixtral, routed
from verifier_svc.config import VerifierConfig
from verifier_svc.model.loading import load_probed_target

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
tiled_experts = pytest.importorskip("verifier_svc.layers.tiled_experts", reason="Triton is not installed")


@pytest.mark.parametrize("new_experts", [mixtral, gpt_oss])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)], ids=str)
@torch.inference_mode()
def test_a_row_is_right_and_has_the_same_bits_in_every_company(
    new_experts: object, dtype: torch.dtype, tolerance: float, device: torch.device
) -> None:
    experts = new_experts()  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    plain = experts(*routed())
    tiled = tiled_experts.TiledExperts(experts.to(device, dtype))
    rows, index, weights = (part.to(device) for part in routed())
    rows, weights = rows.to(dtype), weights.to(dtype)
    tiled.num_rows = ROWS
    expected = tiled(rows, index, weights)
    assert torch.allclose(expected.float().cpu(), plain, atol=tolerance)
    for size in (1, 2, 3, 5, 11, ROWS):
        some = torch.randperm(ROWS, generator=generator)[:size].to(device)
        tiled.num_rows = size
        assert torch.equal(tiled(rows[some], index[some], weights[some]), expected[some])


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt-oss"])
def test_a_target_in_strict_mode(name: str, device: torch.device, tmp_path: Path) -> None:
    """Dense products are a library's: whether rows stand alone depends on the device, and is said."""
    FAMILIES[name].write(tmp_path)
    config = VerifierConfig(
        model=str(tmp_path), device=device.type, dtype="float32", exactness="strict", kv_cache_mib=8
    )
    try:
        _, info = load_probed_target(config)
    except IncompatibleError as error:
        if "different bits in a batch" not in str(error):
            raise
        pytest.skip(str(error))
    assert info.exact
