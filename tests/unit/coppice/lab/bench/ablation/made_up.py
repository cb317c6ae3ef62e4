"""Drafters and samples that are made up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from coppice.cli.topology import DrafterSpec
from coppice.completion import Speculation
from coppice.lab.bench.ablation.suite import Measured
from coppice.lab.bench.ablation.variants import Group, Variant
from coppice.lab.bench.contenders import OFF, ON, Completion
from coppice.lab.bench.counters import Counters
from coppice.lab.bench.harness.experiment import Samples
from coppice.lab.bench.latency import Sample
from tests.unit.coppice.lab.bench.named_contender import NamedContender

SMALL_LM = DrafterSpec("small-lm", "models/small-lm")
SEMI_AR = DrafterSpec("semi-ar", "models/semi-ar")
DIFFUSION = DrafterSpec("diffusion", "models/diffusion")
NUM_TOKENS = 120


def measured(
    group: str,
    taus: Mapping[tuple[str, float], Iterable[float]],
    readings: Mapping[str, Counters] | None = None,
    outputs: Mapping[str, int] | None = None,
    hits: Mapping[str, tuple[int, ...]] | None = None,
) -> Measured:
    """A group of variants with these τ by name and temperature, run by run, and speculation off; tokens/s are 100 τ.

    What is in `outputs` says another token than speculation off. `hits` are those of drafts made ahead, of ten outcomes
    that were expected.
    """
    samples = []
    temperatures = tuple(dict.fromkeys(temperature for _, temperature in taus))
    named = {(f"{ON} {name}", temperature): tuple(values) for (name, temperature), values in taus.items()}
    num_runs = len(next(iter(named.values())))
    named |= {(OFF, temperature): (1.0,) * num_runs for temperature in temperatures}
    for (name, temperature), values in named.items():
        for run, tau in enumerate(values):
            rounds = round(NUM_TOKENS / tau)
            tokens = ((outputs or {}).get(name, 1),) * NUM_TOKENS
            ahead = (hits or {}).get(name)
            speculation = (
                Speculation(
                    0, 0, 0, 0, 0, draft_ahead_hits_by_rank=ahead, expected_outcomes=10, outcomes_inside_expected=1
                )
                if ahead
                else None
            )
            counted = (
                (readings or {}).get(name.removeprefix(f"{ON} "))
                if (run, temperature) == (0, temperatures[0])
                else None
            )
            completion = Completion(
                tokens, NUM_TOKENS / tau / 100, 0.1, rounds, 0.1, speculation=speculation, counted=counted
            )
            samples.append(Sample(name, temperature, run, 0, completion))
    variants = tuple(
        Variant(name, (), (), traversal=name.endswith("traversal")) for name in dict.fromkeys(name for name, _ in taus)
    )
    contenders = tuple(NamedContender(name) for name in dict.fromkeys(name for name, _ in named))
    return Measured(Group(group, variants, temperatures), Samples(samples), contenders)


def observed(nodes: float, expected: float, accepted: float, probability: str = "0.5") -> Counters:
    """What a drafter counted in one tenth of probability."""
    labels = (("probability", probability), ("temperature", "0"))
    return Counters(
        {
            ("coppice_drafter_observed_nodes_total", labels): nodes,
            ("coppice_drafter_expected_acceptance_total", labels): expected,
            ("coppice_drafter_accepted_nodes_total", labels): accepted,
        }
    )
