"""Text that the target says itself: end-of-text is a token like others, and every token can come."""

from __future__ import annotations

import torch

from coppice.training.target_samples import continue_prompts
from tests.tiny_checkpoint import tiny_llama


def test_what_the_target_s_own_settings_say_does_not_count() -> None:
    """Checkpoints of chat models have an end-of-text, and a top-p that would leave only the likeliest tokens."""
    target = tiny_llama(vocab_size=24, max_context_tokens=128, initializer_range=0.05)
    own = target.generation_config
    assert own is not None
    own.eos_token_id, own.top_p = 2, 0.01
    prompts = torch.randint(3, 24, (4, 6), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    rows = continue_prompts(target, prompts, 100, 1.0)
    assert rows.shape == (4, 106)
    said = rows[:, 6:]
    assert len(set(said.flatten().tolist())) == 24
    assert (said == 2).sum() > len(said)
    # What is padded.
    assert (said == 0).mean() < 0.2
    assert target.generation_config is own
