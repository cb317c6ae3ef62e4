"""`coppice bench ablation`: what each drafter, shape of tree, way to choose children or part of a pass is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coppice.checkpoints.bundled import MODELS
from coppice.cli.bench import options as opt
from coppice.cli.bench.services import finish, run_or_exit
from coppice.cli.options import Threads
from coppice.cli.topology import DEFAULT_KIND, DrafterSpec, TopologySpec
from coppice.core.denoising import MAX_BLOCK_TOKENS, MAX_DENOISING_STEPS

if TYPE_CHECKING:
    from coppice.lab.bench.ablation.in_pass import InPass
    from coppice.lab.bench.harness.report import Report, Shown

ASYNCHRONOUS, SYNCHRONOUS = "asynchronous", "synchronous"
DRAFTERS, IN_PASS = "drafters", "in-pass"
# Prompts, tokens, runs and temperatures of each suite, and with --quick.
USUAL = {DRAFTERS: (8, 96, 3, [0.0, 0.7, 1.0]), IN_PASS: (4, 128, 2, [0.0, 1.0])}
QUICK = (2, 24, 1, [0.0, 1.0])
PARTS_IN_PASS = ("drafting", "pruning")
# A verifier's own limit on a round's nodes.
MOST_NODES = 64
# Of plain decoding on two cores, to say beforehand about how long it will take.
TOKENS_PER_S = 150
# Room for the sequences of a benchmark; so many verifiers at once cannot each have the usual gibibyte.
KV_CACHE_MIB = 256


def ablation(
    suite: Annotated[
        str,
        typer.Option(metavar="SUITE", help="drafters, or in-pass: what the target does in its own passes is worth."),
    ] = DRAFTERS,
    prompts: opt.PromptsFile = None,
    target: opt.Target = opt.TARGET,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=DIR",
            help="Repeatable, one of a kind. Default: every kind that is in models/; in-pass: one, small-lm.",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Directory for ablation.json and .png, or in-pass.json and .png.")
    ] = opt.OUT,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="How many prompts to use. Default: 8; in-pass: 4, batches what they need.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of each completion. Default: 96; in-pass: 128.")
    ] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="Passes over all prompts. Default: 3; in-pass: 2.")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Repeatable. Default: 0, 0.7 and 1; in-pass: 0 and 1.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            help="drafters: most nodes of a round's tree, all sources together; the orchestrator's MAX_NODES. "
            "Default: 15, its own.",
        ),
    ] = None,
    masks: Annotated[
        str | None, typer.Option(metavar="K,K,…", help="drafters: masks of semi-ar drafters to try. Default: 2,4.")
    ] = None,
    gammas: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="drafters: tokens of diffusion blocks to try. Default: 4,8.")
    ] = None,
    denoising_steps: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="drafters: passes over each of these blocks. Default: 1,2.")
    ] = None,
    ahead_steps: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,…", help="drafters: most steps of a small LM behind likely outcomes. Default: 2,8,32."
        ),
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,…", help="drafters: most tokens of a sequence that they read. Default: 128,512,2048."
        ),
    ] = None,
    rounds: Annotated[
        str | None,
        typer.Option(
            metavar="FORM",
            help="drafters: asynchronous, as it serves (default); synchronous: each round waits for its draft, so that "
            "counts, τ among them, do not depend on how busy the machine is, and speed is not what it could be.",
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=100.0,
            help="drafters: of every request. Greedy outputs of small models loop, which flatters T=0; with 1.3 they "
            "hardly do. Default: 1, none.",
        ),
    ] = None,
    space: Annotated[
        Path | None, typer.Option(help="in-pass: the target's adapter. Default: models/space where there is one.")
    ] = None,
    early_head: Annotated[
        Path | None, typer.Option(help="in-pass: the early head. Default: the bundled target's.")
    ] = None,
    batches: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="in-pass: requests at once, with pruning. Default: 1,4,16.")
    ] = None,
    tree_sizes: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="in-pass: nodes of trees that are pruned. Default: 8,16,32.")
    ] = None,
    parts: Annotated[
        str | None,
        typer.Option(
            metavar="PART,PART,…",
            help="What is compared, of sources, shape, coupling, acceptance, calibration, masks, gamma, ahead and "
            "context; in-pass: of drafting and pruning. Default: all.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="2 prompts x 24 tokens, 1 run, T=0 and 1, no grids.")] = False,
    threads: Threads = 0,
    seed: opt.Seed = 0,
) -> None:
    """Drafters alone, in pairs and all; trees and chains; coupling and calibration: in turn with speculation off.

    With --suite in-pass: the target's own drafts and early pruning. Exit code 1 when a token is not what it is with
    speculation off, but where trees are drawn.
    """
    opt.begin(target)
    theirs = {"--space": space, "--early-head": early_head, "--batches": batches, "--tree-sizes": tree_sizes}
    ours = {
        "--nodes": nodes,
        "--masks": masks,
        "--gammas": gammas,
        "--denoising-steps": denoising_steps,
        "--ahead-steps": ahead_steps,
        "--contexts": contexts,
        "--rounds": rounds,
        "--repetition-penalty": repetition_penalty,
    }
    _refuse(suite, theirs if suite == DRAFTERS else ours)
    usual = QUICK if quick else USUAL[suite]
    sizes = num_prompts or usual[0], max_tokens or usual[1], runs or usual[2]
    temperatures = opt.choose_temperatures(temperature or usual[3])
    if suite == IN_PASS:
        choice = InPassChoice(target, drafter, space, early_head, batches, tree_sizes, parts, quick)
        report, shown = _measured_in_pass(choice, prompts, sizes, temperatures, seed, threads)
        finish(report, shown, out)
        return
    drafters = _drafters(drafter)
    form = rounds or ASYNCHRONOUS
    if form not in (ASYNCHRONOUS, SYNCHRONOUS):
        raise typer.BadParameter(f"--rounds: must be {ASYNCHRONOUS} or {SYNCHRONOUS}, got {rounds!r}")
    tried = (
        opt.numbers(masks or "2,4", "--masks"),
        opt.numbers(gammas or "4,8", "--gammas", MAX_BLOCK_TOKENS),
        opt.numbers(denoising_steps or "1,2", "--denoising-steps", MAX_DENOISING_STEPS),
        opt.numbers(ahead_steps or "2,8,32", "--ahead-steps"),
        opt.numbers(contexts or "128,512,2048", "--contexts"),
    )
    chosen = opt.choose_prompts(prompts, sizes[0], seed)

    from coppice.lab.bench.ablation.drafters import PARTS, SHOWN, AblationSuite, Grids, make_groups
    from coppice.lab.bench.comparison import Plan
    from coppice.lab.bench.services import measure_on
    from orchestrator.config import Config

    most = nodes or Config.model_fields["max_nodes"].default
    chosen_parts, grids = opt.choose_parts(parts, PARTS), Grids() if quick else Grids(*tried)
    groups = make_groups(drafters, temperatures, most, grids, chosen_parts, synchronous=form == SYNCHRONOUS)
    if not groups:
        raise typer.BadParameter(f"--parts: these drafters and temperatures give nothing to compare in {parts}")
    plan = Plan(sizes[2], sizes[1], temperatures, seed, repetition_penalty or 1.0)
    measured = AblationSuite(opt.setup(target, chosen, plan, threads), drafters, groups, most, form)
    spec = TopologySpec(str(target), (), threads=threads)
    finish(run_or_exit(measure_on(spec, measured.start, measured.run)), SHOWN, out)


def _refuse(suite: str, others: Mapping[str, object]) -> None:
    """Raises typer.BadParameter where there is no such suite, or an option is one of another suite's."""
    if suite not in (DRAFTERS, IN_PASS):
        raise typer.BadParameter(f"--suite: must be {DRAFTERS} or {IN_PASS}, got {suite!r}")
    for option, value in others.items():
        if value is not None:
            raise typer.BadParameter(f"{option}: means nothing to --suite {suite}")


