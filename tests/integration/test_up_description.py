"""The two lines with which `coppice up` says what it serves."""

from __future__ import annotations

import pytest

from coppice.cli.topology import DrafterSpec, Topology, TopologySpec
from coppice.cli.up import described
from coppice.v1 import sampling_pb2
from orchestrator.app import running
from orchestrator.config import Config
from tests.fakes import FakeVerifier, serving

SPEC = TopologySpec(target="some/toy", drafters=(DrafterSpec("small-lm", "x"),))


@pytest.mark.parametrize(
    ("fake", "precision"),
    [
        (FakeVerifier(), "float32, strict"),
        (FakeVerifier(dtype="bfloat16", exactness=sampling_pb2.EXACTNESS_FAST), "bfloat16, fast"),
        (FakeVerifier(quantization="int8"), "int8 weights, strict"),
        # Of before there was this field.
        (FakeVerifier(quantization=""), "float32, strict"),
    ],
)
async def test_what_is_served_is_said_in_the_words_of_the_orchestrator(fake: FakeVerifier, precision: str) -> None:
    topology = Topology(SPEC)
    async with (
        serving(fake) as verifier,
        running(Config(verifier_address=verifier, listen_address="127.0.0.1:0")) as orchestrator,
    ):
        topology.address = orchestrator.address
        said = await described(topology, SPEC)
    assert said.splitlines() == [f"target    toy: {precision}, 400 tokens of context", "drafters  cache"]


async def test_where_the_orchestrator_does_not_say_it_the_command_line_does() -> None:
    topology = Topology(SPEC)
    topology.address = "127.0.0.1:1"
    assert await described(topology, SPEC) == "target    toy\ndrafters  small-lm"
