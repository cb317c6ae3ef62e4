"""The directory of the bundled checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

MODELS = Path(os.environ.get("COPPICE_MODELS", Path(__file__).resolve().parents[2] / "models"))


def missing_model(model: str) -> str:
    """Advice on a missing bundled checkpoint; empty if it exists or `model` is not a bundled one."""
    path = Path(model)
    if path.parent != MODELS or path.is_dir():
        return ""
    if MODELS.is_dir():
        return f"there is no bundled model {path.name!r} in {MODELS}"
    return (
        f"there is no bundled model at {path}: the package has none. Take models/ from Coppice's repository and set "
        "COPPICE_MODELS to it, or name a model of your own: --target DIR_OR_HUB_ID --drafter none"
    )


def fitting_drafters(target: str, directory: Path = MODELS) -> list[str]:
    """Drafters in a directory that were made for the target of this name, as KIND=DIR."""
    found = []
    for record in sorted(directory.glob("*/recipe.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            kind = json.loads((record.parent / "drafter.json").read_text())["kind"]
            if json.loads(record.read_text())["target"] == target:
                found.append(f"{kind}={record.parent}")
    return found
