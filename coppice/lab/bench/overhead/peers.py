"""`python -m coppice.lab.bench.overhead.peers`: scripted peers and clients in a process of their own.

So the CPU time of the other process is the orchestrator's alone. One JSON object per line each way: it says where the
peers listen, then for every run that it is told of says when it is warm, waits for a line, and says what it measured.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import Any

from coppice.checkpoints.bundled import MODELS
from coppice.client import Client, Options
from coppice.core.tokenizer import TargetTokenizer, load_tokenizer_json
from coppice.lab.bench.overhead.scripted_peers import KIND, Script, ScriptedDrafter, ScriptedVerifier, Traffic
from coppice.net.rpc import Server, run
from coppice.v1 import drafter_pb2_grpc, verifier_pb2_grpc
from orchestrator.prefix_cache.guesses import SOURCE as CACHE

# Tokens of a round, so that an output of a given length has about so many rounds.
TOKENS_PER_ROUND = 2.5
PROMPT_TOKENS = 200


@dataclass(frozen=True, slots=True)
class RunSettings:
    """One run: so many requests at once at an orchestrator's address, each of about so many rounds."""

    address: str
    num_requests: int
    num_rounds: int
    warm_up_rounds: int
    num_nodes: int
    # Whether the text is one that the prefix cache knows.
    repeats: bool


async def main() -> None:
    """Serve, and run what stdin says, until it ends."""
    tokenizer_json = load_tokenizer_json(MODELS / "target")
    tokenizer = TargetTokenizer(tokenizer_json)
    script = Script(tokenizer_json, tokenizer.fingerprint, tokenizer.vocab_size, 1, False, Traffic())
    verifier, drafter = Server([], guarded=False), Server([], guarded=False)
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(ScriptedVerifier(script), verifier.grpc)
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(ScriptedDrafter(script), drafter.grpc)
    ports = [await server.start("127.0.0.1:0") for server in (verifier, drafter)]
    _say({"verifier": f"127.0.0.1:{ports[0]}", "drafter": f"127.0.0.1:{ports[1]}"})
    while line := await _line():
        await _run(script, RunSettings(**json.loads(line)))
    for server in (verifier, drafter):
        await server.stop(0.0)


async def _run(script: Script, settings: RunSettings) -> None:
    script.num_nodes, script.repeats = settings.num_nodes, settings.repeats
    async with Client(settings.address) as client:
        await load(client, settings, settings.warm_up_rounds, first_seed=1)
        _say({"warm": True})
        await _line()
        script.traffic.reset()
        await load(client, settings, settings.num_rounds, first_seed=1 + settings.num_requests)
    _say(script.traffic.report())


async def load(client: Client, settings: RunSettings, num_rounds: int, first_seed: int) -> None:
    """Complete so many requests at once, each of about so many rounds."""
    max_tokens = round(TOKENS_PER_ROUND * num_rounds)
    sources = f"{KIND},{CACHE}" if settings.repeats else KIND

    async def request(seed: int) -> None:
        prompt = [(seed * 7 + at * 3) % 256 for at in range(PROMPT_TOKENS)]
        # Forced: every round is to have a draft, whatever the planner thinks of these peers. It learns all the same.
        options = Options(max_tokens=max_tokens, temperature=0.0, seed=seed, ignore_eos=True, speculation=sources)
        completion = await client.generate(prompt, options)
        assert len(completion.token_ids) == max_tokens

    async with asyncio.TaskGroup() as tasks:
        for seed in range(first_seed, first_seed + settings.num_requests):
            tasks.create_task(request(seed))


async def _line() -> str:
    return await asyncio.to_thread(sys.stdin.readline)


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run(main)
