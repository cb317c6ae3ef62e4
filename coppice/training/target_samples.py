"""Text that the target has read: its own continuations and corpus text, each computed once and kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel

from coppice.checkpoints.writing import whole_file
from coppice.training.teacher import TaughtRows, teach
from coppice.training.token_store import TokenArray, TokenStore

# Fractions of rows by temperature; 0 is greedy. Greedy output of small models loops, so it has the least.
TEMPERATURES = ((1.0, 0.5), (0.7, 0.25), (0.0, 0.25))


@dataclass(frozen=True, slots=True)
class SampleShape:
    """Number of continuations, and lengths of prompt and continuation in tokens."""

    # Rows as long as contexts in use: beyond trained lengths, drafters guess badly.
    rows: int = 3072
    batch: int = 64
    prompt_tokens: int = 256
    new_tokens: int = 256

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self.prompt_tokens + self.new_tokens


@torch.inference_mode()
def sample_target(
    target: PreTrainedModel, corpus: TokenArray, shape: SampleShape, seed: int, cache: Path
) -> npt.NDArray[np.int64]:
    """Continue random windows of `corpus` with the target; returns token ids [rows, length].

    Batches are functions of (seed, number) and stored under `cache`, so interrupted runs can resume.
    """
    cache.mkdir(parents=True, exist_ok=True)
    batches = []
    for number in tqdm(range(shape.rows // shape.batch), desc="sampling the target", mininterval=5):
        path = cache / f"samples-{number:05}.npy"
        if not path.exists():
            batch = _sample_batch(target, corpus, shape, [seed, number])
            with whole_file(path) as file:
                np.save(file, batch)
        batches.append(np.load(path))
    return np.concatenate(batches).astype(np.int64)


def _sample_batch(
    target: PreTrainedModel, corpus: TokenArray, shape: SampleShape, seed: list[int]
) -> npt.NDArray[np.uint16]:
    generator = np.random.default_rng(seed)
    torch.manual_seed(int(generator.integers(2**31)))
    temperatures, shares = zip(*TEMPERATURES, strict=True)
    temperature = float(generator.choice(temperatures, p=shares))
    starts = generator.integers(0, len(corpus) - shape.prompt_tokens, shape.batch)
    prompts = np.stack([corpus[start : start + shape.prompt_tokens] for start in starts]).astype(np.int64)
    return continue_prompts(target, torch.from_numpy(prompts), shape.new_tokens, temperature)


def continue_prompts(
    target: PreTrainedModel, prompts: torch.Tensor, new_tokens: int, temperature: float
) -> npt.NDArray[np.uint16]:
    """`prompts` [rows, tokens] with the target's continuations; end-of-text is a regular token."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    config = GenerationConfig(max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0, **sampling)
    prompts = prompts.to(target.device)
    # In place of the target's own, which transformers takes what a given one leaves open from: EOS, top-p, penalties.
    own, target.generation_config = target.generation_config, config
    try:
        rows = target.generate(prompts, attention_mask=torch.ones_like(prompts))  # type: ignore[operator]
    finally:
        target.generation_config = own
    result: npt.NDArray[np.uint16] = rows.cpu().numpy().astype(np.uint16)
    return result


@dataclass(frozen=True)
class OwnText:
    """`samples` [rows, length] drawn by the target, `windows` [rows, length] of the corpus; `taught` covers both."""

    samples: Tensor
    windows: Tensor
    taught: TaughtRows

    def described(self) -> str:
        """Sizes of both parts, for a card."""
        own, corpus = self.samples.numel(), self.windows.numel()
        return f"{own:,} tokens of its own continuations and {corpus:,} tokens of corpus text"

    @classmethod
    def build(
        cls,
        target: PreTrainedModel,
        store: TokenStore,
        shape: SampleShape,
        corpus_rows: int,
        seed: int,
        cache: Path,
    ) -> Self:
        """Sample the target, draw windows of the corpus, and run the target over both; resumes an interrupted run."""
        samples = torch.from_numpy(sample_target(target, store.train, shape, seed, cache / "samples"))
        windows = store.training_batch(seed, 0, corpus_rows, shape.length)
        text = torch.cat([samples, windows])
        return cls(samples, windows, teach(target, text, cache / "taught"))
