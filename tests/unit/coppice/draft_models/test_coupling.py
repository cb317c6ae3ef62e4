"""Children from logits: what the target would draw is among them, and probabilities are those of the formula."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.core.noise import gumbel
from coppice.core.sampling import SamplingParams
from coppice.draft_models.coupling import ChildChoice, Coupling, FloatArray, NoiseRows, filled_by
from coppice.kernels.cpu.top_scores import top_scores

VOCAB = 300


def random_logits(seed: int, rows: int = 1) -> FloatArray:
    return np.random.default_rng(seed).normal(0, 3, (rows, VOCAB)).astype(np.float32)


def softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values.max())
    return weights / weights.sum()


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    positions=st.lists(st.integers(0, 5000), min_size=1, max_size=4),
    sigma=st.floats(0.2, 3),
)
def test_children_are_the_likeliest_of_log_q_plus_noise(
    seed: int, temperature: float, positions: list[int], sigma: float
) -> None:
    logits = random_logits(seed % 1000, len(positions))
    coupling = Coupling(SamplingParams(temperature=temperature, seed=seed), VOCAB, sigma, [1])
    rows = coupling.children(logits, positions, 5)
    for row, position, children in zip(logits, positions, rows, strict=True):
        log_q = np.log(softmax(row.astype(np.float64)))
        scores = log_q + temperature * gumbel(seed, position, 1, VOCAB)[0]
        assert children.token_ids[0] == scores.argmax()
        assert list(children.token_ids) == np.argsort(-scores)[:5].tolist()
        expected = np.log(softmax(scores / sigma))[list(children.token_ids)]
        assert list(children.log_probs) == pytest.approx(expected.tolist(), abs=1e-4)
        assert list(children.log_probs) == sorted(children.log_probs, reverse=True)


def test_noise_computed_ahead_is_the_same_noise() -> None:
    logits = random_logits(1, 12)
    sampling = SamplingParams(temperature=1.0, seed=99)
    prepared = Coupling(sampling, VOCAB, 1.0, [1])
    prepared.prepare(20, 16)
    prepared.prepare(23, 16)
    positions = list(range(23, 35))
    assert prepared.children(logits, positions, 4) == Coupling(sampling, VOCAB, 1.0, [1]).children(logits, positions, 4)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids="temperature {}".format)
def test_bad_and_not_allowed_tokens_are_never_children(temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, allowed_token_ids=(3, 5, 8), bad_token_ids=(5,))
    [children] = Coupling(sampling, VOCAB, 1.0, [1]).children(random_logits(2), [7], 6)
    assert set(children.token_ids) == {3, 8}


def test_a_row_in_which_nothing_is_allowed_has_no_children() -> None:
    sampling = SamplingParams(temperature=0.7, top_p=0.5, allowed_token_ids=(3,), bad_token_ids=(3,))
    [children] = Coupling(sampling, VOCAB, 1.0, [1]).children(random_logits(2), [7], 6)
    assert list(children.token_ids) == []


def test_a_logit_bias_lifts_a_token() -> None:
    [children] = Coupling(SamplingParams(logit_bias={17: 100.0}), VOCAB, 1.0, [1]).children(random_logits(3), [1], 2)
    assert children.token_ids[0] == 17


def test_top_k_keeps_the_k_likeliest() -> None:
    logits = random_logits(4)
    sampling = SamplingParams(temperature=1.5, top_k=7, seed=3)
    [children] = Coupling(sampling, VOCAB, 1.0, [1]).children(logits, [2], 50)
    assert set(children.token_ids) == set(np.argsort(-logits[0])[:7].tolist())


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9], ids="top_p {}".format)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float) -> None:
    logits = random_logits(5)
    sampling = SamplingParams(temperature=0.8, top_p=top_p)
    [children] = Coupling(sampling, VOCAB, 1.0, [1]).children(logits, [2], VOCAB)
    probabilities = softmax(logits[0].astype(np.float64) / 0.8)
    order = np.argsort(-probabilities)
    count = int((probabilities[order].cumsum() < top_p).sum()) + 1
    assert set(children.token_ids) == set(order[:count].tolist())


def test_a_temperature_next_to_nothing_leaves_the_likeliest_and_warns_of_nothing() -> None:
    logits = random_logits(5)
    [children] = Coupling(SamplingParams(temperature=1e-39, top_p=0.9), VOCAB, 1.0, [1]).children(logits, [2], VOCAB)
    assert list(children.token_ids) == [int(logits[0].argmax())]


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest() -> None:
    logits = random_logits(6)
    [children] = Coupling(SamplingParams(temperature=1.3, min_p=0.1), VOCAB, 1.0, [1]).children(logits, [2], VOCAB)
    probabilities = softmax(logits[0].astype(np.float64) / 1.3)
    assert set(children.token_ids) == set(np.flatnonzero(probabilities >= 0.1 * probabilities.max()).tolist())


def test_penalties_act_on_prompt_and_output_tokens() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, :4] = [8.0, 7.0, 6.0, 5.0]
    sampling = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5)
    coupling = Coupling(sampling, VOCAB, 1.0, [0])
    coupling.commit([1, 1])
    scores = coupling.scores(logits, [3])[0]
    # Divided by 2; divided by 2, less 1 for presence and 2 x 0.5 for frequency; untouched.
    assert scores[:4].tolist() == [4.0, 1.5, 6.0, 5.0]


@settings(deadline=None, max_examples=50)
@given(
    committed=st.lists(st.integers(0, 20), max_size=12),
    paths=st.lists(st.lists(st.integers(0, 20), max_size=6), min_size=1, max_size=4),
    sampling=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1.0]),
        top_k=st.sampled_from([0, 30]),
        repetition_penalty=st.sampled_from([0.5, 1.0, 1.7]),
        presence_penalty=st.sampled_from([-1.0, 0.0, 1.5]),
        frequency_penalty=st.sampled_from([-0.5, 0.0, 0.8]),
    ),
)
def test_penalties_of_drafted_tokens_are_those_that_they_have_once_they_are_committed(
    committed: list[int], paths: list[list[int]], sampling: SamplingParams
) -> None:
    logits = random_logits(len(committed), len(paths))
    coupling = Coupling(sampling, VOCAB, 1.0, [1, 2])
    coupling.commit(committed)
    together = coupling.children(logits, [40] * len(paths), 9, paths)
    for row, path, children in zip(logits, paths, together, strict=True):
        later = Coupling(sampling, VOCAB, 1.0, [1, 2])
        later.commit([*committed, *path])
        assert [children] == later.children(row[None], [40], 9)


def library_top_scores(
    scores: FloatArray, sigma: np.float32, limit: int
) -> tuple[npt.NDArray[np.int64], FloatArray, npt.NDArray[np.int64]]:
    """`top_scores` in numpy."""
    vocab_size = scores.shape[-1]
    # Sorted by token, so that ties keep that order.
    top = np.sort(np.argpartition(scores, vocab_size - limit, axis=-1)[:, vocab_size - limit :], axis=-1)
    values = np.take_along_axis(scores, top, -1)
    order = np.argsort(-values, axis=-1, kind="stable")
    values = np.take_along_axis(values, order, -1)
    tokens = np.take_along_axis(top, order, -1)
    peak = values[:, :1]
    # -inf minus -inf, in a row of -inf: no children.
    with np.errstate(invalid="ignore"):
        total = np.log(np.exp((scores - peak) / sigma).sum(-1, keepdims=True))
        log_probs: FloatArray = (values - peak) / sigma - total
    return tokens, log_probs, np.isfinite(log_probs).sum(-1)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32), limit=st.sampled_from([1, 2, 7, VOCAB]), excluded=st.sampled_from([0, VOCAB - 3]))
def test_compiled_and_library_code_find_the_same_children(seed: int, limit: int, excluded: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.normal(0, 5, (3, VOCAB)).astype(np.float32)
    scores[1, rng.choice(VOCAB, excluded, replace=False)] = -np.inf
    tokens, log_probs, counts = top_scores(scores, np.float32(0.7), limit)
    other_tokens, other_log_probs, other_counts = library_top_scores(scores, np.float32(0.7), limit)
    assert counts.tolist() == other_counts.tolist()
    for row, count in enumerate(counts):
        assert tokens[row, :count].tolist() == other_tokens[row, :count].tolist()
        assert np.allclose(log_probs[row, :count], other_log_probs[row, :count], atol=1e-4)


def test_a_score_that_is_no_number_is_no_child() -> None:
    scores = np.array([[1.0, np.nan, 3.0, 2.0]], np.float32)
    tokens, log_probs, counts = top_scores(scores, np.float32(1), 4)
    assert tokens[0, : counts[0]].tolist() == [2, 3, 0]
    assert np.isfinite(log_probs).all()


def test_without_coupling_children_are_the_drafter_s_likeliest_whatever_the_seed() -> None:
    logits = random_logits(8)
    for seed in (1, 2):
        sampling = SamplingParams(temperature=0.7, seed=seed)
        sigma = ChildChoice(is_coupled=False).sigma(0.7, calibrated=0.5)
        coupling = Coupling(sampling, VOCAB, sigma, [1], is_coupled=False)
        coupling.prepare(7, 4)
        [children] = coupling.children(logits, [7], 5)
        assert list(children.token_ids) == np.argsort(-logits[0])[:5].tolist()
        # What the target draws from, if it is as the drafter says.
        expected = np.log(softmax(logits[0].astype(np.float64) / 0.7))[list(children.token_ids)]
        assert list(children.log_probs) == pytest.approx(expected.tolist(), abs=1e-4)
        assert len(coupling.noise(7, 3)) == 0


def test_greedy_requests_have_no_noise_to_leave_out() -> None:
    assert ChildChoice(is_coupled=False).sigma(0.0, calibrated=0.5) == ChildChoice().sigma(0.0, 0.5) == 0.5


VOCAB_SIZE = 7
REQUESTS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), min_size=1, max_size=30)


@given(st.integers(0, 2**64 - 1), st.sampled_from([0.3, 1.0, 2.5]), REQUESTS)
def test_rows_are_those_of_their_positions(seed: int, temperature: float, requests: list[tuple[int, int]]) -> None:
    rows = NoiseRows(VOCAB_SIZE, filled_by(seed, temperature))
    for position, count in requests:
        expected = (gumbel(seed, position, count, VOCAB_SIZE) * temperature).astype(np.float32)
        assert np.array_equal(rows.at(position, count), expected)


def test_a_growing_text_computes_every_row_once_and_keeps_little(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []

    def counted(seed: int, first: int, count: int, vocab_size: int) -> npt.NDArray[np.float64]:
        computed.extend(range(first, first + count))
        return gumbel(seed, first, count, vocab_size)

    monkeypatch.setattr("coppice.draft_models.coupling.gumbel", counted)
    rows = NoiseRows(VOCAB_SIZE, filled_by(3, 1.0))
    position = 100
    for step in range(200):
        rows.at(position, 26)
        rows.at(position, 13)
        position += 1 + step % 9
    assert computed == list(range(100, computed[-1] + 1))
    assert len(rows._rows) == 52
