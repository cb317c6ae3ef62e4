"""Weights that a full disk has cut short: a service says so in one line, and does not start."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from coppice.core.errors import IncompatibleError
from drafter_svc.config import DrafterConfig
from drafter_svc.drafters.registry import load_drafter
from tests.faults.doors import write_checkpoint
from verifier_svc import app
from verifier_svc.config import CONFIGURATION_ERROR, VerifierConfig
from verifier_svc.model.loading import load_probed_target

LOADERS: dict[str, Callable[[str], object]] = {
    "verifier": lambda model: load_probed_target(VerifierConfig(model=model, device="cpu")),
    "drafter": lambda model: load_drafter(DrafterConfig(model=model, device="cpu")),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    write_checkpoint(directory)
    return directory


def cut_short(whole: Path, directory: Path, num_bytes: int) -> str:
    shutil.copytree(whole, directory, dirs_exist_ok=True)
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:num_bytes])
    return str(directory)


@pytest.mark.parametrize("num_bytes", [0, 100, 20_000])
@pytest.mark.parametrize("service", LOADERS)
def test_they_are_refused_by_name(service: str, num_bytes: int, whole: Path, tmp_path: Path) -> None:
    model = cut_short(whole, tmp_path, num_bytes)
    with pytest.raises(IncompatibleError, match="are damaged or cut short") as raised:
        LOADERS[service](model)
    assert model in str(raised.value)


def test_the_process_ends_with_its_usual_code_for_settings(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = VerifierConfig(model=cut_short(whole, tmp_path, 20_000), device="cpu")
    with pytest.raises(SystemExit) as raised:
        app.run_verifier(config)
    assert raised.value.code == CONFIGURATION_ERROR
    assert "are damaged or cut short" in caplog.text
