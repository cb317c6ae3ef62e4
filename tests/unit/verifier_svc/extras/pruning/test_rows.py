"""Who survives early pruning, and the pass that is left: no model needed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from coppice.core.errors import IncompatibleError
from coppice.core.noise import gumbel, gumbel_of
from coppice.core.sampling import SamplingParams
from coppice.core.tree import ROOT, TokenTree
from tests.unit.verifier_svc.early_heads import THRESHOLDS, random_head
from tests.unit.verifier_svc.kernels.triton.test_triton_plan import SCRATCH, keys_of_rows
from tests.unit.verifier_svc.oracles import random_tree
from verifier_svc.engine.kv_cache import KVCache, SequenceCache
from verifier_svc.engine.pass_plan import PassPlan, SequenceRows, plan_pass
from verifier_svc.extras.pruning.head import EarlyHead, load_head, save_head
from verifier_svc.extras.pruning.rows import (
    candidates_of,
    num_candidates,
    surviving_part,
    surviving_rows,
    survivors_of,
    without_pruned,
)
from verifier_svc.extras.redraft.groups import MaskGroup
from verifier_svc.kernels.cpu.attention import ragged_rows
from verifier_svc.kernels.triton.plan import Layout, PassBuffers
from verifier_svc.verify.draw_rule import DrawRule, Threshold, draw_rule, threshold_at

VOCAB = 500


def random_plan(seed: int, row_multiple: int = 4) -> tuple[PassPlan, list[SequenceRows]]:
    """Three sequences: greedy with masks, sampled, and one that may not be pruned."""
    generator = np.random.default_rng(seed)
    cache = KVCache(64)
    rules = (DrawRule(0.0, 0, -1.0), DrawRule(0.7, 9, 0.3), None)
    work = []
    for size, pending, rule in zip((40, 13, 7), (1, 5, 1), rules, strict=True):
        sequence = SequenceCache(cache, 512)
        sequence.reserve(70)
        sequence.length = 70 if pending == 1 else 0
        masks = (MaskGroup(ROOT, 2), MaskGroup(3, 3), MaskGroup(size - 1, 1)) if rule != rules[1] else ()
        tree = random_tree(generator, VOCAB, size)
        work.append(SequenceRows(sequence, [0] * pending, tree, masks=masks, draw_rule=rule))
    return plan_pass(work, row_multiple=row_multiple), work


def nodes_left(rows: SequenceRows, scores: dict[int, float]) -> list[int]:
    """The slow way: nodes whose whole path passes, by token id."""
    rule = rows.draw_rule
    left = []
    for node in range(len(rows.tree)):
        passes = True
        for step in rows.tree.path(node) if rule is not None else ():
            token = rows.tree.token_ids[step]
            position = rows.cache.length + len(rows.pending) - 1 + rows.tree.depths[step]
            noise = rule.temperature * gumbel(rule.seed, position, 1, VOCAB)[0, token] if rule.temperature else 0.0
            passes = passes and scores[token] + noise >= rule.threshold
        if passes:
            left.append(node)
    return left


@pytest.mark.parametrize("seed", range(5))
def test_nodes_survive_whose_whole_path_passes(seed: int) -> None:
    plan, work = random_plan(seed)
    generator = np.random.default_rng(seed)
    by_token = dict(enumerate(generator.normal(0, 1.5, VOCAB).tolist()))
    candidates = candidates_of(plan)
    assert num_candidates(plan) == len(candidates) == 53
    scores = np.array([by_token[token] for token in candidates.token_ids.tolist()])
    rows = surviving_rows(plan, candidates, scores)
    left = without_pruned(plan, rows, 4)
    assert len(left.token_ids) % 4 == 0
    for segment, before, own in zip(left.segments, plan.segments, work, strict=True):
        expected = nodes_left(own, by_token)
        survivors = survivors_of(segment)
        assert [node for node in survivors if node < len(own.tree)] == expected
        part = surviving_part(own, survivors)
        assert part.tree.token_ids == tuple(own.tree.token_ids[node] for node in expected)
        assert part.pending == own.pending
        # A mask is left where its end is.
        assert len(survivors) == len(part.tree) + part.num_masks
        ends = [group.node for group in own.masks if group.node in (ROOT, *expected)]
        assert [ROOT if g.node == ROOT else expected[g.node] for g in part.masks] == ends
        # Token, place in the text and slot are what they were.
        old = [before.start + place for place in segment.row_places]
        assert left.token_ids[segment.start : segment.stop].tolist() == plan.token_ids[old].tolist()
        assert segment.positions.tolist() == plan.positions[old].tolist()
        assert left.write_slots[segment.start : segment.stop].tolist() == plan.write_slots[old].tolist()
        # Parents are the same nodes.
        for node, parent in enumerate(segment.parents):
            old_parent = before.parents[survivors[node]]
            assert parent == (ROOT if old_parent == ROOT else survivors.index(old_parent))
        assert len(part.tree) < len(own.tree) or own.draw_rule is None
    if plan.mask_places is not None and left.mask_places is not None:
        assert (left.mask_places >= 0).sum() == sum(
            surviving_part(o, survivors_of(s)).num_masks for o, s in zip(work, left.segments, strict=True)
        )


def test_logit_rows_are_those_of_the_roots_and_of_what_is_left() -> None:
    plan, _ = random_plan(0)
    candidates = candidates_of(plan)
    rows = surviving_rows(plan, candidates, np.where(np.arange(len(candidates)) % 3, np.inf, -np.inf))
    left = without_pruned(plan, rows, 4)
    for segment, (first, last) in zip(left.segments, left.logit_ranges, strict=True):
        assert left.logit_rows[first:last].tolist() == list(
            range(segment.start + segment.num_pending - 1, segment.stop)
        )
    assert len(left.logit_rows) % 4 == 0


def test_scores_that_are_no_numbers_prune_nothing() -> None:
    plan, _ = random_plan(1)
    candidates = candidates_of(plan)
    assert len(surviving_rows(plan, candidates, np.full(len(candidates), np.nan))) == plan.num_rows
    none = candidates_of(replace(plan, draw_rules=(None, None, None)))
    assert len(none) == 0
    assert len(surviving_rows(plan, none, np.empty(0))) == plan.num_rows


@pytest.mark.parametrize("seed", range(3))
def test_kernels_are_told_of_the_same_keys_as_before(seed: int) -> None:
    """Of each row that is left, by slot: through the flat arrays of two kernels."""
    plan, _ = random_plan(seed)
    candidates = candidates_of(plan)
    generator = np.random.default_rng(seed)
    scores = np.where(generator.random(len(candidates)) < 0.3, -np.inf, np.inf)
    rows = surviving_rows(plan, candidates, scores)
    left = without_pruned(plan, rows, 4)
    seen = []
    for some in (plan, left):
        buffers = PassBuffers(Layout.of(some), torch.device("cpu"))
        buffers.load(some, SCRATCH)
        seen.append(keys_of_rows(some, buffers.tensors))
    assert {row: sorted(seen[1][row]) for row in range(len(rows))} == {
        row: sorted(seen[0][old]) for row, old in enumerate(rows.tolist())
    }
    flat, flat_before = ragged_rows(left.segments), ragged_rows(plan.segments)

    def tails(of: object, row: int) -> list[int]:
        return of.tails[of.tail_starts[row] : of.tail_starts[row + 1]].tolist()  # type: ignore[attr-defined]

    for row, old in enumerate(rows.tolist()):
        assert tails(flat, row) == tails(flat_before, old)
        assert flat.runs[row] == flat_before.runs[old]
        assert flat.ends[row] == flat_before.ends[old]


def test_noise_of_single_tokens_is_that_of_whole_rows() -> None:
    positions, tokens = np.array([7, 8, 2**40, 0, 7]), np.array([0, 13, 98, 3, 0])
    seeds = np.array([2**60 + 5, 2**64 - 1, 2**60 + 5, 0, 9], np.uint64)
    rows = [gumbel(int(seed), int(place), 1, 100)[0] for seed, place in zip(seeds, positions, strict=True)]
    expected = [row[token] for row, token in zip(rows, tokens, strict=True)]
    assert gumbel_of(seeds, positions, tokens).tolist() == expected


def test_thresholds_lie_between_those_of_the_nearest_temperatures() -> None:
    assert threshold_at(THRESHOLDS, 0.0) == 0.0
    assert threshold_at(THRESHOLDS, 0.35) == pytest.approx(0.25)
    assert threshold_at(THRESHOLDS, 1.0) == 1.0
    assert threshold_at(THRESHOLDS, 1.1) is None
    assert threshold_at((Threshold(0.7, 0.5, 1.0),), 0.0) is None


def test_requests_that_change_the_scores_are_never_pruned() -> None:
    rule = draw_rule(SamplingParams(temperature=0.7, seed=4, top_p=0.5), THRESHOLDS)
    assert rule == DrawRule(0.7, 4, 0.5 + 0.7 * math.log(0.5))
    assert draw_rule(SamplingParams(), THRESHOLDS) == DrawRule(0.0, 0, 0.0)
    others = (
        {"temperature": 1.5},
        {"top_k": 1},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": (1, 2)},
        {"bad_token_ids": (1,)},
    )
    for parameters in others:
        assert draw_rule(SamplingParams(**{"temperature": 0.7, **parameters}), THRESHOLDS) is None  # type: ignore[arg-type]
    assert draw_rule(SamplingParams(), THRESHOLDS, min_tokens=3) is None


def test_heads_are_written_and_read(tmp_path: Path) -> None:
    head = random_head(8)
    lens = EarlyHead(2, torch.ones(8), torch.zeros(8), True, 1e-5, None, (Threshold(0.0, -6.0, 1.0),))
    rows = torch.randn(3, 8)
    for saved in (head, lens):
        save_head(saved, tmp_path)
        loaded = load_head(tmp_path)
        assert (loaded.layer, loaded.is_centred, loaded.eps) == (saved.layer, saved.is_centred, saved.eps)
        assert loaded.thresholds == saved.thresholds
        rounded = saved.to(torch.device("cpu"), torch.bfloat16).to(torch.device("cpu"), torch.float32)
        assert torch.equal(loaded.predict(rows), rounded.predict(rows))
    assert torch.equal(lens.predict(rows), torch.nn.functional.layer_norm(rows, (8,)))


def test_heads_that_are_damaged_are_refused(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleError, match="no early head"):
        load_head(tmp_path)
    save_head(random_head(8), tmp_path)
    description = tmp_path / "early_head.json"
    content = description.read_text()
    for change in (('"layer": 1', '"layer": 0'), ('"recall": 0.99', '"recall": 2'), ('"score": 0.5', '"skore": 0.5')):
        description.write_text(content.replace(*change))
        with pytest.raises(IncompatibleError, match="no early head"):
            load_head(tmp_path)
    description.write_text(content.replace("early-exit", "space"))
    with pytest.raises(IncompatibleError, match="kind"):
        load_head(tmp_path)
    with pytest.raises(ValueError, match="in order"):
        replace(random_head(8), thresholds=())
    with pytest.raises(ValueError, match="rows of 9"):
        replace(random_head(8), norm_weight=torch.ones(9), norm_bias=torch.zeros(9))


def test_a_deep_chain_ends_at_its_first_weak_node() -> None:
    tree = TokenTree(tuple(range(6)), tuple(range(-1, 5)), (0.0,) * 6)
    rows = SequenceRows(SequenceCache(KVCache(4), 64), [1], tree, draw_rule=DrawRule(0.0, 0, -2.0))
    plan = plan_pass([rows], row_multiple=1)
    left = surviving_rows(plan, candidates_of(plan), np.array([-1, -2, -1.9, -2.1, 5, 5]))
    assert left.tolist() == [0, 1, 2, 3]
