"""Early pruning in a pass: rows that are left have the bits of whole passes, and those that are not are gone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from coppice.core.errors import IncompatibleError
from tests.unit.verifier_svc.adapters import random_adapter
from tests.unit.verifier_svc.conftest import FAMILIES, VOCAB
from tests.unit.verifier_svc.early_heads import THRESHOLDS, random_head
from tests.unit.verifier_svc.model.test_pass_graphs import CPUKernel, Repeating
from tests.unit.verifier_svc.oracles import random_tree
from tests.unit.verifier_svc.test_mask_passes import BUNDLED, KERNELS, new_target, some_masks
from verifier_svc.config import VerifierConfig
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.extras.pruning.head import save_head
from verifier_svc.extras.pruning.layers import decoder_layers
from verifier_svc.extras.pruning.pace import ON, PruningSettings
from verifier_svc.extras.pruning.probe import check_pruning
from verifier_svc.extras.pruning.rows import survivors_of
from verifier_svc.model.loading import with_early_head
from verifier_svc.model.pass_graphs import PassGraphs
from verifier_svc.model.target_model import TargetModel
from verifier_svc.verify.draw_rule import DrawRule

NewModel = Callable[[str], PreTrainedModel]
GREEDY = DrawRule(0.0, 0, 0.0)


def with_head(model: PreTrainedModel, kernel: str = "compiled") -> TargetModel:
    target = new_target(model, kernel)
    target.install_head(random_head(model.config.hidden_size))
    return target


def random_scores(generator: np.random.Generator, count: int, share: float = 0.35) -> torch.Tensor:
    return torch.from_numpy(np.where(generator.random(count) < share, -np.inf, np.inf))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_are_left_have_the_bits_of_a_whole_pass(family: str, kernel: str, new_model: NewModel) -> None:
    """Over rounds that keep a surviving path: had keys gone to other slots, later rounds would see it. With masks."""
    plain, pruned = new_target(new_model(family), kernel), with_head(new_model(family), kernel)
    for target in (plain, pruned):
        target.adapt(random_adapter(target.model, 3))
    generator = np.random.default_rng(6)
    caches = [[SequenceCache(target.cache, 256) for _ in range(3)] for target in (plain, pruned)]
    pending = [generator.integers(0, VOCAB, size).tolist() for size in (60, 6, 9)]
    rules = (GREEDY, DrawRule(0.0, 3, 0.0), None)
    num_gone = num_masks_gone = 0
    for sizes in ((24, 9, 5), (17, 30, 8), (12, 11, 13)):
        trees = [random_tree(generator, VOCAB, size) for size in sizes]
        masks = [some_masks(generator, size) for size in sizes]
        works = [
            [
                SequenceRows(cache, tokens, tree, masks=groups, draw_rule=rule)
                for cache, tokens, tree, groups, rule in zip(own, pending, trees, masks, rules, strict=True)
            ]
            for own in caches
        ]
        plan = plain.plan(works[0])
        whole = plain.forward(plan)
        left, forward = pruned.forward_pruned(pruned.plan(works[1]), random_scores(generator, sum(sizes[:2])))
        num_gone += forward.num_pruned
        for index, segment in enumerate(forward.plan.segments):
            tree, survivors = trees[index], survivors_of(segment)
            first, last = forward.plan.logit_ranges[index]
            start = plan.logit_ranges[index][0]
            expected = whole[[start, *(start + 1 + node for node in survivors)]]
            assert torch.equal(left[first:last], expected)
            nodes = [node for node in survivors if node < len(tree)]
            assert all(tree.parents[node] in (-1, *nodes) for node in nodes)
            num_masks_gone += works[1][index].num_masks - (len(survivors) - len(nodes))
            if rules[index] is None:
                assert len(survivors) == len(tree) + works[1][index].num_masks
            path = tree.path(nodes[-1]) if nodes else ()
            for own in caches:
                own[index].keep([*range(len(pending[index])), *(len(pending[index]) + node for node in path)])
            pending[index] = [int(generator.integers(VOCAB))]
    assert num_gone > 20
    assert num_masks_gone > 0


def test_layers_behind_the_head_compute_fewer_rows(new_model: NewModel) -> None:
    target = with_head(new_model("llama"))
    rows: list[int] = []
    for layer in target.model.model.layers:
        layer.mlp.register_forward_hook(lambda _module, inputs, _output: rows.append(inputs[0].shape[1]))
    cache = SequenceCache(target.cache, 256)
    tree = random_tree(np.random.default_rng(0), VOCAB, 31)
    plan = target.plan([SequenceRows(cache, [1], tree, draw_rule=GREEDY)])
    scores = torch.full((31,), -torch.inf)
    scores[:1] = torch.inf
    _, forward = target.forward_pruned(plan, scores)
    assert rows == [32, 4]
    assert forward.num_pruned == 30
    assert len(forward.plan.logit_rows) == 4
    # Nothing is left out where the padding would come to as many rows.
    rows.clear()
    _, forward = target.forward_pruned(plan, torch.tensor([torch.inf] * 29 + [-torch.inf] * 2))
    assert (rows, forward.num_pruned) == ([32, 32], 0)
    target.forward(plan)
    assert rows == [32, 32, 32, 32]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_scores_are_those_of_the_childrens_own_rows_of_the_output_layer(family: str, new_model: NewModel) -> None:
    """The slow way: the head on every row, against the whole output layer."""
    model = new_model(family)
    target = with_head(model)
    hidden: list[torch.Tensor] = []

    def keep(_module: object, _inputs: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        hidden.append(output[0] if isinstance(output, tuple) else output)

    decoder_layers(model)[0].register_forward_hook(keep)
    tree = random_tree(np.random.default_rng(3), VOCAB, 40)
    work = [SequenceRows(SequenceCache(target.cache, 256), [4, 5], tree, draw_rule=GREEDY)]
    target.forward(target.plan(work))
    with torch.inference_mode():
        predicted = random_head(64).predict(hidden[0][0, 1:42])
        logits = torch.nn.functional.linear(predicted, model.get_output_embeddings().weight)
    scores = [float(logits[parent + 1, token]) for parent, token in zip(tree.parents, tree.token_ids, strict=True)]
    assert min(map(abs, scores)) > 1e-3
    survives: list[bool] = []
    for parent, score in zip(tree.parents, scores, strict=True):
        survives.append(score >= 0 and (parent == -1 or survives[parent]))
    _, forward = target.forward_pruned(target.plan(work))
    assert survivors_of(forward.plan.segments[0]) == tuple(np.flatnonzero(survives))
    assert 0 < sum(survives) < 40


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_probe_accepts_supported_families(family: str, kernel: str, new_model: NewModel) -> None:
    target = with_head(new_model(family), kernel)
    check_pruning(target, VOCAB, exact=True)
    assert target.cache.num_free_blocks == target.cache.num_blocks


def test_the_bundled_target_keeps_every_bit() -> None:
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    target = new_target(model)
    target.install_head(random_head(512, layer=2))
    check_pruning(target, model.config.vocab_size, exact=True)


def test_a_model_whose_later_layers_need_every_row_is_refused(new_model: NewModel) -> None:
    target = with_head(new_model("llama"))
    target.model.model.layers[1].mlp.register_forward_hook(
        lambda _module, _inputs, output: output + output.mean(1, keepdim=True)
    )
    with pytest.raises(IncompatibleError, match="once nodes are pruned"):
        check_pruning(target, VOCAB, exact=False)


def test_strict_mode_refuses_other_bits(new_model: NewModel) -> None:
    target = with_head(new_model("llama"))
    target.model.model.layers[1].mlp.register_forward_hook(
        lambda _module, _inputs, output: output * (1 + 1e-6) if output.shape[1] % 8 else output
    )
    with pytest.raises(IncompatibleError, match="other bits"):
        check_pruning(target, VOCAB, exact=True)
    check_pruning(target, VOCAB, exact=False)


def test_logits_that_are_not_the_output_layer_s_are_refused(new_model: NewModel) -> None:
    target = with_head(new_model("llama"))
    target.model.get_output_embeddings().register_forward_hook(lambda _module, _inputs, output: 2 * output)
    with pytest.raises(IncompatibleError, match="cannot follow"):
        check_pruning(target, VOCAB, exact=True)


def test_recordings_are_not_pruned(new_model: NewModel) -> None:
    model = new_model("llama")
    kernel, capture = CPUKernel(), Repeating()
    target = TargetModel(model, exact=True, num_blocks=64, kernel=kernel)
    target.install_head(random_head(64))
    target.record_passes(PassGraphs(kernel, capture, (16,)))
    generator = np.random.default_rng(2)
    small, large = (
        target.plan([SequenceRows(SequenceCache(target.cache, 64), [1], random_tree(generator, VOCAB, size))])
        for size in (15, 16)
    )
    assert not target.can_prune(small)
    assert target.can_prune(large)
    assert not new_target(new_model("llama")).can_prune(large)


def test_heads_that_do_not_fit_are_refused(new_model: NewModel) -> None:
    target = new_target(new_model("llama"))
    plan = target.plan([SequenceRows(SequenceCache(target.cache, 64), [1])])
    with pytest.raises(IncompatibleError, match="no early head"):
        target.forward_pruned(plan)
    with pytest.raises(IncompatibleError, match="48 numbers"):
        target.install_head(random_head(48))
    with pytest.raises(IncompatibleError, match="after layer 2"):
        target.install_head(random_head(64, layer=2))
    model = new_model("llama")
    # A stack that is no list of layers.
    model.model.layers = torch.nn.Sequential(*model.model.layers)
    with pytest.raises(IncompatibleError, match="no list of decoder layers"):
        TargetModel(model, exact=True, num_blocks=8).install_head(random_head(64))
    model = new_model("llama")
    model.set_output_embeddings(torch.nn.Identity())
    with pytest.raises(IncompatibleError, match="no output layer"):
        TargetModel(model, exact=True, num_blocks=8).install_head(random_head(64))


def test_a_head_is_loaded_tried_and_switched(tmp_path: Path, new_model: NewModel) -> None:
    target = new_target(new_model("llama"))
    save_head(random_head(64), tmp_path)
    config = VerifierConfig(model="m", early_head=str(tmp_path))
    settings = with_early_head(target, config, VOCAB, exact=True)
    assert settings == PruningSettings(THRESHOLDS, free_rows=16, row_multiple=4)
    forced = with_early_head(
        new_target(new_model("llama")), config.model_copy(update={"early_pruning": "on"}), VOCAB, exact=True
    )
    assert forced is not None
    assert forced.switch == ON
    for off in (config.model_copy(update={"early_pruning": "off"}), VerifierConfig(model="m")):
        other = new_target(new_model("llama"))
        assert with_early_head(other, off, VOCAB, exact=True) is None
        assert not other.can_prune(other.plan([SequenceRows(SequenceCache(other.cache, 64), [1])]))
    with pytest.raises(IncompatibleError, match="no early head"):
        with_early_head(target, config.model_copy(update={"early_head": str(tmp_path / "none")}), VOCAB, exact=True)
