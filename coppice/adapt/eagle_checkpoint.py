"""Checkpoint of an EAGLE-3 head: the format of `speculators`, with `drafter.json` and a card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from coppice.adapt.eagle_head import EagleHead
from coppice.adapt.eagle_measure import EagleReport
from coppice.core.errors import IncompatibleError
from coppice.training.checkpoint import make_readable

_CARD = """# EAGLE-3 head for {target}

| | |
|---|---|
| trained parameters | {parameters:,} |
| draft vocabulary | {draft_vocab:,} of {vocab:,} tokens, and those of a request's prompt |
| data | {tokens:,} tokens of the target's own answers, each after its prompt |
| seed | {seed} |
| steps | {steps} |
| held-out loss | {loss:.4f} |
| training time | {minutes:.0f} minutes |
| target's weights | `{fingerprint}` |
| command | `{command}` |
| versions | {versions} |
| date | {date} |
| licence | as the target's |

Share of {positions:,} held-out positions at which the target's token is among the first children, given the true
tokens before it, both models adding the same noise:

{table}
"""


def save_head(
    head: EagleHead,
    draft_ids: npt.NDArray[np.int64],
    layers: Sequence[int],
    report: EagleReport,
    out: Path,
    *,
    facts: dict[str, Any],
) -> None:
    """Write a head to `out`; embeddings and output rows, which are the target's, are left out.

    `facts` fill the card: target, fingerprint, tokens, steps, loss, minutes, command, and the curve and recipe.
    """
    out.mkdir(parents=True, exist_ok=True)
    vocab_size, shape = len(head.embeddings), head.shape
    in_draft = torch.zeros(vocab_size, dtype=torch.bool)
    in_draft[torch.from_numpy(draft_ids)] = True
    tensors = {name: value.detach().bfloat16().contiguous() for name, value in head.state_dict().items()}
    tensors["d2t"] = torch.from_numpy(draft_ids) - torch.arange(len(draft_ids))
    tensors["t2d"] = in_draft
    save_file(tensors, out / "model.safetensors")
    layer = {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "rms_norm_eps": shape.epsilon,
        "rope_theta": shape.rope_theta,
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "num_hidden_layers": 1,
    }
    config = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": len(draft_ids),
        "norm_before_residual": False,
        "norm_before_fc": True,
        "target_hidden_size": shape.hidden,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "transformer_layer_config": layer,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": facts["target"]}},
    }
    calibration = {"kind": "eagle", "target": facts["fingerprint"], "reads_prompt": True, **report.calibration()}
    for name, content in (("config.json", config), ("drafter.json", calibration), ("recipe.json", facts)):
        (out / name).write_text(json.dumps(content, indent=1) + "\n")
    parameters = sum(value.numel() for value in head.parameters())
    about = {"parameters": parameters, "draft_vocab": len(draft_ids), "vocab": vocab_size, **asdict(report)}
    (out / "README.md").write_text(_CARD.format(**{**about, **facts}, table=report.table()))
    make_readable(out)


def read_head(directory: Path, fingerprint: str) -> dict[str, Tensor]:
    """Trained parameters of a head that `save_head` wrote, in single precision, by name.

    Raises:
        IncompatibleError: it is not a head for the target with these weights, or not whole.
    """
    try:
        target = json.loads((directory / "drafter.json").read_text())["target"]
        tensors = load_file(directory / "model.safetensors")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise IncompatibleError(f"{directory} holds no whole EAGLE-3 head; choose another directory") from error
    if target != fingerprint:
        raise IncompatibleError(
            f"{directory} is the head of a target with weights {target}, and this one has {fingerprint}; "
            f"choose another directory"
        )
    return {name: value.float() for name, value in tensors.items() if name not in ("d2t", "t2d")}
