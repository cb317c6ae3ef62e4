"""`coppice demo`: the same completions without and with speculation, side by side."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import typer

from coppice.cli.child import ChildError
from coppice.cli.demo_prompts import PROMPTS, DemoPrompt
from coppice.cli.options import DEFAULT_TARGET, Device, Drafters, Target, Threads, topology_spec
from coppice.cli.topology import TopologySpec, running
from coppice.client import Client, Options, RequestFailedError
from coppice.completion import Completion

TEMPERATURES = (0.0, 1.0)
SEED = 20
WARM_UP_TOKENS = 16
# For one completion; it takes seconds, unless something hangs.
TIMEOUT_S = 120.0
INDENT = "    "

Show = Callable[[str], None]


class Generator(Protocol):
    """What the demo asks of a client."""

    async def generate(
        self, prompt: str | Sequence[int], options: Options | None = None, timeout_s: float = ...
    ) -> Completion:
        """Complete a prompt."""
        ...


@dataclass(frozen=True, slots=True)
class DemoRun:
    """A completion, and how long the client waited for all of it."""

    completion: Completion
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the output over the whole time, the prompt's included."""
        return len(self.completion.token_ids) / self.seconds


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt without and with speculation."""

    prompt: DemoPrompt
    temperature: float
    plain: DemoRun
    speculative: DemoRun

    @property
    def is_identical(self) -> bool:
        """Whether both gave the same tokens and ended for the same reason."""
        one, other = self.plain.completion, self.speculative.completion
        return one.token_ids == other.token_ids and one.finish_reason == other.finish_reason

    @property
    def ratio(self) -> float:
        """Speed with speculation over speed without."""
        return self.speculative.tokens_per_s / self.plain.tokens_per_s

    @property
    def tau(self) -> float:
        """Tokens committed per round."""
        return self.speculative.completion.speculation.mean_acceptance_length


def demo(
    prompts: Annotated[int, typer.Option(min=1, max=len(PROMPTS), help="How many prompts to complete.")] = len(PROMPTS),
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each completion.")] = 128,
    target: Target = DEFAULT_TARGET,
    drafter: Drafters = None,
    device: Device = "",
    threads: Threads = 0,
) -> None:
    """Complete a few prompts without and with speculation and compare speed and text.

    Starts three services of its own and stops them. Exit code 1 when an output is not the same both ways.
    """
    spec = topology_spec(target, drafter, device=device, threads=threads)
    try:
        comparisons = asyncio.run(_run(spec, PROMPTS[:prompts], max_tokens))
    except (ChildError, RequestFailedError) as error:
        typer.echo(f"coppice: {error}", err=True)
        raise typer.Exit(1) from error
    if not all(comparison.is_identical for comparison in comparisons):
        raise typer.Exit(1)


async def _run(spec: TopologySpec, prompts: Sequence[DemoPrompt], max_tokens: int) -> list[Comparison]:
    typer.echo("starting verifier, drafter and orchestrator ...")
    async with running(spec) as topology, Client(topology.address) as client:
        comparisons = await compare_all(client, prompts, max_tokens, typer.echo)
    typer.echo("stopped the services")
    return comparisons


async def compare_all(
    client: Generator, prompts: Sequence[DemoPrompt], max_tokens: int, show: Show
) -> list[Comparison]:
    """Complete every prompt at every temperature both ways, showing each comparison and then a summary."""
    for speculation in ("off", "auto"):
        await client.generate(prompts[0].text, _options(speculation, 0.0, WARM_UP_TOKENS), TIMEOUT_S)
    comparisons = []
    for temperature in TEMPERATURES:
        for number, prompt in enumerate(prompts, start=1):
            comparison = await _compare(client, prompt, temperature, max_tokens, plain_first=number % 2 == 1)
            comparisons.append(comparison)
            show(describe(comparison, f"{number}/{len(prompts)}"))
    show(summarise(comparisons))
    return comparisons


async def _compare(
    client: Generator, prompt: DemoPrompt, temperature: float, max_tokens: int, *, plain_first: bool
) -> Comparison:
    # In turn, so that neither way always meets the warmer machine.
    measured = {}
    for speculation in ("off", "auto") if plain_first else ("auto", "off"):
        options = _options(speculation, temperature, max_tokens)
        start = time.perf_counter()
        completion = await client.generate(prompt.text, options, TIMEOUT_S)
        measured[speculation] = DemoRun(completion, time.perf_counter() - start)
    return Comparison(prompt, temperature, measured["off"], measured["auto"])


def _options(speculation: str, temperature: float, max_tokens: int) -> Options:
    # A salt for each, so that neither way finds what the other has computed for its prompt.
    salt = f"{speculation} {temperature:g}"
    return Options(max_tokens=max_tokens, temperature=temperature, seed=SEED, speculation=speculation, cache_salt=salt)


def describe(comparison: Comparison, number: str) -> str:
    """A comparison as text: the prompt dim, what follows it plain, then the figures."""
    title = f"── {number}  {comparison.prompt.name}, temperature {comparison.temperature:g} "
    completion = comparison.speculative.completion
    lines = [
        "",
        typer.style(title.ljust(78, "─"), bold=True),
        typer.style(comparison.prompt.text, dim=True) + completion.text,
        "",
        f"{INDENT}without speculation {comparison.plain.tokens_per_s:8.1f} tokens/s",
        f"{INDENT}with speculation    {comparison.speculative.tokens_per_s:8.1f} tokens/s   "
        f"{comparison.ratio:.2f}x   τ {comparison.tau:.2f}   "
        f"identical: {'yes' if comparison.is_identical else 'no'}",
    ]
    if not comparison.is_identical:
        lines += ["", f"{INDENT}without speculation it was:", comparison.plain.completion.text]
    return "\n".join(lines)


def summarise(comparisons: Sequence[Comparison]) -> str:
    """The medians by temperature, and whether every output was the same both ways."""
    lines = ["", typer.style("── medians ".ljust(78, "─"), bold=True)]
    lines.append(f"{INDENT}temperature   without   with speculation   ratio      τ")
    for temperature in dict.fromkeys(comparison.temperature for comparison in comparisons):
        chosen = [comparison for comparison in comparisons if comparison.temperature == temperature]
        plain = statistics.median(comparison.plain.tokens_per_s for comparison in chosen)
        speculative = statistics.median(comparison.speculative.tokens_per_s for comparison in chosen)
        ratio = statistics.median(comparison.ratio for comparison in chosen)
        tau = statistics.median(comparison.tau for comparison in chosen)
        lines.append(f"{INDENT}{temperature:11g} {plain:9.1f} {speculative:9.1f} tokens/s {ratio:6.2f}x {tau:6.2f}")
    same = sum(comparison.is_identical for comparison in comparisons)
    verdict = "yes" if same == len(comparisons) else "NO"
    lines += ["", f"{INDENT}identical: {verdict} ({same} of {len(comparisons)} outputs, token for token)"]
    return "\n".join(lines)
