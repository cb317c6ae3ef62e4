"""`coppice bench throughput`: many requests at once, and transformers."""

from __future__ import annotations

import os

from coppice.cli.bench.options import (
    DRAFTER,
    OUT,
    TARGET,
    Concurrency,
    Drafter,
    MaxTokens,
    Out,
    PromptsFile,
    Runs,
    Seed,
    Target,
    choose_prompts,
    drafter_spec,
    numbers,
    require_checkpoint,
)
from coppice.cli.bench.services import finish, measure_or_exit
from coppice.cli.options import Threads
from coppice.cli.topology import TopologySpec
from coppice.kernels.openmp import set_spin_count


def throughput(
    prompts: PromptsFile = None,
    target: Target = TARGET,
    drafter: Drafter = DRAFTER,
    out: Out = OUT,
    concurrency: Concurrency = "1,4,16,64",
    max_tokens: MaxTokens = 64,
    runs: Runs = 3,
    threads: Threads = 0,
    seed: Seed = 0,
) -> None:
    """Many requests at once: transformers' batched and continuous batching, and us with speculation off and on.

    Exit code 1 when our output with speculation on is not what it is with speculation off.
    """
    set_spin_count()
    require_checkpoint(target, "--target")
    levels = numbers(concurrency, "--concurrency", least=1)
    chosen = choose_prompts(prompts, max(levels), seed)

    from coppice.lab.bench.throughput import SHOWN, ThroughputSuite

    spec = TopologySpec(str(target), (drafter_spec(drafter),), threads=threads)
    suite = ThroughputSuite(target, tuple(chosen), threads or os.cpu_count() or 1, levels, runs, max_tokens)
    finish(measure_or_exit(suite, spec), SHOWN, out)
