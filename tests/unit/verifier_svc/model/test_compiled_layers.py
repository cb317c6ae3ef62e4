"""Compiled layers say what the model's own say, and give a row the same bits in any company and by any threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coppice.checkpoints.quantization import quantize_linears
from coppice.core.errors import IncompatibleError
from coppice.core.tree import EMPTY_TREE
from coppice.kernels.cpu.vector_code import HAS_WIDE_REGISTERS
from tests.unit.verifier_svc.early_heads import random_head
from tests.unit.verifier_svc.oracles import plain_logits, random_tree
from tests.unit.verifier_svc.tiny_engine import VOCAB
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.kernels.cpu.attention import CompiledKernel
from verifier_svc.kernels.cpu.decoder_layers import Matrices
from verifier_svc.kernels.cpu.panel_products import PANEL
from verifier_svc.model import compiled_layers
from verifier_svc.model.compiled_layers import compile_layers
from verifier_svc.model.conformance_probe import ConformanceProbe
from verifier_svc.model.exactness_probe import rows_stand_alone
from verifier_svc.model.precision import multiplies_bfloat16
from verifier_svc.model.target_model import TargetModel

# The first test of a kind compiles all layers.
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not HAS_WIDE_REGISTERS, reason="layers are compiled for vectors of 512 bits"),
]

# Widths that are no multiples of a panel, biases, norms of heads, windows, and layers of two kinds.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "intermediate_size": 72},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 24},
    "qwen2": {"num_key_value_heads": 1},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 200},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 20, "num_hidden_layers": 6},
}
# Products of bfloat16 by the processor's own instruction, where it has one.
ROUNDS_INPUTS = [False, True] if multiplies_bfloat16() else [False]
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def new_model(family: str, *, is_half: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family]})
    ).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
        if is_half:
            parameter.data = parameter.data.bfloat16().float()
    return model


def compiled(model: PreTrainedModel, *, rounds_inputs: bool = False, quantizes: bool = False) -> TargetModel:
    kernel = CompiledKernel()
    target = TargetModel(model, exact=True, num_blocks=64, kernel=kernel)
    compile_layers(target, kernel, rounds_inputs=rounds_inputs, quantizes=quantizes)
    target.row_multiple = 1
    return target


@pytest.mark.parametrize("is_half", [False, True], ids=["single", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_trees_have_the_logits_of_the_layers_own_forward(family: str, is_half: bool) -> None:
    plain = new_model(family, is_half=is_half)
    model = new_model(family, is_half=is_half)
    own = [type(module).forward for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]
    target = compiled(model)
    for module in model.modules():
        if type(module).__name__.endswith("DecoderLayer"):
            assert getattr(module.forward, "__func__", None) not in own, "a module's own forward is in use"
    generator = np.random.default_rng(1)
    contexts = [generator.integers(0, VOCAB, size).tolist() for size in (3, 31, 17)]
    caches = [SequenceCache(target.cache, 256) for _ in contexts]
    pending = [list(context) for context in contexts]
    for _ in range(3):
        trees = [random_tree(generator, VOCAB, size) for size in (7, 1, 12)]
        plan = target.plan([SequenceRows(c, p, t) for c, p, t in zip(caches, pending, trees, strict=True)])
        logits = target.forward(plan)
        for index, (first, last) in enumerate(plan.logit_ranges):
            paths = [(), *trees[index].paths()]
            expected = torch.stack([plain_logits(plain, [*contexts[index], *path]) for path in paths])
            assert torch.allclose(logits[first:last], expected, atol=3e-4)
            path = trees[index].path(int(generator.integers(len(trees[index]))))
            num_pending = len(pending[index])
            caches[index].keep([*range(num_pending), *(num_pending + step for step in path)])
            bonus = int(generator.integers(VOCAB))
            contexts[index] += [*(trees[index].token_ids[step] for step in path), bonus]
            pending[index] = [bonus]


@pytest.mark.parametrize("rounds_inputs", ROUNDS_INPUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_have_the_same_bits_in_any_company(family: str, rounds_inputs: bool) -> None:
    target = compiled(new_model(family, is_half=rounds_inputs), rounds_inputs=rounds_inputs)
    assert rows_stand_alone(target, VOCAB)


@pytest.mark.skipif(not multiplies_bfloat16(), reason="the processor does not multiply bfloat16")
@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_in_bfloat16_are_those_of_the_layers_own_forward_rounded(family: str) -> None:
    """The model's own modules in single precision, each product's inputs rounded on the way; and transformers' own."""
    plain, halves = new_model(family, is_half=True), new_model(family, is_half=True).bfloat16()
    for module in plain.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16().float(),))
    target = compiled(new_model(family, is_half=True), rounds_inputs=True)
    prompt = np.random.default_rng(1).integers(0, VOCAB, 40).tolist()
    tree = random_tree(np.random.default_rng(2), VOCAB, 9)
    cache = SequenceCache(target.cache, 64)
    logits = target.forward(target.plan([SequenceRows(cache, prompt, tree)]))
    paths = [(), *tree.paths()]
    expected = torch.stack([plain_logits(plain, [*prompt, *path]) for path in paths])
    # Where a sum in another order falls on the other side of a rounding edge, one input differs by 1 in 256.
    assert torch.allclose(logits, expected, atol=0.02 * expected.std().item())
    others = torch.stack([plain_logits(halves, [*prompt, *path]).float() for path in paths])
    assert torch.allclose(logits, others, atol=0.15 * expected.std().item())


