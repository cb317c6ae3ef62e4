"""Text that the target has looked at: its own continuations and corpus text, each computed once and kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coppice.training.target_samples import SampleShape, sample_target
from coppice.training.teacher import TaughtRows, teach
from coppice.training.token_store import TokenStore


@dataclass(frozen=True)
class OwnText:
    """`samples` [rows, length] are the target's own, `windows` [rows, length] the corpus's; `taught` has both."""

    samples: Tensor
    windows: Tensor
    taught: TaughtRows

    @classmethod
    def build(
        cls,
        target: PreTrainedModel,
        store: TokenStore,
        shape: SampleShape,
        corpus_rows: int,
        seed: int,
        cache: Path,
        *,
        with_states: bool = False,
    ) -> Self:
        """Sample the target, draw windows of the corpus, and run the target over both, or go on where a run ended.

        `with_states`: the target's hidden states are kept, too.
        """
        samples = torch.from_numpy(sample_target(target, store.train, shape, seed, cache / "samples"))
        windows = store.training_batch(seed, 0, corpus_rows, shape.length)
        text = torch.cat([samples, windows])
        return cls(samples, windows, teach(target, text, cache / "taught", with_states=with_states))
