"""The Triton kernel of recurrences in the interpreter: what the compiled one is tested for, and that one beside it."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from tests.unit.verifier_svc.layers.forests import random_segments
from tests.unit.verifier_svc.layers.test_recurrences import (  # noqa: F401 tests of this module, too
    KEYS,
    VALUES,
    Inputs,
    NewRunner,
    Runner,
    test_a_pass_that_is_repeated_gives_the_same_bits,
    test_a_row_s_bits_are_those_of_its_path_token_by_token,
    test_a_row_s_output_is_that_of_its_path,
    test_a_state_after_accepted_nodes_is_that_of_their_path,
    test_after_a_pruned_pass_states_advance_over_the_rows_that_remained,
    test_the_bits_after_accepted_nodes_are_those_of_their_path_token_by_token,
    test_the_state_at_a_border_is_kept_and_copied,
)
from verifier_svc.engine.pass_plan import Segment
from verifier_svc.layers.linear_recurrence import LinearRecurrence
from verifier_svc.layers.recurrence import RowForest, StateCommit
from verifier_svc.layers.triton_recurrence import TritonRecurrence

CPU = torch.device("cpu")
KINDS = ["delta", "delta by key", "mamba-1", "mamba-2"]


@pytest.fixture(params=KINDS)
def new_runner(request: pytest.FixtureRequest) -> NewRunner:
    """Makes a recurrence without states."""
    num_decays = KEYS if request.param == "delta by key" else 1
    num_steps = VALUES if request.param == "mamba-1" else 1
    inputs = Inputs(200, num_decays, num_steps)
    return lambda: Runner(request.param, inputs, functools.partial(TritonRecurrence, CPU))


@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_what_the_compiled_kernel_does(kind: str) -> None:
    """With sizes that are no powers of two, and several parts of columns."""
    heads, groups, keys, values = 3, 1, 20, 72
    generator = torch.Generator().manual_seed(7)
    segments: list[Segment] = random_segments(np.random.default_rng(7), [(9, 0), (2, 32), (1, 6)], first_state=1)
    forest = RowForest(segments)
    num_rows = forest.num_rows + 2
    draw = lambda *shape: torch.randn(num_rows, *shape, generator=generator)  # noqa: E731
    normed = torch.nn.functional.normalize(draw(groups, keys), dim=-1)
    decays = draw(heads, keys if kind == "delta by key" else 1).sigmoid()
    strengths = draw(heads, values if kind == "mamba-1" else 1).sigmoid()
    inputs = draw(groups, keys), normed, draw(heads, values), decays, strengths
    rates = torch.rand(heads, keys, values, generator=generator) if kind == "mamba-1" else None
    results = []
    for new in (LinearRecurrence, functools.partial(TritonRecurrence, CPU)):
        recurrence = new(heads, keys, values, corrects="delta" in kind, rates=rates)
        recurrence.allocate(4)
        recurrence.begin(forest)
        output = recurrence(*inputs)
        # A node deep in the large tree, and a segment without accepted nodes.
        path = [int(forest.starts[2]) - 1]
        while path[-1] > forest.starts[1]:
            path.append(int(forest.parents[path[-1]]))
        assert len(path) > 4
        recurrence.commit([StateCommit(1, 2, tuple(path[::-1])), StateCommit(0, 1, tuple(range(9)))])
        results.append((output, torch.as_tensor(recurrence._states)))
    for compiled, in_triton in zip(*results, strict=True):
        assert compiled.abs().max() > 0.5
        assert torch.allclose(compiled, in_triton, atol=1e-5)
