"""`coppice train target`: the bundled target, a small Llama trained from nothing on Python sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from coppice.checkpoints.writing import whole_directory
from coppice.core.tokenizer import fingerprint
from coppice.training.checkpoint import save_checkpoint
from coppice.training.loop import Schedule, language_model_loss, trained
from coppice.training.run import open_run

# Few, wide layers: transformers costs about half a millisecond per layer on a CPU, whatever the width.
LAYERS = 5
HIDDEN = 512
INTERMEDIATE = 1152
HEADS = 8
KV_HEADS = 4
MAX_POSITIONS = 2048


@dataclass(frozen=True, slots=True)
class TargetRecipe:
    """All parameters of a run. Short windows first, longer ones in the cool-down."""

    steps: int = 2000
    rows: int = 32
    length: int = 256
    final_length: int = 512
    learning_rate: float = 3e-3
    cooldown_share: float = 0.4
    seed: int = 0

    def window(self, step: int) -> tuple[int, int]:
        """Rows and length of a step's batch; the number of tokens is constant."""
        if step < self.steps * (1 - self.cooldown_share):
            return self.rows, self.length
        return self.rows * self.length // self.final_length, self.final_length


def new_target(vocab_size: int, eos_token_id: int, seed: int) -> LlamaForCausalLM:
    """A Llama with random weights, about 15 million parameters at a vocabulary of 4,096."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=eos_token_id + 1,
    )
    return LlamaForCausalLM(config)


def train_target(roots: Sequence[Path], tokenizer_dir: Path, out: Path, recipe: TargetRecipe) -> None:
    """Train, evaluate in bits per byte on the held-out split, and write the checkpoint with its card."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir, trust_remote_code=False)
    digest = fingerprint(tokenizer.backend_tokenizer.to_str().encode())
    store, state_dir = open_run(roots, tokenizer, out, recipe, tokenizer=digest)
    model = new_target(len(tokenizer), tokenizer.eos_token_id, recipe.seed).train()
    held_out = store.held_out_batches(windows=64, rows=16, length=256)

    def loss(runner: nn.Module, step: int) -> Tensor:
        ids = store.training_batch(recipe.seed, step, *recipe.window(step))
        return language_model_loss(runner, ids)

    schedule = Schedule(recipe.steps, recipe.learning_rate, cooldown_share=recipe.cooldown_share)
    loop = trained(model, loss, language_model_loss, held_out, schedule, state_dir)
    with whole_directory(out) as whole:
        save_checkpoint(model, tokenizer, whole, title="Bundled target", recipe=recipe, store=store, loop=loop)
