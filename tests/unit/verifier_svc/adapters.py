"""Random adapters for tiny targets."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from verifier_svc.extras.redraft.adapter import LowRank, SpaceAdapter

RANK = 4
SIGMAS = ((0.0, (1.0, 1.0)), (1.0, (1.0, 1.5)))
# Layers that see every row of a pass, in any family's words.
RECURRENT = ("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_qkvz", "in_proj_ba", "x_proj", "f_a_proj", "out_proj")
ADAPTED = ("q_proj", "v_proj", "o_proj", "down_proj", "query_key_value", "dense_h_to_4h", "c_attn", "c_fc", "fc1")


def random_adapter(
    model: PreTrainedModel, num_masks: int, seed: int = 0, scale: float = 0.5, names: tuple[str, ...] = ADAPTED
) -> SpaceAdapter:
    """Masks and low-rank additions large enough to change everything that they reach; in bfloat16, as adapters are."""
    generator = torch.Generator().manual_seed(seed)
    hidden = model.config.hidden_size
    low_rank = {}
    for name, module in model.named_modules():
        if name.endswith(names):
            size_in, size_out = sizes(module)
            down = (scale * torch.randn(RANK, size_in, generator=generator)).bfloat16().float()
            up = (scale * torch.randn(size_out, RANK, generator=generator)).bfloat16().float()
            low_rank[name] = LowRank(down, up)
    assert low_rank
    return SpaceAdapter(torch.randn(num_masks, hidden, generator=generator), low_rank, SIGMAS)


def sizes(module: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a layer; GPT-2's layers have their weights the other way round."""
    if hasattr(module, "in_features"):
        return int(module.in_features), int(module.out_features)
    rows, columns = module.weight.shape
    return int(rows), int(columns)
