"""Models of the Hugging Face hub: whether one can be had, before its library tries for half a minute."""

from __future__ import annotations

import http.client
import os
import re
import ssl
import threading
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from coppice.core.errors import IncompatibleError

OFFLINE_VARIABLE = "HF_HUB_OFFLINE"
# Form of a hub id; anything else is a path.
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# With the start of a command it makes less than 3 s.
_ANSWER_S = 1.2


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
    """Reason that the hub, or the proxy before it, does not answer a request; empty where it does."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    host = urllib.parse.urlsplit(endpoint).hostname
    outcome = [f"{host} does not answer"]

    def ask() -> None:
        try:
            # With the proxies of now: urlopen keeps those of its first call.
            opener = urllib.request.build_opener()
            opener.open(urllib.request.Request(endpoint, method="HEAD"), timeout=_ANSWER_S).close()
        except (urllib.error.HTTPError, http.client.HTTPException):
            pass
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                return
            # Whom to trust is for the library to say.
            if not isinstance(reason, ssl.SSLError):
                outcome[0] = f"{host}: {getattr(reason, 'strerror', None) or reason}"
                return
        outcome[0] = ""

    # On a thread: nothing bounds the resolution of a name.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_ANSWER_S)
    return outcome[0]
