"""Options that several suites share, and what is read from them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coppice.checkpoints.bundled import MODELS
from coppice.cli.options import Threads, here, refusing
from coppice.cli.topology import DEFAULT_KIND, NO_DRAFTER, DrafterSpec, Topology, TopologySpec
from coppice.kernels.cpu.openmp import set_spin_count
from coppice.usable_cores import usable_cores

if TYPE_CHECKING:
    from coppice.lab.bench.comparison import Setup
    from coppice.lab.bench.harness.report import Report, Shown
    from coppice.lab.bench.prompts import Prompt

# Defaults of every suite's --target and --drafter.
TARGET = MODELS / "target"
DRAFTER = f"{DEFAULT_KIND}={MODELS / DEFAULT_KIND}"
OUT = Path("results")
# Most characters of a prompt that is cut from a file.
MAX_CHARS = 900
# Most characters of what a user says in one turn of a generated conversation.
TURN_CHARS = 300
# Of arrivals; far above it, a client measures how fast it opens streams.
MAX_RATE = 10


def _directory(model: str) -> Path:
    return Path(here(str(model), "--target"))


Target = Annotated[
    Path,
    typer.Option(
        parser=_directory,
        metavar="NAME|DIR|FILE.gguf",
        help="The target: a short name of `coppice models`, a checkpoint directory or a GGUF file.",
    ),
]
Drafter = Annotated[str, typer.Option(metavar="KIND=DIR", help="The drafter's checkpoint directory.")]
Out = Annotated[Path, typer.Option(help="Directory for SUITE.json and the suite's picture.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Tokens of each completion, EOS or not.")]
Runs = Annotated[
    int, typer.Option(min=1, help="Runs, in each of which every contender has its turn; at least 3 to be quoted.")
]
Concurrency = Annotated[str, typer.Option(metavar="N,N,…", help="Requests at once.")]
TtftTarget = Annotated[float, typer.Option(min=0, help="Target of goodput: time to the first token.")]
TpotTarget = Annotated[float, typer.Option(min=0, help="Target of goodput: time per token after it.")]
Temperatures = Annotated[list[float] | None, typer.Option(help="Repeatable. Default: 0 and 1.")]

PromptsFile = Annotated[
    Path | None,
    typer.Option(
        help="JSON lines with `prompt` or `turns`, .gz too. "
        "Default: cut from standard-library files that no bundled model was trained on."
    ),
]
NumPrompts = Annotated[int, typer.Option(min=1, help="How many prompts to use; fewer if the file has fewer.")]
PerCategory = Annotated[
    int, typer.Option(min=0, help="Take so many prompts of each `category` of the file, and not --num-prompts.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of the generated prompts, and of sampling.")]


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """What every suite on a target is asked: of which target, where to write, and how many threads."""

    target: Target = TARGET
    out: Out = OUT
    threads: Threads = 0
    seed: Seed = 0

    def begin(self) -> None:
        """Before torch is imported: while another contender works, our waiting threads must sleep.

        Raises typer.BadParameter unless a checkpoint is there.
        """
        set_spin_count()
        require_checkpoint(self.target, "--target")

    def topology(self, drafter: str) -> TopologySpec:
        """The target and one drafter, or none; raises typer.BadParameter where `--drafter` says nothing."""
        drafters = () if drafter == NO_DRAFTER else (drafter_spec(drafter),)
        return TopologySpec(str(self.target), drafters, threads=self.threads)

    def finish(self, report: Report, shown: Shown) -> None:
        """Write the suite's files, print its tables, and exit with code 1 where outputs differ that must not."""
        finish(report, shown, self.out)


@dataclass(frozen=True, slots=True)
class PromptSuiteOptions(SuiteOptions):
    """Of suites on prompts, from a file too."""

    prompts: PromptsFile = None

    def choose_prompts(self, num_prompts: int, max_chars: int = MAX_CHARS, per_category: int = 0) -> list[Prompt]:
        """As `choose_prompts`, with the options' file and seed."""
        return choose_prompts(self.prompts, num_prompts, self.seed, max_chars, per_category)

    def setup(
        self,
        prompts: Sequence[Prompt],
        runs: int,
        max_tokens: int,
        temperatures: tuple[float, ...],
        repetition_penalty: float = 1.0,
    ) -> Setup:
        """What is measured on which prompts."""
        from coppice.lab.bench.comparison import Plan, Setup

        plan = Plan(runs, max_tokens, temperatures, self.seed, repetition_penalty)
        return Setup(self.target, tuple(prompts), plan, num_threads(self.threads))


def num_threads(threads: int) -> int:
    """The services' own default, which they take for 0 threads."""
    return threads or usable_cores()


