"""What a checkpoint may consist of: weights as safetensors, and no code of its own."""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

from coppice.errors import IncompatibleError

# Weights in pickles, or in formats that may embed one.
UNSAFE_KINDS = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5"})


def refuse_unsafe(model: str, known_types: Container[str]) -> None:
    """Look at the names of a checkpoint's files and at its configuration, before any library does.

    `known_types` are the architectures that the library has itself. What is no directory is a hub id, and left to the
    library, which is told the same rules.

    Raises:
        IncompatibleError: its weights are in a format that can carry code, or it needs code of its own.
    """
    directory = Path(model)
    if not directory.is_dir():
        return
    kinds = {path.suffix for path in directory.iterdir()}
    if ".safetensors" not in kinds and kinds & UNSAFE_KINDS:
        raise IncompatibleError(
            f"{directory.name} has no *.safetensors; other formats of weights can carry code and are never read"
        )
    config = _read_config(directory)
    # With an architecture that the library has, its own class is used, and the code beside the weights is not.
    if "auto_map" in config and config.get("model_type") not in known_types:
        raise IncompatibleError(f"{directory.name} needs code of its own, which is never run")


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        # The library says what is wrong with it.
        return {}
    return config if isinstance(config, dict) else {}
