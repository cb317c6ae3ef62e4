"""Time of a pass for its products alone, for measurements: its own kernels on its weights, and no more."""

from __future__ import annotations

from collections.abc import Callable

import torch

from coppice.kernels.cpu.compiler import compiled_exactly
from verifier_svc.kernels.cpu.decoder_layers import Buffers, LayerWeights, share_product
from verifier_svc.kernels.cpu.packed_layers import PackedLinear
from verifier_svc.kernels.cpu.shared_work import CounterArray, new_counters
from verifier_svc.model.compiled_layers import CompiledLayers
from verifier_svc.model.target_model import TargetModel

_PRODUCTS = 4


@compiled_exactly
def multiply_all(weights: LayerWeights, buffers: Buffers, counters: CounterArray) -> None:
    """All products of all layers in the order of a pass, shared by all threads that call this.

    `counters` are of four phases per layer. The inputs are whatever the buffers hold.
    """
    last = len(weights.qkv.panels) - 1
    for layer in range(last + 1):
        output, gate_up, down = weights.output.panels[layer], weights.gate_up.panels[layer], weights.down.panels[layer]
        after = weights.qkv.panels[min(layer + 1, last)]
        phase = _PRODUCTS * layer
        share_product(buffers.normed, weights.qkv, layer, buffers.qkv, counters, phase, output)
        share_product(buffers.seen_rows, weights.output, layer, buffers.change, counters, phase + 1, gate_up)
        share_product(buffers.normed, weights.gate_up, layer, buffers.gate_up, counters, phase + 2, down)
        share_product(buffers.gated, weights.down, layer, buffers.change, counters, phase + 3, after)


def products_of(target: TargetModel) -> Callable[[int], None] | None:
    """A call of all products of a pass over so many rows, the output layer's included; None without compiled layers."""
    layers, head = target.layers, target.model.get_output_embeddings()
    if not isinstance(layers, CompiledLayers) or not isinstance(head, PackedLinear):
        return None
    num_layers = len(layers.weights.qkv.panels)

    @torch.inference_mode()
    def run(num_rows: int) -> None:
        arguments = layers.weights, layers.buffers(num_rows), new_counters(_PRODUCTS * num_layers)
        layers.threads.call(multiply_all, torch.get_num_threads(), *arguments)
        head(torch.zeros(num_rows, head.in_features))

    return run
