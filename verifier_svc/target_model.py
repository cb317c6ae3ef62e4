"""The target: any Hugging Face causal language model, unmodified, run over packed token trees."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coppice.errors import IncompatibleError
from verifier_svc.cpu_threads import CpuThreads
from verifier_svc.kv_cache import KVCache
from verifier_svc.pass_plan import ROW_MULTIPLE, PassPlan, SequenceRows, plan_pass
from verifier_svc.tree_attention import TreeAttention


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What others need to know about the target."""

    name: str
    tokenizer_json: bytes
    tokenizer_fingerprint: str
    vocab_size: int
    hidden_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    exact: bool


class TargetModel:
    """A loaded model with its tree attention and paged cache. Used by one thread at a time."""

    def __init__(
        self, model: PreTrainedModel, *, exact: bool, num_blocks: int, threads: CpuThreads | None = None
    ) -> None:
        self._threads = threads
        self.device = next(model.parameters()).device
        self.cache = KVCache(num_blocks, self.device)
        self._model = model
        self._attention = TreeAttention(self.cache, exact=exact)
        self._row_multiple = ROW_MULTIPLE if exact else 1
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        model.set_attn_implementation(self._attention.name)
        if model.config._attn_implementation != self._attention.name:
            raise IncompatibleError(f"{type(model).__name__} does not support replacing its attention")

    @property
    def model(self) -> PreTrainedModel:
        """The model itself."""
        return self._model

    def resize_cache(self, num_blocks: int) -> None:
        """Start over with an empty cache of another size."""
        self.cache = KVCache(num_blocks, self.device)
        self._attention.cache = self.cache

    def plan(self, work: list[SequenceRows]) -> PassPlan:
        """Lay out a pass for this model."""
        return plan_pass(work, row_multiple=self._row_multiple, device=self.device)

    @torch.inference_mode()
    def forward(self, plan: PassPlan) -> Tensor:
        """Run a pass; returns float32 logits [K, vocab] of the plan's logit rows on the CPU."""
        keep = {"logits_to_keep": plan.logit_rows} if self._keeps_rows else {}
        if self._threads is not None:
            self._threads.set_for(plan.num_rows)
        self._attention.begin(plan)
        try:
            output = self._model(input_ids=plan.token_ids, position_ids=plan.positions, use_cache=False, **keep)
        finally:
            self._attention.end()
        logits: Tensor = output.logits[0]
        if not self._keeps_rows:
            logits = logits.index_select(0, plan.logit_rows)
        return logits.float().cpu()
