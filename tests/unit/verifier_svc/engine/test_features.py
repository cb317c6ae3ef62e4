"""Features are the hidden states of the committed text in transformers; asking for them changes no bit and no token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from coppice.core.errors import IncompatibleError
from coppice.core.feature_layers import default_feature_layers
from coppice.core.sampling import StoppingOptions
from coppice.core.tree import TokenTree
from coppice.kernels.cpu.vector_code import HAS_WIDE_REGISTERS
from tests.tiny_checkpoint import tiny_llama
from tests.unit.verifier_svc.adapters import random_adapter
from tests.unit.verifier_svc.conftest import FAMILIES
from tests.unit.verifier_svc.early_heads import THRESHOLDS, random_head
from tests.unit.verifier_svc.engine_harness import Harness
from tests.unit.verifier_svc.model.test_pass_graphs import CPUKernel, Repeating
from tests.unit.verifier_svc.oracles import random_tree
from tests.unit.verifier_svc.test_mask_passes import KERNELS, new_target, some_masks
from tests.unit.verifier_svc.tiny_engine import LIMITS, PROMPTS, SAMPLING, VOCAB, oracle_drafter, tiny_info, tiny_target
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.features import FeatureShape, committed_features, offered_features
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import PassPlan, SequenceRows
from verifier_svc.engine.prompt_states import PromptStates
from verifier_svc.extras.pruning.layers import decoder_layers
from verifier_svc.extras.pruning.pace import ON, PruningSettings
from verifier_svc.extras.pruning.rows import survivors_of
from verifier_svc.kernels.cpu.attention import CompiledKernel
from verifier_svc.model import compiled_layers, layer_states
from verifier_svc.model.compiled_layers import compile_layers
from verifier_svc.model.layer_states import LayerStates
from verifier_svc.model.pass_graphs import PassGraphs
from verifier_svc.model.target_model import TargetModel
from verifier_svc.verify.acceptance import Acceptance
from verifier_svc.verify.draw_rule import DrawRule

NewModel = Callable[[str], PreTrainedModel]
HIDDEN = 64
SIZE = 3 * HIDDEN
NUM_TOKENS = 24
STOPPING = StoppingOptions(max_tokens=NUM_TOKENS, ignore_eos=True)


def read(features: bytes) -> np.ndarray:
    """Features as numbers [tokens, 3 * hidden], by torch."""
    halves = torch.frombuffer(bytearray(features), dtype=torch.bfloat16)
    return halves.float().view(-1, SIZE).numpy()


@torch.inference_mode()
def plain_states(model: PreTrainedModel, token_ids: Sequence[int]) -> np.ndarray:
    """The oracle: states that the library gives [tokens, 3 * hidden], by one plain forward over the whole text."""
    output = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False, output_hidden_states=True)
    layers = default_feature_layers(model.config.num_hidden_layers)
    return torch.cat([output.hidden_states[layer][0] for layer in layers], -1).numpy()


def assert_features(model: PreTrainedModel, prompt: Sequence[int], token_ids: Sequence[int], features: bytes) -> None:
    """One for each token, of the row before it, as far as bfloat16 can say."""
    expected = plain_states(model, [*prompt, *token_ids])[len(prompt) - 1 : -1]
    found = read(features)
    assert found.shape == expected.shape == (len(token_ids), SIZE)
    np.testing.assert_allclose(found, expected, atol=0.02, rtol=0.01)
    # Neighbours are no less than that apart.
    assert np.abs(expected[1:] - expected[:-1]).max(1).min() > 0.1


@pytest.fixture
def engine_of() -> Iterator[Callable[..., Engine]]:
    """Makes engines that run until the test is over."""
    engines: list[Engine] = []

    def start(target: TargetModel, **info: object) -> Engine:
        engine = Engine(target, replace(tiny_info(), **info), LIMITS, max_nodes=16)
        engine.start()
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.stop()


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "opt"])
@pytest.mark.parametrize("sampling", ["greedy", "T=1 penalties"])
def test_features_are_the_states_of_the_rows_that_tokens_were_drawn_from(
    family: str, sampling: str, new_model: NewModel, engine_of: Callable[..., Engine]
) -> None:
    """Trees, prompts that come in parts, and sequences of which only some ask, in the same passes."""
    harness = Harness(engine_of(tiny_target(new_model(family))))
    plain = harness.generate(PROMPTS, SAMPLING[sampling], STOPPING)
    outputs = [result.token_ids for result in plain]
    assert [result.features for result in plain] == [b""] * len(PROMPTS)
    asked = harness.generate(
        PROMPTS, SAMPLING[sampling], STOPPING, oracle_drafter(outputs, seed=1), wants_features=(0, 1, 3)
    )
    assert [result.token_ids for result in asked] == outputs
    assert sum(result.accepted for result in asked) > 20
    assert asked[2].features == b""
    for index in (0, 1, 3):
        assert_features(new_model(family), PROMPTS[index], outputs[index], asked[index].features)


def test_nothing_is_lost_by_preemptions_and_by_going_on_elsewhere(
    new_model: NewModel, engine_of: Callable[..., Engine]
) -> None:
    target = tiny_target(new_model("llama"))
    target.resize_cache(6)
    engine = engine_of(target)
    harness = Harness(engine)
    prompts = [list(range(first, first + 40)) for first in (3, 20, 50)]
    stopping = replace(STOPPING, max_tokens=120)
    results = harness.generate(prompts, SAMPLING["T=1 top_k"], stopping, wants_features=range(3))
    assert engine.scheduler.num_preemptions > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.token_ids) == 120
        assert_features(new_model("llama"), prompt, result.token_ids, result.features)
    # What an earlier call has generated is prompt here.
    resumed = [*prompts[0], *results[0].token_ids[:20]]
    [rest] = harness.generate([resumed], SAMPLING["T=1 top_k"], stopping, num_resumed=20, wants_features=(0,))
    assert rest.token_ids == results[0].token_ids[20:]
    assert_features(new_model("llama"), resumed, rest.token_ids, rest.features)


def assert_prompt_features(model: PreTrainedModel, prompt: Sequence[int], found: dict[int, bytes], first: int) -> None:
    """One for each token from `first` on, of the row before it."""
    assert list(found) == list(range(first, len(prompt)))
    expected = plain_states(model, prompt)[first - 1 : -1]
    np.testing.assert_allclose(read(b"".join(found.values())), expected, atol=0.02, rtol=0.01)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "opt"])
def test_features_of_prompts_are_the_states_of_their_rows(
    family: str, new_model: NewModel, engine_of: Callable[..., Engine]
) -> None:
    """Prompts that come in parts, in passes with others; the last part comes after the first token."""
    harness = Harness(engine_of(tiny_target(new_model(family))))
    plain = harness.generate(PROMPTS, stopping=STOPPING, salt="plain")
    asked = harness.generate(PROMPTS, stopping=STOPPING, wants_features=(0, 1, 2), max_prompt_features=512)
    assert [result.token_ids for result in asked] == [result.token_ids for result in plain]
    for index in (0, 1):
        assert_prompt_features(new_model(family), PROMPTS[index], asked[index].prompt_features, 1)
        assert_features(new_model(family), PROMPTS[index], asked[index].token_ids, asked[index].features)
    assert (asked[0].rounds_before, asked[1].rounds_before[-1]) == ([1], 1)
    assert len(asked[1].rounds_before) > 2
    assert set(asked[1].rounds_before[:-1]) == {0}
    # A prompt of one token has none, and the others did not ask.
    assert not any(result.prompt_features for result in (asked[2], asked[3], *plain))


def test_as_many_features_of_a_prompt_are_sent_as_are_wanted_and_computed(
    new_model: NewModel, engine_of: Callable[..., Engine]
) -> None:
    harness, prompt = Harness(engine_of(tiny_target(new_model("llama")))), PROMPTS[1]
    few, rest = (
        harness.generate([prompt], stopping=STOPPING, wants_features=(0,), max_prompt_features=most)[0]
        for most in (20, 512)
    )
    assert_prompt_features(new_model("llama"), prompt, few.prompt_features, len(prompt) - 20)
    # The second time they are in the prefix cache, but for the last tokens.
    assert 0 < rest.num_cached < len(prompt) - 1
    assert_prompt_features(new_model("llama"), prompt, rest.prompt_features, rest.num_cached + 1)


def test_features_of_prompts_are_sent_once_over_preemptions(
    new_model: NewModel, engine_of: Callable[..., Engine]
) -> None:
    target = tiny_target(new_model("llama"))
    target.resize_cache(6)
    engine = engine_of(target)
    prompts = [list(range(first, first + 40)) for first in (3, 20, 50)]
    results = Harness(engine).generate(
        prompts,
        SAMPLING["T=1 top_k"],
        replace(STOPPING, max_tokens=120),
        wants_features=range(3),
        max_prompt_features=512,
    )
    assert engine.scheduler.num_preemptions > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert_prompt_features(new_model("llama"), prompt, result.prompt_features, 1)


def test_features_of_prompts_are_sent_in_pieces_of_a_bounded_size() -> None:
    states = PromptStates(5, np.arange(21, dtype=np.int16).reshape(7, 3))
    for most, sizes in ((12, [2, 2, 2, 1]), (1, [1] * 7), (1000, [7])):
        pieces = list(states.pieces(most))
        assert [len(features) // 6 for _, features in pieces] == sizes
        assert [first for first, _ in pieces] == [5 + sum(sizes[:at]) for at in range(len(sizes))]
        assert b"".join(features for _, features in pieces) == states.states.tobytes()


def test_an_output_that_ends_inside_a_tree_has_one_feature_for_each_of_its_tokens() -> None:
    states = np.arange(5, dtype=np.int16)[:, None]
    for tokens, nodes, rows in (((7, 8, 9), (1, 3), [0, 2, 4]), ((7, 8), (1, 3), [0, 2]), ((7,), (), [0])):
        features = committed_features(states, Acceptance(tokens, nodes))
        assert np.frombuffer(features, np.int16).tolist() == rows


def deep_llama() -> PreTrainedModel:
    """Of eight layers, so that a feature has three different ones."""
    model = tiny_llama(
        vocab_size=VOCAB, max_context_tokens=512, hidden_size=HIDDEN, num_hidden_layers=8, initializer_range=0.1
    )
    assert default_feature_layers(8) == (2, 4, 5)
    return model


def compiled_deep_target() -> TargetModel:
    """The same model with compiled layers."""
    if not HAS_WIDE_REGISTERS:
        pytest.skip("layers are compiled on processors with vectors of 512 bits")
    model, kernel = deep_llama(), CompiledKernel()
    target = TargetModel(model, exact=True, num_blocks=64, kernel=kernel)
    compile_layers(target, kernel)
    return target


@pytest.mark.parametrize("kind", ["modules", "compiled layers", "blocks of logits", "pruned"])
def test_each_layer_s_states_are_where_they_belong(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the layers as modules or as compiled runs, in one part, in blocks, and with rows pruned between layers."""
    target = new_target(deep_llama()) if kind == "modules" else compiled_deep_target()
    if kind == "pruned":
        target.install_head(replace(random_head(HIDDEN), layer=4))
    tokens = np.random.default_rng(0).integers(0, VOCAB, 12).tolist()
    tree = random_tree(np.random.default_rng(3), VOCAB, 20)

    def plan(*, wants: bool) -> PassPlan:
        cache = SequenceCache(target.cache, 64)
        rule = DrawRule(0.0, 0, 0.0)
        shown = range(3, 9) if wants else range(0)
        rows = SequenceRows(cache, tokens, tree, draw_rule=rule, wants_states=wants, shown=shown)
        return target.plan([rows])

    nodes = list(range(len(tree)))
    if kind == "blocks of logits":
        asked = torch.cat(list(target.forward_in_blocks(plan(wants=True), 5)))
        states = target.take_states()
        plain = torch.cat(list(target.forward_in_blocks(plan(wants=False), 5)))
    elif kind == "pruned":
        asked, forward = target.forward_pruned(plan(wants=True))
        states = target.take_states()
        plain, _ = target.forward_pruned(plan(wants=False))
        nodes = list(survivors_of(forward.plan.segments[0]) or ())
        assert 0 < len(nodes) < len(tree)
    else:
        asked = target.forward(plan(wants=True))
        states = target.take_states()
        plain = target.forward(plan(wants=False))
    assert torch.equal(asked, plain)
    assert states is not None
    found = read(states.tobytes())[: 1 + len(nodes)]
    paths = [[], *([tree.token_ids[step] for step in tree.path(node)] for node in nodes)]
    expected = np.stack([plain_states(deep_llama(), [*tokens, *path])[-1] for path in paths])
    np.testing.assert_allclose(found, expected, atol=0.02, rtol=0.01)
    if kind != "pruned":
        shown = read(states[-6:].tobytes())
        np.testing.assert_allclose(shown, plain_states(deep_llama(), tokens)[3:9], atol=0.02, rtol=0.01)
    low, middle, high = expected[:, :HIDDEN], expected[:, HIDDEN : 2 * HIDDEN], expected[:, 2 * HIDDEN :]
    assert min(np.abs(low - middle).max(), np.abs(middle - high).max()) > 0.2


