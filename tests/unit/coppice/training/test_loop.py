"""The training loop: its schedule, and that an interrupted run ends with exactly the weights of one that was not."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import Tensor, nn

from coppice.training.loop import LoopConfig, Schedule, TrainingLoop, training_dtype

STEPS = 12


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class TinyModel(nn.Module):
    """An embedding, a matrix and a norm: one parameter for each way the loop treats them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.matrix = nn.Linear(8, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.matrix(self.norm(self.embedding(ids)))
        return logits


class KilledError(Exception):
    """Stands for whatever kills a run."""


def batch(step: int) -> Tensor:
    return torch.randint(16, (4, 9), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> Tensor:
    ids = batch(step)
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def held_out(model: nn.Module) -> float:
    return loss_of(model, 10_000).item()


def config(state_dir: Path, save_every_s: float = 0.0) -> LoopConfig:
    return LoopConfig(
        Schedule(STEPS, learning_rate=0.02, warmup_steps=3),
        state_dir,
        evaluate_every=4,
        save_every_s=save_every_s,
        use_compiler=False,
    )


def interrupted_at(step: int, state_dir: Path) -> None:
    """A run that is killed during the given step, after the step's predecessor was saved."""

    def loss(model: nn.Module, now: int) -> Tensor:
        if now == step:
            raise KilledError
        return loss_of(model, now)

    with pytest.raises(KilledError):
        TrainingLoop(TinyModel(), loss, held_out, config(state_dir)).run()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.state_dict())


@pytest.mark.parametrize("at", [1, 5, STEPS - 1])
def test_an_interrupted_run_ends_bit_identical_to_an_uninterrupted_one(tmp_path: Path, at: int) -> None:
    whole_model, resumed_model = TinyModel(), TinyModel()
    whole = TrainingLoop(whole_model, loss_of, held_out, config(tmp_path / "whole"))
    whole.run()

    interrupted_at(at, tmp_path / "resumed")
    steps_taken = []

    def loss(model: nn.Module, step: int) -> Tensor:
        steps_taken.append(step)
        return loss_of(model, step)

    resumed = TrainingLoop(resumed_model, loss, held_out, config(tmp_path / "resumed"))
    resumed.run()

    assert steps_taken == list(range(at, STEPS))
    expected = weights(whole_model)
    assert all(value.equal(expected[name]) for name, value in weights(resumed_model).items())
    points = [[(entry["step"], entry["held_out"]) for entry in loop.curve] for loop in (whole, resumed)]
    assert points[0] == points[1]


def test_work_since_the_last_save_is_done_again(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    with pytest.raises(KilledError):
        TrainingLoop(TinyModel(), _killed_at_5, held_out, config(state_dir, save_every_s=3600)).run()
    assert not (state_dir / "state.pt").exists()


def _killed_at_5(model: nn.Module, step: int) -> Tensor:
    if step == 5:
        raise KilledError
    return loss_of(model, step)


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    TrainingLoop(TinyModel(), loss_of, held_out, config(tmp_path)).run()
    model = TinyModel()

    def loss(model: nn.Module, step: int) -> Tensor:
        raise AssertionError(f"step {step} was trained again")

    loop = TrainingLoop(model, loss, held_out, config(tmp_path))
    loop.run()
    assert [entry["step"] for entry in loop.curve] == [4, 8, 12]
    assert not model.matrix.weight.equal(TinyModel().matrix.weight)


def test_training_lowers_the_loss_and_writes_its_progress(tmp_path: Path) -> None:
    model = TinyModel()

    def loss(model: nn.Module, step: int) -> Tensor:
        return loss_of(model, 0)

    before = loss(model, 0).item()
    TrainingLoop(model, loss, held_out, config(tmp_path)).run()
    assert loss(model, 0).item() < before
    progress = json.loads((tmp_path / "progress.json").read_text())
    assert progress["step"] == STEPS
    assert [entry["step"] for entry in progress["curve"]] == [4, 8, 12]


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        return loss_of(model, step) * float("nan")

    with pytest.raises(FloatingPointError, match="step 0"):
        TrainingLoop(TinyModel(), loss, held_out, config(tmp_path)).run()


def test_the_rate_warms_up_stays_and_falls_to_nothing() -> None:
    schedule = Schedule(steps=100, learning_rate=1.0, warmup_steps=10, cooldown_share=0.4)
    rates = [schedule.at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:60] == [1.0] * 51
    assert rates[60:] == sorted(rates[60:], reverse=True)
    assert rates[80] == pytest.approx(0.5)
    assert 0 < rates[99] < 0.05


def test_a_run_shorter_than_its_warm_up_still_trains() -> None:
    schedule = Schedule(steps=5, learning_rate=1.0, warmup_steps=60)
    assert all(schedule.at(step) > 0 for step in range(5))


def test_a_full_disk_stops_the_run_by_name_and_spoils_no_saved_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = torch.save

    def full(state: dict[str, Any], file: BinaryIO) -> None:
        if state["step"] < 4:
            save(state, file)
            return
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    uninterrupted = TinyModel()
    TrainingLoop(uninterrupted, loss_of, held_out, config(tmp_path / "other")).run()
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"No space left on device: .*state\.pt"):
        TrainingLoop(TinyModel(), loss_of, held_out, config(tmp_path / "state")).run()
    monkeypatch.setattr(torch, "save", save)
    resumed = TinyModel()
    TrainingLoop(resumed, loss_of, held_out, config(tmp_path / "state")).run()
    assert all(
        torch.equal(a, b) for a, b in zip(weights(resumed).values(), weights(uninterrupted).values(), strict=True)
    )


@pytest.mark.parametrize(("avx512_bf16", "amx"), [(True, False), (False, True)])
def test_a_processor_that_multiplies_bfloat16_uses_it(
    monkeypatch: pytest.MonkeyPatch, avx512_bf16: bool, amx: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert training_dtype() is torch.bfloat16


def test_others_compute_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert training_dtype() is torch.float32
    assert training_dtype("cuda") is torch.bfloat16
