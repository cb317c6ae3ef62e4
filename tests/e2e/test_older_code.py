"""Services of the version before, from git, with those of today: every mixture gives the same tokens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coppice.client import Client, Options
from coppice.completion import Completion
from tests.contract_relay import PREVIOUS, ROOT
from tests.faults.deployment import LOCAL, START_S, free_port
from tests.faults.doors import write_checkpoint

# Services that have to compile their loops first take minutes on a busy machine.
pytestmark = pytest.mark.timeout(900)
STOP_S = 30.0
PROMPT, TOKENS = (5, 6, 7), 24
OPTIONS = (
    Options(max_tokens=TOKENS, temperature=0.0, ignore_eos=True),
    Options(max_tokens=TOKENS, temperature=1.0, seed=3, top_k=40, top_p=0.9, ignore_eos=True, top_log_probs=2),
    Options(max_tokens=TOKENS, temperature=0.7, seed=4, ignore_eos=True, resume_token_ids=(8, 9)),
)
MODEL = {"DEVICE": "cpu", "THREADS": "1"}


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of the version before."""
    directory = tmp_path_factory.mktemp("older")
    try:
        archive = subprocess.run(["git", "archive", PREVIOUS], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"commit {PREVIOUS} cannot be had: no git, or a shallow clone")
    subprocess.run(["tar", "-x", "-C", str(directory)], input=archive, check=True)
    return directory


@contextlib.asynccontextmanager
async def serving(tree: Path, module: str, **env: str) -> AsyncIterator[str]:
    """A service of a tree in a process; its address."""
    address = f"{LOCAL}:{free_port()}"
    settings = {**os.environ, "PYTHONPATH": str(tree), "LISTEN_ADDRESS": address, **env}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, cwd=tree, env=settings, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            while not (line := await process.stdout.readline()).startswith(b"ready"):
                assert line, f"{module} of {tree} has ended"
        yield address
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()


async def answers(address: str) -> list[Completion]:
    """Outputs with every kind of option that both versions have; the last, without drafts, is greedy."""
    async with Client(address) as client:
        without = Options(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, speculation="off")
        return [await client.generate(PROMPT, one, timeout_s=60) for one in (*OPTIONS, without)]


async def test_every_mixture_of_versions_gives_the_same_tokens(older: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    trees = {"today": ROOT, "before": older}
    async with contextlib.AsyncExitStack() as stack:
        starting = [
            stack.enter_async_context(serving(tree, module, MODEL=str(tmp_path), **MODEL, **more))
            for module, more in (("verifier_svc", {"KV_CACHE_MIB": "1"}), ("drafter_svc", {}))
            for tree in trees.values()
        ]
        addresses = [await one for one in starting]
        verifiers, drafters = dict(zip(trees, addresses[:2], strict=True)), dict(zip(trees, addresses[2:], strict=True))
        tokens = {}
        for mixture in itertools.product(trees, repeat=3):
            orchestrator, verifier, drafter = mixture
            peers = {"VERIFIER_ADDRESS": verifiers[verifier], "DRAFTER_ADDRESSES": drafters[drafter]}
            async with serving(trees[orchestrator], "orchestrator", PLANNER="fixed", **peers) as address:
                outputs = await answers(address)
            tokens[mixture] = [one.token_ids for one in outputs]
            assert outputs[0].token_ids == outputs[-1].token_ids
            assert all(one.speculation.accepted_tokens > 0 for one in outputs[:-1]), mixture
    assert [len(one) for one in tokens["today", "today", "today"]] == [TOKENS, TOKENS, TOKENS - 2, TOKENS]
    assert all(one == tokens["today", "today", "today"] for one in tokens.values())