def test_compiled_layers_are_one_run_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    target = compiled_deep_target()
    # Several threads may make the same call.
    calls: set[str] = set()
    for name in ("run_layers", "run_whole", "share_product"):
        call = getattr(compiled_layers, name)
        monkeypatch.setattr(compiled_layers, name, lambda *a, name=name, call=call: (calls.add(name), call(*a))[1])
    runs = []
    for wants in (False, True, False):
        calls.clear()
        target.forward(target.plan([SequenceRows(SequenceCache(target.cache, 64), [1, 2], wants_states=wants)]))
        runs.append(sorted(calls))
    assert runs == [["run_whole"]] * 3


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_asking_changes_no_bit_of_any_logit(family: str, kernel: str, new_model: NewModel) -> None:
    """Over rounds with trees and masks: the same bits with and without, and one state for each logit row."""
    targets = [new_target(new_model(family), kernel) for _ in range(2)]
    for target in targets:
        target.adapt(random_adapter(target.model, 3))
    generator = np.random.default_rng(2)
    caches = [[SequenceCache(target.cache, 256) for _ in range(3)] for target in targets]
    pending = [generator.integers(0, VOCAB, size).tolist() for size in (40, 1, 9)]
    for sizes in ((12, 3, 0), (0, 0, 0), (7, 20, 5)):
        trees = [random_tree(generator, VOCAB, size) for size in sizes]
        masks = [some_masks(generator, size) for size in sizes]
        logits = []
        for number, (target, own) in enumerate(zip(targets, caches, strict=True)):
            work = [
                SequenceRows(cache, tokens, tree, masks=groups, wants_states=bool(number) and index == 1)
                for index, (cache, tokens, tree, groups) in enumerate(zip(own, pending, trees, masks, strict=True))
            ]
            plan = target.plan(work)
            logits.append(target.forward(plan))
            states = target.take_states()
            assert (states is not None) == bool(number)
            assert states is None or states.shape == (len(plan.logit_rows), SIZE)
            assert target.take_states() is None
            for cache, tokens in zip(own, pending, strict=True):
                cache.keep(range(len(tokens)))
        assert torch.equal(*logits)
        pending = [[int(generator.integers(VOCAB))] for _ in sizes]


