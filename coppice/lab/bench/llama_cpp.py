"""llama.cpp as a contender: its own server in a process of its own, through the package `xllamacpp`.

Prebuilt wheels may lack vector instructions of this machine; the contender's note has what the build says of itself.
`python -m coppice.lab.bench.llama_cpp FILE THREADS CONTEXT` is that process.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import json
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coppice.cli.child import READY, Child
from coppice.completion import Completion, Speculation, Timing, Usage
from coppice.lab.bench.client import DEADLINE_S, Answer, Batch, Delta, Fate, Task
from coppice.lab.bench.harness.experiment import BenchmarkError

PACKAGE = "xllamacpp"
_MODULE = "coppice.lab.bench.llama_cpp"
_START_TIMEOUT_S, _STOP_TIMEOUT_S = 120.0, 5.0
# GNU's own default: how long our services' threads spin is nothing for llama.cpp.
_SPIN_COUNT = "300000"


def is_installed() -> bool:
    """Whether llama.cpp is there."""
    return importlib.util.find_spec(PACKAGE) is not None


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """A running server with one model; requests draw from the whole distribution, as ours do."""

    name: str
    note: str
    address: str

    async def complete(self, tasks: Sequence[Task]) -> Batch:
        """Complete tasks, all at once. Raises BenchmarkError if one failed."""
        return Batch(tuple(await asyncio.gather(*(asyncio.to_thread(self._answer, task) for task in tasks))))

    def _answer(self, task: Task) -> Answer:
        message = {
            "prompt": list(task.prompt_ids),
            "n_predict": task.max_tokens,
            "temperature": task.temperature,
            "samplers": ["temperature"],
            "seed": task.seed,
            "repeat_penalty": task.repetition_penalty,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        request = urllib.request.Request(
            f"{self.address}/completion", json.dumps(message).encode(), {"Content-Type": "application/json"}
        )
        start = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
                answer: Mapping[str, Any] = json.load(response)
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise BenchmarkError(f"{self.name}: {error}") from error
        wall_s = time.perf_counter() - start
        token_ids, timings = tuple(answer["tokens"]), answer["timings"]
        spent = Timing(forward_ms=timings["prompt_ms"] + timings["predicted_ms"])
        counts = Speculation(len(token_ids))
        completion = Completion("", task.seed, "", token_ids, "length", None, Usage(), counts, spent)
        deltas = (Delta(timings["prompt_ms"] / 1000, 1),)
        return Answer(
            task, 0.0, 0.0, wall_s, Fate.COMPLETED, token_ids, deltas, completion=completion, counts_drafts=False
        )


@contextlib.asynccontextmanager
async def serving(name: str, file: Path, threads: int, context: int) -> AsyncIterator[LlamaCpp]:
    """llama.cpp with a GGUF file while the context is open. Raises ChildError if it does not start."""
    child = Child(name, _MODULE, {"GOMP_SPINCOUNT": _SPIN_COUNT}, None, (str(file), str(threads), str(context)))
    try:
        await child.start()
        address, _, system = (await child.ready(_START_TIMEOUT_S)).partition(" ")
        yield LlamaCpp(name, f"{PACKAGE} {importlib.metadata.version(PACKAGE)}, {system}", address)
    finally:
        await child.stop(_STOP_TIMEOUT_S)


def _serve(file: str, threads: int, context: int) -> None:
    """Serve until a signal ends the process."""
    llama: Any = importlib.import_module(PACKAGE)
    params = llama.CommonParams()
    params.model.path = file
    params.n_ctx = context
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    # Its log goes to standard output otherwise.
    params.verbosity = -1
    server = llama.Server(params)
    system = " ".join(llama.get_system_info().replace("|", " ").split())
    sys.stdout.write(f"{READY}{server.listening_address} {system}\n")
    sys.stdout.flush()
    # The server's threads serve; this one waits for the signal that ends the process.
    signal.pause()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
