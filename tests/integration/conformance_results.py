"""The conformance suite on a toy deployment."""

from __future__ import annotations

from coppice.lab.conformance.catalogue import cases_like
from coppice.lab.conformance.deployment import connected
from coppice.lab.conformance.report import Result, run_cases
from tests.toy_deployment import ToyDeployment, serving_toy

LIMIT_S = 60.0
SPECULATION_CASES = "greedy/with-and-without-speculation"
# Streams are left here, and a stream that takes no time would be over by then.
UNDER_WAY = ("cancellation/", "resume/", "streaming/")
PASS_S = 0.0003


async def results(toy: ToyDeployment, *patterns: str) -> dict[str, Result]:
    """How the cases of some patterns end, by name."""
    cases = cases_like(patterns)
    assert cases
    if any(pattern.startswith(UNDER_WAY) for pattern in patterns):
        toy.pass_s = PASS_S
    async with serving_toy(toy) as address, connected(address, LIMIT_S) as deployment:
        ended = await run_cases(cases, deployment, LIMIT_S, lambda result: None)
    return {result.name: result for result in ended}
