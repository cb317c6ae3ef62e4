"""The state of an unfinished run, whole at any time, from which no other run may continue."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coppice.checkpoints.writing import whole_file
from coppice.core.errors import IncompatibleError

_MADE_FROM = "made_from"


class ForeignStateError(IncompatibleError):
    """The state next to a checkpoint was left by a run with other settings, or from other models or text."""


def open_state(out: Path, recipe: Any, made_from: Mapping[str, str]) -> Path:
    """The state directory of the run that writes `out`, made for this recipe.

    One that holds nothing yet, of a run that ended at once, may be taken by any.

    Args:
        out: directory of the finished checkpoint; its state lies next to it, under the same name with ".state".
        recipe: a dataclass instance with every setting of the run.
        made_from: digests of what else decides the result (models, corpus), by what it is.

    Raises:
        ForeignStateError: the state there belongs to another recipe or was made from something else, or does not say;
            going on from it would mix the two.
    """
    directory = out.with_name(out.name + ".state")
    path = directory / "recipe.json"
    settings = {"recipe": type(recipe).__name__, **asdict(recipe), _MADE_FROM: dict(made_from)}
    # As it is read: tuples are lists there.
    settings = json.loads(json.dumps(settings))
    kept = [other for other in directory.iterdir() if other != path] if directory.exists() else []
    if kept and path.exists():
        _check(directory, path, settings)
    elif kept:
        raise ForeignStateError(f"{directory} does not say which recipe it belongs to; delete it to start anew")
    directory.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write((json.dumps(settings, indent=1) + "\n").encode())
    return directory


def weights_digest(model: nn.Module) -> str:
    """A hash of all weights, the same in every precision that holds them exactly."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {list(value.shape)}\n".encode())
        digest.update(value.detach().cpu().to(torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()


def _check(directory: Path, path: Path, settings: Mapping[str, Any]) -> None:
    try:
        found = json.loads(path.read_text())
        found_from, expected_from = found.get(_MADE_FROM), settings[_MADE_FROM]
    except (ValueError, AttributeError) as error:
        raise ForeignStateError(f"{path} is damaged; delete {directory} to start anew") from error
    if {**found, _MADE_FROM: None} != {**settings, _MADE_FROM: None}:
        raise ForeignStateError(f"{directory} belongs to a run with other settings ({path}); delete it to start anew")
    if found_from == expected_from:
        return
    if not isinstance(found_from, dict):
        raise ForeignStateError(
            f"{directory} does not say which models and corpus it was made from ({path}); delete it to start anew"
        )
    names = sorted({*found_from, *expected_from})
    others = " and ".join(name for name in names if found_from.get(name) != expected_from.get(name))
    raise ForeignStateError(f"{directory} was made from another {others} ({path}); delete it to start anew")
