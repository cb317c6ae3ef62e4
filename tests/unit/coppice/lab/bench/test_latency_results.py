"""Rows, ratios and mismatches of made-up samples."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from coppice.lab.bench.contenders import OFF, ON, Completion
from coppice.lab.bench.harness.experiment import Ratios, Samples
from coppice.lab.bench.latency import Sample, find_divergences, latency_ratios, latency_rows, mismatches
from tests.unit.coppice.lab.bench.named_contender import NamedContender


def _sample(
    contender: str,
    wall_s: float,
    *,
    run: int = 0,
    prompt: int = 0,
    temperature: float = 0.0,
    tokens: tuple[int, ...] = (1, 2, 3, 4),
) -> Sample:
    completion = Completion(tokens, wall_s, ttft_s=0.1, num_rounds=2, forward_s=wall_s / 4)
    return Sample(contender, temperature, run, prompt, completion)


def test_a_ratio_is_the_median_of_the_runs_own_ratios() -> None:
    # The machine is twice as slow in run 1, for everybody: medians of speeds alone would see 2, 3 or 6 mixed up.
    walls = {OFF: [2.0, 4.0, 2.0], ON: [1.0, 2.0, 0.5]}
    samples = [_sample(name, wall_s, run=run) for name, times in walls.items() for run, wall_s in enumerate(times)]
    found = Ratios.of(latency_ratios(Samples(samples)))
    values, spread = found.values, found.spread
    assert values["on/off"] == 2.0
    assert spread["on/off"] == [2.0, 4.0]
    assert values["forward-share"] == values["forward-share-off"] == 0.25
    assert "on/transformers" not in values


def test_on_must_repeat_off_in_every_run() -> None:
    samples = Samples(
        [
            *(_sample(name, 1.0, run=run, temperature=1.0) for name in ("coppice-off", "coppice-on") for run in (0, 1)),
            _sample("coppice-off", 1.0, prompt=1, temperature=1.0),
            _sample("coppice-on", 1.0, prompt=1, temperature=1.0, tokens=(1, 2, 3, 5)),
        ]
    )
    [mismatch] = mismatches(samples)
    assert str(mismatch) == "coppice-on differs from coppice-off at T=1 on prompt 2 (run 1)"
    [off, on] = latency_rows(samples, [NamedContender("coppice-off"), NamedContender("coppice-on")])
    assert (off["identical"], off["identical_to"], off["num_identical"]) == (None, None, None)
    assert (on["identical"], on["identical_to"], on["num_identical"]) == (False, "coppice-off", 1)
    assert on["num_identical_to_transformers"] is None


def test_a_row_says_speed_spread_and_identity() -> None:
    samples = Samples(
        [
            *(_sample("transformers", 1.0, run=run) for run in range(3)),
            *(_sample("coppice-off", wall_s, run=run) for run, wall_s in enumerate((1.0, 2.0, 4.0))),
        ]
    )
    [_, row] = latency_rows(samples, [NamedContender("transformers"), NamedContender("coppice-off")])
    assert row["name"] == "coppice-off T=0"
    assert (row["tokens_per_s"], row["tokens_per_s_min"], row["tokens_per_s_max"]) == (2.0, 1.0, 4.0)
    assert row["mean_acceptance_length"] == 2.0
    assert (row["identical"], row["identical_to"], row["num_identical"]) == (True, "transformers", 1)
    assert row["num_identical_to_transformers"] == 1


@pytest.mark.parametrize(("gap", "near_tie"), [(1e-6, True), (0.5, False)])
def test_a_divergence_names_the_place_and_how_close_it_was(gap: float, near_tie: bool) -> None:
    samples = Samples([_sample("transformers", 1.0), _sample("coppice-off", 1.0, tokens=(1, 2, 9, 4))])
    asked: list[list[int]] = []

    def top_two(context: Sequence[int]) -> tuple[float, tuple[int, int]]:
        asked.append(list(context))
        return gap, (3, 9)

    [found] = find_divergences(samples, ["coppice-off"], [[50, 51]], top_two)
    assert asked == [[50, 51, 1, 2]]
    assert (found.position, found.token_id, found.transformers_token_id) == (2, 9, 3)
    assert found.record()["near_tie"] is near_tie