def _drafters(texts: list[str] | None) -> tuple[DrafterSpec, ...]:
    """One drafter of each kind; raises typer.BadParameter where there is none, or two of a kind."""
    from drafter_svc.drafters.kinds import KINDS

    if texts is None:
        found = tuple(DrafterSpec(kind, str(MODELS / kind)) for kind in KINDS if opt.has_checkpoint(MODELS / kind))
    else:
        found = tuple(map(opt.drafter_spec, texts))
    kinds = [spec.kind for spec in found]
    if not kinds or len(set(kinds)) < len(kinds):
        raise typer.BadParameter("--drafter: needs one checkpoint of each kind, and at least one")
    for spec in found:
        opt.require_checkpoint(Path(spec.model), "--drafter")
    return found


@dataclass(frozen=True, slots=True)
class InPassChoice:
    """What the command line says of the models, trees and batches of --suite in-pass; None leaves it to the suite."""

    target: Path
    drafter: list[str] | None
    space: Path | None
    early_head: Path | None
    batches: str | None
    tree_sizes: str | None
    parts: str | None
    quick: bool

    def compared(self) -> tuple[InPass, tuple[str, ...]]:
        """What there is to compare, and what is left out and why.

        Raises:
            typer.BadParameter: an option makes no sense, or there is nothing to compare.
        """
        from coppice.lab.bench.ablation.in_pass import GROUPS_TRIED, MASKS_TRIED, InPass

        texts = self.drafter or [DEFAULT_KIND]
        if len(texts) > 1:
            raise typer.BadParameter("--drafter: --suite in-pass takes one")
        drafter = opt.drafter_spec(texts[0])
        opt.require_checkpoint(Path(drafter.model), "--drafter")
        batches = opt.numbers(self.batches or ("1,4" if self.quick else "1,4,16"), "--batches")
        trees = opt.numbers(self.tree_sizes or ("8" if self.quick else "8,16,32"), "--tree-sizes")
        if max(trees) > MOST_NODES:
            raise typer.BadParameter(f"--tree-sizes: a round has at most {MOST_NODES} nodes, got {max(trees)}")
        space, num_masks = _space(self.space)
        head, missing = _early_head(self.early_head, self.target)
        left_out = [missing] if missing else []
        if not space:
            left_out.append("The target's own drafts are left out: no adapter (coppice train space, --space).")
        if not space and not head:
            raise typer.BadParameter(" ".join(["nothing to compare.", *left_out]))
        parts = opt.choose_parts(self.parts, PARTS_IN_PASS)
        drafting, pruning = (part in parts for part in PARTS_IN_PASS)
        if not (drafting or (pruning and head)):
            raise typer.BadParameter(" ".join(["--parts: nothing to compare.", *left_out]))
        masks, groups = ((min(3, num_masks),), (1,)) if self.quick else (MASKS_TRIED, GROUPS_TRIED)
        if unknown := [count for count in masks if space and count > num_masks]:
            left_out.append(f"k={', '.join(map(str, unknown))} are left out: the adapter has {num_masks} masks.")
        prunes = pruning and bool(head)
        sizes = (trees, batches) if prunes else ((), ())
        what = InPass(drafter, space, num_masks, head if prunes else "", masks, groups, *sizes, drafting=drafting)
        return what, tuple(left_out)


