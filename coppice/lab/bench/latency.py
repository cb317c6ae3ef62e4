"""One stream: every contender completes every prompt in turn. Also what the ablation of drafters measures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import torch

from coppice.lab.bench import figures
from coppice.lab.bench.contenders import (
    ASSISTED,
    OFF,
    ON,
    TRANSFORMERS,
    Completion,
    Contender,
    CoppiceContender,
    Mode,
    Task,
    get_model_info,
)
from coppice.lab.bench.environment import describe_machine
from coppice.lab.bench.forms import Form, form_ratios, form_remarks
from coppice.lab.bench.harness.experiment import (
    BenchmarkError,
    ByRun,
    Experiment,
    Ratios,
    Samples,
    at_temperature,
    over,
    progress,
    rounded,
    spread,
)
from coppice.lab.bench.harness.plots import Panel, bars, depths
from coppice.lab.bench.harness.report import Report, Row, Shown, document, shown_path
from coppice.lab.bench.harness.tables import Table
from coppice.lab.bench.prompts import Prompt, encoded_prompts
from coppice.lab.bench.transformers_baseline import TransformersContender, load_model, quiet_transformers, top_two_gap

# Enough for lazy initialisation, thread pools and the first allocations to be over.
NUM_WARM_UP_PROMPTS = 2
MAX_WARM_UP_TOKENS = 32
# Float32 logits of one row computed in two ways differ by less than this; a smaller gap is a tie to both.
NEAR_TIE = 1e-4
# Above this share of repeated 4-grams an output mostly copies itself.
LOOPING_SHARE = 0.3
# With speculation on, fewer rounds with a draft than this measure something else.
MIN_DRAFTED_SHARE = 0.8
MAX_DEPTHS_SHOWN = 6
MAX_PASS_SIZES_SHOWN = 6

SPEED_RATIOS = {
    "on/off": (ON, OFF),
    "on/transformers": (ON, TRANSFORMERS),
    "on/assisted": (ON, ASSISTED),
    "off/transformers": (OFF, TRANSFORMERS),
}
FORWARD_SHARES = {"forward-share": ON, "forward-share-off": OFF}
RATIO_NOTE = (
    "median over runs of the ratio within a run; plain names are T=0, '@T1' marks temperature 1; "
    "forward-share (on) and forward-share-off are shares of our requests' wall time inside the target's "
    "forward"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Runs, tokens and temperatures of a benchmark of single streams or of batches."""

    num_runs: int
    max_tokens: int
    temperatures: tuple[float, ...]
    seed: int
    # Of our own server's requests; transformers is not asked for any.
    repetition_penalty: float = 1.0

    def task(self, prompt_ids: Sequence[int], prompt: int, temperature: float) -> Task:
        """The same task in every run, so that runs differ by the machine's noise alone."""
        return Task(tuple(prompt_ids), self.max_tokens, temperature, self.seed + prompt, self.repetition_penalty)


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion within the benchmark; `prompt` is its index."""

    contender: str
    temperature: float
    run: int
    prompt: int
    completion: Completion


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Outputs that differ where they must not: same prompt, temperature, seed and run."""

    contender: str
    reference: str
    temperature: float
    run: int
    prompt: int

    def __str__(self) -> str:
        return (
            f"{self.contender} differs from {self.reference} at T={self.temperature:g} "
            f"on prompt {self.prompt + 1} (run {self.run + 1})"
        )


# Token ids by run and prompt.
Outputs = dict[tuple[int, int], tuple[int, ...]]


def measure(
    contenders: Sequence[Contender],
    prompts: Sequence[Sequence[int]],
    plan: Plan,
    on_sample: Callable[[], None] = lambda: None,
) -> Samples[Sample]:
    """Complete every prompt with every contender in turn, `num_runs` times at every temperature.

    Raises:
        BenchmarkError: a contender failed or did not produce the length asked for.
    """
    for temperature in plan.temperatures:
        for prompt_ids in prompts[:NUM_WARM_UP_PROMPTS]:
            for contender in contenders:
                tokens = min(plan.max_tokens, MAX_WARM_UP_TOKENS)
                contender.complete(Task(tuple(prompt_ids), tokens, temperature, plan.seed))
    loads = [(temperature, prompt) for temperature in plan.temperatures for prompt in range(len(prompts))]
    taken = []
    for turn in Experiment(contenders, loads, plan.num_runs).turns():
        (temperature, prompt), contender = turn.load, turn.arm
        completion = contender.complete(plan.task(prompts[prompt], prompt, temperature))
        if (given := len(completion.token_ids)) != plan.max_tokens:
            raise BenchmarkError(f"{contender.name} gave {given} tokens where {plan.max_tokens} were asked for")
        taken.append(Sample(contender.name, temperature, turn.run, prompt, completion))
        on_sample()
    return Samples(taken)


