"""The requests of a load."""

from __future__ import annotations

import statistics

from coppice.client import Client
from coppice.lab.bench.client import ATTENTIVE, Answer, Fate, Mode, Policy, Window
from coppice.lab.bench.load.loads import LEAVE_WITHIN_S, Arrival, Workload, open_loop
from tests.toy_deployment import ToyDeployment, serving_toy

WORKLOAD = Workload(((1, 2), (3,), (4, 5)), min_tokens=32, max_tokens=128, temperature=0.5, seed=10)


def test_prompts_take_turns_with_lengths_drawn_evenly_from_the_range() -> None:
    requests = [WORKLOAD.request(number) for number in range(3000)]
    assert [request.prompt for request in requests[:4]] == [0, 1, 2, 0]
    assert requests[4].prompt_ids == (3,)
    assert (requests[4].temperature, requests[4].seed) == (0.5, 11)
    lengths = [request.max_tokens for request in requests]
    assert (min(lengths), max(lengths)) == (32, 128)
    assert abs(statistics.fmean(lengths) - WORKLOAD.mean_tokens) < 3
    assert requests == [WORKLOAD.request(number) for number in range(3000)]


def test_lognormal_lengths_are_mostly_short_and_within_the_bounds() -> None:
    workload = Workload(((1,),), min_tokens=16, max_tokens=256, lognormal=True)
    lengths = [workload.request(number).max_tokens for number in range(3000)]
    assert (min(lengths), max(lengths)) == (16, 256)
    # Half of them are below the geometric mean of the bounds, and the mean above it.
    assert abs(statistics.median(lengths) - 64) < 3
    assert statistics.fmean(lengths) > 70
    assert abs(statistics.fmean(lengths) - workload.mean_tokens) < 2


CHATS = Workload(((1,), (1, 2), (3,), (3, 4)), min_tokens=32, max_tokens=128, num_turns=2)


def test_a_turn_has_an_output_of_one_length_since_the_next_turn_has_it_in_its_prompt() -> None:
    lengths = [CHATS.request(number).max_tokens for number in range(8)]
    assert lengths[:4] == lengths[4:]
    assert len(set(lengths)) > 1
    # Whatever a trace says.
    assert CHATS.request(1, 5).max_tokens == lengths[1]
    assert CHATS.mean_tokens == statistics.fmean(lengths)


def test_a_share_of_the_clients_leaves_at_any_moment() -> None:
    manners = [Workload(((1,),), leaving=0.2).manner(number) for number in range(3000)]
    left = [manner.leave_after_s for manner in manners if manner.leave_after_s is not None]
    assert abs(len(left) / len(manners) - 0.2) < 0.03
    assert 0 <= min(left) < 0.1 * LEAVE_WITHIN_S < 0.9 * LEAVE_WITHIN_S < max(left) <= LEAVE_WITHIN_S
    assert all(WORKLOAD.manner(number) == ATTENTIVE for number in range(100))


async def test_turns_follow_each_other_and_share_a_salt_until_their_conversation_comes_again() -> None:
    workload = Workload(tuple(tuple(b"turn " + bytes([letter])) for letter in b"abcd"), 3, 9, num_turns=2)
    heard = []

    class Toy(ToyDeployment):
        def hear(self, request):  # type: ignore[no-untyped-def]
            heard.append(request)

    async with serving_toy(Toy()) as address, Client(address) as client:
        window = Window(client, Policy("auto", Mode.MODE_AUTO))
        await open_loop(window, workload, [Arrival(0.0), Arrival(0.3), Arrival(0.6)], drain_s=30)
        answers = window.answers()
    assert {answer.fate for answer in answers} == {Fate.COMPLETED}
    for number in range(3):
        first, second = (one for one in answers if one.task.prompt // 2 == number % 2 and _round(one) == number // 2)
        assert (first.task.prompt % 2, second.task.prompt % 2) == (0, 1)
        assert first.intended_s == 0.3 * number
        # The second was to be sent when it was: after the first had been answered.
        assert first.ended_s <= second.intended_s == second.sent_s
    salts = [request.cache_salt for request in sorted(heard, key=lambda one: (one.cache_salt, one.sampling.seed))]
    assert [salts.count(salt) for salt in dict.fromkeys(salts)] == [4, 2]


def _round(answer: Answer) -> int:
    """0 for an answer of the first two conversations, 1 for one of the third, which is the first again."""
    return int(answer.sent_s >= 0.6 and answer.task.prompt < 2)
