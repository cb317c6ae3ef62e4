"""Checks of the numbers in a checkpoint's config.json, before any library builds a model of them.

Libraries allocate what a configuration says, and take NaN for a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from coppice.core.errors import IncompatibleError

# Of sizes and ids; bases of rotary positions, and what a file says of its training, may be larger.
_LARGEST = (1 << 31) - 1
_UNBOUNDED = ("theta", "base", "base_freq", "seed", "tokens", "params", "parameters")
# transformers names every label, and language models have none.
_MOST_LABELS = 1 << 16
_LAYERS = frozenset({"num_hidden_layers", "n_layer", "n_layers", "num_layers"})
_POSITIONS = frozenset({"max_position_embeddings", "n_positions"})


def refuse_absurd_numbers(model: str, config: Mapping[str, Any]) -> None:
    """Refuse numbers that no model has: NaN, huge sizes, and norms or rotary positions that give none.

    Raises:
        IncompatibleError: with the field's name.
    """
    for field, value in _numbers(config):
        if reason := _fault(field.rpartition(".")[2], value):
            raise IncompatibleError(f"config.json of {model}: {field} {reason}")


def refuse_more_layers(model: str, config: Mapping[str, Any], num_tensors: int) -> None:
    """Refuse more layers than the weights have tensors.

    Raises:
        IncompatibleError: with the field's name.
    """
    for field, value in _numbers(config):
        if field.rpartition(".")[2] in _LAYERS and value > num_tensors:
            raise IncompatibleError(
                f"config.json of {model}: {field} is {value}, and the weights have {num_tensors} tensors"
            )


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """All numbers with their fields, such as `rope_parameters.rope_theta`; those of a list have the list's."""
    left: list[tuple[str, Any]] = [("", config)]
    while left:
        field, value = left.pop()
        if isinstance(value, Mapping):
            left += [(f"{field}.{name}" if field else name, inner) for name, inner in value.items()]
        elif isinstance(value, list):
            left += [(field, inner) for inner in value]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield field, value


def _fault(name: str, value: int | float) -> str:
    """Reason against a field's number; empty without one."""
    number = _float(value)
    if math.isnan(number):
        return "is NaN"
    if name.endswith("theta") and not 0 < number < math.inf:
        return f"is {number:g}, and must be a finite number above 0"
    if name.rpartition("_")[2] in ("eps", "epsilon") and not 0 <= number < math.inf:
        return f"is {number:g}, and must be a finite number of at least 0"
    if name in _POSITIONS and number < 0:
        return f"is {number:g}, and must be at least 0"
    if name == "num_labels" and number > _MOST_LABELS:
        return f"is above {_MOST_LABELS}"
    if isinstance(value, int) and not name.endswith(_UNBOUNDED) and abs(value) > _LARGEST:
        return f"is beyond {_LARGEST}"
    return ""


def _float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
