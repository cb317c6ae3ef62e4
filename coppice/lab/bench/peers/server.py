"""Other engines as contenders: each a server in a process of its own, all of them asked as llama.cpp's server is."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coppice.checkpoints.gguf_export import export_gguf
from coppice.cli.child import Child
from coppice.completion import Completion, Speculation, Timing, Usage
from coppice.core.errors import CoppiceError
from coppice.lab.bench.client import DEADLINE_S, Answer, Batch, Delta, Fate, Task
from coppice.lab.bench.environment import REPOSITORY
from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.lab.bench.harness.report import shown_path

# Where `make peers` installs, below our own environment.
ENVIRONMENT = "peers"
_START_TIMEOUT_S, _STOP_TIMEOUT_S = 120.0, 5.0
# GNU's own default: how long our services' threads spin is nothing for other engines.
_SPIN_COUNT = "300000"
# A thread per request at once, started when it is needed.
_SENDING = ThreadPoolExecutor(256, "requests")


@dataclass(frozen=True, slots=True)
class Engine:
    """Another engine: the package that has it, and the module that serves it."""

    name: str
    package: str
    module: str

    @property
    def not_installed(self) -> str:
        """What to say where it has no interpreter."""
        return f"{self.package} is not installed (make peers)"

    def interpreter(self) -> str | None:
        """The Python that has the package, ours or that of `make peers`; None where neither has."""
        if importlib.util.find_spec(self.package) is not None:
            return sys.executable
        environment = Path(sys.prefix, ENVIRONMENT)
        found = any(environment.glob(f"lib/python*/site-packages/{self.package}"))
        return str(environment / "bin" / "python") if found else None


LLAMA_CPP = Engine("llama.cpp", "xllamacpp", "coppice.lab.bench.peers.llama_cpp")
OPENVINO = Engine("openvino", "openvino_genai", "coppice.lab.bench.peers.openvino")


@dataclass(frozen=True, slots=True)
class EngineServer:
    """A running server with one model; requests draw from the whole distribution, as ours do."""

    name: str
    note: str
    address: str

    async def complete(self, tasks: Sequence[Task]) -> Batch:
        """Complete tasks, all at once. Raises BenchmarkError if one failed."""
        loop, begin = asyncio.get_running_loop(), time.perf_counter()
        answers = [loop.run_in_executor(_SENDING, self._answer, task, begin) for task in tasks]
        return Batch(tuple(await asyncio.gather(*answers)))

    def _answer(self, task: Task, begin: float) -> Answer:
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
        sent_s = time.perf_counter() - begin
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
                answer: Mapping[str, Any] = json.load(response)
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise BenchmarkError(f"{self.name}: {error}") from error
        ended_s = time.perf_counter() - begin
        token_ids, timings = tuple(answer["tokens"]), answer["timings"]
        spent = Timing(forward_ms=timings["prompt_ms"] + timings["predicted_ms"])
        # Each accepted token of a draft saves a pass; they come only where the engine speculates.
        counts = Speculation(len(token_ids) - timings.get("draft_n_accepted", 0))
        completion = Completion("", task.seed, "", token_ids, "length", None, Usage(), counts, spent)
        deltas = (Delta(sent_s + timings["prompt_ms"] / 1000, 1),)
        return Answer(
            task, sent_s, sent_s, ended_s, Fate.COMPLETED, token_ids, deltas, completion=completion, counts_drafts=False
        )


@contextlib.asynccontextmanager
async def serving(engine: Engine, name: str, options: Mapping[str, object]) -> AsyncIterator[EngineServer]:
    """An engine under a contender's name while the context is open; `options` are those of its module.

    Raises BenchmarkError if it is not installed, ChildError if it does not start.
    """
    if (interpreter := engine.interpreter()) is None:
        raise BenchmarkError(engine.not_installed)
    env = {"GOMP_SPINCOUNT": _SPIN_COUNT}
    if interpreter != sys.executable:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    child = Child(name, engine.module, env, None, (json.dumps(options),), interpreter=interpreter)
    try:
        await child.start()
        address, _, note = (await child.ready(_START_TIMEOUT_S)).partition(" ")
        yield EngineServer(name, note, address)
    finally:
        await child.stop(_STOP_TIMEOUT_S)


def exported(model: Path, directory: Path, kind: str) -> Path:
    """The model as a GGUF file in `directory`, its matrices as `kind`.

    Raises BenchmarkError if llama.cpp does not know it.
    """
    file = directory / f"{model.name}-{kind}.gguf"
    if not file.exists():
        try:
            export_gguf(model, file, kind)
        except CoppiceError as error:
            # No path of this machine: it may end in a report.
            reason = str(error).replace(str(model), "it")
            raise BenchmarkError(f"{shown_path(model)} cannot be given to llama.cpp: {reason}") from error
    return file
