"""Where an unfinished run keeps its state, and that no other recipe goes on from it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coppice.errors import IncompatibleError


class ForeignStateError(IncompatibleError):
    """The state beside a checkpoint was left by a run with other settings."""


def open_state(out: Path, recipe: Any) -> Path:
    """The state directory of the run that writes `out`, made for this recipe.

    Args:
        out: directory of the finished checkpoint; its state lies beside it, under the same name with ".state".
        recipe: a dataclass instance with every setting of the run.

    Raises:
        ForeignStateError: the state there belongs to another recipe, and going on from it would mix the two.
    """
    directory = out.with_name(out.name + ".state")
    path = directory / "recipe.json"
    settings = json.dumps({"recipe": type(recipe).__name__, **asdict(recipe)}, indent=1) + "\n"
    if not path.exists() and directory.exists() and any(directory.iterdir()):
        raise ForeignStateError(f"{directory} does not say which recipe it belongs to; delete it to start anew")
    if path.exists() and path.read_text() != settings:
        raise ForeignStateError(f"{directory} belongs to a run with other settings ({path}); delete it to start anew")
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(settings)
    return directory
