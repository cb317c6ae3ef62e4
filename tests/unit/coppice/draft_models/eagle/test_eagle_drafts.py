"""Drafts are best-first trees over an oracle's logits with the request's noise, whatever was kept, dropped or lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from coppice.core.noise import gumbel
from coppice.core.sampling import SamplingParams
from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree
from coppice.draft_models.coupling import Coupling
from coppice.draft_models.eagle import sequence as eagle_sequence
from coppice.draft_models.eagle.checkpoint import EagleWeights, load_eagle
from coppice.draft_models.eagle.forward import WINDOW, CompiledEagle, EagleForward, TorchEagle, probe_eagle
from coppice.draft_models.eagle.sequence import EagleSequence, HeadSizes, LoadedHead
from coppice.draft_models.eagle.target_rows import TargetRows, read_target_rows
from coppice.draft_models.kernels.cpu.int8_weights import quantise
from coppice.search.likeliest_tokens import top_children
from coppice.search.tree_builder import Frontier, build_tree
from coppice.search.tree_limits import Children, TreeLimits
from drafter_svc.config import DrafterConfig
from drafter_svc.drafters.eagle import drafter as eagle_drafter
from drafter_svc.model.cache_budget import CacheBudget
from tests.eagle_checkpoints import eagle_settings, eagle_tensors, write_eagle
from tests.eight_bits import needs_int8_inputs
from tests.unit.coppice.draft_models.eagle.conftest import VOCAB
from tests.unit.coppice.draft_models.eagle.eagle_oracle import EagleOracle

LIMITS = TreeLimits(20, width=4, max_steps=4, max_depth=5)
SIGMAS = {"0": [0.7, 0.8, 0.9, 1.0, 1.1], "1": [0.5, 0.6, 0.7, 0.8, 0.9]}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GREEDY, NOISY = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=2**63 + 11)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True, "layer": {"num_key_value_heads": 1}},
}


class Case:
    """A checkpoint, the drafter's weights, and the oracle."""

    def __init__(self, directory: Path, target: Path, *, is_rounded: bool = False, **changes: Any) -> None:
        settings = eagle_settings(target, 24, **changes)
        tensors = eagle_tensors(settings)
        if is_rounded:
            for name, tensor in tensors.items():
                if tensor.dim() == 2:
                    values, scales = quantise(tensor.float().numpy())
                    tensors[name] = torch.from_numpy(values * scales[:, None])
        write_eagle(directory, settings, tensors, sigmas=SIGMAS)
        self.rows: TargetRows = read_target_rows(str(target))
        self.weights: EagleWeights = load_eagle(str(directory), self.rows)
        own = self.weights.draft_ids.tolist()
        ids = [*own, *sorted(set(PROMPT) - set(own))]
        self.oracle = EagleOracle(settings, tensors, self.rows.embedding, self.rows.output[ids], ids)

    def drafter(self, forward: EagleForward | None = None) -> LoadedHead:
        forward = forward or TorchEagle(self.weights, torch.device("cpu"))
        return LoadedHead(forward, HeadSizes(VOCAB, self.weights.feature_size), self.weights.calibration, LIMITS)


@pytest.fixture(scope="module")
def case(eagle_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("eagle"), eagle_target)


