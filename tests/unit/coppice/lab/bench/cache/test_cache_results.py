"""Rows and ratios of samples that were made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coppice.completion import SourceCounts, Speculation, Usage
from coppice.lab.bench.cache import Sample, broken_rules, cache_ratios, cache_remarks, cache_rows
from coppice.lab.bench.client import Answer, Delta, Fate
from coppice.lab.bench.harness.experiment import Ratios, Samples
from coppice.lab.bench.harness.report import unequal
from orchestrator.prefix_cache.store import CacheCounts
from tests.unit.coppice.lab.bench import made_up

TOKENS = tuple(range(12))


def answer(prompt: int, rounds: int, ttft_s: float = 0.1, tokens: tuple[int, ...] = TOKENS) -> Answer:
    """Twelve tokens in so many rounds and a second, half of whose prompt was computed before."""
    counts = Speculation(rounds=rounds, sources={"cache": SourceCounts(9, 4), "small-lm": SourceCounts(7, 7)})
    usage = Usage(prompt_tokens=100, completion_tokens=len(tokens), cached_prompt_tokens=50)
    return made_up.answer(
        [(ttft_s, len(tokens))], tokens=tokens, ended_s=1.0, prompt=prompt, speculation=counts, usage=usage
    )


def rounds_of(one: Answer, *tokens: int) -> Answer:
    return replace(one, deltas=tuple(Delta(0.1 + number, count) for number, count in enumerate(tokens)))


def failed(prompt: int, tokens: tuple[int, ...]) -> Answer:
    deltas = [(0.1, len(tokens))] if tokens else []
    return made_up.answer(deltas, Fate.FAILED, tokens=tokens, ended_s=0.5, prompt=prompt)


def samples(*phases: tuple[str, int, list[Answer]], setting: str = "cache", heat: float = 0.0) -> list[Sample]:
    """Those of (phase, run, answers)."""
    counts = CacheCounts(reads=3, hits=2, misses=1)
    return [Sample(setting, heat, run, phase, tuple(answers), counts) for phase, run, answers in phases]


def off(heat: float = 0.0) -> Sample:
    return Sample("off", heat, 0, "off", tuple(answer(prompt, 12) for prompt in range(3)), CacheCounts())


def test_a_row_has_medians_of_runs_and_sums_of_counts() -> None:
    taken = samples(
        ("cold", 0, [answer(0, 6, 0.1), answer(1, 6, 0.2)]),
        ("cold", 1, [answer(0, 4, 0.3), answer(1, 4, 0.4)]),
        ("cold", 2, [answer(0, 2, 0.5), answer(1, 1, 0.6)]),
    )
    plain, row = cache_rows(Samples([off(), *taken]))
    assert (plain["name"], plain["mean_acceptance_length"], plain["identical"]) == ("off T=0", 1.0, True)
    assert (row["name"], row["setting"], row["phase"]) == ("cache T=0 cold", "cache", "cold")
    assert [row[f"mean_acceptance_length{end}"] for end in ("", "_min", "_max")] == [3.0, 2.0, 8.0]
    assert (row["ttft_ms_p50"], row["ttft_ms_p99"]) == (350.0, pytest.approx(595.0))
    assert row["tokens_per_s"] == 12.0
    assert (row["cache_proposed"], row["cache_accepted"]) == (54, 24)
    assert (row["cache_reads"], row["cache_hits"], row["cache_misses"], row["cache_errors"]) == (9, 6, 3, 0)
    assert row["cached_prompt_share"] == 0.5
    assert (row["num_requests"], row["num_failed"], row["identical"]) == (6, 0, True)


def test_ratios_are_within_runs_over_the_same_prompts_when_cold_and_the_worst_leads() -> None:
    cold = [answer(0, 4, 0.2), answer(1, 12, 0.4), answer(2, 12, 9.0)]
    taken = samples(
        ("cold", 0, cold),
        ("again", 0, [answer(0, 2, 0.1)]),
        ("shifted", 0, [answer(1, 6, 0.1)]),
        ("second", 0, [answer(0, 4, 0.2), answer(1, 4, 0.1)]),
        ("cold", 1, cold),
        ("again", 1, [answer(0, 1, 0.3)]),
        ("shifted", 1, [answer(1, 24, 0.2)]),
        ("second", 1, [answer(0, 4, 0.2), answer(1, 4, 0.1)]),
    )
    hot = samples(("cold", 0, cold), ("again", 0, [answer(0, 5, 0.1)]), heat=1.0)
    found = cache_ratios(Samples([off(), off(1.0), *taken, *hot]))
    values, spread = found.values, found.spread
    assert (values["again/cold.tau-with-first.cache.T0"], spread["again/cold.tau-with-first.cache.T0"]) == (
        3.0,
        [2.0, 4.0],
    )
    assert (values["shifted/cold.tau-with-first.cache.T0"], spread["shifted/cold.tau-with-first.cache.T0"]) == (
        1.25,
        [0.5, 2.0],
    )
    assert values["again/cold.tau-with-first.cache.T1"] == 0.8
    # Of both warm phases at both temperatures.
    assert (values["warm/cold.tau-with-first"], spread["warm/cold.tau-with-first"]) == (0.8, [0.8, 0.8])
    assert values["warm-second/cold.tau-with-first"] == 2.0
    assert values["again/cold.ttft.cache.T0"] == 1.0
    assert values["shifted/cold.ttft.cache.T0"] == 0.375
    assert (values["warm/cold.ttft"], spread["warm/cold.ttft"]) == (1.0, [0.5, 1.5])
    assert values["warm-second/cold.ttft"] == 0.5
    assert "killed/cold.tau-with-first" not in values
    assert values["failed-requests"] == 0


def test_the_first_round_of_a_cold_prompt_had_a_draft_only_since_it_took_so_long() -> None:
    """Both have 3 tokens a round later on; the cold one had 3 in its first round, too, and the warm one had 1."""
    cold = rounds_of(answer(0, 4), 3, 3, 3, 3)
    warm = rounds_of(answer(0, 5, tokens=tuple(range(13))), 1, 3, 3, 3, 3)
    worse = rounds_of(answer(1, 6), 2, 2, 2, 2, 2, 2)
    taken = samples(
        ("cold", 0, [cold, replace(cold, task=answer(1, 4).task)]), ("again", 0, [warm]), ("shifted", 0, [worse])
    )
    given = Samples([off(), *taken])
    found = cache_ratios(given)
    values = found.values
    assert values["again/cold.tau.cache.T0"] == 1.0
    assert values["again/cold.tau-with-first.cache.T0"] == round(2.6 / 3, 4)
    assert [row["later_acceptance_length"] for row in cache_rows(given)[1:]] == [3.0, 3.0, 2.0]
    assert broken_rules(found) == [
        "shifted/cold.tau.cache.T0: τ is 33.3% below that of a cold cache (0.667 to 0.667 x it over the runs), more "
        "than the 2% that it may be."
    ]


def test_two_percent_below_is_within_the_rule() -> None:
    name = "again/cold.tau.cache.T0"
    assert broken_rules(Ratios({name: 0.98}, {name: [0.9, 1.0]})) == []
    assert len(broken_rules(Ratios({name: 0.979}, {name: [0.9, 1.0]}))) == 1
    # Nobody has anything to find there.
    assert broken_rules(Ratios({"fill/cold.tau.cache.T0": 0.5, "killed/cold.tau.cache.T0": 0.5}, {})) == []
    # The leading figure repeats one of those that have a setting, and times have no such rule.
    assert broken_rules(Ratios({"warm/cold.tau": 0.5, "again/cold.ttft.cache.T0": 0.5}, {})) == []


def test_failed_requests_are_counted_by_run_and_compared_as_far_as_they_came() -> None:
    wrong = answer(1, 3, tokens=(*TOKENS[:-1], 99))
    taken = samples(
        ("cold", 0, [answer(0, 6), answer(1, 1), answer(2, 1)]),
        ("killed", 0, [answer(0, 3), failed(1, TOKENS[:4]), failed(2, ())]),
        ("killed", 1, [wrong, failed(0, (99,)), replace(answer(2, 3), token_ids=TOKENS[:4])]),
    )
    given = Samples([off(), *taken])
    found = cache_ratios(given)
    values, spread = found.values, found.spread
    assert (values["failed-requests"], spread["failed-requests"]) == (3, [1, 2])
    # Of the one prompt that was completed both times.
    assert values["killed/cold.tau-with-first"] == 2.0
    result = cache_rows(given)
    assert (result[2]["num_failed"], result[1]["num_identical"]) == (3, 3)
    assert unequal(result) == ["cache T=0 killed: 3 of 6 outputs differ"]
    assert cache_remarks(result, with_redis=True) == ["cache T=0 killed: 3 requests failed."]
    assert cache_remarks([], with_redis=False) == [
        "No redis-server is installed: the phases through Redis are left out."
    ]
