"""One target in several precisions: ours without speculation, transformers, and llama.cpp where it is installed."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch

from coppice.cli.topology import Topology
from coppice.lab.bench.client import TRANSFORMERS, Contender, Mode, Policy, Server, connected
from coppice.lab.bench.comparison import Sample, Setup, speed_ratios
from coppice.lab.bench.harness.experiment import BenchmarkError, ByRun, Samples, at_temperature
from coppice.lab.bench.peers.server import LLAMA_CPP, exported, serving
from coppice.lab.bench.transformers_baseline import Generate, load_model


@dataclass(frozen=True, slots=True)
class Precision:
    """Numbers of a target: the verifier's settings, those of transformers, and of a GGUF file's matrices."""

    name: str
    env: Mapping[str, str] = field(hash=False)
    # None: transformers has no such weights.
    dtype: torch.dtype | None
    gguf: str

    @property
    def ours(self) -> str:
        """Name of our contender, without speculation."""
        return f"off-{self.name}"

    @property
    def policy(self) -> Policy:
        """That of our contender."""
        setting = ", ".join(f"{key}={value}" for key, value in self.env.items())
        return Policy(self.ours, Mode.MODE_OFF, setting=setting)

    @property
    def llama_cpp(self) -> str:
        """Name of llama.cpp's contender."""
        return f"llama.cpp-{self.gguf}"

    @property
    def transformers(self) -> str:
        """Name of transformers' contender."""
        return f"{TRANSFORMERS}-{self.name}"


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        one.name: one
        for one in (
            Precision("f32", {"DTYPE": "float32"}, torch.float32, "f32"),
            Precision("bf16", {"DTYPE": "bfloat16"}, torch.bfloat16, "bf16"),
            Precision("int8", {"DTYPE": "auto", "QUANTIZATION": "int8"}, None, "q8_0"),
        )
    }
)


def parse_precisions(text: str) -> tuple[Precision, ...]:
    """Names with commas between. Raises BenchmarkError if one is unknown."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if unknown := [name for name in names if name not in PRECISIONS]:
        raise BenchmarkError(f"--precisions: must be of {', '.join(PRECISIONS)}, got {', '.join(unknown)}")
    return tuple(PRECISIONS[name] for name in names)


async def served_in(topology: Topology, precision: Precision) -> str:
    """Address of an orchestrator for a verifier of this precision, both beside the topology's.

    Raises ChildError if a service did not start.
    """
    verifier = await topology.add_verifier(f"verifier {precision.name}", precision.env)
    env = {"VERIFIER_ADDRESS": verifier, "DRAFTER_ADDRESSES": ""}
    return await topology.add_orchestrator(f"orchestrator {precision.name}", env)


async def in_precisions(
    setup: Setup, stack: contextlib.AsyncExitStack, served: Mapping[Precision, str], dtype: str, context: int
) -> list[Contender]:
    """Contenders in each precision: ours at its address, transformers, and llama.cpp where it is installed.

    `dtype` is that of the contenders that are there already. `context` bounds a prompt and its completion, in tokens.

    Raises:
        BenchmarkError: a server does not answer, or llama.cpp does not know the target.
        ChildError: llama.cpp did not start.
    """
    found: list[Contender] = []
    for one, address in served.items():
        found.append(Server(await connected(stack, address), one.policy))
        if one.dtype is not None and one.dtype != getattr(torch, dtype):
            found.append(Generate(load_model(setup.target, one.dtype), setup.threads, name=one.transformers))
    if LLAMA_CPP.interpreter() is None:
        return found
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    for one in served:
        file = exported(setup.target, directory, one.gguf)
        options = {"model": str(file), "threads": setup.threads, "context": context}
        found.append(await stack.enter_async_context(serving(LLAMA_CPP, one.llama_cpp, options)))
    return found


def precision_ratios(samples: Samples[Sample], precisions: Collection[Precision]) -> ByRun:
    """Ours over llama.cpp and over transformers in each precision, by temperature."""
    return {
        at_temperature(f"{one.ours}/{theirs}", temperature): values
        for temperature in samples.each("temperature")
        for one in precisions
        for theirs in (one.llama_cpp, one.transformers)
        if (values := speed_ratios(samples, one.ours, theirs, temperature))
    }