def choose_prompts(
    path: Path | None, num_prompts: int, seed: int, max_chars: int = MAX_CHARS, per_category: int = 0
) -> list[Prompt]:
    """The prompts of a file, or held-out ones; raises typer.BadParameter where there are none to be had.

    With `per_category` so many of each category of the file.
    """
    from coppice.lab.bench.prompts import PromptsError, first_of_each_category, held_out_prompts, read_prompts

    if path is None and per_category:
        raise typer.BadParameter("--per-category: needs --prompts")
    with refusing("--prompts", PromptsError):
        if path is None:
            return held_out_prompts(num_prompts, seed, max_chars=max_chars)
        if per_category:
            return first_of_each_category(read_prompts(path), per_category)
        return read_prompts(path)[:num_prompts]


def drafter_spec(drafter: str) -> DrafterSpec:
    """What `--drafter` says; raises typer.BadParameter where that is nothing."""
    with refusing("--drafter", ValueError):
        return DrafterSpec.parse(drafter)


def has_checkpoint(directory: Path) -> bool:
    """Whether there is a model, or a drafter that uses another's."""
    return any((directory / name).is_file() for name in ("config.json", "drafter.json"))


def require_checkpoint(directory: Path, option: str) -> None:
    """Raise typer.BadParameter unless a checkpoint is there."""
    if not has_checkpoint(directory):
        raise typer.BadParameter(f"{option}: no checkpoint in {directory}")


def numbers(text: str, option: str, most: int | None = None, least: int = 0) -> tuple[int, ...]:
    """Positive numbers with commas between, each once, at least `least` of them and none above `most`.

    Raises typer.BadParameter where that is not so.
    """
    try:
        values = tuple(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError:
        values = (0,)
    if any(number < 1 for number in values):
        raise typer.BadParameter(f"{option}: needs numbers such as 4,8,16, got {text!r}")
    if most is not None and max(values, default=0) > most:
        raise typer.BadParameter(f"{option}: at most {most}, got {text!r}")
    if len(values) < least:
        raise typer.BadParameter(f"{option}: needs at least one number")
    return values


def rates(text: str, option: str, below: float = MAX_RATE) -> tuple[float, ...]:
    """Numbers above 0 with commas between, each once; raises typer.BadParameter where one is none."""
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",") if part.strip()))
    except ValueError:
        found = (0.0,)
    if not all(0 < rate < below for rate in found):
        bound = f" and below {below:g}" if below < math.inf else ""
        raise typer.BadParameter(f"{option}: needs numbers above 0{bound} such as 0.3,0.9, got {text!r}")
    return found


def choice(text: str, option: str, known: Sequence[str]) -> str:
    """One of the known words; raises typer.BadParameter where it is none."""
    if text not in known:
        raise typer.BadParameter(f"{option}: must be one of {', '.join(known)}, got {text!r}")
    return text


def length_range(text: str) -> tuple[int, int]:
    """The bounds that `--output-tokens` says; raises typer.BadParameter where it says none."""
    lengths = numbers(text, "--output-tokens")
    if not 1 <= len(lengths) <= 2 or list(lengths) != sorted(lengths):
        raise typer.BadParameter(f"--output-tokens: needs a range such as 32,128, got {text!r}")
    return lengths[0], lengths[-1]


def choose_parts(text: str | None, known: Sequence[str], option: str = "--parts") -> frozenset[str]:
    """Names with commas between, or all that are known; raises typer.BadParameter where one is not."""
    parts = frozenset(part.strip() for part in (text or ",".join(known)).split(","))
    if unknown := sorted(parts - set(known)):
        raise typer.BadParameter(f"{option}: must be of {', '.join(known)}, got {', '.join(unknown)}")
    return parts


def choose_temperatures(chosen: list[float] | None) -> tuple[float, ...]:
    """The temperatures asked for, each once, or 0 and 1; raises typer.BadParameter where one is out of range."""
    temperatures = tuple(dict.fromkeys(chosen or (0.0, 1.0)))
    for value in temperatures:
        if not 0 <= value <= 100:
            raise typer.BadParameter(f"--temperature: must be in [0, 100], got {value}")
    return temperatures


def measured(measure: Callable[[Topology], Coroutine[Any, Any, Report]], spec: TopologySpec) -> Report:
    """The report of services as `spec` says."""
    from coppice.lab.bench.services import measure_on, start_all

    return asyncio.run(measure_on(spec, start_all, measure))


def finish(report: Report, shown: Shown, out: Path) -> None:
    """Write a suite's files, print its tables, and exit with code 1 where outputs differ that must not."""
    from coppice.lab.bench.harness.report import write_report

    typer.echo(write_report(report, shown, out))
    if report["mismatches"]:
        raise typer.Exit(1)
