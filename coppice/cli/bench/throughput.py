"""`coppice bench throughput`: many requests at once, and transformers."""

from __future__ import annotations

from coppice.cli.bench import options as opt
from coppice.cli.bench.services import finish, measure_or_exit
from coppice.cli.options import Threads
from coppice.cli.topology import TopologySpec


def throughput(
    prompts: opt.PromptsFile = None,
    target: opt.Target = opt.TARGET,
    drafter: opt.Drafter = opt.DRAFTER,
    out: opt.Out = opt.OUT,
    concurrency: opt.Concurrency = "1,4,16,64",
    max_tokens: opt.MaxTokens = 64,
    runs: opt.Runs = 3,
    threads: Threads = 0,
    seed: opt.Seed = 0,
) -> None:
    """Many requests at once: transformers' batched and continuous batching, and us with speculation off and on.

    Exit code 1 when our output with speculation on is not what it is with speculation off.
    """
    opt.begin(target)
    levels = opt.numbers(concurrency, "--concurrency", least=1)
    chosen = opt.choose_prompts(prompts, max(levels), seed)

    from coppice.lab.bench.comparison import Plan
    from coppice.lab.bench.throughput import SHOWN, ThroughputSuite

    spec = TopologySpec(str(target), (opt.drafter_spec(drafter),), threads=threads)
    suite = ThroughputSuite(opt.setup(target, chosen, Plan(runs, max_tokens, (0.0,), seed), threads), levels)
    finish(measure_or_exit(suite, spec), SHOWN, out)
