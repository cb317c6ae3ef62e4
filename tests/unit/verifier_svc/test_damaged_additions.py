"""Adapters and early heads whose tensors are missing, too many, of other shapes, or not finite."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from coppice.checkpoints.bundled import MODELS
from coppice.core.errors import IncompatibleError
from tests.tiny_checkpoint import tiny_llama
from tests.unit.verifier_svc.adapters import random_adapter
from verifier_svc.extras.pruning.head import load_head
from verifier_svc.extras.redraft.adapter import LowRank, SpaceAdapter, load_adapter
from verifier_svc.extras.redraft.rows import MaskRows

LOADERS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "space": (load_adapter, "space", "masks"),
    "head": (load_head, "early_head", "norm.weight"),
}


def changed(what: str, directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> Callable[[], object]:
    """Loads the bundled one with other tensors."""
    load, name, _ = LOADERS[what]
    source = MODELS / {"space": "space", "head": "early-head"}[what]
    tensors = load_file(source / f"{name}.safetensors")
    change(tensors)
    save_file(tensors, directory / f"{name}.safetensors")
    (directory / f"{name}.json").write_text((source / f"{name}.json").read_text())
    return lambda: load(directory)


@pytest.mark.parametrize("what", LOADERS)
def test_they_are_refused_by_the_names_of_their_tensors(what: str, tmp_path: Path) -> None:
    name = LOADERS[what][2]
    changed(what, tmp_path, lambda tensors: None)()
    with pytest.raises(IncompatibleError, match=f"has NaN or infinity in 1 tensor .{name}.") as told:
        changed(what, tmp_path, lambda tensors: tensors[name].view(-1)[-1].fill_(math.nan))()
    assert str(tmp_path) in str(told.value)
    with pytest.raises(IncompatibleError, match=f"lacks 1 tensor .{name}."):
        changed(what, tmp_path, lambda tensors: tensors.pop(name))()
    with pytest.raises(IncompatibleError, match=r"has 1 tensor .strange. that are not used"):
        changed(what, tmp_path, lambda tensors: tensors.update(strange=torch.ones(2)))()


@pytest.mark.parametrize("what", LOADERS)
@pytest.mark.timeout(20)
def test_pipes_and_descriptions_nested_too_deeply_are_refused(what: str, tmp_path: Path) -> None:
    load = changed(what, tmp_path, lambda tensors: None)
    description = tmp_path / f"{LOADERS[what][1]}.json"
    description.write_text("[" * 500_000)
    with pytest.raises(IncompatibleError, match="that can be used"):
        load()
    description.unlink()
    os.mkfifo(description)
    with pytest.raises(IncompatibleError, match=f"{description.name} of .* is no regular file"):
        load()


def test_half_of_a_low_rank_addition_is_named(tmp_path: Path) -> None:
    def halve(tensors: dict[str, Tensor]) -> None:
        del tensors[next(name for name in sorted(tensors) if name.endswith(".up"))]

    with pytest.raises(IncompatibleError, match=r"lacks 1 tensor .*\.up"):
        changed("space", tmp_path, halve)()
    with pytest.raises(IncompatibleError, match=r"lacks 1 tensor .up."):
        changed("head", tmp_path, lambda tensors: tensors.pop("up"))()


def test_an_addition_of_other_sizes_than_its_layer_s_is_refused_before_a_pass() -> None:
    model = tiny_llama(vocab_size=61, max_context_tokens=64)
    adapter = random_adapter(model, 2)
    name, low_rank = next(iter(adapter.low_rank.items()))
    for wrong in (
        LowRank(low_rank.down, torch.cat([low_rank.up, low_rank.up])),
        LowRank(low_rank.down[:, 1:], low_rank.up),
    ):
        other = SpaceAdapter(adapter.masks, {**adapter.low_rank, name: wrong}, adapter.sigmas)
        with pytest.raises(IncompatibleError, match=f"the adapter's addition to '{name}'"):
            MaskRows(model, other)
