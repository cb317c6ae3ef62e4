"""The Triton kernels in the interpreter, over what early pruning leaves of a pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.unit.verifier_svc.attention_passes import NO_MOVES, Heads, RandomPass, Share
from verifier_svc.extras.pruning.rows import candidates_of, surviving_rows, without_pruned
from verifier_svc.kernels.base import AttentionRule, KernelLimitError
from verifier_svc.kernels.triton.attention import TritonKernel
from verifier_svc.verify.draw_rule import DrawRule

PAIR = Heads(2, 1, 16, 16)
# A tree that crosses blocks and words of bits, plain decoding, and a tree whose end goes.
SHARES = (Share(3, 240, 2, 38), Share(2, 70, 1), Share(5, 90, 1, 9))


def test_rows_that_are_left_see_what_they_saw() -> None:
    one = RandomPass(PAIR, SHARES, torch.float32)
    rules = (DrawRule(0.0, 0, 0.0),) * len(SHARES)
    plan = replace(one.plan, draw_rules=rules)
    candidates = candidates_of(plan)
    scores = np.where(np.random.default_rng(1).random(len(candidates)) < 0.25, -np.inf, np.inf)
    scores[-1] = -np.inf
    rows = surviving_rows(plan, candidates, scores)
    assert 10 < len(rows) < plan.num_rows - 10
    left = without_pruned(plan, rows, row_multiple=4)
    kernel, rule = TritonKernel(torch.device("cpu"), 3), AttentionRule(0.3)
    whole = one.run_padded(kernel, rule)
    kept = torch.from_numpy(np.concatenate([rows, np.zeros(len(left.token_ids) - len(rows), np.int64)]))
    narrow = [tensor.index_select(1, kept) for tensor in (one.query, one.key, one.value)]
    keys, values = one.pools(kernel)
    gone = torch.from_numpy(np.setdiff1d(plan.write_slots, left.write_slots))
    for pool in (keys, values):
        # Nobody may look at what pruned nodes have left.
        pool[gone // 64, :, gone % 64] = 1e6
    kernel.begin(left, NO_MOVES, NO_MOVES)
    output = kernel.attend(0, narrow[0], narrow[1], narrow[2], rule)
    assert torch.allclose(output[: len(rows)], whole[rows], atol=3e-6)
    with pytest.raises(KernelLimitError, match="sliding windows"):
        kernel.attend(0, narrow[0], narrow[1], narrow[2], AttentionRule(0.3, sliding_window=24))
