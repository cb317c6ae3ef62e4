"""Training of an EAGLE-3 head on a target's answers, and its checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coppice.adapt.answer_store import NUM_READ, AnswerStore, Window, read_texts, shards
from coppice.adapt.eagle_head import EagleHead, distillation, final_norm, new_head
from coppice.training.loop import Schedule, trained

_HELD_OUT_WINDOWS = 8
# Share of the learning rate for a head that is trained further, which the whole rate would undo first.
_FURTHER_RATE = 0.3


@dataclass(frozen=True, slots=True)
class EagleRecipe:
    """Settings of a run. A pass over the data is an epoch; `steps` of the training-time test."""

    seed: int = 0
    epochs: float = 5.0
    draft_vocab: int = 8192
    rows: int = 4
    length: int = 512
    test_steps: int = 4
    # Weight of each further step: it only matters if the ones before were right.
    step_decay: float = 0.8
    total_variation: float = 1.0
    learning_rate: float = 2e-2
    warmup_steps: int = 20

    def training_steps(self, num_tokens: int) -> int:
        """Steps of all epochs over so many tokens."""
        return max(1, int(self.epochs * num_tokens / (self.rows * self.length)))


class EagleLoss:
    """Loss of a head on windows of answers.

    `final_norm` is the target's norm before its output layer, `output_rows` [draft vocab, hidden] that layer's rows.
    """

    def __init__(
        self, recipe: EagleRecipe, final_norm: nn.Module, output_rows: Tensor, *, use_compiler: bool = False
    ) -> None:
        self._recipe = recipe
        self._use_compiler = use_compiler
        self._final_norm = final_norm
        self._rows = output_rows

    def __call__(self, runner: nn.Module, window: Window) -> Tensor:
        """Mean over rows of the weighted sum over steps of the training-time test."""
        recipe = self._recipe
        with torch.no_grad():
            targets = self.target_logits(window).float().softmax(-1).to(self._rows.dtype)
        losses = []
        for step, (rows, valid) in enumerate(self.predictions(runner, window, recipe.test_steps)):
            # Row i of step s predicts token i + s + 1.
            scored = targets[:, step + 1 :].flatten(0, 1)
            weights = valid.flatten().float()
            arguments = rows.flatten(0, 1), scored, self._rows, weights, recipe.total_variation
            loss = distillation(*arguments, use_compiler=self._use_compiler)
            losses.append(loss * recipe.step_decay**step)
        return torch.stack(losses).sum()

    def target_logits(self, window: Window) -> Tensor:
        """The target's logits [B, L, draft vocab] from which the window's tokens were drawn."""
        states: Tensor = self._final_norm(window.answers.states[:, :, NUM_READ])
        return states.to(self._rows.dtype) @ self._rows.T

    def predictions(self, runner: nn.Module, window: Window, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """For every step, inputs of the output layer [B, L - 1 - step, hidden], and which predict a token."""
        results: list[Tensor] = runner(*window, steps)
        segments = window.answers.segments
        for step, rows in enumerate(results):
            away = step + 1
            valid = segments[:, :-away] == segments[:, away:]
            yield rows[:, :-away].to(self._rows.dtype), valid


@dataclass(frozen=True, slots=True)
class TrainedHead:
    """A head, the ids of its vocabulary, its loss, and the validation curve."""

    head: EagleHead
    draft_ids: npt.NDArray[np.int64]
    loss: EagleLoss
    curve: list[dict[str, float]]


def frequent_ids(directory: Path, size: int, vocab_size: int) -> npt.NDArray[np.int64]:
    """The `size` most frequent tokens of the answers, in ascending order."""
    counts = np.zeros(vocab_size, np.int64)
    for shard in shards(directory):
        for text in read_texts(shard):
            counts += np.bincount(text.answer, minlength=vocab_size)
    # Stable, so ties are broken by id.
    return np.sort(np.argsort(-counts, kind="stable")[: min(size, vocab_size)])


def train_head(
    model: PreTrainedModel,
    directory: Path,
    state_dir: Path,
    recipe: EagleRecipe,
    begun_with: Mapping[str, Tensor] | None = None,
    *,
    use_compiler: bool = True,
) -> TrainedHead:
    """Train a head on the answers of `directory`; a run that was interrupted goes on from `state_dir`.

    It begins with the parameters `begun_with`, by name, and a lower learning rate, or with those of `new_head`.

    Raises:
        IncompatibleError: there are too few answers, or the model's parts are not those of the Llama family.
    """
    use_compiler = use_compiler and shutil.which("g++") is not None
    torch.manual_seed(recipe.seed)
    store, held_out = (AnswerStore.open(directory, held_out=which) for which in (False, True))
    vocab_size = model.get_output_embeddings().weight.shape[0]
    ids = frequent_ids(directory, recipe.draft_vocab, vocab_size)
    scales = store.windows([0], min(4096, len(store))).answers.states[0, :, :NUM_READ].float()
    head = new_head(model, torch.from_numpy(ids), scales.square().mean((0, 2)).sqrt())
    rate = recipe.learning_rate
    if begun_with is not None:
        head.load_state_dict(begun_with)
        rate *= _FURTHER_RATE
    loss = EagleLoss(recipe, final_norm(model), head.output_rows, use_compiler=use_compiler)
    windows = held_out.first_windows(_HELD_OUT_WINDOWS, recipe.length)

    def step_loss(runner: nn.Module, step: int) -> Tensor:
        return loss(runner, store.batch(recipe.seed, step, recipe.rows, recipe.length))

    def held_out_loss(_: nn.Module, number: Tensor) -> Tensor:
        return loss(head, windows[int(number)])

    schedule = Schedule(recipe.training_steps(len(store)), rate, recipe.warmup_steps)
    numbers = list(torch.arange(len(windows)))
    loop = trained(head, step_loss, held_out_loss, numbers, schedule, state_dir, use_compiler=False)
    return TrainedHead(head, ids, loss, loop.curve)
