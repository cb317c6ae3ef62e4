"""Name of the KV cache argument, which depends on the version of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

# From transformers 5.24, and before.
NAMES = ("cache", "past_key_values")


def cache_argument(forward: Callable[..., Any]) -> str:
    """Keyword of a model's forward for the KV cache."""
    accepted = inspect.signature(forward).parameters
    return next((name for name in NAMES if name in accepted), NAMES[-1])
