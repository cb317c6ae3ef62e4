"""Ratios over peers, the best of those that speculate, and figures by kind of prompts."""

from __future__ import annotations

import pytest

from coppice.lab.bench.client import OFF, ON
from coppice.lab.bench.harness.experiment import Ratios, Samples
from coppice.lab.bench.peers.figures import WANTED, Measured, absences, kind_rows, peer_ratios
from coppice.lab.bench.peers.hard import KINDS as KINDS_OF_HARD
from coppice.lab.bench.peers.hard import hard_prompts
from coppice.lab.bench.peers.suite import engine_arms
from tests.unit.coppice.lab.bench.made_up import sample

LLAMA, LOOKUP, NGRAM = "llama.cpp-bf16", "transformers-lookup", "llama.cpp-bf16 ngram-simple"
# Seconds of each contender on a prompt of writing, one of coding, and one of HumanEval.
SECONDS = {OFF: (4, 4, 3), ON: (2, 2, 1), LLAMA: (6, 10, 1), LOOKUP: (5, 5, 1), NGRAM: (3, 9, 1)}
KINDS = ("writing", "coding", "humaneval")


def measured() -> Measured:
    alone = Samples(
        sample(name, times[prompt] * (1 + run), prompt=prompt, run=run)
        for name, times in SECONDS.items()
        for prompt in range(3)
        for run in range(2)
    )
    crowd = {1: {OFF: 4, ON: 2}, 16: {OFF: 4, ON: 5, "llama.cpp": 10}}
    at_once = Samples(sample(name, wall, size=size) for size, walls in crowd.items() for name, wall in walls.items())
    return Measured(alone, at_once, KINDS, (LOOKUP, NGRAM))


def test_ratios_are_of_spec_bench_and_humaneval_has_its_own() -> None:
    found = Ratios.of(peer_ratios(measured()))
    assert found.values == {
        "on/off": 2.0,
        "on/llama.cpp-bf16": 4.0,
        # Prompt lookup with 10 seconds of both, and not n-grams with 12, which are faster on HumanEval's.
        "on/best-speculative-peer": 2.5,
        "on/off@humaneval": 3.0,
        "on/llama.cpp@c16": 2.0,
        "planner/off.c1": 2.0,
        "planner/off.c16": 0.8,
        "planner/off.min": 0.8,
    }


def test_hard_prompts_have_the_ratio_of_the_worst_kind_and_are_in_no_other() -> None:
    kinds = ("writing", "base64", "long")
    seconds = {OFF: (4, 4, 9), ON: (2, 5, 10), LLAMA: (6, 1, 1)}
    alone = Samples(
        sample(name, times[prompt], prompt=prompt) for name, times in seconds.items() for prompt in range(3)
    )
    found = Ratios.of(peer_ratios(Measured(alone, Samples(), kinds))).values
    assert found == {
        **{"on/off": 2.0, "on/llama.cpp-bf16": 3.0},
        **{"hard/off.base64": 0.8, "hard/off.long": 0.9, "hard/off.min": 0.8},
    }


def test_hard_prompts_are_of_every_kind_and_the_same_for_a_seed() -> None:
    prompts = hard_prompts(3)
    assert prompts == hard_prompts(3)
    assert prompts != hard_prompts(4)
    assert tuple(dict.fromkeys(prompt.category for prompt in prompts)) == KINDS_OF_HARD
    assert len(prompts[-1].text) > 9000


def test_a_ratio_that_is_missing_says_why() -> None:
    given = set(WANTED) - {"on/off@T1", "on/llama.cpp-q8_0", "on/off@humaneval"}
    assert list(absences(given, {"llama.cpp-q8_0": "xllamacpp is not installed (make peers)"})) == [
        "on/off@T1 is missing: temperature 1 was not asked for (--temperature)",
        "on/llama.cpp-q8_0 is missing: llama.cpp-q8_0: xllamacpp is not installed (make peers)",
        "on/off@humaneval is missing: no prompts of HumanEval were given (--humaneval)",
    ]


def test_kinds_have_speeds_over_off_and_llama_cpp_and_all_has_intervals() -> None:
    rows = kind_rows(measured())
    assert len(rows) == (len(KINDS) + 1) * 4
    coding, every = rows[f"coding, {ON} T=0"], rows[f"all, {ON} T=0"]
    assert (coding["speed_over_off"], coding["speed_over_llama_cpp"], coding["num_prompts"]) == (2.0, 5.0, 1)
    assert (coding["speed_over_llama_cpp_min"], coding["speed_over_llama_cpp_max"]) == (None, None)
    assert (every["num_prompts"], every["speed_over_llama_cpp"], every["mean_acceptance_length"]) == (2, 4.0, 2.0)
    assert (every["speed_over_llama_cpp_min"], every["speed_over_llama_cpp_max"]) == (3.0, 5.0)
    assert rows[f"all, {LOOKUP} T=0"]["speed_over_off"] == pytest.approx(0.8)
    assert f"all, {NGRAM} T=0" not in rows


def test_arms_are_engines_in_each_type_of_matrices_plain_and_with_each_speculation() -> None:
    names = [arm.name for arm in engine_arms(["bf16", "q8_0"])]
    assert {"llama.cpp-bf16", "llama.cpp-q8_0", NGRAM, "llama.cpp-q8_0 draft-model"} <= set(names)
    assert names[-2:] == ["openvino-q8_0", "openvino-q8_0 prompt-lookup"]
    assert len(set(names)) == len(names)