def figure_by_run(
    samples: Samples[Sample], contender: str, temperature: float, figure: figures.Figure
) -> list[float | None]:
    """A figure of a contender's completions in each run; empty where it did not take part."""
    chosen = samples.where(contender=contender, temperature=temperature)
    return chosen.by_run(lambda run: figure([sample.completion for sample in run]))


def speed_ratios(samples: Samples[Sample], first: str, second: str, temperature: float) -> list[float]:
    """The ratio of two contenders' tokens/s in each run; empty where one did not take part."""
    return over(*(figure_by_run(samples, name, temperature, figures.tokens_per_s) for name in (first, second)))


def outputs(samples: Samples[Sample], contender: str, temperature: float) -> Outputs:
    """A contender's token ids."""
    chosen = samples.where(contender=contender, temperature=temperature)
    return {(sample.run, sample.prompt): sample.completion.token_ids for sample in chosen}


def mismatches(samples: Samples[Sample]) -> list[Mismatch]:
    """Every output of ours with speculation on that is not what we gave with speculation off."""
    return [
        Mismatch(name, OFF, temperature, *key)
        for temperature in samples.each("temperature")
        for name in samples.each("contender")
        if name.startswith(ON)
        for key, token_ids in outputs(samples, name, temperature).items()
        if token_ids != outputs(samples, OFF, temperature).get(key)
    ]


def latency_rows(samples: Samples[Sample], contenders: Sequence[Contender]) -> list[Row]:
    """One flat row per contender and temperature."""
    return [_row(samples, one, temperature) for temperature in samples.each("temperature") for one in contenders]


def latency_ratios(samples: Samples[Sample]) -> ByRun:
    """The named ratios of each run."""
    found: ByRun = {}
    for temperature in samples.each("temperature"):
        for name, (first, second) in SPEED_RATIOS.items():
            found[at_temperature(name, temperature)] = speed_ratios(samples, first, second, temperature)
        for name, contender in FORWARD_SHARES.items():
            shares = figure_by_run(samples, contender, temperature, figures.forward_share)
            found[at_temperature(name, temperature)] = [share for share in shares if share is not None]
    return found


def remarks(rows: Sequence[Row]) -> list[str]:
    """Warnings about outputs that repeat themselves, and about speculation that hardly drafted."""
    found = []
    if looping := [row for row in rows if row["repeated_4grams"] >= LOOPING_SHARE]:
        worst = max(looping, key=lambda row: row["repeated_4grams"])
        temperatures = sorted({f"{row['temperature']:g}" for row in looping})
        found.append(
            f"Outputs at T={' and T='.join(temperatures)} loop: up to {worst['repeated_4grams']:.0%} of their 4-grams "
            f"occurred before in the same output ({worst['name']}). Repetition is easy to draft, so the speed-up there "
            "flatters speculation; compare it with the figures of a temperature without loops."
        )
    return found + [
        f"{row['name']} had a draft in only {row['drafted_share']:.0%} of its rounds: this is mostly plain decoding."
        for row in rows
        if row["contender"].startswith(ON) and (row["drafted_share"] or 0) < MIN_DRAFTED_SHARE
    ]


def _row(samples: Samples[Sample], contender: Contender, temperature: float) -> Row:
    group = samples.where(contender=contender.name, temperature=temperature)
    completions = [sample.completion for sample in group]
    over_off = spread("over", speed_ratios(samples, contender.name, OFF, temperature), 4)["over"]
    return {
        "name": f"{contender.name} T={temperature:g}",
        "contender": contender.name,
        "temperature": temperature,
        **spread("tokens_per_s", figure_by_run(samples, contender.name, temperature, figures.tokens_per_s)),
        "speed_over_off": over_off,
        "mean_acceptance_length": round(figures.mean_acceptance_length(completions), 4),
        "drafted_share": rounded(figures.drafted_share(completions), 4),
        "acceptance_by_depth": [round(share, 4) for share in figures.acceptance_by_depth(completions)],
        **{name: round(figure(completions), 4) for name, figure in figures.SHARES.items()},
        "ttft_ms": round(figures.median_ttft_ms(completions), 3),
        "repeated_4grams": round(figures.repeated_4grams(item.token_ids for item in completions), 4),
        **_identity(samples, contender.name, temperature),
        "ms_per_pass_by_rows": figures.ms_per_pass_by_rows(completions),
        "rounds": sum(item.num_rounds for item in completions),
        "tokens": sum(len(item.token_ids) for item in completions),
        **figures.draft_counts(completions),
        "note": contender.note,
    }