def _measured_in_pass(
    choice: InPassChoice,
    prompts: Path | None,
    sizes: tuple[int, int, int],
    temperatures: tuple[float, ...],
    seed: int,
    threads: int,
) -> tuple[Report, Shown]:
    """The report, and how it is shown; `sizes` are prompts, tokens and runs."""
    what, left_out = choice.compared()
    count, length, num_runs = sizes
    chosen = opt.choose_prompts(prompts, max(count, *what.batch_sizes, 1), seed)

    from coppice.lab.bench.ablation.groups import num_requests
    from coppice.lab.bench.ablation.in_pass import InPassSuite, make_groups, shown
    from coppice.lab.bench.ablation.variants import variants_of
    from coppice.lab.bench.comparison import Plan
    from coppice.lab.bench.services import measure_on

    groups = make_groups(what, temperatures)
    setup = opt.setup(choice.target, chosen, Plan(num_runs, length, temperatures, seed), threads)
    suite = InPassSuite(setup, what, groups, min(count, len(chosen)), left_out)
    total = num_requests(groups, suite.num_prompts, num_runs)
    num_verifiers = len({one.verifier for one in variants_of(groups)})
    typer.echo(
        f"{total} completions of {length} tokens with {num_verifiers} verifiers: "
        f"{total * length / TOKENS_PER_S / 60:.0f} minutes at {TOKENS_PER_S} tokens/s, and their start",
        err=True,
    )
    spec = TopologySpec(str(choice.target), (), threads=threads, kv_cache_mib=KV_CACHE_MIB)
    report = run_or_exit(measure_on(spec, suite.start, suite.run))
    return report, shown(report)


def _space(directory: Path | None) -> tuple[str, int]:
    """The adapter's directory and its number of masks; nothing where none was asked for and none is bundled."""
    from coppice.core.errors import IncompatibleError
    from verifier_svc.extras.redraft.space_adapter import DESCRIPTION_FILE, load_adapter

    chosen = directory or MODELS / "space"
    if directory is None and not (chosen / DESCRIPTION_FILE).is_file():
        return "", 0
    try:
        return str(chosen.resolve()), load_adapter(chosen).num_masks
    except IncompatibleError as error:
        raise typer.BadParameter(f"--space: {error}") from error


def _early_head(directory: Path | None, target: Path) -> tuple[str, str]:
    """The head's directory, the bundled target's by default, or why early pruning is left out."""
    chosen = directory or MODELS / "early-head"
    is_bundled = target.resolve() == (MODELS / "target").resolve()
    exists = (chosen / "early_head.json").is_file() and (directory is not None or is_bundled)
    if directory is not None and not exists:
        raise typer.BadParameter(f"--early-head: no head in {directory}")
    if not exists:
        return "", "Early pruning is left out: no head (coppice train early-exit, --early-head)."
    return str(chosen.resolve()), ""
