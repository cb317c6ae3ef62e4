"""Fast mode: what it leaves out, and that its tokens differ from strict mode's at counted near-ties only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from coppice.core.noise import gumbel
from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tree import TokenTree
from tests.oracles.cut_edges import has_cuts
from tests.unit.verifier_svc.crowd import Clock
from tests.unit.verifier_svc.oracles import tree_around
from tests.unit.verifier_svc.test_preemption import INFO
from tests.unit.verifier_svc.tiny_engine import VOCAB
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.engine.scheduler import SchedulerLimits
from verifier_svc.engine.sequence import Draft, SequenceKey, SequenceSpec
from verifier_svc.kernels.cpu.attention import CompiledKernel
from verifier_svc.model.parallel import tensor_attention
from verifier_svc.model.target_model import TargetModel
from verifier_svc.stream.events import Event, LoadEvent, OutcomeEvent
from verifier_svc.verify.token_choice import TokenChooser

# Of half precision, where rounding shows, as servers have it by default.
GAP = 0.25
LIMITS = SchedulerLimits(max_sequences=6, max_queued=100, prefill_chunk=16)
STOPPING = StoppingOptions(max_tokens=40, ignore_eos=True)


def half_precision_target(new_model: Callable[[str], PreTrainedModel], *, exact: bool) -> TargetModel:
    return TargetModel(new_model("llama").to(torch.bfloat16), exact=exact, num_blocks=60)


@pytest.mark.parametrize("kernel", [None, CompiledKernel], ids=["tensor operations", "compiled"])
@pytest.mark.parametrize(("exact", "num_rows"), [(True, 8), (False, 5)])
def test_fast_passes_have_no_padding(
    exact: bool, num_rows: int, kernel: type[CompiledKernel] | None, new_model: Callable[[str], PreTrainedModel]
) -> None:
    target = TargetModel(new_model("llama"), exact=exact, num_blocks=8, kernel=kernel() if kernel else None)
    plan = target.plan([SequenceRows(SequenceCache(target.cache, 64), [1, 2, 3, 4, 5])])
    assert len(plan.token_ids) == num_rows
    assert len(plan.logit_rows) == (4 if exact else 1)


def test_fast_attention_is_the_library_s_own_and_strict_attention_is_not(
    new_model: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[torch.dtype] = []

    def recorded(query: torch.Tensor, *others: object) -> torch.Tensor:
        used.append(query.dtype)
        return fused(query, *others)

    fused = tensor_attention._fused_attention
    monkeypatch.setattr(tensor_attention, "_fused_attention", recorded)
    for exact, layers in ((True, 0), (False, 2)):
        target = half_precision_target(new_model, exact=exact)
        target.forward(target.plan([SequenceRows(SequenceCache(target.cache, 64), [1, 2, 3])]))
        assert used == [torch.bfloat16] * layers


@dataclass
class Output:
    """A sequence's tokens, and beside each of them the near-ties that its round counted."""

    token_ids: list[int] = field(default_factory=list)
    near_ties: list[int] = field(default_factory=list)
    finished: bool = False


CUTS = {"top_k": {"top_k": 6}, "top_p": {"top_p": 0.8}, "min_p": {"min_p": 0.15}}


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), *(SamplingParams(temperature=0.8, seed=5, **cut) for cut in ({}, *CUTS.values()))],
    ids=["greedy", "T=0.8", *CUTS],
)
def test_tokens_differ_from_strict_mode_s_at_near_ties_only_and_these_are_counted(
    sampling: SamplingParams, new_model: Callable[[str], PreTrainedModel]
) -> None:
    generator = np.random.default_rng(3)
    prompts = [[int(token) for token in generator.integers(3, VOCAB, 12)] for _ in range(36)]
    strict = half_precision_target(new_model, exact=True)
    expected = generate(strict, prompts, sampling, gap=0.0)
    assert not any(near_ties for output in expected for near_ties in output.near_ties)

    def draft(index: int, num_done: int) -> TokenTree:
        return tree_around(generator, expected[index].token_ids[num_done:][:5], VOCAB, num_decoys=2)

    fast = generate(half_precision_target(new_model, exact=False), prompts, sampling, gap=GAP, draft=draft)
    num_different, num_at_an_edge = 0, 0
    for prompt, one, other in zip(prompts, expected, fast, strict=True):
        if one.token_ids != other.token_ids:
            pairs = zip(one.token_ids, other.token_ids, strict=True)
            common = next(place for place, (mine, theirs) in enumerate(pairs) if mine != theirs)
            assert other.near_ties[common] > 0
            num_different += 1
            num_at_an_edge += gap_behind(strict, [*prompt, *one.token_ids[:common]], sampling) >= GAP
    # There is something to explain.
    assert num_different >= 5
    assert (num_at_an_edge > 0) == has_cuts(sampling, VOCAB)


def gap_behind(target: TargetModel, tokens: list[int], sampling: SamplingParams) -> float:
    """How far the two best scores behind `tokens` that no cut takes are apart, as logits, by one pass of its own."""
    cache = SequenceCache(target.cache, 256)
    logits = target.forward(target.plan([SequenceRows(cache, tokens)]))[0].double().numpy()
    cache.release()
    if sampling.temperature:
        law = TokenChooser(sampling, VOCAB, prompt=[]).law(logits.astype(np.float32), [])
        noise = gumbel(sampling.seed, len(tokens), 1, VOCAB)[0]
        logits = np.where(law > 0, logits, -np.inf) + sampling.temperature * noise
    second, best = np.sort(logits)[-2:]
    return float(best - second)


def generate(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    gap: float,
    draft: Callable[[int, int], TokenTree] | None = None,
) -> list[Output]:
    """Everybody's output together, near-ties counted below `gap`; turn by turn, so that each run is the same."""
    engine = Engine(target, replace(INFO, exact=gap == 0, near_tie_gap=gap), LIMITS, 16, Clock())
    events: list[Event] = []
    engine.attach(0, events.extend)
    outputs = [Output() for _ in prompts]
    for index, prompt in enumerate(prompts):
        engine.open(
            SequenceKey(0, index), SequenceSpec(tuple(prompt), sampling, STOPPING, linger_s=1.0 if draft else 0.0)
        )
    while not all(output.finished for output in outputs):
        engine.step()
        for event in events:
            if isinstance(event, LoadEvent):
                continue
            assert isinstance(event, OutcomeEvent), event
            output, outcome = outputs[event.sequence_id], event.outcome
            output.token_ids += outcome.token_ids
            output.near_ties += [outcome.near_ties] * len(outcome.token_ids)
            output.finished = outcome.finish is not None
            if draft is not None and not output.finished:
                base = outcome.base_length + len(outcome.token_ids)
                tree = draft(event.sequence_id, len(output.token_ids))
                engine.submit(SequenceKey(0, event.sequence_id), Draft(base, tree))
        events.clear()
    assert engine.counts.num_tokens == sum(len(output.token_ids) for output in outputs)
    return outputs
