"""Checkpoints of block drafters made from a tiny target, for tests that load or serve them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from drafter_svc.training.block_model import new_block_model

BLOCK = 5


def block_calibration(kind: str, num_masks: int) -> dict[str, object]:
    """What `drafter.json` has."""
    sigmas = {"0.0": [0.5, 0.8, 1.0], "1.0": [0.6, 1.0, 1.2]}
    shares = [0.6, 0.2]
    return {"kind": kind, "num_masks": num_masks, "block": BLOCK, "sigmas": sigmas, "acceptance_by_rank": shares}


def write_tiny_block_drafter(directory: Path, target: Path, kind: str, noise: float = 0.0) -> None:
    """A drafter that predicts the next token as the target does, with untrained masks; `noise` spoils its weights."""
    num_masks = 1 if kind == "diffusion" else BLOCK - 1
    start = LlamaForCausalLM.from_pretrained(target)
    model = new_block_model(start, num_masks, extra_layers=1 if kind == "diffusion" else 0, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(directory)
    shutil.copy(target / "tokenizer.json", directory)
    (directory / "drafter.json").write_text(json.dumps(block_calibration(kind, num_masks)))
