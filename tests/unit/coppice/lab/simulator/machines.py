"""Machines and records for tests of the simulator, with numbers that a reader can add up."""

from __future__ import annotations

from coppice.core.tree import EMPTY_TREE, chain
from coppice.lab.simulator.machine import Contention, Curve, DrafterCosts, Machine, VerifierCosts
from coppice.lab.simulator.profile import Trace

TOKENS = tuple(range(10, 74))


def constant_machine(**verifier: float) -> Machine:
    """Passes of 10 ms, 2 ms between them, drafts of 3 ms, messages of 1 ms, and nothing that varies."""
    costs = VerifierCosts(Curve((1,), (0.010,)), gap_s=0.002, **verifier)  # type: ignore[arg-type]
    return Machine(costs, DrafterCosts(Curve((0,), (0.003,))), message_s=0.001)


def usual_machine() -> Machine:
    """About the bundled pair on two cores."""
    return Machine(
        VerifierCosts(
            Curve((4, 16, 64, 256), (0.005, 0.008, 0.0147, 0.05)),
            row_context_s=2e-7,
            sequence_s=0.00005,
            round_row_s=0.00001,
            prompt_token_s=0.00002,
            gap_s=0.001,
            gap_sequence_s=0.0001,
            row_multiple=4,
        ),
        DrafterCosts(Curve((1, 16), (0.002, 0.004)), read_token_s=0.00005),
        message_s=0.0002,
        contention=Contention(0.5, 1.3),
        noise=0.05,
    )


def right_trace(depth: int, num_prompt: int = 100) -> Trace:
    """An output whose drafts are chains of so many nodes, always right."""
    looped = TOKENS + TOKENS
    trees = tuple(chain(looped[at : at + depth], [-0.05] * depth) if depth else EMPTY_TREE for at in range(len(TOKENS)))
    return Trace(num_prompt, TOKENS, trees)