def encoded(features: np.ndarray) -> bytes:
    return (np.ascontiguousarray(features, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()


def random_features(rng: np.random.Generator, count: int, size: int) -> np.ndarray:
    """Numbers that bfloat16 has."""
    return (rng.integers(-8, 8, (count, size)) + 0.5) / 4


class Text:
    """What a sequence was told: tokens with features, at their positions."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.size = size
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.features = np.empty((0, size))
        self.num_generated = self.num_prompt = 0

    def more(self, tokens: Sequence[int]) -> bytes:
        features = random_features(self.rng, len(tokens), self.size)
        self.token_ids += tokens
        first = len(PROMPT) - 1 + self.num_generated
        self.positions += range(first, first + len(tokens))
        self.num_generated += len(tokens)
        self.features = np.concatenate([self.features, features])
        return encoded(features)

    def prompt(self, first: int, last: int) -> bytes:
        """Features of tokens [first, last) of the prompt, which are those before all others."""
        features = random_features(self.rng, last - first, self.size)
        at = self.num_prompt
        self.token_ids[at:at] = PROMPT[first:last]
        self.positions[at:at] = range(first - 1, last - 1)
        self.features = np.concatenate([self.features[:at], features, self.features[at:]])
        self.num_prompt += last - first
        return encoded(features)


def expected_draft(
    case: Case, text: Text, sampling: SamplingParams, window: int = WINDOW, max_nodes: int = 20, row_multiple: int = 1
) -> TokenTree:
    """The oracle's logits, the noise of `coppice.core.noise`, and the library's best-first search."""
    ids = np.array(case.oracle.ids)
    length = len(PROMPT) + text.num_generated
    sigmas = np.array([np.interp(sampling.temperature, [0, 1], pair) for pair in zip(*SIGMAS.values(), strict=True)])
    coupling = Coupling(sampling, VOCAB, 1.0, PROMPT)
    coupling.commit(text.token_ids[text.num_prompt :])
    paths: list[list[int]] = []

    def children(path: list[int]) -> Children:
        committed = text.token_ids[-window:], torch.from_numpy(text.features[-window:]), text.positions[-window:]
        every = np.full((1, VOCAB), -np.inf, np.float32)
        every[0, ids] = case.oracle.logits(*committed, path)
        depth = len(path)
        scores = coupling.processed(every, [path])
        if sampling.temperature > 0:
            scores = scores + sampling.temperature * gumbel(sampling.seed, length + depth, 1, VOCAB)
        return top_children((scores / sigmas[depth]).astype(np.float32), np.float32(1), 16)[0]

    def expand(frontier: Frontier) -> list[Children]:
        for token, parent in zip(frontier.token_ids, frontier.parent_rows, strict=True):
            paths.append([*([] if parent == ROOT else paths[parent]), token])
        return [children(path) for path in paths[-len(frontier.token_ids) :]]

    limits = replace(LIMITS, max_nodes=max_nodes, row_multiple=row_multiple)
    return build_tree(children([]), expand, limits, "eagle")


def assert_same(found: TokenTree, expected: TokenTree, tolerance: float = 1e-3) -> None:
    assert len(found) > 3
    assert (found.token_ids, found.parents) == (expected.token_ids, expected.parents)
    assert found.log_probs == pytest.approx(expected.log_probs, abs=tolerance)
    assert found.source_names == ("eagle",)


def outcome_of(tree: TokenTree, rng: np.random.Generator) -> list[int]:
    path = tree.path(int(rng.integers(-1, len(tree))))
    return [*(tree.token_ids[node] for node in path), int(rng.integers(VOCAB))]


SAMPLINGS = {
    "greedy": GREEDY,
    "T=1": NOISY,
    "T=0.6": replace(NOISY, temperature=0.6),
    "penalties": replace(NOISY, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3),
    "bias": replace(GREEDY, logit_bias=dict.fromkeys(PROMPT, 3.0), bad_token_ids=(7, 8)),
    "top_k": replace(NOISY, top_k=5),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sampling", [GREEDY, NOISY], ids=["greedy", "T=1"])
def test_drafts_are_those_of_the_oracle_round_after_round(
    variant: str, sampling: SamplingParams, eagle_target: Path, tmp_path: Path
) -> None:
    case = Case(tmp_path, eagle_target, **VARIANTS[variant])
    text = Text(case.weights.feature_size)
    sequence = case.drafter().open(PROMPT, sampling)
    assert sequence.draft(20) == EMPTY_TREE
    tokens = [11]
    for _ in range(6):
        sequence.extend(tokens, text.more(tokens))
        found = sequence.draft(20)
        assert_same(found, expected_draft(case, text, sampling))
        sequence.prepare()
        tokens = outcome_of(found, text.rng)
    assert sequence.num_cached == text.num_generated


@pytest.mark.parametrize("name", SAMPLINGS)
def test_penalties_bias_and_truncation_are_seen(name: str, case: Case) -> None:
    sampling, text = SAMPLINGS[name], Text(case.weights.feature_size)
    sequence = case.drafter().open(PROMPT, sampling)
    tokens = [11, 12, 11]
    for _ in range(3):
        sequence.extend(tokens, text.more(tokens))
        found = sequence.draft(12, 4)
        assert_same(found, expected_draft(case, text, sampling, max_nodes=12, row_multiple=4))
        tokens = outcome_of(found, text.rng)


def test_the_request_s_own_tokens_can_be_drafted(case: Case) -> None:
    own = set(case.weights.draft_ids.tolist())
    [only_prompts] = [token for token in PROMPT if token not in own][:1]
    sampling = replace(GREEDY, logit_bias={only_prompts: 50.0})
    sequence = case.drafter().open(PROMPT, sampling)
    sequence.extend([11], Text(case.weights.feature_size).more([11]))
    assert sequence.draft(4).token_ids[0] == only_prompts
    other = case.drafter().open([token for token in PROMPT if token != only_prompts], sampling)
    other.extend([11], Text(case.weights.feature_size).more([11]))
    assert only_prompts not in other.draft(20).token_ids


def rounded_case(directory: Path, target: Path, variant: str) -> Case:
    """Weights that 8 bits hold, the head's by way of the target's table."""
    case = Case(directory, target, is_rounded=True, **VARIANTS[variant])
    values, scales = quantise(case.weights.head.float().numpy())
    assert case.weights.target_output is not None
    table = case.weights.target_output.float()
    more, more_scales = quantise(table.numpy())
    case.weights = replace(
        case.weights,
        head=torch.from_numpy(values * scales[:, None]),
        target_output=torch.from_numpy(more * more_scales[:, None]),
    )
    return case


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_passes_have_the_logits_of_those_in_torch(variant: str, eagle_target: Path, tmp_path: Path) -> None:
    """To rounding of single precision, with weights that 8 bits hold."""
    case = rounded_case(tmp_path, eagle_target, variant)
    expected = probe_eagle(TorchEagle(case.weights, torch.device("cpu")))
    found = probe_eagle(CompiledEagle(case.weights, rounds_inputs=False))
    assert np.abs(expected[0] - expected[1]).max() > 0.5
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


@needs_int8_inputs
def test_inputs_in_8_bits_change_logits_by_little(eagle_target: Path, tmp_path: Path) -> None:
    case = rounded_case(tmp_path, eagle_target, "plain")
    expected = probe_eagle(TorchEagle(case.weights, torch.device("cpu")))
    found = probe_eagle(CompiledEagle(case.weights, rounds_inputs=True))
    difference = np.abs(found - expected).max()
    assert 0 < difference < 0.05 * np.abs(expected).max()


class StepByStep:
    """The compiled passes, without whole searches."""

    def __init__(self, forward: CompiledEagle) -> None:
        self._forward = forward

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: None) if name == "search" else getattr(self._forward, name)


@pytest.mark.parametrize("rounds_inputs", [False, pytest.param(True, marks=needs_int8_inputs)])
@pytest.mark.parametrize("sampling", [GREEDY, NOISY], ids=["greedy", "T=1"])
def test_a_whole_search_in_one_call_is_that_in_steps(
    rounds_inputs: bool, sampling: SamplingParams, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round after round, over budgets, outcomes told together, and rows that are dropped."""
    monkeypatch.setattr("coppice.draft_models.eagle.forward.WINDOW", 24)
    monkeypatch.setattr("coppice.draft_models.eagle.forward._STEP", 8)
    forward = CompiledEagle(case.weights, rounds_inputs=rounds_inputs)
    by_steps: Any = StepByStep(forward)
    one, other = (case.drafter(way).open(PROMPT, sampling) for way in (forward, by_steps))
    text = Text(case.weights.feature_size)
    tokens = [11]
    for turn in range(16):
        for part in (tokens[:1], tokens[1:]):
            features = text.more(part)
            one.extend(part, features)
            other.extend(part, features)
        budget = (20, 7, 1, 33)[turn % 4]
        found, expected = one.draft(budget, 1 + turn % 3), other.draft(budget, 1 + turn % 3)
        assert (found.token_ids, found.parents) == (expected.token_ids, expected.parents)
        assert found.log_probs == pytest.approx(expected.log_probs, abs=1e-4)
        assert one.draft(budget, 1 + turn % 3) == found
        tokens = outcome_of(found, text.rng)
    assert text.num_generated > 24 >= one.num_cached == other.num_cached > 12


def test_long_outputs_are_seen_through_a_window(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older rows are dropped, and keys keep their positions."""
    monkeypatch.setattr("coppice.draft_models.eagle.forward.WINDOW", 16)
    monkeypatch.setattr("coppice.draft_models.eagle.forward._STEP", 4)
    sequence, text = case.drafter().open(PROMPT, NOISY), Text(case.weights.feature_size)
    for _ in range(9):
        tokens = text.rng.integers(0, VOCAB, 3).tolist()
        sequence.extend(tokens, text.more(tokens))
        found = sequence.draft(20)
        assert 12 < sequence.num_cached <= 16 or text.num_generated <= 16
        assert_same(found, expected_draft(case, text, NOISY, window=sequence.num_cached))
    assert text.num_generated == 27


@pytest.mark.parametrize("comes", ["first", "after the first outcome", "in parts", "in part"])
@pytest.mark.parametrize("sampling", [GREEDY, NOISY], ids=["greedy", "T=1"])
def test_rows_of_the_prompt_are_seen_from_when_they_come(comes: str, sampling: SamplingParams, case: Case) -> None:
    sequence, text = case.drafter().open(PROMPT, sampling), Text(case.weights.feature_size)
    bounds = {"in parts": [(1, 4), (4, 8)], "in part": [(3, 6)]}.get(comes, [(1, 8)])
    if comes == "first":
        sequence.see_prompt(1, text.prompt(1, 8))
    tokens = [11]
    for turn in range(4):
        sequence.extend(tokens, text.more(tokens))
        found = sequence.draft(20)
        assert_same(found, expected_draft(case, text, sampling))
        if comes != "first" and turn < len(bounds):
            sequence.see_prompt(bounds[turn][0], text.prompt(*bounds[turn]))
        tokens = outcome_of(found, text.rng)
    assert sequence.num_cached == text.num_generated + sum(last - first for first, last in bounds)


@pytest.mark.parametrize("rounds_inputs", [False, pytest.param(True, marks=needs_int8_inputs)])
def test_the_prompt_has_a_place_in_the_window_and_leaves_it_first(
    rounds_inputs: bool, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it comes, and with whole searches or steps."""
    monkeypatch.setattr("coppice.draft_models.eagle.forward.WINDOW", 16)
    monkeypatch.setattr("coppice.draft_models.eagle.forward._STEP", 4)
    forward = CompiledEagle(case.weights, rounds_inputs=rounds_inputs)
    by_steps: Any = StepByStep(forward)
    one, other = (case.drafter(way).open(PROMPT, NOISY) for way in (forward, by_steps))
    plain, text = case.drafter().open(PROMPT, NOISY), Text(case.weights.feature_size)
    features = text.prompt(1, 8)
    for turn in range(8):
        tokens = text.rng.integers(0, VOCAB, 3).tolist()
        committed = text.more(tokens)
        for number, sequence in enumerate((one, other, plain)):
            if turn == number:
                sequence.see_prompt(1, features)
            sequence.extend(tokens, committed)
        drafts = [sequence.draft(20) for sequence in (one, other, plain)]
        if turn > 1:
            assert (drafts[0].token_ids, drafts[0].parents) == (drafts[1].token_ids, drafts[1].parents)
            assert drafts[0].log_probs == pytest.approx(drafts[1].log_probs, abs=1e-4)
            assert_same(drafts[2], expected_draft(case, text, NOISY, window=plain.num_cached))
    assert 12 < one.num_cached == other.num_cached <= 16 < text.num_generated


@pytest.mark.parametrize("garbage", ["none", "of another width", "too many", "NaN", "again", "token 0", "far away"])
def test_damaged_rows_of_the_prompt_are_ignored(garbage: str, case: Case) -> None:
    text = Text(case.weights.feature_size)
    sequence = case.drafter().open(PROMPT, NOISY)
    sequence.see_prompt(1, text.prompt(1, 3))
    bad = np.full((2, text.size), np.nan if garbage == "NaN" else 1.0, np.float32)
    features = {"none": b"", "of another width": encoded(bad)[:-2], "too many": 9 * encoded(bad)}
    first = {"again": 1, "token 0": 0, "far away": 2**32 - 1}.get(garbage, 3)
    sequence.see_prompt(first, features.get(garbage, encoded(bad)))
    sequence.extend([11], text.more([11]))
    assert_same(sequence.draft(20), expected_draft(case, text, NOISY))


def test_of_a_prompt_of_any_length_a_bounded_number_of_rows_is_kept(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle_sequence, "MOST_PROMPT_FEATURES", 4)
    size = 2 * case.weights.feature_size
    sequence = case.drafter().open(PROMPT, NOISY)
    # Not among the last four.
    sequence.see_prompt(3, bytes(size))
    sequence.see_prompt(4, bytes(2 * size))
    sequence.see_prompt(4, bytes(4 * size))
    sequence.see_prompt(6, bytes(2 * size))
    assert sequence.read(9) == 0
    assert sequence.num_cached == 4
    sequence.extend([11], bytes(size))
    assert len(sequence.draft(20)) > 0


def test_a_head_that_was_trained_without_prompts_asks_for_none(eagle_target: Path, tmp_path: Path) -> None:
    found = []
    for name, calibration in (("with", {"sigmas": SIGMAS}), ("without", {"reads_prompt": False}), ("foreign", {})):
        settings = eagle_settings(eagle_target, 24)
        write_eagle(tmp_path / name, settings, eagle_tensors(settings), **calibration)
        config = DrafterConfig(
            model=str(tmp_path / name), drafter_kind="eagle", device="cpu", target_model=str(eagle_target)
        )
        found.append(eagle_drafter.load(config).info.max_prompt_features)
    assert found == [512, 0, 512]


def test_many_outcomes_without_a_draft_are_read_in_pieces(case: Case) -> None:
    sequence, text = case.drafter().open(PROMPT, GREEDY), Text(case.weights.feature_size)
    tokens = text.rng.integers(0, VOCAB, 150).tolist()
    sequence.extend(tokens[:100], text.more(tokens[:100]))
    sequence.extend(tokens[100:], text.more(tokens[100:]))
    sequence.see_prompt(1, text.prompt(1, 8))
    assert sequence.read(1) == 2
    assert sequence.read(1) == 1
    assert (sequence.num_cached, sequence.read(5)) == (71, 0)
    assert_same(sequence.draft(20), expected_draft(case, text, GREEDY))


def test_a_dropped_cache_costs_what_was_seen_and_no_more(case: Case) -> None:
    sequence, text = case.drafter().open(PROMPT, NOISY), Text(case.weights.feature_size)
    budget = CacheBudget(max_tokens=4)
    sequence.extend([1, 2, 3, 4, 5], text.more([1, 2, 3, 4, 5]))
    assert len(sequence.draft(20)) > 0
    budget.note(sequence)
    other = case.drafter().open(PROMPT, NOISY)
    budget.note(other)
    assert budget.num_forgotten == 1
    assert sequence.num_cached == 0
    assert sequence.draft(20) == EMPTY_TREE
    sequence.extend([6, 7], text.more([6, 7]))
    assert_same(sequence.draft(20), expected_draft(case, text, NOISY, window=2))


def told(case: Case, *rounds: tuple[list[int], bytes]) -> EagleSequence:
    sequence = case.drafter().open(PROMPT, NOISY)
    for tokens, features in rounds:
        sequence.extend(tokens, features)
    return sequence


@pytest.mark.parametrize("garbage", ["none", "of another width", "too many", "NaN", "infinite", "huge"])
def test_without_the_last_token_s_features_there_is_no_draft_and_later_ones_go_on(garbage: str, case: Case) -> None:
    size = case.weights.feature_size
    text = Text(size)
    first = text.more([11, 12])
    bad = np.ones((2, size), np.float32)
    bad[1, 5] = {"NaN": np.nan, "infinite": -np.inf, "huge": 3e38}.get(garbage, 1.0)
    features = encoded(bad)
    features = {"none": b"", "of another width": features[:-2], "too many": features + features}.get(garbage, features)
    sequence = told(case, ([11, 12], first), ([13, 14], features))
    assert sequence.draft(20) == EMPTY_TREE
    if garbage in ("NaN", "infinite", "huge"):
        # The other token's are sound.
        text.token_ids.append(13)
        text.positions.append(len(PROMPT) - 1 + 2)
        text.features = np.concatenate([text.features, bad[:1]])
    text.num_generated += 2
    sequence.extend([15], text.more([15]))
    assert_same(sequence.draft(20), expected_draft(case, text, NOISY))


def test_features_belong_to_the_last_tokens(case: Case) -> None:
    text = Text(case.weights.feature_size)
    text.num_generated = 2
    sequence = told(case, ([11, 12, 13], text.more([13])))
    assert_same(sequence.draft(20), expected_draft(case, text, NOISY))


def test_noise_of_picked_tokens_is_that_of_the_whole_vocabulary() -> None:
    ids = np.array([0, 3, 5, 6, 7, 60])
    rows = eagle_sequence._picked_noise(replace(NOISY, temperature=0.7), ids)
    expected = 0.7 * gumbel(NOISY.seed, 2**33 + 5, 3, VOCAB)[:, ids]
    np.testing.assert_allclose(rows.at(2**33 + 5, 3), expected, rtol=1e-6, atol=1e-6)


def test_a_checkpoint_with_tables_of_its_own_needs_no_target(eagle_target: Path, tmp_path: Path) -> None:
    """As `speculators` writes them: drafts have the draft vocabulary alone."""
    settings = eagle_settings(eagle_target, 24, target_hidden_size=20)
    tensors = eagle_tensors(settings, with_tables=True)
    write_eagle(tmp_path, settings, tensors)
    weights = load_eagle(str(tmp_path), None)
    assert (weights.feature_size, weights.feature_layers, weights.target_output) == (60, (2, 4, 5), None)
    ids = weights.draft_ids.tolist()
    oracle = EagleOracle(settings, tensors, tensors["embed_tokens.weight"], tensors["lm_head.weight"], ids)
    forward = TorchEagle(weights, torch.device("cpu"))
    sizes = HeadSizes(weights.vocab_size, weights.feature_size)
    sequence = LoadedHead(forward, sizes, weights.calibration, LIMITS).open(PROMPT, GREEDY)
    text = Text(60)
    sequence.extend([60, 0], text.more([60, 0]))
    found = sequence.draft(1)
    logits = oracle.logits(text.token_ids, torch.from_numpy(text.features), text.positions, [])
    assert found.token_ids == (ids[int(logits.argmax())],)
    expected = logits.max() - np.logaddexp.reduce(logits)
    assert found.log_probs == pytest.approx([expected], abs=1e-3)
    assert load_file(tmp_path / "model.safetensors").keys() == tensors.keys()