def test_a_model_that_gives_all_logits_gives_the_states_of_the_rows_that_are_wanted(new_model: NewModel) -> None:
    found = []
    for keeps_rows in (True, False):
        target = tiny_target(new_model("llama"))
        target._keeps_rows = keeps_rows
        tree = random_tree(np.random.default_rng(0), VOCAB, 6)
        rows = SequenceRows(SequenceCache(target.cache, 64), [3, 1, 4, 1, 5], tree, wants_states=True)
        target.forward(target.plan([rows]))
        found.append(target.take_states())
    assert found[0] is not None
    assert np.array_equal(*found)


def test_a_pass_in_which_nobody_asks_has_no_hook(new_model: NewModel, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(new_model("llama"))
    layer = decoder_layers(target.model)[default_feature_layers(target.model.config.num_hidden_layers)[0]]
    hooks: list[int] = []
    layer.register_forward_hook(lambda *_: hooks.append(len(layer._forward_pre_hooks)))
    monkeypatch.setattr(LayerStates, "of", lambda *_: pytest.fail("nobody asks"))
    part = SequenceRows(SequenceCache(target.cache, 64), [1, 2], wants_logits=False, wants_states=True)
    target.forward(target.plan([part]))
    monkeypatch.undo()
    for wants in (False, True, False):
        target.forward(target.plan([SequenceRows(SequenceCache(target.cache, 64), [1, 2], wants_states=wants)]))
    assert hooks == [0, 0, 1, 0]


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "opt"])
def test_recorded_passes_give_the_states_of_passes_as_they_are(family: str, new_model: NewModel) -> None:
    capture, kernel = Repeating(), CPUKernel()
    plain, recorded = tiny_target(new_model(family)), new_target(new_model(family), "compiled")
    recorded = TargetModel(recorded.model, exact=True, num_blocks=32, kernel=kernel)
    graphs = PassGraphs(kernel, capture, (16,))
    recorded.record_passes(graphs)
    generator = np.random.default_rng(0)
    for wants in (True, False, True, True):
        tree, tokens = random_tree(generator, VOCAB, 4), generator.integers(0, VOCAB, 3).tolist()
        found = []
        for target in (plain, recorded):
            cache = SequenceCache(target.cache, 64)
            logits = target.forward(target.plan([SequenceRows(cache, tokens, tree, wants_states=wants)]))
            found.append((logits[:5], target.take_states()))
            cache.release()
        (logits, states), (replayed, replayed_states) = found
        assert torch.equal(logits, replayed)
        assert (states is None) == (replayed_states is None) == (not wants)
        if states is not None and replayed_states is not None:
            assert np.array_equal(states[:5], replayed_states[:5])
    # Those who do not ask have a recording of their own.
    assert (graphs.num_recordings, capture.num_replays) == (2, 4)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_rows_that_are_left_of_a_pruned_pass_have_the_states_of_a_whole_one(family: str, new_model: NewModel) -> None:
    plain, pruned = new_target(new_model(family), "compiled"), new_target(new_model(family), "compiled")
    pruned.install_head(random_head(HIDDEN))
    generator = np.random.default_rng(1)
    tree = random_tree(generator, VOCAB, 30)
    plans = []
    for target in (plain, pruned):
        rows = SequenceRows(
            SequenceCache(target.cache, 256), [4, 5], tree, draw_rule=DrawRule(0.0, 0, 0.0), wants_states=True
        )
        plans.append(target.plan([rows]))
    plain.forward(plans[0])
    _, forward = pruned.forward_pruned(plans[1])
    whole, left = plain.take_states(), pruned.take_states()
    assert whole is not None
    assert left is not None
    survivors = survivors_of(forward.plan.segments[0])
    assert 0 < len(survivors) < 30
    assert np.array_equal(left[: 1 + len(survivors)], whole[[0, *(1 + node for node in survivors)]])


