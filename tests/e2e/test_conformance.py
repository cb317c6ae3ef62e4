"""The conformance suite over the bundled models: some cases of most groups, on real processes."""

from __future__ import annotations

import pytest

from conformance.catalogue import cases_like
from conformance.deployment import connected
from conformance.reference import ReferenceModel
from conformance.runner import run_cases
from coppice.bundled import MODELS
from coppice.cli.topology import TopologySpec, running

LIMIT_S = 60.0
CASES = (
    "cancellation/cancelled-streams-free-their-place",
    "errors/a-top-p-above-1",
    "greedy/with-and-without-speculation",
    "info/*",
    "limits/min-tokens-holds-off-stop-tokens",
    "lossless/everything-together",
    "penalties/presence-and-frequency-leave-the-prompt-alone",
    "prefix/cached-tokens-are-counted",
    "reference/token-ids-at-temperature-0",
    "resume/resumed-twice",
    "speculation/forced-drafts-are-verified-and-accepted",
    "stops/a-string-across-many-tokens",
    "streaming/deltas-make-the-whole",
    "tokens/bad-token-ids-never-appear",
    "usage/rounds-and-accepted-tokens-make-the-output",
)


@pytest.mark.timeout(240)
async def test_the_bundled_models_pass() -> None:
    spec = TopologySpec(device="cpu", threads=1)
    async with running(spec) as topology, connected(topology.address, LIMIT_S) as deployment:
        deployment.reference = ReferenceModel(MODELS / "target")
        ended = await run_cases(cases_like(CASES), deployment, LIMIT_S, lambda result: None)
    assert len(ended) >= len(CASES)
    assert [result for result in ended if result.status != "passed"] == []
