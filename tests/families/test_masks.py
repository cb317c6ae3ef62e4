"""Masks through recurrent layers predict what they predict after their path, token by token, in transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from coppice.checkpoints.hf_cache import cache_argument
from coppice.core.errors import IncompatibleError
from coppice.core.tree import ROOT
from tests.families.checkpoints import EACH_RECURRENCE, FAMILIES, VOCAB, write_additions
from tests.unit.verifier_svc.adapters import random_adapter
from tests.unit.verifier_svc.oracles import random_tree
from verifier_svc.config import VerifierConfig
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.extras.redraft.adapter import LowRank, SpaceAdapter, load_adapter, save_adapter
from verifier_svc.extras.redraft.groups import MaskGroup
from verifier_svc.model.loading import load_probed_target
from verifier_svc.model.pass_curve import PassCurve

# The first test compiles.
pytestmark = pytest.mark.timeout(600)


@torch.inference_mode()
def mask_logits(model: PreTrainedModel, adapter: SpaceAdapter, token_ids: list[int], num_masks: int) -> torch.Tensor:
    """Logits after each of some masks after tokens [masks, vocab], one step at a time."""
    held = {cache_argument(model.forward): DynamicCache(config=model.config)}
    model(input_ids=torch.tensor([token_ids]), use_cache=True, **held)
    handles = []
    for name, low_rank in adapter.low_rank.items():

        def add(_: object, inputs: tuple[torch.Tensor, ...], output: torch.Tensor, it: LowRank = low_rank) -> object:
            return output + inputs[0] @ it.down.float().T @ it.up.float().T

        handles.append(model.get_submodule(name).register_forward_hook(add))
    said = [
        model(
            inputs_embeds=adapter.masks[None, place : place + 1].float(),
            position_ids=torch.tensor([[len(token_ids) + place]]),
            use_cache=True,
            **held,
        ).logits[0, -1]
        for place in range(num_masks)
    ]
    for handle in handles:
        handle.remove()
    return torch.stack(said)


@pytest.mark.parametrize("name", EACH_RECURRENCE)
def test_a_mask_follows_its_path_and_its_own_group(name: str, tmp_path: Path) -> None:
    FAMILIES[name].write(tmp_path / "model")
    _, directory = write_additions(tmp_path / "model", tmp_path)
    config = VerifierConfig(
        model=str(tmp_path / "model"), device="cpu", exactness="strict", space_adapter=str(directory)
    )
    target, info = load_probed_target(config)
    assert info.redraft is not None
    # Costs of rows were measured, in passes after a context.
    assert info.redraft.curve != PassCurve.line(0.06)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    adapter = load_adapter(directory)
    generator = np.random.default_rng(5)
    prompt, tree = generator.integers(3, VOCAB, 19).tolist(), random_tree(generator, VOCAB, 6)
    groups = (MaskGroup(ROOT, 2), MaskGroup(5, 3), MaskGroup(0, 1))
    cache = SequenceCache(target.cache, 256)
    logits = target.forward(target.plan([SequenceRows(cache, prompt, tree, masks=groups)]))
    row = 1 + len(tree)
    for group in groups:
        path = [] if group.node == ROOT else [tree.token_ids[node] for node in tree.path(group.node)]
        expected = mask_logits(model, adapter, [*prompt, *path], group.num_masks)
        assert torch.allclose(logits[row : row + group.num_masks], expected, atol=3e-3)
        row += group.num_masks


def test_additions_to_a_layer_whose_inputs_are_no_rows_are_refused(tmp_path: Path) -> None:
    """Keys and values of latent attention have heads of their own."""
    FAMILIES["kimi-linear"].write(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    save_adapter(random_adapter(model, num_masks=2, names=("kv_b_proj",)), tmp_path / "adapter")
    config = VerifierConfig(model=str(tmp_path / "model"), device="cpu", space_adapter=str(tmp_path / "adapter"))
    with pytest.raises(IncompatibleError, match=r"kv_b_proj.*cannot act on"):
        load_probed_target(config)
