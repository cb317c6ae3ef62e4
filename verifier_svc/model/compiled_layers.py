"""Compiled calls for a model's decoder layers: consecutive layers are one call, without module calls in between.

For models of the Llama family on CPUs. Attention rules are observed in a pass of the layers' own forward, and the load
probes compare whole passes with it. Other models run their modules.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from coppice.checkpoints.quantization import row_scales, whole_numbers
from coppice.core.errors import IncompatibleError
from coppice.kernels.cpu.half_tables import floats, halves
from coppice.kernels.cpu.lane_sums import LANES
from coppice.kernels.cpu.vector_code import HAS_WIDE_REGISTERS
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.extras.pruning.layers import decoder_layers
from verifier_svc.kernels.base import AttentionRule
from verifier_svc.kernels.cpu.aligned_arrays import aligned_zeros
from verifier_svc.kernels.cpu.attention import CompiledKernel
from verifier_svc.kernels.cpu.decoder_layers import (
    GELU_TANH,
    SILU,
    Buffers,
    LayerWeights,
    Matrices,
    Rotation,
    num_phases,
    run_layers,
    run_whole,
    share_product,
)
from verifier_svc.kernels.cpu.few_row_products import holds_exactly
from verifier_svc.kernels.cpu.norms import CompiledNorm, compile_norms
from verifier_svc.kernels.cpu.packed_layers import PackedLinear
from verifier_svc.kernels.cpu.panel_products import (
    PANEL,
    Panels,
    byte_pair_panels,
    byte_panels,
    float_panels,
    packed_panels,
    pair_panels,
)
from verifier_svc.kernels.cpu.shared_work import SharedThreads, new_counters
from verifier_svc.model.output_layer import output_layer
from verifier_svc.model.target_model import TargetModel

logger = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

# Packs weights [out, in] as panels and scales of outputs [out], or [0] without.
Packing: TypeAlias = Callable[[FloatArray], tuple[Panels, FloatArray]]

_FAMILIES = frozenset({"Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3"})
_ACTIVATIONS: tuple[tuple[int, Callable[[Tensor], Tensor]], ...] = (
    (SILU, F.silu),
    (GELU_TANH, functools.partial(F.gelu, approximate="tanh")),
)
# Types of rope whose factors are the same in all texts.
_STATIC_ROPES = frozenset({"default", "linear", "llama3"})
# Positions whose factors are computed at once, for all passes to come.
_TABLE_BLOCK = 512
# Rows of weights packed at once, whole panels: what that takes besides is little of an output layer's size.
_PACKED_ROWS = 64 * PANEL
# Rows of embeddings compared at once.
_COMPARED_ROWS = 4096
_NO_NORM = torch.empty(0)
_NO_SCALES = np.empty(0, np.float32)


class RotationTable:
    """Cosines and sines of positions, computed once by the model's own module."""

    def __init__(self, rotary: nn.Module, size: int) -> None:
        """`size` is that of a head."""
        self._rotary = rotary
        self._cos = self._sin = np.empty((0, size), np.float32)

    def of(self, positions: IntArray) -> Rotation:
        """Cosines and sines of the rows' positions [N]."""
        last = int(positions.max(initial=0))
        if last >= len(self._cos):
            end = -(-(last + 1) // _TABLE_BLOCK) * _TABLE_BLOCK
            further = torch.arange(len(self._cos), end)[None]
            cos, sin = self._rotary(torch.empty(0), position_ids=further)
            self._cos = np.concatenate([self._cos, cos[0].float().numpy()])
            self._sin = np.concatenate([self._sin, sin[0].float().numpy()])
        return Rotation(self._cos[positions], self._sin[positions])


class HalfEmbedding(nn.Module):
    """Embeddings kept in bfloat16 and read in single precision, for weights that bfloat16 holds exactly."""

    def __init__(self, weight: Tensor) -> None:
        """`weight` [vocab, hidden]."""
        super().__init__()
        self.weight = nn.Parameter(weight.detach().bfloat16(), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Embeddings [..., hidden]."""
        return F.embedding(token_ids, self.weight).float()


def is_half(weight: Tensor) -> bool:
    """Whether bfloat16 holds all of a matrix's numbers exactly."""
    return all(torch.equal(rows, rows.bfloat16().float()) for rows in weight.detach().split(_COMPARED_ROWS))


def _rows_of(embed: Any, token_ids: IntArray) -> FloatArray:
    """Embeddings [N, hidden] in single precision; torch's functions would give up the interpreter's lock."""
    weight: Tensor = embed.weight.detach()
    if weight.dtype == torch.bfloat16:
        return floats(weight.view(torch.int16).numpy().view(np.uint16)[token_ids])
    rows: FloatArray = weight.numpy()[token_ids]
    return rows


class CompiledLayers:
    """Layers of one model, whose forwards are replaced while this is installed."""

    def __init__(
        self,
        model: PreTrainedModel,
        kernel: CompiledKernel,
        rules: Sequence[AttentionRule],
        *,
        rounds_inputs: bool,
        quantizes: bool = False,
    ) -> None:
        """Copy the layers' weights, with `quantizes` as 8-bit integers.

        With `rounds_inputs` products have inputs in bfloat16, and other weights are too.

        Raises:
            IncompatibleError: the layers are not of the family, or have unsupported parts.
        """
        self._model = model
        self._body: Any = model.base_model
        self._layers: list[Any] = list(decoder_layers(model))
        self._kernel = kernel
        self.weights, self._activation, self._epsilon = _read_layers(
            self._layers, rules, rounds_inputs=rounds_inputs, quantizes=quantizes
        )
        self._inputs: Any = np.uint16 if rounds_inputs else np.float32
        attention: Any = self._layers[0].self_attn
        self._size: int = attention.head_dim
        self._heads = attention.q_proj.out_features // self._size
        self._kv_heads = attention.k_proj.out_features // self._size
        self._buffers: Buffers | None = None
        # First layers of runs; within a run layers have equal positions.
        kinds = [getattr(layer.self_attn, "layer_type", None) for layer in self._layers]
        self._starts = {at for at in range(len(kinds)) if at == 0 or kinds[at] != kinds[at - 1]}
        self._has_equal_positions = len(self._starts) == 1
        # None until the whole model is compiled.
        self._rotations: RotationTable | None = None
        # Layers whose inputs are kept, and those of the last pass.
        self._shown: tuple[int, ...] = ()
        self._states: dict[int, Tensor] = {}

    def install(self) -> None:
        """Replace the layers' forwards, and that of the body if all layers have equal positions."""
        for at, layer in enumerate(self._layers):
            layer.forward = functools.partial(self._forward, at)
        if self._has_equal_positions:
            self._body.forward = self._run_body

    def uninstall(self) -> None:
        """Restore the forwards."""
        for layer in self._layers:
            del layer.forward
        if self._has_equal_positions:
            del self._body.forward

    def release(self) -> None:
        """Free the weights of the modules, which are kept here as panels; the layers' own forwards are gone with it.

        Embeddings that bfloat16 holds exactly are kept in it. Weights may be parts of the checkpoint's mapped file,
        which is in memory as long as one of them is: what is left is copied.
        """
        for layer in self._layers:
            for module in layer.modules():
                if type(module) is nn.Linear:
                    module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
        self._halve_embeddings()
        for parameter in self._model.parameters():
            parameter.data = parameter.detach().clone()

    def _halve_embeddings(self) -> None:
        embed, head = self._body.embed_tokens, self._model.get_output_embeddings()
        if type(embed) is not nn.Embedding or not is_half(embed.weight):
            return
        is_tied = isinstance(head, PackedLinear) and head.weight is embed.weight
        self._body.embed_tokens = HalfEmbedding(embed.weight)
        if is_tied:
            head.weight = self._body.embed_tokens.weight

    def cut(self, layer: int) -> None:
        """Begin a run with this layer, so that hooks see the output of the one before."""
        self._starts.add(layer)
        self._rotations = None

    def take_whole(self) -> None:
        """Compute logits without any call of a module from now on, if the model's other parts are plain as well."""
        body, head, output = self._body, self._model.get_output_embeddings(), output_layer(self._model)
        is_plain = (
            type(body.embed_tokens) is nn.Embedding
            and body.embed_tokens.weight.dtype == torch.float32
            and isinstance(body.norm, CompiledNorm)
            and body.norm.epsilon == self._epsilon
            and isinstance(head, PackedLinear)
            and isinstance(head.product, SharedProduct)
            and (output.scale, output.softcap) == (1, None)
            and getattr(body.rotary_emb, "rope_type", None) in _STATIC_ROPES
        )
        if is_plain and self._has_equal_positions:
            self._rotations = RotationTable(body.rotary_emb, self._size)

    def logits(self, token_ids: IntArray, positions: IntArray, logit_rows: IntArray) -> Tensor | None:
        """Logits [K, vocab] of some rows of a pass over N rows; None if the model's own forward has to be called.

        Modules and torch's functions between compiled calls take a tenth of a pass of one row, and twice as much where
        another thread wants the interpreter.
        """
        head: Any = self._model.get_output_embeddings()
        if self._rotations is None or self._body.forward != self._run_body:
            return None
        if any(module._forward_hooks or module._forward_pre_hooks for module in (self._model, self._body.norm, head)):
            return None
        hidden = _rows_of(self._body.embed_tokens, token_ids)
        shared, norm = head.product, self._body.norm
        result = np.empty((len(logit_rows), shared.num_columns), np.float32)
        with self._seen_states(0, len(self._layers), hidden) as (shown, states):
            self.threads.call(
                run_whole,
                torch.get_num_threads(),
                self.weights,
                norm.numbers,
                shared.matrices,
                self._epsilon,
                *self._arguments(hidden, self._rotations.of(positions)),
                shown,
                states,
                logit_rows,
                result,
                new_counters(num_phases(len(self._layers)) + 2),
            )
        return torch.from_numpy(shared.without_padding(result))

    def show(self, layers: Sequence[int]) -> None:
        """Keep the inputs of these layers, or the output of the last, until the next call."""
        self._shown = tuple(sorted(set(layers)))
        self._states = {}

    def take_shown(self) -> dict[int, Tensor]:
        """The kept states [1, N, h], by layer."""
        states, self._states = self._states, {}
        return states

    @property
    def threads(self) -> SharedThreads:
        """Threads of its calls."""
        return self._kernel.threads

    def _run_body(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """The body's forward, with calls only of layers that compute, and of the ones before them.

        In between weights are read, so what Python runs is no longer in the caches: calls of every layer, and masks
        that nobody reads, were a twentieth of a pass of one row.
        """
        hidden = self._body.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        positions = self._body.rotary_emb(hidden, position_ids=position_ids)
        # Hooks may see the output of the ones before.
        starts = {*self._starts, len(self._layers)}
        called = starts.union(start - 1 for start in starts) & set(range(len(self._layers)))
        for at in sorted(called):
            hidden = self._layers[at](hidden, position_embeddings=positions)
        return BaseModelOutputWithPast(last_hidden_state=self._body.norm(hidden))

    def _forward(
        self, layer: int, hidden_states: Tensor, *_: Any, position_embeddings: tuple[Tensor, Tensor], **__: Any
    ) -> Tensor:
        """The first layer of a run computes all of it; the others return their input [1, N, h]."""
        if layer not in self._starts:
            return hidden_states
        num_layers = len(self._layers)
        last = min((start for start in self._starts if start > layer), default=num_layers)
        result = hidden_states.clone(memory_format=torch.contiguous_format)
        cos, sin = (part[0].contiguous().numpy() for part in position_embeddings)
        self._run(layer, last, result.numpy()[0], Rotation(cos, sin))
        return result

    def _run(self, first: int, last: int, hidden: FloatArray, rotation: Rotation) -> None:
        """Layers from `first` to `last` (excluded), in place; inputs of those to be shown are kept."""
        with self._seen_states(first, last, hidden) as (shown, states):
            self.threads.call(
                run_layers,
                torch.get_num_threads(),
                self.weights,
                first,
                last,
                self._epsilon,
                *self._arguments(hidden, rotation),
                shown,
                states,
                new_counters(num_phases(last - first)),
            )

    @contextlib.contextmanager
    def _seen_states(self, first: int, last: int, hidden: FloatArray) -> Iterator[tuple[IntArray, FloatArray]]:
        """Layers to be shown, and room for their inputs, which are kept afterwards."""
        shown = [one for one in self._shown if first <= one < last or one == last == len(self._layers)]
        states = np.empty((len(shown), *hidden.shape), np.float32)
        yield np.array(shown, np.int64), states
        self._states.update((one, torch.from_numpy(states[at : at + 1])) for at, one in enumerate(shown))

    def _arguments(self, hidden: FloatArray, rotation: Rotation) -> tuple[Any, ...]:
        """Arguments of compiled calls from `activation` to `buffers`."""
        keys, values = self._kernel.stacked_layers(len(self._layers), self._kv_heads, self._size)
        kernel = self._kernel
        room = self.buffers(len(hidden))
        return self._activation, hidden, rotation, keys, values, kernel.rows, kernel.write_slots, room

    def buffers(self, num_rows: int) -> Buffers:
        """Buffers for `num_rows` rows: those of the largest pass so far, or a part of them."""
        if self._buffers is None or len(self._buffers.qkv) < num_rows:
            weights = self.weights
            seen = _aligned(self._inputs, num_rows, self._heads, self._size)
            self._buffers = Buffers(
                normed=_aligned(self._inputs, num_rows, weights.input_norms.shape[1]),
                qkv=_aligned(np.float32, num_rows, _columns(weights.qkv)),
                query=_aligned(np.float32, num_rows, self._heads, self._size),
                key=_aligned(np.float32, num_rows, self._kv_heads, self._size),
                value=_aligned(np.float32, num_rows, self._kv_heads, self._size),
                seen=seen,
                seen_rows=seen.reshape(num_rows, -1),
                change=_aligned(np.float32, num_rows, _columns(weights.output)),
                gate_up=_aligned(np.float32, num_rows, _columns(weights.gate_up)),
                gated=_aligned(self._inputs, num_rows, _columns(weights.gate_up) // 2),
            )
        rooms: Any = [array[:num_rows] for array in self._buffers]
        return Buffers(*rooms)


def _columns(matrices: Matrices) -> int:
    """Width of a product's rows, padded to panels."""
    num_panels: int = matrices.panels.shape[1]
    return num_panels * PANEL


class SharedProduct:
    """Product with one layer's weights, shared by threads."""

    def __init__(
        self, layer: nn.Linear, threads: SharedThreads, *, rounds_inputs: bool, quantizes: bool = False
    ) -> None:
        self._num_outputs = layer.out_features
        self._rounds_inputs = rounds_inputs
        self.matrices = _matrices(_packing([layer], rounds_inputs, quantizes), [[layer]])
        self.num_columns = _columns(self.matrices)
        self._threads = threads

    def __call__(self, rows: Tensor) -> Tensor:
        """`rows` [..., in] to [..., out]."""
        result = self.of(rows.reshape(-1, rows.shape[-1]).contiguous().numpy())
        return torch.from_numpy(result).view(*rows.shape[:-1], self._num_outputs)

    def of(self, rows: FloatArray) -> FloatArray:
        """`rows` [N, in] to [N, out]."""
        inputs: Any = halves(rows) if self._rounds_inputs else rows
        result = np.empty((len(inputs), self.num_columns), np.float32)
        arguments = inputs, self.matrices, 0, result, new_counters(1), 0, self.matrices.panels[0]
        self._threads.call(share_product, torch.get_num_threads(), *arguments)
        return self.without_padding(result)

    def without_padding(self, result: FloatArray) -> FloatArray:
        """Outputs [N, out] of a product [N, `num_columns`]."""
        return np.ascontiguousarray(result[:, : self._num_outputs])


def compile_layers(
    target: TargetModel, kernel: CompiledKernel, *, rounds_inputs: bool = False, quantizes: bool = False
) -> None:
    """Replace a target's layers, output layer and last norm by compiled ones.

    With `rounds_inputs` products have inputs in bfloat16, and weights are bfloat16 numbers. With `quantizes` weights
    are those of `quantize_linears`.

    Raises:
        IncompatibleError: the model is not of the family.
    """
    model = target.model
    layers = decoder_layers(model)
    if not HAS_WIDE_REGISTERS:
        raise IncompatibleError("without vectors of 512 bits oneDNN's products may be faster")
    if type(layers[0]).__name__.removesuffix("DecoderLayer") not in _FAMILIES:
        raise IncompatibleError(f"{type(layers[0]).__name__} is not of the Llama family")
    rules = _seen_rules(target, kernel, len(layers))
    compiled = CompiledLayers(model, kernel, rules, rounds_inputs=rounds_inputs, quantizes=quantizes)
    head = model.get_output_embeddings()
    if type(head) is nn.Linear:
        name = next(name for name, module in model.named_modules() if module is head)
        product = SharedProduct(head, kernel.threads, rounds_inputs=rounds_inputs, quantizes=quantizes)
        model.set_submodule(name, PackedLinear(head, product))
    elif quantizes:
        raise IncompatibleError(f"{type(head).__name__} is no plain output layer")
    compile_norms(model)
    target.use_layers(compiled)
    compiled.take_whole()


def _seen_rules(target: TargetModel, kernel: CompiledKernel, num_layers: int) -> list[AttentionRule]:
    """Attention rules of the layers' own forwards, observed in a pass of one row."""
    cache = SequenceCache(target.cache, 1)
    target.forward(target.plan([SequenceRows(cache, [0])]))
    cache.release()
    return [kernel.rules[layer] for layer in range(num_layers)]


def _read_layers(
    layers: Sequence[Any], rules: Sequence[AttentionRule], *, rounds_inputs: bool, quantizes: bool
) -> tuple[LayerWeights, int, float]:
    """Weights, activation and epsilon of layers of equal kind."""
    attentions, mlps = [layer.self_attn for layer in layers], [layer.mlp for layer in layers]
    is_sandwich = hasattr(layers[0], "pre_feedforward_layernorm")
    names = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    norms = [[getattr(layer, name, None) for layer in layers] for name in names]
    if not is_sandwich:
        norms = [norms[0], [None] * len(layers), norms[1], [None] * len(layers)]
    input_norms, after_attention, mlp_norms, after_mlp = norms
    query_norms, key_norms = ([getattr(part, name, None) for part in attentions] for name in ("q_norm", "k_norm"))
    every_norm: list[Any] = [norm for some in (*norms, query_norms, key_norms) for norm in some if norm is not None]
    epsilons: set[Any] = {getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) for norm in every_norm}
    if len(epsilons) != 1 or any(len(norm.weight) % LANES for norm in every_norm):
        raise IncompatibleError("the layers' norms are not alike, or their width is no multiple of a vector")
    linears = [
        [part.q_proj, part.k_proj, part.v_proj, part.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        for part, mlp in zip(attentions, mlps, strict=True)
    ]
    every_linear = [linear for some in linears for linear in some]
    if any(type(linear) is not nn.Linear or linear.weight.dtype != torch.float32 for linear in every_linear):
        raise IncompatibleError("the layers' products are not all plain ones in single precision")
    if attentions[0].q_proj.weight.shape[0] % attentions[0].head_dim or attentions[0].head_dim % 2:
        raise IncompatibleError("the layers' heads are no whole number of rows")
    packing = _packing(every_linear, rounds_inputs, quantizes)
    weights = LayerWeights(
        input_norms=_norms(input_norms),
        qkv=_matrices(packing, [[part.q_proj, part.k_proj, part.v_proj] for part in attentions]),
        query_norms=_norms(query_norms),
        key_norms=_norms(key_norms),
        scales=np.array([rule.scale for rule in rules], np.float32),
        windows=np.array([rule.sliding_window or 0 for rule in rules], np.int64),
        output=_matrices(packing, [[part.o_proj] for part in attentions]),
        after_attention=_norms(after_attention),
        mlp_norms=_norms(mlp_norms),
        gate_up=_matrices(packing, [[mlp.gate_proj, mlp.up_proj] for mlp in mlps], in_turn=True),
        down=_matrices(packing, [[mlp.down_proj] for mlp in mlps], pads_inputs=True),
        after_mlp=_norms(after_mlp),
    )
    return weights, _activation(mlps), float(epsilons.pop())


def _activation(mlps: Sequence[Any]) -> int:
    """Activation of the gates, identified by its values."""
    numbers = torch.linspace(-12, 12, 97)
    for number, function in _ACTIVATIONS:
        if all(torch.allclose(mlp.act_fn(numbers), function(numbers), atol=1e-6) for mlp in mlps):
            return number
    raise IncompatibleError("the layers' activation is not compiled")


def _norms(norms: Sequence[Any]) -> FloatArray:
    """Weights of one norm in all layers [L, width]; Gemma's are stored minus 1."""
    weights = [
        _NO_NORM if norm is None else norm.weight.detach().float() + ("Gemma" in type(norm).__name__) for norm in norms
    ]
    return torch.stack(weights).numpy()


def _packing(linears: Sequence[nn.Linear], rounds_inputs: bool, quantizes: bool) -> Packing:
    """Format of weights: 8-bit integers, or bfloat16 if exact for all of them, in pairs for bfloat16 inputs."""
    if quantizes:
        return functools.partial(_quantized, byte_pair_panels if rounds_inputs else byte_panels)
    if rounds_inputs:
        return lambda weights: (pair_panels(halves(weights)), _NO_SCALES)
    if all(holds_exactly(linear.weight.detach()) for linear in linears):
        return lambda weights: (packed_panels(halves(weights)), _NO_SCALES)
    return lambda weights: (float_panels(weights), _NO_SCALES)


def _quantized(
    panels: Callable[[npt.NDArray[np.int8]], npt.NDArray[np.int8]], weights: FloatArray
) -> tuple[Panels, FloatArray]:
    """Panels of dequantised weights' integers, and their scales."""
    numbers = torch.from_numpy(weights)
    scales = row_scales(numbers)
    return panels(whole_numbers(numbers, scales).to(torch.int8).numpy()), scales.numpy()


def _matrices(
    packing: Packing,
    linears: Sequence[Sequence[nn.Linear]],
    *,
    in_turn: bool = False,
    pads_inputs: bool = False,
) -> Matrices:
    """One product's weights in all layers, each of several linear layers, concatenated or alternating by panel."""
    stacked: npt.NDArray[Any] | None = None
    biases: list[FloatArray] = []
    scales: list[FloatArray] = []
    for at, some in enumerate(linears):
        weights = [linear.weight.detach() for linear in some]
        own_biases = [
            torch.zeros(len(weight)) if part.bias is None else part.bias.detach()
            for part, weight in zip(some, weights, strict=True)
        ]
        if pads_inputs:
            weights = [F.pad(weight, (0, -weight.shape[1] % PANEL)) for weight in weights]
        if in_turn:
            weights, own_biases = [_in_turn(weights)], [_in_turn(own_biases)]
        whole, bias = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (weights, own_biases))
        own_scales: list[FloatArray] = []
        for first in range(0, len(whole), _PACKED_ROWS):
            panels, some_scales = packing(whole[first : first + _PACKED_ROWS].numpy())
            if stacked is None:
                stacked = _aligned(panels.dtype, len(linears), -(-len(whole) // PANEL), *panels.shape[1:])
            stacked[at, first // PANEL :][: len(panels)] = panels
            own_scales.append(some_scales)
        all_scales = np.concatenate(own_scales)
        scales.append(np.pad(all_scales, (0, -len(all_scales) % PANEL)))
        biases.append(F.pad(bias, (0, -len(bias) % PANEL)).numpy())
    assert stacked is not None
    has_biases = any(linear.bias is not None for some in linears for linear in some)
    empty = np.empty((len(linears), 0), np.float32)
    return Matrices(stacked, np.stack(scales), np.stack(biases) if has_biases else empty)


def _in_turn(parts: Sequence[Tensor]) -> Tensor:
    """Two weights [out, in] or biases [out], alternating by panel, padded with zeros."""
    missing = -len(parts[0]) % PANEL
    whole = [F.pad(part, (0, 0) * (part.dim() - 1) + (0, missing)) for part in parts]
    panels = [part.view(-1, PANEL, *part.shape[1:]) for part in whole]
    return torch.stack(panels, 1).flatten(0, 2)


def _aligned(kind: npt.DTypeLike, *shape: int) -> npt.NDArray[Any]:
    """Zeros of a type and shape, aligned to a cache line."""
    size, dtype = math.prod(shape), np.dtype(kind)
    return aligned_zeros(-(-size * dtype.itemsize // 4)).view(dtype)[:size].reshape(shape)
