"""One training loop for every recipe: seeded, resumable, with Muon, a progress bar and a validation curve."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from coppice.checkpoints.writing import whole_file

# RMS of an update, to match AdamW's.
_RMS_OF_ADAMW = 0.2


class Float32Muon(torch.optim.Muon):
    """`torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, with updates orthogonalised in float32.

    In bfloat16 that takes forty times as long on a CPU that has to emulate it: longer than the model's own step.
    State and settings are torch's, so that a saved state fits both.
    """

    def __init__(self, params: Iterable[Tensor], *, weight_decay: float) -> None:
        """`params` are matrices."""
        super().__init__(params, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; `closure` is not used."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, state, momentum = parameter.grad, self.state[parameter], group["momentum"]
        assert gradient is not None, "parameters without one are left out"
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(mean, momentum) if group["nesterov"] else mean
        update = orthogonalised(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * _RMS_OF_ADAMW * math.sqrt(max(parameter.shape)))


def orthogonalised(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """About U V^T of the matrix's U S V^T, by so many steps of Newton and Schulz (Jordan et al., "Muon", 2024)."""
    a, b, c = coefficients
    found: Tensor = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    found = found / found.norm().clamp(min=eps)
    for _ in range(steps):
        gram = found @ found.mT
        found = a * found + (b * gram + c * gram @ gram) @ found
    return found.mT if matrix.shape[0] > matrix.shape[1] else found


def training_dtype(device_type: str = "cpu") -> torch.dtype:
    """bfloat16 if the processor has instructions for it, else float32, since emulation is four to five times slower.

    So a run is a function of its settings, its seed and the type of processor.
    """
    if device_type != "cpu" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return torch.bfloat16
    return torch.float32


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate by step: linear warm-up, constant, then linear to zero over the last `cooldown_share`."""

    steps: int
    learning_rate: float
    warmup_steps: int = 60
    cooldown_share: float = 0.4

    def at(self, step: int) -> float:
        """The learning rate of a step."""
        warmup = min(1.0, (step + 1) / self.warmup_steps)
        left = (self.steps - step) / max(1.0, self.steps * self.cooldown_share)
        return self.learning_rate * min(warmup, left, 1.0)


@dataclass(frozen=True, slots=True)
class Cycles:
    """Consecutive schedules, each with its own warm-up and cool-down."""

    cycles: tuple[Schedule, ...]

    @property
    def steps(self) -> int:
        """Steps of all cycles."""
        return sum(cycle.steps for cycle in self.cycles)

    def at(self, step: int) -> float:
        """The learning rate of a step, counted over all cycles."""
        for cycle in self.cycles[:-1]:
            if step < cycle.steps:
                return cycle.at(step)
            step -= cycle.steps
        return self.cycles[-1].at(step)


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """Pace of evaluation and saving, and the directory of a run's state."""

    schedule: Schedule | Cycles
    state_dir: Path
    evaluate_every: int = 100
    save_every_s: float = 120.0
    use_compiler: bool = True


class TrainingLoop:
    """Runs `loss(model, step)` for the scheduled steps; a killed run goes on from its last saved step.

    Matrices inside the layers are trained with Muon, everything else (embeddings, norms) with AdamW.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, int], Tensor],
        evaluate: Callable[[nn.Module], float],
        config: LoopConfig,
    ) -> None:
        self._model = model
        self._loss = loss
        self._evaluate = evaluate
        self._config = config
        self._optimizers = _optimizers(model)
        self._step = 0
        # Of training so far, over all resumed runs.
        self.seconds = 0.0
        self._curve: list[dict[str, float]] = []

    @property
    def curve(self) -> list[dict[str, float]]:
        """The validation curve: step, held-out loss in nats per token, seconds of training so far."""
        return list(self._curve)

    def run(self) -> None:
        """Train to the last scheduled step, from the saved state if there is one."""
        self._restore()
        runner = self._compiled()
        steps = self._config.schedule.steps
        last_save = time.monotonic()
        with tqdm(total=steps, initial=self._step, unit="step", mininterval=5) as bar:
            while self._step < steps:
                started = time.monotonic()
                value = self._train_step(runner)
                self.seconds += time.monotonic() - started
                self._step += 1
                bar.update()
                if self._step % self._config.evaluate_every == 0 or self._step == steps:
                    held_out = self._record(runner, value)
                    bar.set_postfix(loss=f"{value:.3f}", held_out=f"{held_out:.3f}")
                if time.monotonic() - last_save > self._config.save_every_s or self._step == steps:
                    self._save()
                    last_save = time.monotonic()

    def _train_step(self, runner: nn.Module) -> float:
        rate = self._config.schedule.at(self._step)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        device = next(self._model.parameters()).device.type
        with _autocast(device):
            loss = self._loss(runner, self._step)
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        value = loss.item()
        if not math.isfinite(value):
            raise FloatingPointError(f"loss is {value} at step {self._step}")
        return value

    def _record(self, runner: nn.Module, train_loss: float) -> float:
        self._model.eval()
        device = next(self._model.parameters()).device.type
        with torch.no_grad(), _autocast(device):
            held_out = self._evaluate(runner)
        self._model.train()
        entry = {"step": self._step, "train": train_loss, "held_out": held_out, "seconds": self.seconds}
        self._curve.append(entry)
        return held_out

    def _compiled(self) -> nn.Module:
        # Compiling needs a C++ compiler; without one the same run is slower, not different in kind.
        if self._config.use_compiler and shutil.which("g++"):
            # One program for each batch shape: the ones for changing shapes run at half the speed.
            return torch.compile(self._model, dynamic=False)  # type: ignore[return-value]
        return self._model

    def _save(self) -> None:
        directory = self._config.state_dir
        directory.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self._model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "step": self._step,
            "seconds": self.seconds,
            "curve": self._curve,
        }
        with whole_file(directory / "state.pt") as file:
            torch.save(state, file)
        schedule = asdict(self._config.schedule)
        progress = {"step": self._step, "schedule": schedule, "curve": self._curve}
        with whole_file(directory / "progress.json") as file:
            file.write(json.dumps(progress, indent=1).encode())

    def _restore(self) -> None:
        path = self._config.state_dir / "state.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        self._model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._step = state["step"]
        self.seconds = state["seconds"]
        self._curve = state["curve"]


def trained(
    model: nn.Module,
    loss: Callable[[nn.Module, int], Tensor],
    held_out_loss: Callable[[nn.Module, Tensor], Tensor],
    held_out: Sequence[Tensor],
    schedule: Schedule | Cycles,
    state_dir: Path,
    *,
    use_compiler: bool = True,
) -> TrainingLoop:
    """The loop of a run after its last step; the curve has the mean loss of the `held_out` batches [rows, length]."""

    def evaluate(runner: nn.Module) -> float:
        return sum(float(held_out_loss(runner, rows)) for rows in held_out) / len(held_out)

    loop = TrainingLoop(model, loss, evaluate, LoopConfig(schedule, state_dir, use_compiler=use_compiler))
    loop.run()
    return loop


def language_model_loss(runner: nn.Module, ids: Tensor) -> Tensor:
    """Mean next-token cross-entropy of `ids` [rows, length], in nats per token."""
    loss: Tensor = runner(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def _autocast(device_type: str) -> torch.autocast:
    dtype = training_dtype(device_type)
    return torch.autocast(device_type, dtype, enabled=dtype != torch.float32)


def _optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [p for p in trained if p.ndim == 2 and id(p) not in embeddings]
    others = [p for p in trained if p.ndim != 2 or id(p) in embeddings]
    muon: torch.optim.Optimizer
    if training_dtype(trained[0].device.type) == torch.float32:
        muon = Float32Muon(matrices, weight_decay=0.05)
    else:
        muon = torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    return [
        muon,
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
