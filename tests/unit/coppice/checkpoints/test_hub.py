"""Models of the hub: refused at once where the hub does not answer, unless they are in the cache."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from coppice.checkpoints.hub import OFFLINE_VARIABLE, refuse_absent
from coppice.core.errors import IncompatibleError

MODEL = "somebody/some-model"


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv(OFFLINE_VARIABLE, "")
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)


def test_a_hub_that_does_not_answer_has_no_model() -> None:
    with pytest.raises(IncompatibleError, match=r"cannot be fetched from the hub \(127.0.0.1: Connection refused\)"):
        refuse_absent(MODEL)


def test_a_cached_model_is_used_without_it(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--somebody--some-model" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    with pytest.raises(IncompatibleError):
        refuse_absent(MODEL)
    (snapshot / "config.json").write_text("{}")
    refuse_absent(MODEL)
    assert os.environ[OFFLINE_VARIABLE] == "1"


def test_a_hub_that_answers_is_asked_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        refuse_absent(MODEL)
        monkeypatch.setenv(OFFLINE_VARIABLE, "1")
        with pytest.raises(IncompatibleError, match="HF_HUB_OFFLINE is set"):
            refuse_absent(MODEL)


def test_a_proxy_stands_for_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        refuse_absent(MODEL)
