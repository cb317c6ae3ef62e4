"""Early-exit head: scores next tokens from an early layer's hidden states. Loaded with the target.

A directory with `early_head.json` and, in bfloat16, `early_head.safetensors`. The head is a norm and a low-rank
addition; its output is multiplied by rows of the target's own output layer, for drafted tokens only. It is trained to
be self-normalised: a score approximates log P(token). Without the low-rank addition, and with the target's own norm,
it is the logit lens.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from coppice.checkpoints.files import refuse_special_files
from coppice.checkpoints.loaded_weights import refuse_not_finite, refuse_other_names
from coppice.core.errors import IncompatibleError
from verifier_svc.extras.redraft.adapter import LowRank
from verifier_svc.verify.draw_rule import Threshold, Thresholds

DESCRIPTION_FILE = "early_head.json"
TENSOR_FILE = "early_head.safetensors"
KIND = "early-exit"


@dataclass(frozen=True, slots=True)
class EarlyHead:
    """Applied after the target's first `layer` layers.

    `norm_weight` and `norm_bias` [hidden]; `is_centred`: the norm subtracts the mean (LayerNorm, not RMSNorm).
    `low_rank` adds up(silu(down(x))) to the norm's output x.

    Raises:
        ValueError: shapes do not match, or thresholds are not in order.
    """

    layer: int
    norm_weight: Tensor
    norm_bias: Tensor
    is_centred: bool
    eps: float
    low_rank: LowRank | None
    thresholds: Thresholds

    def __post_init__(self) -> None:
        size = self.norm_weight.shape
        if self.layer < 1 or len(size) != 1 or self.norm_bias.shape != size or not self.eps > 0:
            raise ValueError(
                f"layer {self.layer}, weight {tuple(size)}, bias {tuple(self.norm_bias.shape)}, {self.eps}"
            )
        if self.low_rank is not None and (self.low_rank.down.shape[1], self.low_rank.up.shape[0]) != (*size, *size):
            raise ValueError(f"the low-rank addition is not one to rows of {size[0]} numbers")
        temperatures = [threshold.temperature for threshold in self.thresholds]
        if not temperatures or temperatures != sorted(set(temperatures)):
            raise ValueError(f"thresholds must be at temperatures in order, got {temperatures}")

    @property
    def hidden_size(self) -> int:
        """Width of hidden states."""
        return len(self.norm_weight)

    def to(self, device: torch.device, dtype: torch.dtype) -> EarlyHead:
        """Copy on a device, in a dtype."""
        low_rank = None if self.low_rank is None else self.low_rank.to(device, dtype)
        weight, bias = self.norm_weight.to(device, dtype), self.norm_bias.to(device, dtype)
        return EarlyHead(self.layer, weight, bias, self.is_centred, self.eps, low_rank, self.thresholds)

    def predict(self, hidden: Tensor) -> Tensor:
        """Approximation of the target's last hidden states [rows, hidden], from those after `layer` layers."""
        rows = predicted_norm(hidden, self.norm_weight, self.norm_bias, is_centred=self.is_centred, eps=self.eps)
        if self.low_rank is None:
            return rows
        return rows + F.linear(F.silu(F.linear(rows, self.low_rank.down)), self.low_rank.up)


def predicted_norm(hidden: Tensor, weight: Tensor, bias: Tensor, *, is_centred: bool, eps: float) -> Tensor:
    """LayerNorm if `is_centred`, else RMSNorm with a bias, of hidden states [..., hidden]."""
    size = (hidden.shape[-1],)
    if is_centred:
        return F.layer_norm(hidden, size, weight, bias, eps)
    return F.rms_norm(hidden, size, weight, eps) + bias


def load_head(directory: Path) -> EarlyHead:
    """Load the head in a directory.

    Raises:
        IncompatibleError: missing or damaged.
    """
    refuse_special_files(str(directory))
    try:
        content = json.loads((directory / DESCRIPTION_FILE).read_text())
        if content.get("kind") != KIND:
            raise IncompatibleError(f"{directory / DESCRIPTION_FILE} is not that of a head of the kind {KIND!r}")
        tensors = {name: tensor.float() for name, tensor in load_file(directory / TENSOR_FILE).items()}
        optional = ["down", "up"] if {"down", "up"} & tensors.keys() else []
        refuse_other_names(str(directory / TENSOR_FILE), tensors, ["norm.weight", "norm.bias", *optional])
        refuse_not_finite(str(directory / TENSOR_FILE), tensors.items())
        low_rank = LowRank(tensors["down"], tensors["up"]) if "down" in tensors else None
        thresholds = tuple(Threshold(**entry) for entry in content["thresholds"])
        return EarlyHead(
            layer=int(content["layer"]),
            norm_weight=tensors["norm.weight"],
            norm_bias=tensors["norm.bias"],
            is_centred=bool(content["is_centred"]),
            eps=float(content["eps"]),
            low_rank=low_rank,
            thresholds=thresholds,
        )
    except (OSError, SafetensorError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise IncompatibleError(f"{directory} has no early head that can be used: {error!r}") from error


def save_head(head: EarlyHead, directory: Path) -> None:
    """Write a head to a directory, in bfloat16."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {"norm.weight": head.norm_weight, "norm.bias": head.norm_bias}
    if head.low_rank is not None:
        tensors |= {"down": head.low_rank.down, "up": head.low_rank.up}
    kept = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(kept, directory / TENSOR_FILE)
    content = {
        "kind": KIND,
        "layer": head.layer,
        "is_centred": head.is_centred,
        "eps": head.eps,
        "thresholds": [asdict(threshold) for threshold in head.thresholds],
    }
    (directory / DESCRIPTION_FILE).write_text(json.dumps(content, indent=1) + "\n")
