"""Models of the hub: refused at once where the hub does not answer, unless they are in the cache."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest
import trustme

from coppice.checkpoints import hub
from coppice.checkpoints.hub import OFFLINE_VARIABLE, refuse_absent
from coppice.core.errors import IncompatibleError
from tests.certificates import directory
from tests.one_answer import answering

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


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what does answer, on a busy machine."""
    monkeypatch.setattr(hub, "_ANSWER_S", 30.0)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_hub_that_is_connected_to_and_says_nothing_does_not_answer(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In the listener's backlog.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"{scheme}://127.0.0.1:{silent.getsockname()[1]}")
        started_s = time.monotonic()
        with pytest.raises(IncompatibleError, match=r"cannot be fetched from the hub \(127.0.0.1 does not answer\)"):
            refuse_absent(MODEL)
        assert hub._ANSWER_S <= time.monotonic() - started_s < hub._ANSWER_S + 3.0


def test_the_wait_for_a_hub_leaves_time_for_the_start_of_a_command() -> None:
    # A start takes 1.1 s, and a mistake is told within 3 s.
    assert hub._ANSWER_S <= 1.5


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.0 404 Not Found\r\n\r\n", b"no HTTP\r\n"],
    ids=["fine", "another page", "nonsense"],
)
@pytest.mark.usefixtures("patience")
def test_a_hub_that_answers_is_asked_by_the_library(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(answer) as (address, _):
        monkeypatch.setenv("HF_ENDPOINT", f"http://{address}")
        refuse_absent(MODEL)
    monkeypatch.setenv(OFFLINE_VARIABLE, "1")
    with pytest.raises(IncompatibleError, match="HF_HUB_OFFLINE is set"):
        refuse_absent(MODEL)


@pytest.mark.usefixtures("patience")
def test_whom_to_trust_is_left_to_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files = directory(tmp_path / "tls", trustme.CA())
    server.load_cert_chain(files.cert, files.key)

    def shake_hands() -> None:
        connection, _ = listener.accept()
        with contextlib.suppress(OSError), server.wrap_socket(connection, server_side=True):
            pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=shake_hands, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"https://127.0.0.1:{listener.getsockname()[1]}")
        refuse_absent(MODEL)


@pytest.mark.usefixtures("patience")
def test_a_proxy_stands_for_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    with answering(b"HTTP/1.0 200 OK\r\n\r\n") as (address, sent):
        monkeypatch.setenv("http_proxy", f"http://{address}")
        refuse_absent(MODEL)
    assert sent[0].startswith(b"HEAD http://hub.invalid")
