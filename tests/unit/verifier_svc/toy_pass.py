"""A target that is a pure function of the tokens before, behind the engine's own passes, cache and scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from coppice.core.tree import ROOT
from verifier_svc.engine.kv_cache import BLOCK_SIZE, KVCache
from verifier_svc.engine.pass_plan import PassPlan, Segment, SequenceRows, plan_pass
from verifier_svc.model.target_model import TargetInfo
from verifier_svc.verify.sampler import Logits

# Raw logits [vocab] behind a whole context.
Language = Callable[[tuple[int, ...]], Logits]


class ToyTarget:
    """Stands in for a `TargetModel`. What it knows of a context it reads from the slots that a pass has written."""

    def __init__(self, language: Language, num_blocks: int) -> None:
        self._language = language
        self.cache = KVCache(num_blocks)
        self._tokens = np.full(num_blocks * BLOCK_SIZE, -1)

    def plan(self, work: Sequence[SequenceRows]) -> PassPlan:
        return plan_pass(work, row_multiple=1)

    def forward(self, plan: PassPlan) -> torch.Tensor:
        sources, destinations = self.cache.take_moves()
        self._tokens[destinations] = self._tokens[sources]
        self.cache.moves_made()
        rows = []
        for segment in plan.segments:
            rows += self._contexts(segment, plan.token_ids[segment.start : segment.stop].tolist())
        self._tokens[plan.write_slots] = plan.token_ids[: plan.num_rows]
        return torch.from_numpy(np.array([self._language(rows[row]) for row in plan.logit_rows], np.float32))

    def _contexts(self, segment: Segment, tokens: list[int]) -> list[tuple[int, ...]]:
        """What each of a segment's rows sees, itself included."""
        past = tuple(self._tokens[segment.slots(0, segment.num_context)].tolist())
        count = segment.num_pending
        contexts = [(*past, *tokens[: index + 1]) for index in range(count)]
        for parent, token in zip(segment.parents, tokens[count:], strict=True):
            contexts.append((*contexts[count - 1 if parent == ROOT else count + parent], token))
        return contexts


def toy_info(vocab_size: int, tokenizer_json: bytes, eos_token_ids: tuple[int, ...], context: int) -> TargetInfo:
    """What the engine has to know of such a target."""
    return TargetInfo(
        name="toy",
        tokenizer_json=tokenizer_json,
        tokenizer_fingerprint="",
        vocab_size=vocab_size,
        hidden_size=1,
        max_context_tokens=context,
        eos_token_ids=eos_token_ids,
        exact=True,
    )
