"""Experts' products in tiles in the interpreter: what packed ones are tested for, in half precision, and tiles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.families.checkpoints import FAMILIES, VOCAB
from tests.unit.verifier_svc.interpreted.test_triton_attention import even_products  # noqa: F401 a fixture
from tests.unit.verifier_svc.layers.test_experts import (  # noqa: F401 fixtures and tests of this module, too
    EXPERTS,
    ROWS,
    Replace,
    block,
    routed,
    test_a_row_has_the_same_bits_in_every_company,
    test_they_compute_what_the_modules_do,
)
from verifier_svc.layers.tiled_experts import _ROWS, _Tiles, tile_experts
from verifier_svc.model.conformance_probe import ConformanceProbe
from verifier_svc.model.target_model import TargetModel

pytestmark = pytest.mark.usefixtures("even_products")


@pytest.fixture
def replace_experts() -> Replace:
    """Replaces a block's experts; returns their number."""
    return tile_experts


@torch.inference_mode()
def test_half_precision_is_rounded_after_each_product(block: nn.Module) -> None:  # noqa: F811 a fixture
    rows, index, weights = routed()
    expected = block["experts"](rows, index, weights)
    experts = block.half()
    tile_experts(experts)
    experts["experts"].num_rows = ROWS - 2
    output = experts["experts"](rows.half(), index, weights.half())
    assert output.dtype == torch.float16
    assert torch.allclose(output[:-2].float(), expected[:-2], atol=0.05)
    assert not output[-2:].any()


@pytest.mark.parametrize("sizes", [[40, 0, 16, 17, 0, 1], [0, 0, 0, 0, 0, 3], [5, 5, 5, 5, 5, 5]], ids=str)
def test_every_choice_is_in_one_tile_of_its_expert(sizes: list[int]) -> None:
    chosen = torch.tensor([expert for expert, size in enumerate(sizes) for _ in range(size)])
    chosen = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))]
    tiles = _Tiles(chosen, EXPERTS)
    seen: list[int] = []
    for expert, first, stop in zip(tiles.experts, tiles.firsts, tiles.stops, strict=True):
        choices = tiles.order[first:stop] if first < stop else tiles.order[:0]
        assert len(choices) <= _ROWS
        assert (chosen[choices] == expert).all()
        seen += choices.tolist()
    assert sorted(seen) == list(range(len(chosen)))


@pytest.mark.filterwarnings("ignore")
def test_a_mixture_in_tiles_gives_the_logits_of_plain_forwards(tmp_path: Path) -> None:
    FAMILIES["mixtral"].write(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    probe = ConformanceProbe(model, VOCAB)
    assert tile_experts(model) == 2
    probe.check(TargetModel(model, exact=True, num_blocks=8))
