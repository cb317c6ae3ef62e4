"""Random EAGLE-3 drafters in the format of `speculators`, for any target."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from coppice.core.feature_layers import default_feature_layers

# Of the layer, for tests.
SMALL_LAYER: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}


def eagle_settings(target: Path, num_drafted: int, **changes: Any) -> dict[str, Any]:
    """Contents of `config.json`."""
    config = json.loads((target / "config.json").read_text())
    layer = {**SMALL_LAYER, "hidden_size": config["hidden_size"], "vocab_size": config["vocab_size"]}
    settings = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": num_drafted,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(default_feature_layers(config["num_hidden_layers"])),
        "transformer_layer_config": layer,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "somebody/model"}},
    }
    layer |= changes.pop("layer", {})
    return settings | changes


def eagle_tensors(settings: dict[str, Any], seed: int = 0, *, with_tables: bool = False) -> dict[str, Tensor]:
    """Random weights in bfloat16 for these settings; `with_tables` embeddings and output layer are among them."""
    generator = torch.Generator().manual_seed(seed)
    layer = settings["transformer_layer_config"]
    hidden, inner, vocab_size = layer["hidden_size"], layer["intermediate_size"], layer["vocab_size"]
    queries, keys = (layer[name] * layer["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    width = 3 * (settings["target_hidden_size"] or hidden)
    num_drafted = settings["draft_vocab_size"]

    def matrix(*shape: int) -> Tensor:
        numbers: Tensor = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        return numbers.bfloat16()

    def norm(size: int) -> Tensor:
        return (1 + 0.2 * torch.randn(size, generator=generator)).bfloat16()

    ids = torch.randperm(vocab_size, generator=generator)[:num_drafted].sort().values
    to_draft = torch.zeros(vocab_size, dtype=torch.bool)
    to_draft[ids] = True
    tensors = {
        "fc.weight": matrix(hidden, width),
        "norm.weight": norm(hidden),
        "layers.0.input_layernorm.weight": norm(hidden),
        "layers.0.hidden_norm.weight": norm(hidden),
        "layers.0.post_attention_layernorm.weight": norm(hidden),
        "layers.0.self_attn.q_proj.weight": matrix(queries, 2 * hidden),
        "layers.0.self_attn.k_proj.weight": matrix(keys, 2 * hidden),
        "layers.0.self_attn.v_proj.weight": matrix(keys, 2 * hidden),
        "layers.0.self_attn.o_proj.weight": matrix(hidden, queries),
        "layers.0.mlp.gate_proj.weight": matrix(inner, hidden),
        "layers.0.mlp.up_proj.weight": matrix(inner, hidden),
        "layers.0.mlp.down_proj.weight": matrix(hidden, inner),
        "d2t": ids - torch.arange(num_drafted),
        "t2d": to_draft,
    }
    if settings["norm_before_fc"]:
        tensors["input_norm.weight"] = norm(width)
    if with_tables:
        tensors["embed_tokens.weight"] = matrix(vocab_size, hidden)
        tensors["lm_head.weight"] = 3 * matrix(num_drafted, hidden)
    return tensors


def write_eagle(directory: Path, settings: dict[str, Any], tensors: dict[str, Tensor], **calibration: Any) -> None:
    """A checkpoint directory; without `calibration` it has no `drafter.json`, as foreign ones."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(settings))
    save_file(tensors, directory / "model.safetensors")
    if calibration:
        (directory / "drafter.json").write_text(json.dumps({"kind": "eagle", **calibration}))


def write_tiny_eagle(directory: Path, of_target: Path, num_drafted: int = 24, **calibration: Any) -> None:
    """A drafter without tables of its own for a tiny target."""
    settings = eagle_settings(of_target, num_drafted)
    write_eagle(directory, settings, eagle_tensors(settings), **calibration)


def main() -> None:
    """Write a random drafter for a target: `python -m tests.eagle_checkpoints TARGET OUT`.

    It is sure of what it guesses, so that trees are full, and right by the noise that it shares with the target.
    """
    target, out = map(Path, sys.argv[1:])
    settings = eagle_settings(target, 1024)
    write_eagle(out, settings, eagle_tensors(settings), sigmas={"0": [0.05], "1": [0.05]})


if __name__ == "__main__":
    main()
