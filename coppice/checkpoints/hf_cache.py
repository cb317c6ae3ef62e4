"""The name of a model's key and value cache argument, which differs between versions of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

# Since transformers 5.24, and before.
NAMES = ("cache", "past_key_values")


def cache_argument(forward: Callable[..., Any]) -> str:
    """The keyword under which a model's forward takes the cache that it reads and appends to."""
    accepted = inspect.signature(forward).parameters
    return next((name for name in NAMES if name in accepted), NAMES[-1])
