"""Packed tree passes against the model's own plain forward, family by family."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from coppice.core.errors import IncompatibleError
from coppice.core.tree import EMPTY_TREE, TokenTree
from tests.unit.verifier_svc.conftest import FAMILIES, VOCAB
from tests.unit.verifier_svc.oracles import plain_logits, random_tree
from verifier_svc.engine.kv_cache import KVCache, SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows, visibility
from verifier_svc.kernels.base import AttentionKernel
from verifier_svc.kernels.cpu.attention import CompiledKernel
from verifier_svc.kernels.cpu.packed_layers import pack_linears
from verifier_svc.model.conformance_probe import ConformanceProbe
from verifier_svc.model.target_model import TargetModel

# The first test compiles, and may have to share its core.
pytestmark = pytest.mark.timeout(400)

NewModel = Callable[[str], PreTrainedModel]
NewKernel = Callable[[], AttentionKernel | None]
KERNELS = {"compiled": CompiledKernel, "tensors": lambda: None}


@pytest.fixture(params=KERNELS.values(), ids=KERNELS.keys())
def new_kernel(request: pytest.FixtureRequest) -> NewKernel:
    """Makes the kernel that a target model is built with."""
    make: NewKernel = request.param
    return make


@pytest.mark.parametrize("exact", [True, False], ids=["strict", "fast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_node_sees_its_own_path_and_nothing_else(
    family: str, exact: bool, new_model: NewModel, new_kernel: NewKernel
) -> None:
    model, plain = new_model(family), new_model(family)
    pack_linears(model)
    target = TargetModel(model, exact=exact, num_blocks=64, kernel=new_kernel())
    generator = np.random.default_rng(1)
    contexts = [generator.integers(0, VOCAB, size).tolist() for size in (3, 31, 17)]
    caches = [SequenceCache(target.cache, 256) for _ in contexts]
    pending = [list(context) for context in contexts]
    for _ in range(3):
        trees = [random_tree(generator, VOCAB, size) for size in (7, 1, 12)]
        work = [SequenceRows(c, p, t) for c, p, t in zip(caches, pending, trees, strict=True)]
        plan = target.plan(work)
        logits = target.forward(plan)
        for index, (first, last) in enumerate(plan.logit_ranges):
            paths = [(), *trees[index].paths()]
            expected = torch.stack([plain_logits(plain, [*contexts[index], *path]) for path in paths])
            assert torch.allclose(logits[first:last], expected, atol=2e-4)
            node = int(generator.integers(len(trees[index])))
            path = trees[index].path(node)
            num_pending = len(pending[index])
            caches[index].keep([*range(num_pending), *(num_pending + step for step in path)])
            bonus = int(generator.integers(VOCAB))
            contexts[index] += [*(trees[index].token_ids[step] for step in path), bonus]
            pending[index] = [bonus]


def test_strict_rows_do_not_depend_on_the_batch_or_the_tree(new_model: NewModel, new_kernel: NewKernel) -> None:
    model = new_model("llama")
    pack_linears(model)
    target = TargetModel(model, exact=True, num_blocks=128, kernel=new_kernel())
    generator = np.random.default_rng(2)
    prompt = generator.integers(0, VOCAB, 40).tolist()
    path = generator.integers(0, VOCAB, 6).tolist()
    alone = SequenceCache(target.cache, 256)
    one_by_one = []
    pending = prompt
    for token in [*path, 0]:
        one_by_one.append(target.forward(target.plan([SequenceRows(alone, pending)]))[0])
        alone.keep(range(len(pending)))
        pending = [token]
    chain = TokenTree(tuple(path), tuple(range(-1, len(path) - 1)), (0.0,) * len(path))
    crowd = [SequenceCache(target.cache, 256) for _ in range(4)]
    work = [
        SequenceRows(crowd[0], generator.integers(0, VOCAB, 9).tolist(), random_tree(generator, VOCAB, 5)),
        SequenceRows(crowd[1], prompt, chain),
        SequenceRows(crowd[2], [5]),
        SequenceRows(crowd[3], generator.integers(0, VOCAB, 70).tolist(), wants_logits=False),
    ]
    plan = target.plan(work)
    first, last = plan.logit_ranges[1]
    assert torch.equal(target.forward(plan)[first:last], torch.stack(one_by_one))


def test_a_prompt_in_chunks_gives_the_logits_of_a_prompt_at_once(new_model: NewModel, new_kernel: NewKernel) -> None:
    model = new_model("qwen3")
    # As a verifier does: products that are not packed differ between 4 and more rows on some processors.
    pack_linears(model)
    target = TargetModel(model, exact=True, num_blocks=64, kernel=new_kernel())
    prompt = np.random.default_rng(3).integers(0, VOCAB, 50).tolist()
    whole, parts = SequenceCache(target.cache, 64), SequenceCache(target.cache, 64)
    expected = target.forward(target.plan([SequenceRows(whole, prompt)]))[0]
    for start in range(0, 48, 16):
        target.forward(target.plan([SequenceRows(parts, prompt[start : start + 16], wants_logits=False)]))
        parts.keep(range(16))
    assert torch.equal(target.forward(target.plan([SequenceRows(parts, prompt[48:])]))[0], expected)


def test_visibility_is_derived_from_parents() -> None:
    tree = TokenTree((5, 6, 7), (-1, 0, -1), (0.0,) * 3)
    expected = [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    assert visibility(2, tree.parents).astype(int).tolist() == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_accepts_supported_families(family: str, new_model: NewModel, new_kernel: NewKernel) -> None:
    model = new_model(family)
    probe = ConformanceProbe(model, VOCAB)
    target = TargetModel(model, exact=False, num_blocks=16, kernel=new_kernel())
    assert probe.check(target) < 1e-3
    assert target.cache.num_free_blocks == target.cache.num_blocks


def test_the_probe_refuses_a_model_whose_attention_is_wrong(new_model: NewModel) -> None:
    model = new_model("llama")
    probe = ConformanceProbe(model, VOCAB)
    target = TargetModel(model, exact=False, num_blocks=16)
    model.model.layers[1].self_attn.scaling *= 1.5
    with pytest.raises(IncompatibleError, match="not supported"):
        probe.check(target)


def test_an_empty_tree_is_plain_decoding() -> None:
    sequence = SequenceCache(KVCache(4), 32)
    rows = SequenceRows(sequence, [1, 2, 3])
    assert rows.tree is EMPTY_TREE
    assert len(rows) == 3
