"""What overload does to those who get in, in a modelled clock: bounds by time keep their times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.unit.orchestrator.crowded_server import CrowdedServer, Visit
from tests.unit.orchestrator.reading_server import ReadingServer

# Requests per second of about 54 tokens and 12 more for the prompt, where about 13 outputs run at once.
SATURATION_PER_S = 10.0
BOUNDS = {"max_token_s": 0.025, "max_wait_s": 0.25}


def p99(visits: Sequence[Visit]) -> float:
    assert len(visits) > 50
    return float(np.percentile([visit.token_s for visit in visits], 99))


def settled(**limits: float) -> CrowdedServer:
    """A server that has been as busy as it should be for a while, and knows its pace."""
    server = CrowdedServer(max_running=256, max_queued=256, **limits)
    server.load(0.7 * SATURATION_PER_S, 10.0)
    return server


@pytest.fixture(scope="module")
def unloaded_s() -> float:
    return p99(settled(**BOUNDS).load(0.7 * SATURATION_PER_S, 60.0))


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_the_time_per_token_of_those_who_get_in_at_most_doubles(factor: int, unloaded_s: float) -> None:
    server = settled(**BOUNDS)
    refused, arrived = server.num_refused, server.num_arrived
    ended = server.load(factor * SATURATION_PER_S, 30.0)
    assert p99(ended) <= 2 * unloaded_s
    # As much work is done as there can be, and the queue is short.
    assert len(ended) >= 0.85 * 30.0 * SATURATION_PER_S
    assert server.most_waiting < 8
    if factor > 1:
        assert server.num_refused - refused > 0.8 * (1 - 1 / factor) * (server.num_arrived - arrived)


def test_bounds_by_count_alone_do_not_keep_it(unloaded_s: float) -> None:
    assert p99(settled().load(4 * SATURATION_PER_S, 15.0)) > 5 * unloaded_s


def test_it_is_as_before_at_once_when_the_overload_is_over(unloaded_s: float) -> None:
    server = settled(**BOUNDS)
    server.load(4 * SATURATION_PER_S, 15.0)
    server.load(0.7 * SATURATION_PER_S, 2.0)
    refused = server.num_refused
    assert p99(server.load(0.7 * SATURATION_PER_S, 20.0)) <= 1.3 * unloaded_s
    assert server.num_refused - refused <= 0.05 * 20.0 * 0.7 * SATURATION_PER_S


def test_places_follow_the_pace_up_to_where_each_output_is_as_fast_as_it_should_be() -> None:
    server = CrowdedServer(max_running=256, max_queued=256, **BOUNDS)
    # One after another: little is known of a crowd, and so few get in at first.
    server.load(1.0, 40.0)
    alone = server.admission.num_places
    server.load(2 * SATURATION_PER_S, 20.0)
    crowded = server.admission.num_places
    # With n outputs each has a token in 3 + 1.3 n milliseconds, and a fifth more with its prompt's part of them.
    assert alone < 0.8 * crowded
    assert 11 <= crowded <= 16


def first_token_p99(server: ReadingServer, rate_per_s: float) -> float:
    """Of those who get in over twenty seconds; as many do as the server has the speed for."""
    ended = server.load(rate_per_s, 20.0)
    assert len(ended) > 0.6 * 20.0 * min(rate_per_s, SATURATION_PER_S)
    return float(np.percentile([caller.ttft_s for caller in ended], 99))


@pytest.mark.parametrize("seed", range(3))
def test_first_tokens_under_overload_are_late_by_the_queue_and_little_else(seed: int) -> None:
    server = ReadingServer(seed, max_token_s=0.012, max_wait_s=0.15)
    calm_s = first_token_p99(server, 0.7 * SATURATION_PER_S)
    assert first_token_p99(server, 4 * SATURATION_PER_S) <= 2 * calm_s


@pytest.mark.parametrize("seed", range(3))
def test_a_bound_of_the_wait_alone_keeps_prompts_from_crowding_the_passes(seed: int) -> None:
    server = ReadingServer(seed, max_wait_s=0.15)
    first_token_p99(server, 0.7 * SATURATION_PER_S)
    server.most_read = 0
    # The wait at the door, that behind prompts which are read, and the pass that runs when it comes.
    assert first_token_p99(server, 4 * SATURATION_PER_S) <= 3 * 0.15
    assert server.most_read <= 8