def _identity(samples: Samples[Sample], contender: str, temperature: float) -> Row:
    """Whom a contender must agree with, and on how many prompts it does (in every run).

    With speculation on we must repeat what we gave with it off. Under greedy decoding all should agree with plain
    `generate`; under sampling they cannot, because the random numbers differ.
    """
    is_plain = temperature != 0 or contender == TRANSFORMERS
    reference = OFF if contender.startswith(ON) else None if is_plain else TRANSFORMERS
    by_generate = outputs(samples, TRANSFORMERS, 0.0) if temperature == 0 else {}
    given = outputs(samples, contender, temperature)
    num_prompts = len({prompt for _, prompt in given})
    same = None if reference is None else _num_identical(given, outputs(samples, reference, temperature))
    return {
        "num_prompts": num_prompts,
        "identical": None if same is None else same == num_prompts,
        "identical_to": reference,
        "num_identical": same,
        "num_identical_to_transformers": _num_identical(given, by_generate) if by_generate else None,
    }


def _num_identical(given: Outputs, expected: Outputs) -> int:
    differing = {prompt for (run, prompt), ids in given.items() if ids != expected.get((run, prompt))}
    return len({prompt for _, prompt in given} - differing)


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position at which a greedy output leaves that of `generate`."""

    contender: str
    prompt: int
    position: int
    token_id: int
    transformers_token_id: int
    # Between the two best logits there, computed by transformers in one pass over the common prefix.
    top_2_gap: float
    top_2_token_ids: tuple[int, int]

    def record(self) -> Row:
        """For the report; a near tie is one that rounding alone explains."""
        near_tie = self.top_2_gap < NEAR_TIE and self.token_id in self.top_2_token_ids
        return {**asdict(self), "top_2_token_ids": list(self.top_2_token_ids), "near_tie": near_tie}

    def __str__(self) -> str:
        return (
            f"{self.contender} leaves transformers generate on prompt {self.prompt + 1} at token {self.position}: "
            f"{self.token_id} instead of {self.transformers_token_id}; the two best logits are {self.top_2_gap:.2e} "
            f"apart{' (a near tie)' if self.record()['near_tie'] else ''}"
        )


def find_divergences(
    samples: Samples[Sample],
    contenders: Sequence[str],
    prompts: Sequence[Sequence[int]],
    top_two: Callable[[Sequence[int]], tuple[float, tuple[int, int]]],
) -> list[Divergence]:
    """Where greedy outputs of `contenders` leave those of `generate`, first run."""
    expected = outputs(samples, TRANSFORMERS, 0.0)
    found = []
    for contender in contenders:
        for (run, prompt), given in sorted(outputs(samples, contender, 0.0).items()):
            reference = expected.get((run, prompt))
            if run == 0 and reference is not None and given != reference:
                pairs = enumerate(zip(given, reference, strict=True))
                at = next(index for index, (mine, theirs) in pairs if mine != theirs)
                gap, top_token_ids = top_two([*prompts[prompt], *reference[:at]])
                found.append(Divergence(contender, prompt, at, given[at], reference[at], gap, top_token_ids))
    return found


@dataclass(frozen=True, slots=True)
class LatencySuite:
    """One latency benchmark of a target and its small LM, served at `address`."""

    target: Path
    small_lm: Path
    prompts: tuple[Prompt, ...]
    plan: Plan
    threads: int
    # Node budget of plain `coppice-on`; None leaves it to the server.
    default_nodes: int | None = None
    sweep_nodes: tuple[int, ...] = ()
    # Where further forms of the deployment are served.
    forms: Mapping[Form, str] = field(default_factory=dict)

    def run(self, address: str) -> Report:
        """Measure and return the report.

        Raises:
            BenchmarkError: a contender failed.
        """
        machine = describe_machine()
        quiet_transformers()
        # Here, because the setting belongs to the thread that computes.
        torch.set_num_threads(self.threads)
        target, small_lm = load_model(self.target), load_model(self.small_lm)
        with contextlib.ExitStack() as channels:
            channel = channels.enter_context(grpc.insecure_channel(address))
            info = get_model_info(channel)
            for nodes in self.sweep_nodes:
                # It would be cut to the limit, and the row would carry the wrong name.
                if nodes > info.max_nodes:
                    raise BenchmarkError(
                        f"--sweep-nodes: {nodes} is above the server's limit of {info.max_nodes} nodes"
                    )
            own = (getattr(model.config, "max_position_embeddings", None) for model in (target, small_lm))
            context = min(filter(None, (info.max_context_tokens, *own)))
            prompt_ids, num_cut = encoded_prompts(self.target, self.prompts, self.plan.max_tokens, context)
            forced = Mode.MODE_FORCED
            contenders: list[Contender] = [
                TransformersContender(TRANSFORMERS, target),
                TransformersContender(ASSISTED, target, small_lm),
                CoppiceContender(OFF, channel, Mode.MODE_OFF),
                CoppiceContender(ON, channel, forced, self.default_nodes),
                *(CoppiceContender(f"{ON} nodes={nodes}", channel, forced, nodes) for nodes in self.sweep_nodes),
                *self._form_contenders(channels),
            ]
            total = len(contenders) * len(self.prompts) * len(self.plan.temperatures) * self.plan.num_runs
            with progress("latency", total) as advance:
                samples = measure(contenders, prompt_ids, self.plan, advance)
        rows = latency_rows(samples, contenders)
        apart = find_divergences(samples, [OFF, ASSISTED], prompt_ids, partial(top_two_gap, target))
        speeds = partial(speed_ratios, samples)
        by_run = partial(figure_by_run, samples)
        temperatures = samples.each("temperature")
        ratios = Ratios.of({**latency_ratios(samples), **form_ratios(temperatures, self.forms, speeds, by_run)})
        return document(
            "latency",
            machine,
            self._settings(prompt_ids, num_cut),
            rows,
            ratios,
            RATIO_NOTE,
            [*remarks(rows), *form_remarks(ratios.values, rows, list(self.forms)), *map(str, apart)],
            mismatches(samples),
            divergences=[one.record() for one in apart],
        )

    def _form_contenders(self, channels: contextlib.ExitStack) -> Iterator[Contender]:
        for form, address in self.forms.items():
            channel = channels.enter_context(grpc.insecure_channel(address))
            yield CoppiceContender(form.name, channel, form.mode, self.default_nodes, form.setting)

    def _settings(self, prompt_ids: Sequence[Sequence[int]], num_cut: int) -> Row:
        return {
            "target": shown_path(self.target),
            "small_lm": shown_path(self.small_lm),
            # Of each model, save that the drafter takes one by itself unless --threads names a number.
            "threads": self.threads,
            "num_runs": self.plan.num_runs,
            "max_tokens": self.plan.max_tokens,
            "seed": self.plan.seed,
            "prompts": prompt_settings(self.prompts, prompt_ids),
            "num_prompts": len(self.prompts),
            "forms": [
                {"contender": form.name, "form": form.kind.value, "delay_ms": form.delay_ms} for form in self.forms
            ],
            # Prompts that lost their beginning because the context has no room for all of it.
            "num_cut_prompts": num_cut,
        }


def prompt_settings(prompts: Sequence[Prompt], prompt_ids: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Where prompts come from and how long they are."""
    return [{"origin": prompt.origin, "tokens": len(ids)} for prompt, ids in zip(prompts, prompt_ids, strict=True)]


