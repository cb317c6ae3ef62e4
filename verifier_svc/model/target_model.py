"""Target model: an unmodified Hugging Face causal language model, run over packed token trees."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from coppice.core.errors import IncompatibleError
from coppice.core.feature_layers import default_feature_layers
from coppice.core.tree import ROOT
from verifier_svc.engine.kv_cache import BLOCK_SIZE, HalfArray, IntArray, KVCache, SequenceCache
from verifier_svc.engine.pass_plan import ROW_MULTIPLE, PassPlan, SequenceRows, padded_sizes, plan_pass
from verifier_svc.engine.state_slots import StateSlots
from verifier_svc.extras.head.head import HeadSettings
from verifier_svc.extras.lookup.lookup import LookupSettings
from verifier_svc.extras.pruning.head import EarlyHead
from verifier_svc.extras.pruning.layers import PrunedForward, PrunedLayers
from verifier_svc.extras.pruning.pace import PruningSettings
from verifier_svc.extras.redraft.adapter import SpaceAdapter
from verifier_svc.extras.redraft.groups import MaskGroup
from verifier_svc.extras.redraft.redraft import RedraftSettings
from verifier_svc.extras.redraft.rows import MaskRows
from verifier_svc.kernels.base import AttentionKernel
from verifier_svc.kernels.cpu.even_functions import EvenFunctions
from verifier_svc.kernels.cpu.packed_layers import prepare_rows
from verifier_svc.layers.alibi import install_alibi
from verifier_svc.layers.attention_traits import attention_traits
from verifier_svc.layers.experts import replaced_experts
from verifier_svc.layers.registry import install_layers
from verifier_svc.model.cpu_threads import CpuThreads
from verifier_svc.model.layer_states import LayerStates, ShownLayers
from verifier_svc.model.output_layer import KeptBody
from verifier_svc.model.parallel.tensor_attention import TensorKernel
from verifier_svc.model.pass_graphs import Outputs, PassGraphs
from verifier_svc.model.rope_regimes import make_rotary_rowwise
from verifier_svc.model.tree_attention import TreeAttention

# Recurrent states of sequences and at borders, before `set_num_states`.
_PROBE_STATES = (4, 1)


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """Properties of the target for other modules and services."""

    name: str
    tokenizer_json: bytes
    tokenizer_fingerprint: str
    vocab_size: int
    hidden_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    # Whether a row's logits are guaranteed to have the same bits alone and in a batch.
    exact: bool
    # Block size of the shared prefix cache in tokens; 0 if disabled.
    shared_block_tokens: int = 0
    # Rows of a pass are a multiple of this.
    row_multiple: int = 1
    # Result of the exactness test at start, whether guaranteed or not.
    bit_exact: bool = False
    # Logit gap below which choices count as near-ties; 0 counts none, as in strict mode.
    near_tie_gap: float = 0.0
    # In-pass re-drafting; None without an adapter.
    redraft: RedraftSettings | None = None
    # Prompt lookup; None if disabled, or with an adapter.
    lookup: LookupSettings | None = None
    # A head that drafts in this process; None without.
    head: HeadSettings | None = None
    # Early pruning; None without a head.
    pruning: PruningSettings | None = None
    # Layers and width of a committed token's feature, the layers' states side by side; none and 0 if not available.
    feature_layers: tuple[int, ...] = ()
    feature_size: int = 0
    # Texts of more tokens have long rope factors, see rope_regimes.py; None if factors do not depend on the length.
    rope_boundary: int | None = None
    # Serving dtype, and the fingerprints of precision.py.
    dtype: str = "float32"
    num_parameters: int = 0
    # "none" or "int8".
    quantization: str = "none"
    weights_fingerprint: str = ""
    serving_fingerprint: str = ""
    # Chat template of the checkpoint, empty without one, and texts of its special tokens by name.
    chat_template: str = ""
    special_tokens: Mapping[str, str] = field(default_factory=dict)


class LayerCalls(ShownLayers, Protocol):
    """Replacement for the forwards of a model's layers, see compiled_layers.py."""

    def install(self) -> None:
        """Replace the layers' forwards."""

    def uninstall(self) -> None:
        """Restore the layers' forwards."""

    def release(self) -> None:
        """Free the layers' own weights, if they are not needed any more."""

    def cut(self, layer: int) -> None:
        """Let hooks of this layer and of the one before it see the states passed between them."""

    def logits(self, token_ids: IntArray, positions: IntArray, logit_rows: IntArray) -> Tensor | None:
        """Logits [K, vocab] of some rows of a pass; None if the model's own forward has to be called."""


