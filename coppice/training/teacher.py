"""The target's likeliest tokens at every position of the training text; computed once."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from coppice.checkpoints.writing import whole_file

# Tokens kept per position; the others are lumped together. At temperature 1 every twelfth token of the target is not
# among its 32 likeliest, and a drafter that never learned their order cannot propose it.
TOP = 128
_ROWS_PER_CHUNK = 64
_SMALLEST = 1e-7


@dataclass(frozen=True)
class TaughtRows:
    """Text with the target's distributions.

    `token_ids` [rows, length]; `top_ids` and `top_log_probs` [rows, length, TOP] describe the next token.
    """

    token_ids: Tensor
    top_ids: Tensor
    top_log_probs: Tensor

    def __len__(self) -> int:
        return len(self.token_ids)

    def batch(self, rows: int, seed: int, step: int) -> TaughtRows:
        """Random rows, as a function of (seed, step)."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        chosen = torch.randint(len(self), (rows,), generator=generator)
        return self.part(chosen)

    def part(self, rows: Tensor | slice) -> TaughtRows:
        """A subset of the rows, in data types for computation."""
        return TaughtRows(self.token_ids[rows], self.top_ids[rows].long(), self.top_log_probs[rows].float())

    def terms(self, logits: Tensor, predicted: Tensor, total_variation: float) -> Tensor:
        """`distillation_terms` [rows, ...] of logits [rows, ..., vocab] for tokens at positions `predicted` [...]."""
        before = predicted - 1
        return distillation_terms(logits, self.top_ids[:, before], self.top_log_probs[:, before], total_variation)


@torch.inference_mode()
def teach(target: PreTrainedModel, token_ids: Tensor, cache: Path) -> TaughtRows:
    """Run the target over `token_ids` [rows, length]; chunks are stored under `cache`, so interrupted runs resume."""
    cache.mkdir(parents=True, exist_ok=True)
    model = torch.compile(target, dynamic=False) if shutil.which("g++") else target
    chunks = []
    for number, chunk in enumerate(tqdm(token_ids.split(_ROWS_PER_CHUNK), desc="teaching", mininterval=5)):
        path = cache / f"taught-{number:05}.npz"
        if not path.exists():
            logits = model(input_ids=chunk, use_cache=False).logits
            top = logits.float().log_softmax(-1).topk(min(TOP, logits.shape[-1]))
            ids, log_probs = top.indices.numpy().astype(np.uint16), top.values.numpy().astype(np.float16)
            with whole_file(path) as file:
                np.savez(file, ids=ids, log_probs=log_probs)
        loaded = np.load(path)
        chunks.append((torch.from_numpy(loaded["ids"].astype(np.int32)), torch.from_numpy(loaded["log_probs"])))
    all_ids, all_log_probs = zip(*chunks, strict=True)
    return TaughtRows(token_ids, torch.cat(all_ids), torch.cat(all_log_probs))


def full_distillation_loss(student_logits: Tensor, teacher_logits: Tensor, total_variation: float) -> Tensor:
    """KL(teacher || student) plus weighted total variation, mean over positions; both [..., vocab]."""
    student, teacher = student_logits.float().log_softmax(-1), teacher_logits.float().log_softmax(-1)
    teacher_p = teacher.exp()
    divergence = (teacher_p * (teacher - student)).sum(-1)
    distance = 0.5 * (teacher_p - student.exp()).abs().sum(-1)
    return (divergence + total_variation * distance).mean()


def distillation_loss(student_logits: Tensor, top_ids: Tensor, top_log_probs: Tensor, total_variation: float) -> Tensor:
    """Mean over positions of `distillation_terms`."""
    return distillation_terms(student_logits, top_ids, top_log_probs, total_variation).mean()


def distillation_terms(
    student_logits: Tensor, top_ids: Tensor, top_log_probs: Tensor, total_variation: float
) -> Tensor:
    """KL(teacher || student) plus weighted total variation at each position.

    Both are taken over the teacher's likeliest tokens and the lump of all others. `student_logits` [..., vocab],
    `top_ids` and `top_log_probs` [..., TOP].
    """
    student = student_logits.float().log_softmax(-1).gather(-1, top_ids)
    teacher_p, student_p = top_log_probs.exp(), student.exp()
    teacher_rest = (1 - teacher_p.sum(-1)).clamp_min(_SMALLEST)
    student_rest = (1 - student_p.sum(-1)).clamp_min(_SMALLEST)
    divergence = (teacher_p * (top_log_probs - student)).sum(-1)
    divergence = divergence + teacher_rest * (teacher_rest.log() - student_rest.log())
    distance = 0.5 * ((teacher_p - student_p).abs().sum(-1) + (teacher_rest - student_rest).abs())
    terms: Tensor = divergence + total_variation * distance
    return terms