def test_features_behind_pruned_trees_are_those_of_the_committed_text(
    new_model: NewModel, engine_of: Callable[..., Engine]
) -> None:
    target = tiny_target(new_model("llama"))
    target.install_head(random_head(HIDDEN))
    engine = engine_of(target, pruning=PruningSettings(THRESHOLDS, 0, target.row_multiple, ON))
    harness = Harness(engine)
    plain = harness.generate(PROMPTS[:2], stopping=STOPPING)

    def draft(index: int, generated: Sequence[int], base: int) -> TokenTree:
        wrong = random_tree(np.random.default_rng(base), VOCAB, 8)
        right = plain[index].token_ids[len(generated) :][:5]
        tokens, parents = [*right], [*range(-1, len(right) - 1)]
        tokens += [token for token in wrong.token_ids if token not in right[:1]]
        parents += [-1] * (len(tokens) - len(parents))
        return TokenTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens))

    results = harness.generate(PROMPTS[:2], stopping=STOPPING, drafter=draft, wants_features=(0, 1))
    assert engine.counts.num_pruned_nodes > 0
    for prompt, result in zip(PROMPTS, results, strict=False):
        assert_features(new_model("llama"), prompt, result.token_ids, result.features)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_says_which_layers_its_features_are_of(family: str, new_model: NewModel) -> None:
    target = tiny_target(new_model(family))
    layers = default_feature_layers(target.model.config.num_hidden_layers)
    assert offered_features(target) == FeatureShape(layers, SIZE)
    assert target.cache.num_free_blocks == target.cache.num_blocks


def test_a_target_without_a_list_of_layers_gives_none(new_model: NewModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: PreTrainedModel) -> torch.nn.ModuleList:
        raise IncompatibleError("none")

    monkeypatch.setattr(layer_states, "decoder_layers", none)
    target = tiny_target(new_model("llama"))
    assert offered_features(target) == FeatureShape()
    assert target.cache.num_free_blocks == target.cache.num_blocks
