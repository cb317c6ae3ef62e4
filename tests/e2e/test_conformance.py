"""The conformance suite over the bundled models, on real processes: cases of every group that cost little.

`make conformance` runs all. Of what is dear, the law of traversal verification is shown on real services in
tests/integration/test_traversal.py, and `pressure/*` on a small cache in tests/integration/test_conformance_command.py.
"""

from __future__ import annotations

import pytest

from coppice.checkpoints.bundled import MODELS
from coppice.client import Client
from coppice.lab.conformance.catalogue import all_groups, cases_like
from coppice.lab.conformance.deployment import connected
from coppice.lab.conformance.reference import ReferenceModel
from coppice.lab.conformance.report import run_cases

LIMIT_S = 60.0
CASES = (
    "cancellation/cancelled-streams-free-their-place",
    "concurrency/stops-and-limits-in-company",
    "errors/a-top-p-above-1",
    "grammars/a-regex-with-and-without-speculation",
    "grammars/penalties-and-truncations-with-and-without-speculation",
    "grammars/a-refused-grammar-disturbs-nobody",
    "grammars/a-schema-*-is-refused",
    "grammars/outputs-keep-a-json-schema",
    "grammars/resumed-*",
    "greedy/with-and-without-speculation",
    "info/*",
    "limits/min-tokens-holds-off-stop-strings",
    "limits/min-tokens-holds-off-stop-tokens",
    "log-probs/with-and-without-speculation",
    "lossless/everything-together",
    "outputs/each-counts-its-own-tokens",
    "penalties/presence-and-frequency-leave-the-prompt-alone",
    "prefix/cached-tokens-are-counted",
    "reference/token-ids-at-temperature-0",
    "reference/log-probs-at-temperature-1",
    "resume/resumed-twice",
    "sampling/tiny-top-p-is-greedy",
    "seeds/seed-in-use-is-returned",
    "speculation/forced-drafts-are-verified-and-accepted",
    "stops/a-string-across-many-tokens",
    "streaming/deltas-make-the-whole",
    "tokens/bad-token-ids-never-appear",
    "traversal/top-k-1-is-greedy",
    "usage/rounds-and-accepted-tokens-make-the-output",
)


@pytest.mark.timeout(240)
async def test_the_bundled_models_pass(bundled: Client) -> None:
    async with connected(bundled.address, LIMIT_S) as deployment:
        deployment.reference = ReferenceModel(MODELS / "target")
        ended = await run_cases(cases_like(CASES), deployment, LIMIT_S, lambda result: None)
    groups = {result.name.partition("/")[0] for result in ended}
    assert groups == {group.name for group in all_groups()} - {"pressure"}
    assert [result for result in ended if result.status != "passed"] == []
