"""Masks in a pass: what they see, and that nobody sees them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from coppice.checkpoints.hf_cache import cache_argument
from coppice.core.errors import IncompatibleError
from coppice.core.tree import ROOT
from tests.unit.verifier_svc.adapters import random_adapter
from tests.unit.verifier_svc.conftest import FAMILIES, VOCAB
from tests.unit.verifier_svc.model.test_pass_graphs import CPUKernel, Repeating
from tests.unit.verifier_svc.oracles import random_tree
from verifier_svc.engine.kv_cache import KVCache, SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows, plan_pass, visibility
from verifier_svc.extras.redraft.adapter import LowRank, SpaceAdapter, load_adapter, save_adapter
from verifier_svc.extras.redraft.groups import MaskGroup
from verifier_svc.kernels.cpu.attention import CompiledKernel
from verifier_svc.kernels.cpu.packed_layers import pack_linears
from verifier_svc.model.exactness_probe import masks_leave_rows_alone
from verifier_svc.model.pass_graphs import PassGraphs
from verifier_svc.model.target_model import TargetModel

NewModel = Callable[[str], PreTrainedModel]
BUNDLED = Path(__file__).resolve().parents[3] / "models" / "target"
KERNELS = {"compiled": CompiledKernel, "tensors": lambda: None}


def new_target(model: PreTrainedModel, kernel: str = "compiled") -> TargetModel:
    pack_linears(model)
    return TargetModel(model, exact=True, num_blocks=64, kernel=KERNELS[kernel]())


def some_masks(generator: np.random.Generator, num_nodes: int) -> tuple[MaskGroup, ...]:
    nodes = generator.choice(np.arange(ROOT, num_nodes), min(3, num_nodes), replace=False)
    return tuple(MaskGroup(int(node), int(generator.integers(1, 4))) for node in nodes)


@torch.inference_mode()
def plain_mask_logits(
    model: PreTrainedModel, adapter: SpaceAdapter, token_ids: list[int], num_masks: int
) -> torch.Tensor:
    """Logits behind the last of some masks after tokens, by one plain forward with the adapter's weights everywhere.

    The tokens' own rows would then be others than the target's, so that their keys and values come from a cache.
    """
    held: dict[str, Any] = {cache_argument(model.forward): DynamicCache(config=model.config)}
    model(input_ids=torch.tensor([token_ids]), use_cache=True, **held)
    handles = []
    for name, low_rank in adapter.low_rank.items():

        def add(_: object, inputs: tuple[torch.Tensor, ...], output: torch.Tensor, it: LowRank = low_rank) -> object:
            return output + inputs[0] @ it.down.T @ it.up.T

        handles.append(model.get_submodule(name).register_forward_hook(add))
    logits = model(
        inputs_embeds=adapter.masks[None, :num_masks],
        position_ids=torch.arange(len(token_ids), len(token_ids) + num_masks)[None],
        **held,
    ).logits[0, -1]
    for handle in handles:
        handle.remove()
    return logits


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_bit_of_any_other_row_depends_on_masks(family: str, kernel: str, new_model: NewModel) -> None:
    """Over rounds that keep a path: had a mask's keys stayed, later rounds would see them."""
    plain, adapted = new_target(new_model(family), kernel), new_target(new_model(family), kernel)
    adapted.adapt(random_adapter(adapted.model, 3))
    generator = np.random.default_rng(4)
    caches = [[SequenceCache(target.cache, 256) for _ in range(2)] for target in (plain, adapted)]
    pending = [generator.integers(0, VOCAB, size).tolist() for size in (31, 6)]
    for sizes in ((5, 2), (1, 9), (4, 4)):
        trees = [random_tree(generator, VOCAB, size) for size in sizes]
        works = [
            [SequenceRows(*rows) for rows in zip(caches[0], pending, trees, strict=True)],
            [
                SequenceRows(cache, tokens, tree, masks=some_masks(generator, len(tree)))
                for cache, tokens, tree in zip(caches[1], pending, trees, strict=True)
            ],
        ]
        logits = []
        for target, work in zip((plain, adapted), works, strict=True):
            plan = target.plan(work)
            result = target.forward(plan)
            starts = [first for first, _ in plan.logit_ranges]
            own = [result[first : first + 1 + len(tree)] for first, tree in zip(starts, trees, strict=True)]
            logits.append(torch.cat(own))
        assert torch.equal(*logits)
        for index, tree in enumerate(trees):
            path = tree.path(len(tree) - 1)
            for own in caches:
                own[index].keep([*range(len(pending[index])), *(len(pending[index]) + node for node in path)])
            pending[index] = [int(generator.integers(VOCAB))]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_sees_its_path_and_its_own_group_alone(family: str, new_model: NewModel) -> None:
    target, model = new_target(new_model(family)), new_model(family)
    adapter = random_adapter(model, 3, scale=0.2)
    target.adapt(random_adapter(target.model, 3, scale=0.2))
    generator = np.random.default_rng(5)
    prompt = generator.integers(0, VOCAB, 19).tolist()
    tree = random_tree(generator, VOCAB, 6)
    groups = (MaskGroup(ROOT, 2), MaskGroup(5, 3), MaskGroup(0, 1))
    cache = SequenceCache(target.cache, 256)
    logits = target.forward(target.plan([SequenceRows(cache, prompt, tree, masks=groups)]))
    rows = iter(range(1 + len(tree), len(logits)))
    for group in groups:
        path = [] if group.node == ROOT else [tree.token_ids[node] for node in tree.path(group.node)]
        for place in range(1, group.num_masks + 1):
            expected = plain_mask_logits(model, adapter, [*prompt, *path], place)
            assert torch.allclose(logits[next(rows)], expected, atol=3e-4)


