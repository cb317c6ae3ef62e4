"""The EAGLE-3 head in PyTorch, as it is trained (2503.01840, with the training-time test of section 3.2).

Row i of a text reads its token i + 1 and the target's states of the row that it was drawn from, and predicts token
i + 2. In step s > 0 of the training-time test the row reads token i + s + 1 and its own output of step s - 1, as it
will when it drafts. Rows of prompts are only attended to: what is trained on is answers. Embeddings and output rows are
the target's and not trained.
"""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from coppice.adapt.answer_store import NUM_READ, TextRows
from coppice.core.errors import IncompatibleError

# Weight of the target's first layer, which reads embeddings, in the half of the head that does.
_EMBEDDING_SHARE = 0.5
_FIRST_CONFIDENCE = 0.3


@dataclass(frozen=True, slots=True)
class EagleShape:
    """Sizes of a head's decoder layer; heads as in the Llama family."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    epsilon: float
    rope_theta: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> EagleShape:
        """The shape of the target's own layers."""
        config: Any = model.config.get_text_config()
        heads = config.num_attention_heads
        rope: Any = getattr(config, "rope_parameters", None) or {}
        return cls(
            config.hidden_size,
            config.intermediate_size,
            heads,
            getattr(config, "num_key_value_heads", None) or heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            getattr(config, "rms_norm_eps", None) or 1e-5,
            float(rope.get("rope_theta", getattr(config, "rope_theta", 10_000.0))),
        )


class _Norm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, rows: Tensor) -> Tensor:
        wide = rows.float()
        normed: Tensor = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon) * self.weight
        return normed


class _Attention(nn.Module):
    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        width, wide, narrow = 2 * shape.hidden, shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self.q_proj = nn.Linear(width, wide, bias=False)
        self.k_proj = nn.Linear(width, narrow, bias=False)
        self.v_proj = nn.Linear(width, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)


class _Mlp(nn.Module):
    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return out


class _EagleLayer(nn.Module):
    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.input_layernorm = _Norm(shape.hidden, shape.epsilon)
        self.hidden_norm = _Norm(shape.hidden, shape.epsilon)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = _Norm(shape.hidden, shape.epsilon)
        self.mlp = _Mlp(shape)


