"""How requests are sent, to a server that is slow, refuses or fails."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coppice.client import Client
from coppice.core.errors import OverloadedError, UnavailableError
from coppice.lab.bench.client import Answer, Fate, Manner, Mode, Policy, Window
from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.lab.bench.load.figures import Span
from coppice.lab.bench.load.loads import Arrival, ClosedLoad, StepLoad, Workload, open_loop
from coppice.lab.bench.load.suite import OFF, PLANNER, measure_loads, policies, reference_outputs
from coppice.v1 import inference_pb2
from orchestrator.api.validation import GenerationRequest
from tests.toy_deployment import MAX_NODES, ToyDeployment, serving_toy

POLICY = Policy(PLANNER, Mode.MODE_AUTO)
WORKLOAD = Workload(tuple(tuple(b"def " + bytes([letter])) for letter in b"abc"), min_tokens=3, max_tokens=9, seed=5)


class Toy(ToyDeployment):
    """Answers after `delay_s`; fails what arrives in `errors`, by its place in the order of arrival."""

    def __init__(self, delay_s: float = 0.0, errors: dict[int, Exception] | None = None) -> None:
        super().__init__()
        self.heard: list[inference_pb2.GenerateRequest] = []
        self._delay_s = delay_s
        self._errors = errors or {}
        self.is_idle = asyncio.Event()

    def leave(self, ended: bool) -> None:
        super().leave(ended)
        if not self.num_running:
            self.is_idle.set()

    def hear(self, request: inference_pb2.GenerateRequest) -> None:
        self.heard.append(request)

    async def check(self, request: Any) -> GenerationRequest:
        error = self._errors.get(len(self.heard) - 1, self._errors.get(-1))
        await asyncio.sleep(self._delay_s)
        if error is not None:
            raise error
        return await super().check(request)


def _at_once(answers: tuple[Answer, ...], at_s: float) -> int:
    return sum(answer.sent_s <= at_s < answer.ended_s for answer in answers)


async def test_late_answers_delay_no_later_arrival() -> None:
    arrivals = [Arrival(0.02 * number) for number in range(8)]
    async with serving_toy(Toy(delay_s=0.6)) as address, Client(address) as client:
        window = Window(client, POLICY)
        await open_loop(window, WORKLOAD, arrivals, drain_s=30)
        answers = window.answers()
    assert [answer.intended_s for answer in answers] == [arrival.at_s for arrival in arrivals]
    assert {answer.fate for answer in answers} == {Fate.COMPLETED}
    # All had been sent before the first was answered, as in no closed loop.
    assert max(answer.sent_s for answer in answers) < min(answer.ended_s for answer in answers)
    assert all(answer.sent_s >= answer.intended_s for answer in answers)


async def test_refused_and_failed_requests_are_counted_apart_and_stop_nobody() -> None:
    errors: dict[int, Exception] = {1: OverloadedError("full", 0.5), 2: OverloadedError("full", 0.5)}
    errors[4] = UnavailableError("no verifier")
    async with serving_toy(Toy(errors=errors)) as address, Client(address) as client:
        window = Window(client, POLICY)
        await open_loop(window, WORKLOAD, [Arrival(0.1 * number) for number in range(6)], drain_s=30)
        answers = window.answers()
    assert [answer.fate for answer in answers] == [
        *(Fate.COMPLETED, Fate.REFUSED, Fate.REFUSED, Fate.COMPLETED, Fate.FAILED, Fate.COMPLETED)
    ]
    assert (answers[1].error, answers[1].retry_after_s) == ("RESOURCE_EXHAUSTED: full", 0.5)
    assert answers[4].error == "UNAVAILABLE: no verifier"


async def test_what_outlasts_the_drain_is_cut_and_keeps_its_tokens() -> None:
    toy = Toy()
    toy.pass_s = 0.2
    async with serving_toy(toy) as address, Client(address) as client:
        window = Window(client, Policy(OFF, Mode.MODE_OFF))
        await open_loop(window, WORKLOAD, [Arrival(0.0, 1), Arrival(0.0, 9)], drain_s=0.9)
        short, long = window.answers()
        assert (short.fate, len(short.token_ids)) == (Fate.COMPLETED, 1)
        assert long.fate is Fate.CUT
        assert 0 < len(long.token_ids) < 9
        # Cancelled at the server, too.
        async with asyncio.timeout(5):
            await toy.is_idle.wait()


async def test_clients_leave_early_or_read_slowly_as_they_are_to() -> None:
    toy = Toy()
    toy.pass_s = 0.05
    arrivals = [Arrival(0.0, 9, Manner(leave_after_s=0.12)), Arrival(0.0, 2, Manner(pause_s=0.3)), Arrival(0.0, 2)]
    async with serving_toy(toy) as address, Client(address) as client:
        window = Window(client, Policy(OFF, Mode.MODE_OFF))
        await open_loop(window, WORKLOAD, arrivals, drain_s=30)
        gone, slow, plain = window.answers()
        async with asyncio.timeout(5):
            await toy.is_idle.wait()
    assert (gone.fate, slow.fate, plain.fate) == (Fate.LEFT, Fate.COMPLETED, Fate.COMPLETED)
    assert len(gone.token_ids) < 9
    assert slow.e2e_s >= 0.6
    assert [one.manner for one in (gone, slow, plain)] == [arrival.manner for arrival in arrivals]


async def test_a_closed_loop_keeps_each_levels_number_running() -> None:
    toy = Toy()
    toy.pass_s = 0.01
    load = StepLoad(5, 0.6)
    async with serving_toy(toy) as address, Client(address) as client:
        window = Window(client, POLICY)
        assert await load.drive(window, WORKLOAD, 0) == Span(0.0, load.levels[-1].span.end_s)
        answers = window.answers()
    assert [answer.task for answer in answers] == [WORKLOAD.request(number) for number in range(len(answers))]
    assert {answer.fate for answer in answers} == {Fate.COMPLETED, Fate.CUT}
    for level in load.levels:
        # Away from the steps; between two requests of a worker there is a moment without one.
        seen = [_at_once(answers, level.span.start_s + 0.2 + 0.002 * step) for step in range(150)]
        assert max(seen) == level.concurrency


async def test_outputs_of_every_length_begin_the_reference() -> None:
    workload = Workload(WORKLOAD.prompts, 3, 9, temperature=1.0, seed=5)
    async with serving_toy(Toy()) as address, Client(address) as client:
        references = await reference_outputs(client, workload, policies(MAX_NODES)[0])
        window = Window(client, POLICY)
        await open_loop(window, workload, [Arrival(0.0)] * 12, drain_s=30)
    assert [len(tokens) for tokens in references] == [9, 9, 9]
    assert len({len(answer.token_ids) for answer in window.answers()}) > 2
    for answer in window.answers():
        assert answer.token_ids == references[answer.task.prompt][: answer.task.max_tokens]


async def test_a_server_that_fails_everything_ends_the_benchmark() -> None:
    toy = Toy(errors={-1: UnavailableError("gone")})
    async with serving_toy(toy) as address, Client(address) as client:
        with pytest.raises(BenchmarkError, match="no output of off to compare with: UNAVAILABLE: gone"):
            await reference_outputs(client, WORKLOAD, policies(MAX_NODES)[0])
        with pytest.raises(BenchmarkError, match="planner c1: no request was completed: UNAVAILABLE: gone"):
            await measure_loads(client, WORKLOAD, [ClosedLoad(1, 0.2)], [POLICY], num_runs=1, seed=0)