def test_the_probe_passes_and_finds_a_wrong_layer() -> None:
    model = new_model("llama")
    probe = ConformanceProbe(model, VOCAB)
    target = compiled(model)
    probe.check(target)
    layers: Any = target.layers
    layers.weights.scales[1] *= 1.1
    with pytest.raises(IncompatibleError, match="other logits"):
        probe.check(target)
    target.use_layers(None)
    probe.check(target)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_without_modules_has_the_bits_of_one_with_them(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = compiled(new_model(family))
    target.show_layers((0, 2, target.model.config.num_hidden_layers))
    layers: Any = target.layers
    assert (layers._rotations is None) == (family == "gemma3_text"), "Gemma scales embeddings and has two ropes"
    called: list[int] = []
    forward = target.model.forward
    monkeypatch.setattr(target.model, "forward", lambda **named: called.append(1) or forward(**named))
    cache, found = SequenceCache(target.cache, 700), []
    # Beyond the first block of positions.
    tokens = np.random.default_rng(3).integers(0, VOCAB, 600).tolist()
    tree = random_tree(np.random.default_rng(4), VOCAB, 9)
    for is_whole in (True, False):
        plan = target.plan([SequenceRows(cache, tokens, tree, wants_states=True)])
        found.append((target.forward(plan).clone(), target.take_states()))
        assert bool(called) != (is_whole and family != "gemma3_text")
        called.clear()
        layers._rotations = None
    assert torch.equal(found[0][0], found[1][0])
    assert np.array_equal(found[0][1], found[1][1])


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("is_half", [False, True])
def test_freed_weights_change_no_bit_and_embeddings_take_half(
    is_tied: bool, is_half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES["llama"], "tie_word_embeddings", is_tied)
    monkeypatch.setattr(compiled_layers, "_COMPARED_ROWS", VOCAB // 3)
    target = compiled(new_model("llama", is_half=is_half))
    layers: Any = target.layers
    tokens, found = np.random.default_rng(3).integers(0, VOCAB, 40).tolist(), []
    for is_freed in (False, True):
        if is_freed:
            layers.release()
        for has_modules in (False, True):
            rotations = layers._rotations
            if has_modules:
                layers._rotations = None
            cache = SequenceCache(target.cache, 64)
            found.append(target.forward(target.plan([SequenceRows(cache, tokens, EMPTY_TREE)])).clone())
            cache.release()
            layers._rotations = rotations
    assert all(torch.equal(one, found[0]) for one in found)
    embed: Any = target.model.get_input_embeddings()
    head: Any = target.model.get_output_embeddings()
    assert embed.weight.dtype == (torch.bfloat16 if is_half else torch.float32)
    assert (head.weight is embed.weight) == is_tied
    assert all(module.weight.numel() == 0 for module in target.model.model.layers.modules() if is_linear(module))


def is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear)


def test_threads_change_no_bit() -> None:
    target = compiled(new_model("qwen3"))
    tokens = np.random.default_rng(3).integers(0, VOCAB, 150).tolist()
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            cache = SequenceCache(target.cache, 256)
            plan = target.plan([SequenceRows(cache, tokens, random_tree(np.random.default_rng(4), VOCAB, 20))])
            results.append(target.forward(plan).clone())
            cache.release()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_hooks_see_what_goes_between_layers() -> None:
    """An early head reads what a layer in the middle says, and later layers run on the rows that are left."""
    model, other = new_model("llama"), new_model("llama")
    target, plain = compiled(model), TargetModel(other, exact=True, num_blocks=64, kernel=CompiledKernel())
    trees = random_tree(np.random.default_rng(5), VOCAB, 12)
    found = []
    for one in (target, plain):
        one.install_head(random_head(48))
        one.row_multiple = 1
        cache = SequenceCache(one.cache, 64)
        plan = one.plan([SequenceRows(cache, [3, 4, 5], trees)])
        logits, forward = one.forward_pruned(plan)
        found.append((logits, forward))
        cache.release()
    assert found[0][1].num_pruned == found[1][1].num_pruned
    assert torch.allclose(found[0][0], found[1][0], atol=3e-4)


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("gpt2", {}, "not of the Llama family"),
        ("llama", {"hidden_act": "relu"}, "activation"),
        ("llama", {"hidden_size": 40}, "norms"),
    ],
)
def test_what_is_not_compiled_runs_as_its_modules_say(family: str, change: dict[str, Any], reason: str) -> None:
    torch.manual_seed(0)
    sizes = {"n_embd": 48, "n_layer": 2, "n_head": 4} if family == "gpt2" else FAMILIES[family]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SHAPE, **sizes, **change})).eval()
    kernel = CompiledKernel()
    target = TargetModel(model, exact=True, num_blocks=8, kernel=kernel)
    with pytest.raises(IncompatibleError, match=reason):
        compile_layers(target, kernel)
    assert target.layers is None


