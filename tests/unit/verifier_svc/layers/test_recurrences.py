"""Recurrences over token trees against their definition, row by row along each path; and their bits in any company."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from coppice.core.errors import IncompatibleError
from tests.unit.verifier_svc.layers.forests import path_to, random_segments, segment
from verifier_svc.engine.state_slots import StateMoves
from verifier_svc.layers import linear_recurrence
from verifier_svc.layers.causal_convolution import CausalConvolution
from verifier_svc.layers.linear_recurrence import LinearRecurrence
from verifier_svc.layers.recurrence import RecurrentStates, RowForest

# The first test compiles.
pytestmark = pytest.mark.timeout(400)

HEADS, GROUPS, KEYS, VALUES = 4, 2, 8, 16
CHANNELS, WIDTH = 12, 4
SIZES = [(5, 7), (1, 9), (3, 0), (2, 12)]


class Inputs:
    """Random inputs of rows, a function of the row's token alone: decays for `num_decays` parts of a head's keys."""

    def __init__(self, num_rows: int, num_decays: int = 1, num_steps: int = 1, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(num_rows, *shape, generator=generator)  # noqa: E731
        self.queries, self.keys, self.values = draw(GROUPS, KEYS), draw(GROUPS, KEYS), draw(HEADS, VALUES)
        self.keys = torch.nn.functional.normalize(self.keys, dim=-1)
        self.decays, self.steps = draw(HEADS, num_decays).sigmoid(), draw(HEADS, num_steps).sigmoid()
        self.channels = draw(CHANNELS)

    def matrix(self, rows: Any) -> tuple[Tensor, ...]:
        """Inputs of some rows for a recurrence with a matrix as state."""
        parts = (self.queries, self.keys, self.values, self.decays, self.steps)
        return tuple(part[rows] for part in parts)


def plan_of(segments: list[Any]) -> Any:
    """A pass of these segments, as far as recurrences look at it."""
    return SimpleNamespace(segments=segments)


class Runner:
    """A recurrence over passes of rows, whose inputs are those of tokens."""

    def __init__(
        self, kind: str, inputs: Inputs, new_recurrence: Callable[..., Any] = LinearRecurrence, device: str = "cpu"
    ) -> None:
        self.inputs = inputs
        self.device = torch.device(device)
        self.recurrence: Any
        if "convolution" in kind:
            generator = torch.Generator().manual_seed(5)
            shapes = (CHANNELS, 1, WIDTH), (CHANNELS,)
            weight, bias = (torch.randn(*shape, generator=generator).to(self.device) for shape in shapes)
            self.recurrence = CausalConvolution(weight, bias)
            self.recurrence._is_compiled = kind == "convolution"
        else:
            generator = torch.Generator().manual_seed(6)
            rates = torch.rand(HEADS, KEYS, VALUES, generator=generator) if kind == "mamba-1" else None
            on_device = None if rates is None else rates.to(self.device)
            self.recurrence = new_recurrence(HEADS, KEYS, VALUES, corrects="delta" in kind, rates=on_device)
            self.rates = None if rates is None else rates.double().numpy()
        self.is_convolution = "convolution" in kind
        self.states = RecurrentStates([self])  # type: ignore[list-item]
        self.states.allocate(12)

    @property
    def recurrences(self) -> tuple[Any, ...]:
        return (self.recurrence,)

    def run(self, segments: list[Any], tokens: list[int], moves: StateMoves | None = None) -> Tensor:
        """Outputs of a pass whose rows have these tokens [rows, size]."""
        self.states.begin(plan_of(segments), moves or StateMoves({}, ()))
        return self.call(tokens)

    def call(self, tokens: list[int]) -> Tensor:
        """Outputs of the rows of a pass that has begun [rows, size]."""
        parts = (self.inputs.channels[tokens],) if self.is_convolution else self.inputs.matrix(tokens)
        output: Tensor = self.recurrence(*(part.to(self.device) for part in parts)).cpu()
        return output

    def by_definition(self, path: list[int]) -> np.ndarray[Any, Any]:
        """Output of the last row of a path of tokens, in double precision."""
        if self.is_convolution:
            weights, biases = (
                part.cpu().double().numpy() for part in (self.recurrence._weights, self.recurrence._biases)
            )
            rows = np.vstack([np.zeros((WIDTH, CHANNELS)), self.inputs.channels[path].double().numpy()])
            return (rows[-WIDTH:] * weights).sum(0) + biases
        states = np.zeros((HEADS, KEYS, VALUES))
        output = np.empty((HEADS, VALUES))
        for token in path:
            query, key, value, decay, step = (part.double().numpy() for part in self.inputs.matrix(token))
            for head in range(HEADS):
                group = head * GROUPS // HEADS
                # [keys or 1, values or 1].
                decays = decay[head][:, None] if self.rates is None else np.exp(-self.rates[head] * step[head])
                state = decays * states[head]
                old = key[group] @ state if self.recurrence._corrects else 0
                states[head] = state + np.outer(key[group], step[head] * (value[head] - old))
                output[head] = query[group] @ states[head]
        return output


NewRunner = Callable[[], Runner]


@pytest.fixture(params=["convolution", "convolution in tensors", "delta", "delta by key", "mamba-1", "mamba-2"])
def new_runner(request: pytest.FixtureRequest) -> NewRunner:
    """Makes a recurrence without states."""
    num_decays = KEYS if request.param == "delta by key" else 1
    num_steps = VALUES if request.param == "mamba-1" else 1
    return lambda: Runner(request.param, Inputs(200, num_decays, num_steps))


def test_a_row_s_output_is_that_of_its_path(new_runner: NewRunner) -> None:
    segments = random_segments(np.random.default_rng(1), SIZES)
    forest, runner = RowForest(segments), new_runner()
    # Rows of padding after those of the segments.
    output = runner.run(segments, list(range(forest.num_rows + 3)))
    for row in range(forest.num_rows):
        assert np.allclose(output[row], runner.by_definition(path_to(forest, row)), atol=1e-4)
    assert not output[forest.num_rows :].any()


def test_a_row_s_bits_are_those_of_its_path_token_by_token(new_runner: NewRunner) -> None:
    segments = random_segments(np.random.default_rng(2), SIZES)
    forest = RowForest(segments)
    output = new_runner().run(segments, list(range(forest.num_rows)))
    for row in range(forest.num_rows):
        path, alone = path_to(forest, row), new_runner()
        moves = StateMoves({}, ())
        for length, token in enumerate(path):
            last = alone.run([segment(0, 1, state=3, num_context=length)], [token], moves)
            moves = StateMoves({3: (0,)}, ())
        assert torch.equal(last[0], output[row])


def test_a_state_after_accepted_nodes_is_that_of_their_path(new_runner: NewRunner) -> None:
    segments = random_segments(np.random.default_rng(3), SIZES, first_state=2)
    forest, runner = RowForest(segments), new_runner()
    runner.run(segments, list(range(forest.num_rows)))
    # Of every segment the last row's path is accepted; the second is not in the next pass, the third is gone.
    paths = [path_to(forest, int(stop) - 1) for stop in forest.starts[1:]]
    commits = {
        part.state: tuple(row - part.start for row in path)
        for place, (part, path) in enumerate(zip(segments, paths, strict=True))
        if place != 2
    }
    following = [segment(0, 2, [-1], state=2, num_context=9), segment(3, 1, state=5, num_context=9)]
    output = runner.run(following, [190, 191, 192, 193], StateMoves(commits, ()))
    assert np.allclose(output[2], runner.by_definition([*paths[0], 190, 191, 192]), atol=1e-4)
    assert np.allclose(output[3], runner.by_definition([*paths[3], 193]), atol=1e-4)
    moves = StateMoves({2: (0, 1), 5: (0,)}, ())
    late = runner.run([segment(0, 1, state=3, num_context=9)], [194], moves)
    assert np.allclose(late[0], runner.by_definition([*paths[1], 194]), atol=1e-4)


def test_the_bits_after_accepted_nodes_are_those_of_their_path_token_by_token(new_runner: NewRunner) -> None:
    segments = random_segments(np.random.default_rng(4), SIZES)
    forest, runner = RowForest(segments), new_runner()
    runner.run(segments, list(range(forest.num_rows)))
    path = path_to(forest, int(forest.starts[2]) - 1)
    assert len(path) > segments[1].num_pending + 1
    accepted = tuple(row - segments[1].start for row in path)
    following = runner.run([segment(0, 1, state=1, num_context=9)], [195], StateMoves({1: accepted}, ()))
    alone, moves = new_runner(), StateMoves({}, ())
    for length, token in enumerate([*path, 195]):
        last = alone.run([segment(0, 1, state=3, num_context=length)], [token], moves)
        moves = StateMoves({3: (0,)}, ())
    assert torch.equal(following, last)


def test_a_pass_that_is_repeated_gives_the_same_bits(new_runner: NewRunner) -> None:
    runner = new_runner()
    runner.run([segment(0, 3, [-1, 0], state=1)], [0, 1, 2, 3, 4])
    following = [segment(0, 2, [-1, -1], state=1, num_context=4)]
    first = runner.run(following, [5, 6, 7, 8], StateMoves({1: (0, 1, 2, 3)}, ()))
    assert torch.equal(runner.run(following, [5, 6, 7, 8]), first)


def test_the_state_at_a_border_is_kept_and_copied(new_runner: NewRunner) -> None:
    runner = new_runner()
    runner.run([segment(0, 5, state=1, borders=((2, 9),))], [0, 1, 2, 3, 4])
    output = runner.run([segment(0, 1, state=4, num_context=3)], [7], StateMoves({}, ((9, 4),)))
    assert np.allclose(output[0], runner.by_definition([0, 1, 2, 7]), atol=1e-4)


def test_rows_of_another_pass_are_not_kept(new_runner: NewRunner) -> None:
    runner = new_runner()
    runner.run([segment(0, 2, state=1)], [0, 1])
    for commits in ({2: (0, 1)}, {1: (0,)}):
        with pytest.raises(RuntimeError, match="not those of the last pass"):
            runner.run([segment(0, 1, state=1)], [2], StateMoves(commits, ()))


def test_after_a_pruned_pass_states_advance_over_the_rows_that_remained(new_runner: NewRunner) -> None:
    """In a layer before the head, which computed all rows, and in one after it."""
    whole, before, after = new_runner(), new_runner(), new_runner()
    both = RecurrentStates([before, after])  # type: ignore[list-item]
    both.allocate(12)
    segments = [segment(0, 2, [-1, -1, 0, 1, 2], state=2), segment(7, 1, [-1, 0], state=3)]
    # Without the first one's nodes 1 and 3.
    remaining = [
        replace(segment(0, 2, [-1, 0, 1], state=2), places=np.array([0, 1, 2, 4, 6])),
        segment(5, 1, [-1, 0], state=3),
    ]
    rows = [0, 1, 2, 4, 6, 7, 8, 9]
    output = whole.run(segments, list(range(10)))
    both.begin(plan_of(segments), StateMoves({}, ()))
    assert torch.equal(before.call(list(range(10))), output)
    both.narrow(plan_of(remaining))
    assert torch.equal(after.call(rows), output[rows])
    following = [segment(0, 1, state=2, num_context=5), segment(1, 1, state=3, num_context=3)]
    commits = {2: (0, 1, 2, 4, 6), 3: (0, 1, 2)}
    expected = whole.run(following, [20, 21], StateMoves(commits, ()))
    both.begin(plan_of(following), StateMoves(commits, ()))
    for runner in (before, after):
        assert torch.equal(runner.call([20, 21]), expected)


def test_pruned_rows_are_not_kept(new_runner: NewRunner) -> None:
    runner = new_runner()
    runner.states.begin(plan_of([segment(0, 1, [-1, -1], state=2)]), StateMoves({}, ()))
    runner.states.narrow(plan_of([replace(segment(0, 1, [-1], state=2), places=np.array([0, 2]))]))
    runner.call([0, 2])
    with pytest.raises(RuntimeError, match="were pruned"):
        runner.run([segment(0, 1, state=2)], [3], StateMoves({2: (0, 1)}, ()))


@pytest.mark.parametrize("corrects", [True, False], ids=["delta", "mamba-2"])
def test_several_threads_give_the_same_bits(corrects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_recurrence, "_WORTH_THREADS", 1)
    segments = random_segments(np.random.default_rng(6), SIZES)
    num_rows, inputs = RowForest(segments).num_rows, Inputs(200)
    results = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        runner = Runner("delta" if corrects else "mamba-2", inputs)
        runner.run(segments, list(range(num_rows)))
        commits = {part.state: (*range(part.num_pending), part.stop - part.start - 1) for part in segments[:2]}
        following = [segment(0, 3, state=0, num_context=9), segment(3, 2, [-1], state=1, num_context=9)]
        results.append(runner.run(following, list(range(100, 106)), StateMoves(commits, ())))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_delta_rule_is_that_of_transformers() -> None:
    inputs, size = Inputs(40), KEYS**-0.5
    runner = Runner("delta", inputs)
    output = runner.run([segment(0, 40)], list(range(40)))
    expected, _ = torch_recurrent_gated_delta_rule(
        inputs.queries[None],
        inputs.keys[None],
        inputs.values[None],
        g=inputs.decays[..., 0].log()[None],
        beta=inputs.steps[None, ..., 0],
    )
    assert torch.allclose(output * size, expected[0], atol=1e-5)


def test_the_delta_rule_with_a_decay_for_each_key_is_that_of_transformers() -> None:
    inputs, size = Inputs(40, KEYS), KEYS**-0.5
    output = Runner("delta by key", inputs).run([segment(0, 40)], list(range(40)))
    queries, keys = (part.repeat_interleave(HEADS // GROUPS, 1)[None] for part in (inputs.queries, inputs.keys))
    # The function itself, and not what stands in front of it and looks for kernels.
    expected, _ = inspect.unwrap(recurrent_kimi_delta_attention)(
        queries,
        keys,
        inputs.values[None],
        g=inputs.decays.log()[None],
        beta=inputs.steps[None, ..., 0],
        initial_state=None,
        output_final_state=False,
    )
    assert torch.allclose(output * size, expected[0], atol=1e-5)


def test_without_triton_a_gpu_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifier_svc.layers.triton_recurrence", None)
    with pytest.raises(IncompatibleError, match="need Triton on a GPU, or DEVICE=cpu"):
        linear_recurrence.linear_recurrence(torch.device("cuda"), HEADS, KEYS, VALUES, corrects=True)