def test_masks_are_branches_that_nobody_else_sees() -> None:
    cache = SequenceCache(KVCache(4), 64)
    tree = random_tree(np.random.default_rng(0), VOCAB, 2)
    rows = SequenceRows(cache, [1, 2], tree, masks=(MaskGroup(ROOT, 2), MaskGroup(1, 1)))
    plan = plan_pass([rows], row_multiple=4)
    [segment] = plan.segments
    visible = visibility(segment.num_pending, segment.parents)
    assert not visible[:4, 4:].any()
    assert visible[4:, 4:].astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    assert plan.mask_places is not None
    assert plan.mask_places.tolist() == [-1, -1, -1, -1, 0, 1, 0, -1]
    depth = tree.depths[1]
    assert plan.positions[:7].tolist() == [0, 1, *(1 + d for d in tree.depths), 2, 3, 1 + depth + 1]
    assert plan.logit_ranges == ((0, 6),)


def test_the_bundled_target_keeps_every_bit_and_an_adapter_that_acts_on_all_rows_is_found_out() -> None:
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    target = new_target(model)
    target.adapt(random_adapter(model, 4, scale=0.1))
    assert masks_leave_rows_alone(target, model.config.vocab_size, 4)
    assert target.cache.num_free_blocks == target.cache.num_blocks
    model.model.layers[1].mlp.register_forward_hook(
        lambda _module, _inputs, output: output * (1 + 1e-6) if output.shape[1] > 64 else output
    )
    assert not masks_leave_rows_alone(target, model.config.vocab_size, 4)


def test_recorded_passes_with_masks_give_the_bits_of_passes_as_they_are(new_model: NewModel) -> None:
    plain, model = new_target(new_model("llama")), new_model("llama")
    pack_linears(model)
    kernel, capture = CPUKernel(), Repeating()
    recorded = TargetModel(model, exact=True, num_blocks=64, kernel=kernel)
    recorded.record_passes(PassGraphs(kernel, capture, (16, 32)))
    for target in (plain, recorded):
        target.adapt(random_adapter(target.model, 3))
    recorded.record_now()
    generator = np.random.default_rng(7)
    for _ in range(4):
        prompt, tree = generator.integers(0, VOCAB, 3).tolist(), random_tree(generator, VOCAB, 4)
        masks = some_masks(generator, 4) if generator.integers(2) else ()
        logits = []
        for target in (plain, recorded):
            plan = target.plan([SequenceRows(SequenceCache(target.cache, 64), prompt, tree, masks=masks)])
            first, last = plan.logit_ranges[0]
            logits.append(target.forward(plan)[first:last])
        assert torch.equal(*logits)
    assert capture.num_replays


def test_a_pass_without_masks_asks_nothing_of_the_adapter(new_model: NewModel) -> None:
    target = new_target(new_model("llama"))
    target.adapt(random_adapter(target.model, 2))
    called = []
    target.model.get_input_embeddings().register_forward_hook(lambda *_: called.append(1))
    plan = target.plan([SequenceRows(SequenceCache(target.cache, 64), [1, 2, 3])])
    assert plan.mask_places is None
    target.forward(plan)
    assert len(called) == 1


def test_adapters_are_written_and_read(tmp_path: Path, new_model: NewModel) -> None:
    adapter = random_adapter(new_model("gpt2"), 2)
    save_adapter(adapter, tmp_path)
    loaded = load_adapter(tmp_path)
    assert torch.equal(loaded.masks, adapter.masks)
    assert loaded.sigmas == adapter.sigmas
    assert loaded.low_rank.keys() == adapter.low_rank.keys()
    assert all(torch.equal(loaded.low_rank[name].up, low.up) for name, low in adapter.low_rank.items())


def test_adapters_that_do_not_fit_are_refused(tmp_path: Path, new_model: NewModel) -> None:
    with pytest.raises(IncompatibleError, match="no adapter"):
        load_adapter(tmp_path)
    model = new_model("llama")
    save_adapter(random_adapter(model, 2), tmp_path)
    (tmp_path / "space.json").write_text('{"kind": "semi-ar"}')
    with pytest.raises(IncompatibleError, match="kind"):
        load_adapter(tmp_path)
    target = new_target(model)
    with pytest.raises(IncompatibleError, match="numbers"):
        target.adapt(SpaceAdapter(torch.zeros(2, 7), {}, ((0.0, (1.0,)),)))
    unknown = {"model.nowhere": LowRank(torch.zeros(1, 64), torch.zeros(64, 1))}
    with pytest.raises(IncompatibleError, match="nowhere"):
        target.adapt(SpaceAdapter(torch.zeros(2, 64), unknown, ((0.0, (1.0,)),)))
    with pytest.raises(ValueError, match="sigmas"):
        SpaceAdapter(torch.zeros(2, 64), {}, ())
    head = {"lm_head": LowRank(torch.zeros(1, 64), torch.zeros(VOCAB, 1))}
    target.adapt(SpaceAdapter(torch.zeros(2, 64), head, ((0.0, (1.0,)),)))
    with pytest.raises(IncompatibleError, match="lm_head"):
        masks_leave_rows_alone(target, VOCAB, 2)