class TargetModel:
    """A loaded model with tree attention and paged KV cache. Used by one thread at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        exact: bool,
        num_blocks: int,
        kernel: AttentionKernel | None = None,
        threads: CpuThreads | None = None,
    ) -> None:
        """Install `kernel` in the model, or by default attention in tensor operations, which supports every model."""
        self._threads = threads
        self.device = next(model.parameters()).device
        # The Hugging Face model.
        self.model = model
        self._attention = TreeAttention(kernel or TensorKernel(self.device, exact=exact), attention_traits(model))
        self._graphs: PassGraphs | None = None
        self._masks: MaskRows | None = None
        self._pruned: PrunedLayers | None = None
        self.layers: LayerCalls | None = None
        # None until they are wanted.
        self._layer_states: LayerStates | None = None
        # Of the last pass, if wanted.
        self._states: Tensor | None = None
        # None without recurrent layers.
        self.recurrent = install_layers(model)
        self._num_states = _PROBE_STATES
        self.resize_cache(num_blocks)
        self.row_multiple = ROW_MULTIPLE if exact else 1
        # As in TargetInfo.
        self.rope_boundary = make_rotary_rowwise(model)
        self._experts = replaced_experts(model)
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        model.set_attn_implementation(self._attention.name)
        is_replaced = model.config._attn_implementation == self._attention.name
        is_installed = install_alibi(model, self._attention.attend) > 0
        if not is_replaced and not is_installed:
            raise IncompatibleError(f"{type(model).__name__} does not support replacing its attention")
        is_extended = bool(self._experts) or self.recurrent is not None or is_installed
        is_even = exact and is_extended and self.device.type == "cpu"
        self._functions = EvenFunctions() if is_even else nullcontext()

    def resize_cache(self, num_blocks: int, *, reuses_prefixes: bool = True) -> None:
        """Replace the cache by an empty one of another size."""
        if self._graphs is not None:
            self._graphs.clear()
        states = None if self.recurrent is None else StateSlots(*self._num_states)
        self.cache = KVCache(num_blocks, reuses_prefixes=reuses_prefixes, states=states)
        self._attention.kernel.allocate(num_blocks)
        if self.recurrent is not None:
            self.recurrent.allocate(sum(self._num_states))

    def set_num_states(self, num_running: int, num_kept: int) -> None:
        """Number of recurrent states of sequences, and at borders of shared blocks, from the next `resize_cache` on."""
        self._num_states = num_running, num_kept

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of keys and values per token; known after the first pass."""
        return self._attention.kernel.bytes_per_slot

    def plan(self, work: list[SequenceRows]) -> PassPlan:
        """Lay out a pass for this model."""
        return plan_pass(work, row_multiple=self.row_multiple)

    def forward(self, plan: PassPlan) -> Tensor:
        """Run a pass; returns float32 logits [K, vocab] of the plan's logit rows on the CPU."""
        return self.run(plan, *self.cache.take_moves())

    @torch.inference_mode()
    def run(self, plan: PassPlan, sources: IntArray, destinations: IntArray) -> Tensor:
        """`forward` with the slots to move before the pass."""
        self.set_threads_for(len(plan.token_ids))
        padded = None if self._graphs is None else self._graphs.padded(plan)
        self._begin(padded or plan, sources, destinations)
        forward = self._logits_and_states if plan.wants_states else self._logits
        try:
            outputs = None
            if self._graphs is not None and padded is not None:
                outputs = self._graphs.run(padded, forward)
            if outputs is None:
                outputs = self._run_eagerly(padded or plan)
        finally:
            self._attention.end()
            if self._masks is not None:
                self._masks.end()
        return self._taken(outputs)

    def can_split(self, plan: PassPlan) -> bool:
        """Whether a pass can return its logits in blocks of rows; captured passes cannot."""
        is_recorded = self._graphs is not None and self._graphs.padded(plan) is not None
        return self._keeps_rows and self.model.base_model is not self.model and not is_recorded

    @torch.inference_mode()
    def forward_in_blocks(self, plan: PassPlan, most: int) -> Iterator[Tensor]:
        """`forward` with the logits of at most `most` rows at a time, in order, each computed on demand."""
        self.set_threads_for(len(plan.token_ids))
        self._begin(plan, *self.cache.take_moves())
        size = max([size for size in padded_sizes(most, self.row_multiple) if size <= most] or [self.row_multiple])
        kept = replace(plan, wants_states=False)
        try:
            with KeptBody(self.model), self.layer_states if plan.wants_states else nullcontext() as states:
                for start in range(0, len(plan.logit_rows), size):
                    rows = replace(kept, logit_rows=plan.logit_rows[start : start + size])
                    (logits,) = self._run_eagerly(rows)
                    yield logits.float().cpu()
            state_rows = self._on_device(np.concatenate([plan.logit_rows, plan.shown_rows]))
            self._states = None if states is None else states.of(lambda _: state_rows)
        finally:
            self._attention.end()
            if self._masks is not None:
                self._masks.end()

    @torch.inference_mode()
    def forward_pruned(self, plan: PassPlan, scores: Tensor | None = None) -> tuple[Tensor, PrunedForward]:
        """`forward` without nodes pruned by the early head; logits are those of the pruned plan.

        `scores` [C] of the plan's candidates replace the head's.

        Raises:
            IncompatibleError: there is no early head, or the model's layers do not support pruning.
        """
        if self._pruned is None:
            raise IncompatibleError("a pass is to be pruned, and the target has no early head")
        self.set_threads_for(len(plan.token_ids))
        self._begin(plan, *self.cache.take_moves())
        self._pruned.begin(plan, self._narrow, scores)
        try:
            outputs = self._run_eagerly(plan, is_pruned=True)
        finally:
            forward = self._pruned.end()
            self._attention.end()
            if self._masks is not None:
                self._masks.end()
        if any(len(output) != len(forward.plan.logit_rows) for output in outputs):
            raise IncompatibleError(f"{type(self.model).__name__} does not call its output layer as others do")
        return self._taken(outputs), forward

    def take_states(self) -> HalfArray | None:
        """States [K + M, feature size] of the last pass's logit rows and then of its shown rows, in bfloat16.

        None if its plan did not want them. Passes that were pruned or captured have none of shown rows: M is 0.
        """
        states, self._states = self._states, None
        return None if states is None else states.bfloat16().cpu().view(torch.int16).numpy()

    def can_prune(self, plan: PassPlan) -> bool:
        """Whether a pass can be pruned; captured passes cannot, since their rows are fixed."""
        return self._pruned is not None and (self._graphs is None or self._graphs.padded(plan) is None)

    def install_head(self, head: EarlyHead) -> None:
        """Enable pruning of passes.

        Raises:
            IncompatibleError: the head does not match the model.
        """
        self._pruned = PrunedLayers(self.model, head, self.row_multiple)
        if self.layers is not None:
            self.layers.cut(head.layer)

    def use_layers(self, layers: LayerCalls | None) -> None:
        """Use these layers instead of the model's own, or the latter if None."""
        if self.layers is not None:
            self.layers.uninstall()
        self.layers = layers
        if layers is not None:
            layers.install()
        if self._layer_states is not None:
            self._layer_states.calls = layers

    @property
    def layer_states(self) -> LayerStates:
        """States of `default_feature_layers`, for passes that want them.

        Raises:
            IncompatibleError: the model's layers are not found.
        """
        if self._layer_states is None:
            layers = default_feature_layers(self.model.config.get_text_config().num_hidden_layers)
            self.show_layers(layers)
            assert self._layer_states is not None
        return self._layer_states

    def show_layers(self, layers: tuple[int, ...]) -> None:
        """Give the states after these layers instead, to passes that want states.

        Raises:
            IncompatibleError: the model's layers are not found.
        """
        self._layer_states = LayerStates(self.model, layers)
        self._layer_states.calls = self.layers

    def adapt(self, adapter: SpaceAdapter) -> None:
        """Enable masks.

        Raises:
            IncompatibleError: the adapter does not match the model.
        """
        self._masks = MaskRows(self.model, adapter)

    def record_passes(self, graphs: PassGraphs | None) -> None:
        """Capture and replay passes of the sizes of `graphs`, or none if None."""
        self._graphs = graphs

    def record_now(self) -> None:
        """Capture every size, largest first, so that no request waits for it; no sequence may be running."""
        if self._graphs is None:
            return
        cache = SequenceCache(self.cache, BLOCK_SIZE)
        masks = [()] if self._masks is None else [(), (MaskGroup(ROOT, 1),)]
        for bucket in reversed(self._graphs.buckets):
            for groups in masks[:bucket]:
                rows = SequenceRows(cache, [0], masks=groups)
                self.run(plan_pass([rows], row_multiple=bucket), *self.cache.take_moves())
        cache.release()

    def set_threads_for(self, num_rows: int) -> None:
        """Set the threads for products of this many rows."""
        if self._threads is not None:
            self._threads.set_for(num_rows)

    def prepare_sizes(self, max_rows: int, limit_s: float) -> int:
        """Prepare pass sizes of up to `max_rows` rows, smallest first, for at most `limit_s`; returns their number.

        Afterwards no request waits for their machine code, and memory does not grow by it.
        """
        started_s = time.monotonic()
        num_met = 0
        for size in padded_sizes(max_rows, self.row_multiple):
            if time.monotonic() - started_s > limit_s:
                break
            self.set_threads_for(size)
            prepare_rows(self.model, size)
            num_met += 1
        return num_met

    def _begin(self, plan: PassPlan, sources: IntArray, destinations: IntArray) -> None:
        self._attention.begin(plan, sources, destinations)
        if self.recurrent is not None and (moves := self.cache.take_state_moves()) is not None:
            self.recurrent.begin(plan, moves)
        self.cache.moves_made()
        self._tell_experts(plan)

    def _narrow(self, plan: PassPlan, rows: Tensor) -> None:
        self._attention.narrow(plan)
        if self.recurrent is not None:
            self.recurrent.narrow(plan)
        self._tell_experts(plan)
        if self._masks is not None:
            self._masks.narrow(rows)

    def _tell_experts(self, plan: PassPlan) -> None:
        for experts in self._experts:
            experts.num_rows = plan.num_rows

    def _taken(self, outputs: Outputs) -> Tensor:
        """Logits of a pass in single precision on the CPU; its hidden states are kept for `take_states`."""
        logits, *states = outputs
        self._states = states[0] if states else None
        return logits.float().cpu()

    def _run_eagerly(self, plan: PassPlan, *, is_pruned: bool = False) -> Outputs:
        if not is_pruned and (outputs := self._compiled_outputs(plan)) is not None:
            return outputs
        token_ids, positions = self._on_device(plan.token_ids)[None], self._on_device(plan.position_ids)[None]
        mask_places = None if plan.mask_places is None else self._on_device(plan.mask_places)
        logit_rows = None if is_pruned else self._on_device(plan.logit_rows)
        if not plan.wants_states:
            return self._logits(token_ids, positions, logit_rows, mask_places)
        shown_rows = self._on_device(plan.shown_rows) if len(plan.shown_rows) and not is_pruned else None
        return self._logits_and_states(token_ids, positions, logit_rows, mask_places, shown_rows)

    def _compiled_outputs(self, plan: PassPlan) -> Outputs | None:
        """Logits, and states if wanted, of one compiled call; None if the model's own forward has to be called."""
        if self.layers is None or self._masks is not None:
            return None
        states = self.layer_states if plan.wants_states else None
        with states or nullcontext():
            logits = self.layers.logits(plan.token_ids, plan.position_ids, plan.logit_rows)
        if logits is None or states is None:
            return None if logits is None else (logits,)
        rows = torch.from_numpy(np.concatenate([plan.logit_rows, plan.shown_rows]))
        return logits, states.of(lambda _: rows)

    def _logits_and_states(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor | None,
        mask_places: Tensor | None,
        shown_rows: Tensor | None = None,
    ) -> Outputs:
        """`_logits`, and the states [K + M, feature size] of their rows and of `shown_rows` [M]."""
        with self.layer_states as states:
            outputs = self._logits(token_ids, positions, logit_rows, mask_places)
        if logit_rows is None:
            return *outputs, states.of(self._pruned_rows)
        rows = logit_rows if shown_rows is None else torch.cat([logit_rows, shown_rows])
        return *outputs, states.of(lambda _: rows)

    def _pruned_rows(self, num_rows: int) -> Tensor:
        assert self._pruned is not None
        return self._pruned.logit_rows(num_rows)

    def _logits(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor | None, mask_places: Tensor | None
    ) -> Outputs:
        """Logits [K, vocab] of some rows; ids and positions are [1, N], mask positions [N].

        Without `logit_rows` the rows are selected by a hook.
        """
        keep = {"logits_to_keep": logit_rows} if self._keeps_rows and logit_rows is not None else {}
        inputs = {"input_ids": token_ids}
        if mask_places is not None:
            if self._masks is None:
                raise IncompatibleError("a pass has masks, and the target has no adapter for them")
            inputs = {"inputs_embeds": self._masks.begin(token_ids, mask_places)}
        with self._functions:
            output = self.model(**inputs, position_ids=positions, use_cache=False, **keep)
        logits: Tensor = output.logits[0]
        return (logits if self._keeps_rows or logit_rows is None else logits.index_select(0, logit_rows),)

    def _on_device(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(self.device)