def test_a_pass_has_no_rows_of_others_before_it() -> None:
    """Room is kept between passes: what a larger one has left there is not read."""
    target = compiled(new_model("mistral"))
    cache, other = SequenceCache(target.cache, 256), SequenceCache(target.cache, 256)
    fresh = target.forward(target.plan([SequenceRows(cache, [7, 8, 9], EMPTY_TREE)])).clone()
    target.forward(target.plan([SequenceRows(other, list(range(1, 60)), EMPTY_TREE)]))
    assert torch.equal(target.forward(target.plan([SequenceRows(cache, [7, 8, 9], EMPTY_TREE)])), fresh)


@pytest.mark.parametrize("rounds_inputs", ROUNDS_INPUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_layers_are_those_of_the_dequantised_model(family: str, rounds_inputs: bool) -> None:
    """The same bits as with its weights kept in more bits: they are exact, and scales are powers of two."""
    models = [new_model(family) for _ in range(2)]
    for model in models:
        quantize_linears(model)
    plain, quantised = (
        compiled(model, rounds_inputs=rounds_inputs, quantizes=quantizes)
        for model, quantizes in zip(models, (False, True), strict=True)
    )
    ids = np.random.default_rng(3).integers(0, VOCAB, 40).tolist()
    tree = random_tree(np.random.default_rng(4), VOCAB, 9)
    found = []
    for target in (plain, quantised):
        cache = SequenceCache(target.cache, 64)
        found.append(target.forward(target.plan([SequenceRows(cache, ids, tree)])))
    assert torch.equal(*found)
    kinds = {matrices.panels.dtype for matrices in compiled_matrices(quantised)}
    assert kinds == {np.dtype(np.int8)}


@pytest.mark.parametrize("quantizes", [False, True])
def test_weights_packed_in_parts_are_the_same(quantizes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rows in (compiled_layers._PACKED_ROWS, PANEL):
        monkeypatch.setattr(compiled_layers, "_PACKED_ROWS", rows)
        model = new_model("qwen2")
        if quantizes:
            quantize_linears(model)
        found.append(compiled_matrices(compiled(model, quantizes=quantizes)))
    assert any(matrices.panels.shape[1] > 1 for matrices in found[0]), "there is more than one part"
    for whole, in_parts in zip(*found, strict=True):
        for one, other in zip(whole, in_parts, strict=True):
            assert one.shape == other.shape
            assert np.array_equal(one, other)


def compiled_matrices(target: TargetModel) -> list[Matrices]:
    layers: Any = target.layers
    return [part for part in layers.weights if isinstance(part, Matrices)]
