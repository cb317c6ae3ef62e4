"""Starting model of a block drafter: the small LM with masks in its vocabulary, and optional layers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from coppice.training.block_layout import BlockLayout
from coppice.training.transition import TrainedTransition

# Masks start as the mean embedding plus noise, at this fraction of the embeddings' spread.
_MASK_SPREAD = 0.1


def new_block_model(
    start: LlamaForCausalLM, num_masks: int, extra_layers: int, seed: int, transition_rank: int = 0
) -> LlamaForCausalLM:
    """A model equal to `start` on tokens, with `num_masks` more embeddings at the end of the vocabulary.

    Additional layers are copies of the last one with zero output matrices, so they add nothing at first. With
    `transition_rank` it also has a `transition`, initially zero.
    """
    generator = torch.Generator().manual_seed(seed)
    config = copy.deepcopy(start.config)
    config.vocab_size += num_masks
    config.num_hidden_layers += extra_layers
    model = LlamaForCausalLM(config)
    state = start.state_dict()
    last = start.config.num_hidden_layers - 1
    for layer in range(last + 1, config.num_hidden_layers):
        for name in [name for name in state if name.startswith(f"model.layers.{last}.")]:
            value = torch.zeros_like(state[name]) if "o_proj" in name or "down_proj" in name else state[name].clone()
            state[name.replace(f".{last}.", f".{layer}.", 1)] = value
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        known = state[name]
        noise = torch.randn(num_masks, known.shape[1], generator=generator) * known.std() * _MASK_SPREAD
        state[name] = torch.cat([known, known.mean(0) + noise])
    model.load_state_dict(state)
    if transition_rank:
        model.transition = TrainedTransition(model, transition_rank, generator, start.config.vocab_size)
    return model


def freeze_tokens(model: LlamaForCausalLM, num_masks: int) -> None:
    """Freeze the embeddings of tokens; those of the masks, last in the vocabulary, stay trainable."""
    model_: Any = model
    for table in (model_.get_input_embeddings().weight, model_.get_output_embeddings().weight):
        learns = torch.zeros(len(table), 1)
        learns[len(table) - num_masks :] = 1
        table.register_hook(lambda gradient, learns=learns: gradient * learns.to(gradient))


def block_logits(model: nn.Module, layout: BlockLayout, token_ids: Tensor, groups: Tensor) -> Tensor:
    """`layout.run` plus the model's transition, if any; then scores of tokens only, without masks.

    Of the tokens between the text a mask sees and the one it predicts, the transition sees the last.
    """
    return with_transition(model, layout, token_ids, layout.run(model, token_ids, groups))


def with_transition(model: nn.Module, layout: BlockLayout, token_ids: Tensor, logits: Tensor) -> Tensor:
    """Logits [R, G, 1 + K, V] of the layout's blocks plus the model's transition, if any."""
    transition: TrainedTransition | None = getattr(model, "transition", None)
    if transition is None:
        return logits
    added = transition(token_ids[:, layout.predicted[:, :-1]])
    tokens = logits[..., : added.shape[-1]]
    return torch.cat([tokens[:, :, :1], tokens[:, :, 1:] + added], 2)


def mask_ids(model: LlamaForCausalLM, num_masks: int) -> torch.Tensor:
    """Ids of the masks [num_masks], the vocabulary's last."""
    size: int = model.config.vocab_size
    return torch.arange(size - num_masks, size)
