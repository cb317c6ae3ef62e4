"""Models of the Hugging Face hub: whether one can be had, before its library tries for half a minute."""

from __future__ import annotations

import os
import re
import socket
import threading
import urllib.parse
import urllib.request
from pathlib import Path

from coppice.core.errors import IncompatibleError

OFFLINE_VARIABLE = "HF_HUB_OFFLINE"
# Form of a hub id; anything else is a path.
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_CONNECT_S = 2.0


def refuse_absent(model: str) -> None:
    """Refuse a name that is no directory and no hub id that can be had: cached, or from a hub that answers.

    Where the hub does not answer, a cached model is used without it: HF_HUB_OFFLINE is set, for this process too if it
    has not imported the library yet.

    Raises:
        IncompatibleError: nothing of this name can be had.
    """
    path = Path(model)
    if path.is_dir():
        return
    if path.exists():
        raise IncompatibleError(f"{model} is a file: a model is a GGUF file, or a directory with config.json")
    if path.suffix == ".gguf":
        raise IncompatibleError(f"there is no file {model}")
    if not _HUB_ID.fullmatch(model):
        raise IncompatibleError(f"there is no directory {model}")
    is_offline = os.environ.get(OFFLINE_VARIABLE, "").upper() in ("1", "ON", "YES", "TRUE")
    reason = f"{OFFLINE_VARIABLE} is set" if is_offline else _no_answer()
    if not reason:
        return
    if not any(_cache().glob(f"models--{model.replace('/', '--')}/snapshots/*/config.json")):
        raise IncompatibleError(
            f"there is no directory {model}, and it cannot be fetched from the hub ({reason}): name a directory, a "
            "GGUF file or a name of `coppice models`"
        )
    os.environ[OFFLINE_VARIABLE] = "1"


def _cache() -> Path:
    """Directory in which the hub's library keeps models."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def _no_answer() -> str:
    """Reason that no connection to the hub, or to the proxy before it, can be made; empty where it can."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    url = urllib.parse.urlsplit(endpoint)
    proxy = urllib.request.getproxies().get(url.scheme)
    if proxy and url.hostname and not urllib.request.proxy_bypass(url.hostname):
        url = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}")
    outcome = [f"{url.hostname} does not answer"]

    def connect() -> None:
        try:
            with socket.create_connection((url.hostname or "", url.port or 443), timeout=_CONNECT_S):
                outcome[0] = ""
        except OSError as error:
            outcome[0] = f"{url.hostname}: {error.strerror or error}"

    # On a thread: nothing bounds the resolution of a name.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_CONNECT_S)
    return outcome[0]
