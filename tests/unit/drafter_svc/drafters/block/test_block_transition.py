"""What a mask says depends on the token above it: in service as in training, and more than any marginal could say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from coppice.core.errors import IncompatibleError
from coppice.training.block_layout import BlockLayout, token_terms
from coppice.training.teacher import TOP, TaughtRows
from drafter_svc.drafters.block.transition import load_transition
from drafter_svc.training import semi_ar
from drafter_svc.training.block_model import block_logits, mask_ids, new_block_model
from drafter_svc.training.block_run import BlockRecipe
from tests.tiny_checkpoint import tiny_llama
from tests.unit.drafter_svc.test_block_training import VOCAB, quiet_torch, small_llama, text

__all__ = ["quiet_torch"]


def test_what_the_token_before_adds_is_in_service_what_it_was_in_training(tmp_path: Path) -> None:
    model = new_block_model(small_llama(), num_masks=2, extra_layers=0, seed=0, transition_rank=5)
    generator = torch.Generator().manual_seed(1)
    layout, rows = BlockLayout(20, torch.tensor([3, 9]), 2, sees_all=False), text(3, 20)
    masks = mask_ids(model, 2).expand(3, 2, -1)
    with torch.no_grad():
        without = layout.run(model, rows, masks)[..., :VOCAB]
        assert torch.equal(block_logits(model, layout, rows, masks), without), "at first it adds nothing"
        model.transition.behind.normal_(generator=generator)
        model.get_input_embeddings().weight += 0.2
        added = block_logits(model, layout, rows, masks) - layout.run(model, rows, masks)[..., :VOCAB]
    assert added[:, :, 0].eq(0).all(), "the first token's row knows the one before"
    model.save_pretrained(tmp_path)
    known = load_transition(str(tmp_path), LlamaForCausalLM.from_pretrained(tmp_path), VOCAB)
    assert known is not None
    before = rows[:, layout.predicted[:, :-1]]
    zeros, ones = np.zeros((1, VOCAB), np.float32), np.ones(1, np.float32)
    said = known.behind(before.flatten().tolist(), zeros, [0] * before.numel(), ones)
    expected = added[:, :, 1:]
    # Tables are kept in bfloat16.
    assert float((torch.from_numpy(said).view_as(expected) - expected).abs().max()) < 0.02 * float(expected.abs().max())
    narrow = tiny_llama(vocab_size=VOCAB, max_context_tokens=256, seed=0, hidden_size=32, initializer_range=0.4)
    with pytest.raises(IncompatibleError, match="do not fit"):
        load_transition(str(tmp_path), narrow, VOCAB)
    small_llama().save_pretrained(tmp_path / "plain")
    assert load_transition(str(tmp_path / "plain"), model, VOCAB) is None
    assert load_transition("somebody/model", model, VOCAB) is None


def test_masks_learn_with_a_transition_what_no_marginal_could_say() -> None:
    """Texts that count in circles from a number that nobody can know: the token before says what comes next."""
    recipe = BlockRecipe("semi-ar", 150, rows=8, block=3, groups=6, total_variation=0.0, transition_rank=16)
    objective = semi_ar.SemiArObjective(recipe)
    rng = torch.Generator().manual_seed(0)
    rows = torch.randint(16, (64, 24), generator=rng)
    # Every other token is any; the one behind it is the next number.
    rows[:, 1::2] = (rows[:, ::2] + 1) % 16
    nexts = torch.cat([rows[:, 1:], rows[:, :1]], 1)
    taught_ids = (nexts[..., None] + torch.arange(TOP)) % VOCAB
    taught = TaughtRows(
        rows, taught_ids.int(), torch.full((*rows.shape, TOP), -20.0).index_fill_(-1, torch.tensor([0]), 0)
    )
    losses = {}
    for rank in (0, 16):
        model = new_block_model(small_llama(), objective.num_masks, 0, 0, transition_rank=rank).train()
        masks = mask_ids(model, objective.num_masks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(150):
            loss = objective.loss(model, taught.batch(8, 0, step), masks, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        # The first mask behind an even place predicts the successor of a token that was drawn behind its text.
        layout = BlockLayout(24, torch.tensor([9, 13]), 2, sees_all=False)
        with torch.no_grad():
            logits = block_logits(model.eval(), layout, rows, masks.expand(len(rows), 2, -1))[..., :VOCAB]
        losses[rank] = float(token_terms(logits, rows[:, layout.predicted])[:, :, 1].mean())
    assert losses[16] < 1 < 2 < losses[0]