def depth_cell(row: Mapping[str, Any]) -> str:
    """The first entries of a row's acceptance by depth."""
    return " ".join(f"{share:.2f}" for share in row["acceptance_by_depth"][:MAX_DEPTHS_SHOWN])


def _identical_cell(row: Mapping[str, Any]) -> str:
    return f"{row['identical_to']} {row['num_identical']}/{row['num_prompts']}" if row["identical_to"] else ""


def _pass_cell(row: Mapping[str, Any]) -> str:
    passes = row["ms_per_pass_by_rows"]
    frequent = sorted(passes, key=lambda rows: -passes[rows]["count"])[:MAX_PASS_SIZES_SHOWN]
    cells = (f"{size}: {passes[size]['mean_ms']:.2f} x {passes[size]['count']}" for size in sorted(frequent, key=int))
    return "   ".join(cells)


SHOWN = Shown(
    tables=(
        Table(
            "Tokens per second, median of the runs (4-grams: share that is repeated in its output)",
            {
                "tokens/s": "{tokens_per_s:.1f}",
                "min to max": "{tokens_per_s_min:.1f} to {tokens_per_s_max:.1f}",
                "x off": "{speed_over_off:.2f}",
                "τ": "{mean_acceptance_length:.2f}",
                "forward": "{forward_share:.0%}",
                "linger": "{linger_share:.0%}",
                "ttft ms": "{ttft_ms:.1f}",
                "identical to": _identical_cell,
                "rep. 4-grams": "{repeated_4grams:.0%}",
            },
        ),
        Table(
            "Milliseconds per pass of the target by rows, most frequent sizes (x = passes)",
            {"rows: ms x passes": _pass_cell, "accepted at depth 1, 2, …": depth_cell},
        ),
    ),
    panels=(
        Panel(
            "One stream: median of runs, from min to max",
            bars,
            x="{contender}",
            y="tokens_per_s",
            series="T={temperature:g}",
            ylabel="tokens/s",
        ),
        Panel(
            "Rounds that accepted this deep, of those drafted so deep",
            depths,
            y="acceptance_by_depth",
            series="{name}",
            xlabel="depth in the tree",
            ylabel="share of rounds",
        ),
    ),
    line="{num_prompts} prompts x {max_tokens} tokens x {num_runs} runs, {threads} threads. "
    "Plain ratios are T=0, those at other temperatures say so.",
)
