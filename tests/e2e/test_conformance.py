"""The conformance suite over the bundled models: some cases of most groups, on real processes."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from conformance.catalogue import cases_like
from conformance.deployment import connected
from conformance.reference import ReferenceModel
from conformance.runner import run_cases
from coppice.bundled import MODELS
from coppice.client import Client
from tests.tiny_checkpoint import write_tiny_llama

LIMIT_S = 60.0
CASES = (
    "cancellation/cancelled-streams-free-their-place",
    "errors/a-top-p-above-1",
    "grammars/*-with-and-without-speculation",
    "grammars/a-refused-grammar-disturbs-nobody",
    "grammars/a-schema-*-is-refused",
    "grammars/outputs-*",
    "grammars/resumed-*",
    "greedy/with-and-without-speculation",
    "info/*",
    "limits/min-tokens-holds-off-stop-tokens",
    "log-probs/with-and-without-speculation",
    "lossless/everything-together",
    "outputs/each-ends-where-it-ends",
    "penalties/presence-and-frequency-leave-the-prompt-alone",
    "prefix/cached-tokens-are-counted",
    "reference/token-ids-at-temperature-0",
    "reference/log-probs-at-temperature-1",
    "resume/resumed-twice",
    "speculation/forced-drafts-are-verified-and-accepted",
    "stops/a-string-across-many-tokens",
    "streaming/deltas-make-the-whole",
    "tokens/bad-token-ids-never-appear",
    "traversal/the-first-tokens-have-the-target-s-law",
    "traversal/top-k-1-is-greedy",
    "usage/rounds-and-accepted-tokens-make-the-output",
)


@pytest.mark.timeout(240)
async def test_the_bundled_models_pass(bundled: Client) -> None:
    async with connected(bundled.address, LIMIT_S) as deployment:
        deployment.reference = ReferenceModel(MODELS / "target")
        ended = await run_cases(cases_like(CASES), deployment, LIMIT_S, lambda result: None)
    assert len(ended) >= len(CASES)
    assert [result for result in ended if result.status != "passed"] == []


@pytest.mark.timeout(240)
async def test_a_small_cache_makes_sequences_preempt_each_other_and_changes_no_token(tmp_path: Path) -> None:
    """Through the command, which counts preemptions by what the verifier says of them."""
    write_tiny_llama(tmp_path, vocab_size=62, max_context_tokens=400)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "coppice.cli", "conformance", "--target", str(tmp_path), "--drafter", "none"),
        *("--device", "cpu", "--kv-cache-mib", "1", "--only", "pressure/*", "--json"),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    report = json.loads(out)
    assert [case["status"] for case in report["cases"]] == ["passed", "passed"]
    assert report["preemptions"] > 0
