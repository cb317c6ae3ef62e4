"""The paired choice against rates that are known: what it settles on, and what its trials cost."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping

import pytest

from orchestrator.planner.paired_choice import (
    ALL,
    BLOCK_PASSES,
    LONGEST_SETTLING,
    OFF,
    SETTLED_PASSES,
    TRIAL_COST,
    Arm,
    PairedChoice,
)

PASS_S, ROUNDS = 0.01, 8


class Load:
    """Passes whose rates are those of their arms, with noise and drift."""

    def __init__(self, rates: Mapping[Arm, float], choice: PairedChoice, noise: float = 0.1, seed: int = 0) -> None:
        self.rates = dict(rates)
        self.choice = choice
        self.noise = noise
        self.drift = 1.0
        self.time_s: Counter[Arm] = Counter()
        self._random = random.Random(seed)

    def run(self, seconds: float) -> float:
        """Tokens per second of so long."""
        tokens = spent_s = 0.0
        while spent_s < seconds:
            arm = self.choice.current
            rate = self.drift * self.rates.get(arm, min(self.rates.values()))
            num_tokens = rate * PASS_S * math.exp(self._random.gauss(0, self.noise))
            self.choice.pass_over(num_tokens, ROUNDS, PASS_S, is_settled=True)
            self.time_s[arm] += PASS_S
            tokens += num_tokens
            spent_s += PASS_S
        return tokens / spent_s


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("off", "drafting"), [(100.0, 200.0), (100.0, 115.0), (100.0, 85.0), (100.0, 40.0)])
def test_the_better_of_two_is_used_and_trials_of_the_other_cost_little(off: float, drafting: float, seed: int) -> None:
    load = Load({OFF: off, ALL: drafting}, PairedChoice(), seed=seed)
    load.run(10.0)
    # Trials cost 1 % of the time, and the noise of a mean of 6,000 passes is 0.2 %.
    assert load.run(60.0) >= 0.97 * max(off, drafting)
    assert load.choice.best == (ALL if drafting > off else OFF)


def test_the_worse_an_arm_is_the_less_time_it_gets() -> None:
    shares = []
    for off in (98.0, 70.0, 20.0):
        load = Load({OFF: off, ALL: 100.0}, PairedChoice())
        load.run(200.0)
        shares.append(load.time_s[OFF] / load.time_s.total())
    assert shares[0] > shares[1] > shares[2] > 0


def test_trials_of_an_arm_that_is_surely_worse_cost_less_than_trials_may() -> None:
    load = Load({OFF: 100.0, ALL: 60.0}, PairedChoice(), noise=0.2)
    load.run(10.0)
    load.time_s.clear()
    load.run(200.0)
    lost = 0.4 * load.time_s[ALL] / load.time_s.total()
    assert 0 < lost <= TRIAL_COST / 4


def test_slow_drift_of_both_does_not_look_like_a_difference() -> None:
    load = Load({OFF: 100.0, ALL: 130.0}, PairedChoice(), noise=0.02)
    for _ in range(400):
        load.drift *= 0.99
        load.run(0.25)
    assert load.choice.best == ALL


def test_an_arm_that_becomes_the_better_one_is_taken() -> None:
    load = Load({OFF: 100.0, ALL: 50.0}, PairedChoice())
    load.run(20.0)
    assert load.choice.best == OFF
    load.rates[ALL] = 200.0
    load.run(60.0)
    assert load.choice.best == ALL


def test_of_equal_arms_the_one_without_drafters_is_taken() -> None:
    load = Load({OFF: 100.0, ALL: 100.0}, PairedChoice())
    load.run(100.0)
    assert load.time_s[OFF] > 0.5 * load.time_s.total()


RATES = {("a",): 120.0, ("b",): 90.0, ("c",): 60.0, ("a", "b"): 150.0, OFF: 100.0, ALL: 80.0}


@pytest.mark.parametrize("seed", range(3))
def test_the_best_set_of_several_drafters_is_found_from_one_alone(seed: int) -> None:
    load = Load(RATES, PairedChoice(("a", "b", "c")), seed=seed)
    load.run(60.0)
    assert load.choice.best == ("a", "b")
    assert load.run(60.0) >= 0.95 * 150.0


def test_a_set_whose_drafter_is_gone_gives_way() -> None:
    load = Load(RATES, PairedChoice(("a", "b", "c")))
    load.run(60.0)
    load.choice.offer(("b", "c"))
    assert load.choice.best == load.choice.current == ALL


def test_passes_before_a_switch_has_settled_do_not_count() -> None:
    choice = PairedChoice()
    while choice.current == ALL:
        choice.pass_over(10.0, ROUNDS, PASS_S, is_settled=True)
    for _ in range(10):
        # As slow as can be, but not of this arm.
        choice.pass_over(1.0, ROUNDS, PASS_S, is_settled=False)
    for _ in range(SETTLED_PASSES + BLOCK_PASSES):
        assert choice.current == OFF
        choice.pass_over(20.0, ROUNDS, PASS_S, is_settled=True)
    assert choice.blocks[OFF].rate == pytest.approx(20.0 / PASS_S)
    assert choice.best == OFF


def test_a_trial_that_does_not_settle_is_given_up_and_comes_back_later() -> None:
    load = Load({OFF: 100.0, ALL: 60.0}, PairedChoice(), noise=0.0)
    load.run(10.0)
    choice = load.choice
    lengths = []
    for _ in range(2):
        while choice.current == OFF:
            choice.pass_over(100.0 * PASS_S, ROUNDS, PASS_S, is_settled=True, num_unread=5000)
        length = 0
        while choice.current == ALL:
            choice.pass_over(0.01, ROUNDS, PASS_S, is_settled=False, num_unread=5000)
            length += 1
        lengths.append(length)
    assert choice.best == OFF
    # Each may lose more than the one before, which has cost that much.
    assert lengths[0] < LONGEST_SETTLING / 2
    assert lengths[1] > 2 * lengths[0]


def test_a_trial_waits_for_longer_the_more_drafters_have_to_read_before_it() -> None:
    waits = []
    for num_unread in (0, 2000, 20000):
        choice = PairedChoice()
        # Drafters have read a thousand tokens, which has lost 50 ms.
        choice.budget.add(1000, 0.05)
        load = Load({OFF: 100.0, ALL: 60.0}, choice, noise=0.0)
        load.run(2.0)
        assert choice.best == OFF
        passes = 0
        while choice.current == OFF:
            choice.pass_over(100.0 * PASS_S, ROUNDS, PASS_S, is_settled=True, num_unread=num_unread)
            passes += 1
        waits.append(passes * PASS_S)
        reading_s = choice.budget.reading_s(num_unread)
        assert waits[-1] - waits[0] == pytest.approx(reading_s / TRIAL_COST, abs=0.2)
    assert waits[0] < waits[1] < waits[2]


def test_a_drafter_that_hardly_loses_keeps_what_was_learned_of_it_and_costs_little_to_try_again() -> None:
    # A round of 17.4 ms with 1.9 tokens against one of 9.3 ms with one token, in answers of 48 tokens.
    load = Load({OFF: 1 / 0.0093, ALL: 1.8 / 0.0174}, PairedChoice(), noise=0.2)
    assert load.run(10.0) >= 0.97 / 0.0093
    assert load.run(60.0) >= 0.98 / 0.0093
    assert load.choice.best == OFF


def test_texts_that_change_are_seen_in_the_next_trial() -> None:
    load = Load({OFF: 100.0, ALL: 60.0}, PairedChoice(), noise=0.05)
    load.run(60.0)
    load.rates[ALL] = 200.0
    while load.choice.current == OFF:
        load.run(PASS_S)
    load.run(0.3)
    assert load.choice.best == ALL


def test_an_interrupted_trial_goes_on_when_it_has_settled_again() -> None:
    load = Load({OFF: 100.0, ALL: 90.0}, PairedChoice(), noise=0.0)
    choice = load.choice
    while choice.current == ALL:
        load.run(PASS_S)
    load.run((SETTLED_PASSES + BLOCK_PASSES - 1.5) * PASS_S)
    choice.hold()
    load.run((SETTLED_PASSES - 0.5) * PASS_S)
    assert choice.is_trial
    load.run(PASS_S / 2)
    assert not choice.is_trial
    assert choice.best == OFF


def test_idle_time_is_nobodys() -> None:
    choice = PairedChoice()
    for _ in range(100):
        assert not choice.pass_over(10.0, ROUNDS, None, is_settled=True)
    assert choice.blocks == {}


def test_another_load_begins_with_what_is_known_and_checks_it() -> None:
    known = Load({OFF: 100.0, ALL: 50.0}, PairedChoice())
    known.run(20.0)
    other = Load({OFF: 100.0, ALL: 200.0}, PairedChoice(known=known.choice))
    assert other.choice.best == OFF
    other.run(30.0)
    assert other.choice.best == ALL
