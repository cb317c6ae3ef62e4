"""`coppice demo`: the same completions without and with speculation, side by side."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import grpc
import typer

from coppice.checkpoints.catalogue import CATALOGUE
from coppice.cli.options import DEFAULT_CHAT_TARGET, DEFAULT_TARGET, Device, Drafters, Threads, topology_spec
from coppice.cli.topology import TopologySpec, running
from coppice.client import Client, Options, RequestFailedError
from coppice.completion import Completion

TEMPERATURES = (0.0, 1.0)
# Answers of a chat model take longer: above temperature 0 there are as many as show that they are the same, too.
NUM_SAMPLED_QUESTIONS = 2
CODE_TOKENS, ANSWER_TOKENS = 128, 64
SEED = 20
WARM_UP_TOKENS = 16
# For one completion; it takes seconds, unless something hangs.
TIMEOUT_S = 120.0
INDENT = "    "

Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A prompt and its name; the target's chat template is applied to a question."""

    name: str
    prompt: str
    is_question: bool


_LINES = Path(__file__).with_name("demo_prompts.jsonl").read_text(encoding="utf-8").splitlines()
_ALL = [DemoPrompt(**json.loads(line)) for line in _LINES]
# Questions for a chat model; beginnings of Python code for the bundled target.
QUESTIONS = [one for one in _ALL if one.is_question]
PROMPTS = [one for one in _ALL if not one.is_question]


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
        return self.speculative.tokens_per_s / self.plain.tokens_per_s

    @property
    def tau(self) -> float:
        """Tokens committed per round."""
        return self.speculative.completion.speculation.mean_acceptance_length


def demo(
    prompts: Annotated[int, typer.Option(min=1, max=len(PROMPTS), help="How many prompts to complete.")] = len(PROMPTS),
    max_tokens: Annotated[
        int, typer.Option(min=0, help=f"Tokens of each output. 0: {ANSWER_TOKENS} of an answer, {CODE_TOKENS} of code.")
    ] = 0,
    target: Annotated[
        str,
        typer.Option(
            metavar="NAME|DIR|FILE.gguf|HUB_ID",
            help=f"The target. Default: {DEFAULT_CHAT_TARGET} where it is installed, else the bundled one.",
        ),
    ] = "",
    drafter: Drafters = None,
    device: Device = "",
    threads: Threads = 0,
) -> None:
    """Answer six questions, or complete code, without and with speculation, and compare speed and tokens.

    Starts services of its own and stops them. Exit code 1 when an output is not the same both ways.
    """
    known = CATALOGUE[DEFAULT_CHAT_TARGET]
    if not target:
        target = known.name if known.is_here() else DEFAULT_TARGET
        if target == DEFAULT_TARGET:
            typer.echo(f"{known.what} is not installed: the bundled model of Python code takes its place", err=True)
    spec = topology_spec(target, drafter, device=device, threads=threads)
    comparisons = asyncio.run(_run(spec, prompts, max_tokens))
    if not all(comparison.is_identical for comparison in comparisons):
        raise typer.Exit(1)


async def _run(spec: TopologySpec, num_prompts: int, max_tokens: int) -> list[Comparison]:
    typer.echo("starting the services ...")
    async with running(spec) as topology, Client(topology.address) as client:
        is_chat = await has_chat_template(client)
        prompts = (QUESTIONS if is_chat else PROMPTS)[:num_prompts]
        tokens = max_tokens or (ANSWER_TOKENS if is_chat else CODE_TOKENS)
        comparisons = await compare_all(client, prompts, tokens, typer.echo, partial(typer.echo, nl=False))
    typer.echo("stopped the services")
    return comparisons


async def has_chat_template(client: Client) -> bool:
    """Whether the target answers conversations. Raises RequestFailedError if the server failed for another reason."""
    try:
        await client.chat([{"role": "user", "content": "Hello"}], Options(max_tokens=1), TIMEOUT_S)
    except RequestFailedError as error:
        if error.code is not grpc.StatusCode.UNIMPLEMENTED:
            raise
        return False
    return True


async def compare_all(
    client: Client, prompts: Sequence[DemoPrompt], max_tokens: int, show: Show, stream: Show = lambda _: None
) -> list[Comparison]:
    """Complete every prompt at every temperature both ways, showing each comparison and then a summary.

    `stream` gets the text of the first way, piece by piece.
    """
    for speculation in ("off", "auto"):
        await _complete(client, prompts[0], _options(speculation, 0.0, WARM_UP_TOKENS), lambda _: None)
    comparisons = []
    for temperature in TEMPERATURES:
        is_short = temperature and prompts[0].is_question
        chosen = prompts[:NUM_SAMPLED_QUESTIONS] if is_short else prompts
        for number, prompt in enumerate(chosen, start=1):
            show(heading(prompt, temperature, f"{number}/{len(chosen)}"))
            comparison = await _compare(client, prompt, temperature, max_tokens, stream, plain_first=number % 2 == 1)
            comparisons.append(comparison)
            show(describe(comparison))
    show(summarise(comparisons))
    return comparisons


async def _compare(
    client: Client, prompt: DemoPrompt, temperature: float, max_tokens: int, stream: Show, *, plain_first: bool
) -> Comparison:
    # In turn, so that neither way always meets the warmer machine.
    measured: dict[str, DemoRun] = {}
    for speculation in ("off", "auto") if plain_first else ("auto", "off"):
        options = _options(speculation, temperature, max_tokens)
        start = time.perf_counter()
        completion = await _complete(client, prompt, options, stream if not measured else lambda _: None)
        measured[speculation] = DemoRun(completion, time.perf_counter() - start)
    return Comparison(prompt, temperature, measured["off"], measured["auto"])


async def _complete(client: Client, prompt: DemoPrompt, options: Options, stream: Show) -> Completion:
    if prompt.is_question:
        chunks = client.stream_chat([{"role": "user", "content": prompt.prompt}], options, TIMEOUT_S)
    else:
        chunks = client.stream(prompt.prompt, options, TIMEOUT_S)
    async for chunk in chunks:
        stream(chunk.text)
    return chunks.result()


def _options(speculation: str, temperature: float, max_tokens: int) -> Options:
    # A salt for each, so that neither way finds what the other has computed for its prompt.
    salt = f"{speculation} {temperature:g}"
    return Options(max_tokens=max_tokens, temperature=temperature, seed=SEED, speculation=speculation, cache_salt=salt)


def heading(prompt: DemoPrompt, temperature: float, number: str) -> str:
    """A title, and the prompt dim; what follows it is streamed."""
    title = f"── {number}  {prompt.name}, temperature {temperature:g} "
    text = typer.style(prompt.prompt, dim=True)
    return f"\n{typer.style(title.ljust(78, '─'), bold=True)}\n{text}" + ("\n" if prompt.is_question else "")


def describe(comparison: Comparison) -> str:
    """The figures of a comparison, and the text of plain decoding where it differs."""
    lines = [
        "",
        "",
        f"{INDENT}without speculation {comparison.plain.tokens_per_s:8.1f} tokens/s",
        f"{INDENT}with speculation    {comparison.speculative.tokens_per_s:8.1f} tokens/s   "
        f"{comparison.ratio:.2f}x   τ {comparison.tau:.2f}   "
        f"identical: {'yes' if comparison.is_identical else 'no'}",
    ]
    if not comparison.is_identical:
        for name, run in (("without", comparison.plain), ("with", comparison.speculative)):
            lines += ["", f"{INDENT}{name} speculation it was:", run.completion.text]
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
