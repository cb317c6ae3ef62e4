"""The drafter stopped and killed under a running request: with the real models, the tokens of an undisturbed run.

The last file here, since it leaves the topology of all tests without a drafter.
"""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from coppice.cli.topology import Topology
from coppice.client import Client, Options

PROMPT = "class Queue:\n    def __init__(self, size):\n"
OPTIONS = Options(temperature=1.0, seed=3, max_tokens=160, ignore_eos=True)
# On a busy machine the planner may have left drafting off.
DRAFTED = replace(OPTIONS, speculation="small-lm")
AFTER_TOKENS = 30


def send(topology: Topology, number: signal.Signals) -> None:
    """Send a signal to the drafter."""
    [drafter] = [child for child in topology._children if child.name.startswith("drafter")]
    assert drafter._process is not None
    drafter._process.send_signal(number)


async def interrupted(
    topology: Topology, client: Client, number: signal.Signals, options: Options = OPTIONS
) -> list[int]:
    """A completion during which the drafter gets a signal."""
    stream = client.stream(PROMPT, options)
    tokens: list[int] = []
    sent = False
    async for chunk in stream:
        tokens += chunk.token_ids
        if not sent and len(tokens) >= AFTER_TOKENS:
            send(topology, number)
            sent = True
    assert sent
    return tokens


@pytest.mark.timeout(180)
async def test_a_drafter_that_hangs_costs_speed_only(topology: Topology, bundled: Client) -> None:
    undisturbed = await bundled.generate(PROMPT, OPTIONS)
    try:
        assert await interrupted(topology, bundled, signal.SIGSTOP) == list(undisturbed.token_ids)
        silent = await bundled.generate(PROMPT, OPTIONS)
    finally:
        send(topology, signal.SIGCONT)
    assert silent.token_ids == undisturbed.token_ids
    # What was drafted, the orchestrator remembered.
    assert set(silent.speculation.sources) <= {"cache"}
    # Most rounds did not wait: a few tried again whether the drafter was back.
    assert silent.timing.linger_ms < silent.timing.total_ms / 2
    again = await bundled.generate(PROMPT, OPTIONS)
    assert again.token_ids == undisturbed.token_ids


@pytest.mark.timeout(180)
async def test_a_killed_drafter_costs_no_token_and_the_next_request_is_served(
    topology: Topology, bundled: Client
) -> None:
    """The last one: the drafter stays dead."""
    undisturbed = await bundled.generate(PROMPT, DRAFTED)
    assert undisturbed.speculation.accepted_tokens > 0
    assert await interrupted(topology, bundled, signal.SIGKILL, DRAFTED) == list(undisturbed.token_ids)
    without = await bundled.generate(PROMPT, OPTIONS)
    assert without.token_ids == undisturbed.token_ids
    # What is drafted now, the orchestrator remembers.
    assert set(without.speculation.sources) <= {"cache"}