class EagleHead(nn.Module):
    """Trained parameters, named as in `speculators` checkpoints; frozen embeddings and output rows.

    `embeddings` [vocab, hidden] and `output_rows` [draft vocab, hidden] are the target's.
    """

    embeddings: Tensor
    output_rows: Tensor

    def __init__(self, shape: EagleShape, embeddings: Tensor, output_rows: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.input_norm = _Norm(NUM_READ * shape.hidden, shape.epsilon)
        self.fc = nn.Linear(NUM_READ * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([_EagleLayer(shape)])
        self.norm = _Norm(shape.hidden, shape.epsilon)
        self.register_buffer("embeddings", embeddings, persistent=False)
        self.register_buffer("output_rows", output_rows, persistent=False)

    def forward(self, answers: TextRows, before: TextRows, steps: int) -> list[Tensor]:
        """Inputs of the output layer [B, L, hidden] for each step of the training-time test.

        Answers are whole or cut, packed; `before` are rows that they see: prompts, and what was cut off. States after
        the first 3 of a row are not read.
        """
        shape, (batch, length) = self.shape, answers.token_ids.shape
        layer: Any = self.layers[0]
        num_before = before.token_ids.shape[1]
        visible = answers.segments[:, :, None] == torch.cat([before.segments, answers.segments], 1)[:, None]
        visible = visible.tril(num_before)[:, None]
        bias = torch.zeros(batch, 1, length, num_before + length).masked_fill(~visible, -math.inf)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        inputs = self._inputs(before.token_ids, self._fused(before))
        first_key, first_value = self._seen(inputs, _rotation(before.places, shape))
        residual = self._fused(answers)
        results = []
        for step in range(steps):
            # Token i + s + 1; what is beyond the row's end predicts nothing that is scored.
            inputs = self._inputs(F.pad(answers.token_ids[:, step:], (0, step)), residual)
            turn = _rotation(answers.places + step, shape)
            query = _rotated(self._split(layer.self_attn.q_proj(inputs), shape.heads), turn)
            key, value = self._seen(inputs, turn)
            keys.append(key if step else torch.cat([first_key, key], 2))
            values.append(value if step else torch.cat([first_value, value], 2))
            residual = residual + layer.self_attn.o_proj(self._attended(query, keys, values, bias))
            residual = residual + layer.mlp(layer.post_attention_layernorm(residual))
            results.append(self.norm(residual))
        return results

    def _fused(self, rows: TextRows) -> Tensor:
        """Inputs of rows with the target's states; in single precision, since they have a few large numbers."""
        fused: Tensor = self.fc(self.input_norm(rows.states[:, :, :NUM_READ].flatten(2))).float()
        return fused

    def _inputs(self, token_ids: Tensor, residual: Tensor) -> Tensor:
        layer: Any = self.layers[0]
        return torch.cat([layer.input_layernorm(self.embeddings[token_ids]), layer.hidden_norm(residual)], -1)

    def _seen(self, inputs: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of rows."""
        layer: Any = self.layers[0]
        attention, heads = layer.self_attn, self.shape.kv_heads
        return _rotated(self._split(attention.k_proj(inputs), heads), turn), self._split(
            attention.v_proj(inputs), heads
        )

    def _split(self, rows: Tensor, heads: int) -> Tensor:
        split: Tensor = rows.unflatten(-1, (heads, self.shape.head_size)).transpose(1, 2)
        return split

    def _attended(self, query: Tensor, keys: list[Tensor], values: list[Tensor], bias: Tensor) -> Tensor:
        """Attention of a step's rows [B, H, L, d] to true rows up to their own, and to their later steps.

        Keys and values of step 0 begin with those before the answers; `bias` [B, 1, L, C + L] is theirs.
        """
        repeats = self.shape.heads // self.shape.kv_heads
        query = query * self.shape.head_size**-0.5
        every_key = [one.repeat_interleave(repeats, 1) for one in keys]
        every_value = [one.repeat_interleave(repeats, 1) for one in values]
        scores = [query @ every_key[0].transpose(-1, -2) + bias.to(query.dtype)]
        scores += [(query * one).sum(-1, keepdim=True) for one in every_key[1:]]
        weights = torch.cat(scores, -1).float().softmax(-1).to(query.dtype)
        length = bias.shape[-1]
        seen = weights[..., :length] @ every_value[0]
        for step, one in enumerate(every_value[1:]):
            seen = seen + weights[..., length + step, None] * one
        rows: Tensor = seen.transpose(1, 2).flatten(2)
        return rows


def _rotation(places: Tensor, shape: EagleShape) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, 1, L, head size] of rotary embeddings (2104.09864) at `places` [B, L]."""
    size = shape.head_size
    frequencies = shape.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float32, device=places.device) / size)
    angles = (places[..., None].float() * frequencies).repeat(1, 1, 2)[:, None]
    return angles.cos(), angles.sin()


def _rotated(rows: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    half = rows.shape[-1] // 2
    swapped = torch.cat([-rows[..., half:], rows[..., :half]], -1)
    return (rows * turn[0] + swapped * turn[1]).to(rows.dtype)


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm before a model's output layer.

    Raises:
        IncompatibleError: it is not found.
    """
    for name in ("norm", "final_layer_norm", "ln_f"):
        if isinstance(norm := getattr(model.base_model, name, None), nn.Module):
            return norm
    raise IncompatibleError(f"{type(model).__name__} has no norm before its output layer")


def check_form(model: PreTrainedModel) -> None:
    """Refuse a target from whose layers no head can begin.

    Raises:
        IncompatibleError: it is not of the Llama family's form.
    """
    body: Any = model.base_model
    layer = getattr(body, "layers", [None])[-1]
    names = {name for name, _ in layer.named_parameters()} if layer is not None else set()
    attention = {f"self_attn.{part}_proj.weight" for part in "qkvo"}
    mlp = {f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    if missing := sorted((attention | mlp | norms) - names):
        raise IncompatibleError(
            f"{type(model).__name__} is not of the Llama family's form: its layers have no {', '.join(missing[:3])}"
        )


def new_head(model: PreTrainedModel, draft_ids: Tensor, state_scales: Tensor) -> EagleHead:
    """A head that begins as the target's last layer on its highest state; scales [3] are the RMS of the states.

    Raises:
        IncompatibleError: the target's layers are not of the Llama family's form.
    """
    check_form(model)
    shape = EagleShape.of(model)
    body: Any = model.base_model
    final_weight: Any = final_norm(model).weight
    embeddings = body.get_input_embeddings().weight.detach().clone()
    head = EagleHead(shape, embeddings, model.get_output_embeddings().weight.detach()[draft_ids].clone())
    first, last = body.layers[0], body.layers[-1]
    layer: Any = head.layers[0]
    with torch.no_grad():
        # After one norm of all states each shall have an RMS of 1.
        total = state_scales.square().mean().sqrt()
        head.input_norm.weight.copy_((total / state_scales).repeat_interleave(shape.hidden))
        head.fc.weight.normal_(std=0.02)
        high = head.fc.weight[:, -shape.hidden :]
        high.add_(torch.eye(shape.hidden) * state_scales[-1])
        for name in ("q_proj", "k_proj", "v_proj"):
            low_part = getattr(first.self_attn, name).weight.float() * _EMBEDDING_SHARE
            parts = [low_part, getattr(last.self_attn, name).weight.float()]
            getattr(layer.self_attn, name).weight.copy_(torch.cat(parts, 1))
        layer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).weight.copy_(getattr(last.mlp, name).weight)
        layer.input_layernorm.weight.copy_(first.input_layernorm.weight)
        layer.hidden_norm.weight.copy_(last.input_layernorm.weight)
        layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        # The target's last layer speaks of the token that is known here; the head begins less sure of it.
        head.norm.weight.copy_(final_weight * _FIRST_CONFIDENCE)
    return head


def _terms(logits: Tensor, shares: Tensor, weights: Tensor, variation: float) -> tuple[Tensor, Tensor]:
    """Weighted loss of rows of logits [n, vocab] against `shares`, and its gradient in the data type of the logits."""
    log_own, target = logits.float().log_softmax(-1), shares.float()
    own = log_own.exp()
    sign = (own - target).sign()
    change = own - target + 0.5 * variation * own * (sign - (own * sign).sum(-1, keepdim=True))
    divergence = torch.xlogy(target, target) - target * log_own
    loss = ((divergence + 0.5 * variation * (own - target).abs()).sum(-1, keepdim=True) * weights).sum()
    return loss, (change * weights).to(logits.dtype)


@functools.cache
def _compiled_terms() -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """`_terms` as one sweep over memory, where there is a C++ compiler."""
    return torch.compile(_terms, dynamic=False) if shutil.which("g++") else _terms


class _Distillation(torch.autograd.Function):
    """Mean of KL(target || drafter) + weight x total variation over rows, computed with its gradient in chunks."""

    CHUNK = 1024

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        targets: Tensor,
        output_rows: Tensor,
        row_weights: Tensor,
        variation: float,
        use_compiler: bool,
    ) -> Tensor:
        gradient = torch.empty_like(rows)
        total = torch.zeros(())
        scale = 1.0 / float(row_weights.sum().clamp_min(1))
        terms = _compiled_terms() if use_compiler else _terms
        for start in range(0, len(rows), _Distillation.CHUNK):
            part = slice(start, start + _Distillation.CHUNK)
            missing = _Distillation.CHUNK - len(rows[part])
            # Padded with rows of no weight: one program for every chunk.
            own, shares, weight = (
                F.pad(one, (0, 0, 0, missing)) for one in (rows[part], targets[part], row_weights[part, None] * scale)
            )
            loss, change = terms(own @ output_rows.T, shares, weight, variation)
            gradient[part] = (change @ output_rows)[: len(rows[part])]
            total += loss
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0], None, None, None, None, None


def distillation(
    rows: Tensor,
    targets: Tensor,
    output_rows: Tensor,
    weights: Tensor,
    variation: float,
    *,
    use_compiler: bool = False,
) -> Tensor:
    """Loss of output-layer inputs `rows` [n, hidden] against `targets` [n, draft vocab], weighted by `weights` [n]."""
    apply: Callable[..., Tensor] = _Distillation.apply
    return apply(rows, targets, output_rows, weights, variation, use_compiler)
