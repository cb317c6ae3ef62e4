"""Training of SPACE masks on text that counts in a circle."""

from __future__ import annotations

import torch

from coppice.training.block_layout import BlockLayout
from verifier_svc.training.space_masks import SpaceMasks


def losses_of_counting(masks: SpaceMasks, num_steps: int, num_texts: int) -> list[float]:
    """Loss of each step, with `num_texts` texts a step."""
    optimizer = torch.optim.Adam(masks.parameters(), lr=2e-2)
    layout = BlockLayout(12, torch.tensor([4, 7, 8]), 2, sees_all=False)
    losses = []
    for step in range(num_steps):
        starts = torch.randint(8, (num_texts, 1), generator=torch.Generator().manual_seed(step))
        tokens = (starts + torch.arange(12)) % 8
        logits = masks(tokens, layout)[:, :, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 2), tokens[:, layout.predicted[:, 1:]].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
