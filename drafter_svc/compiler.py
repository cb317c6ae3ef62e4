"""Compiling the drafters' innermost loops with Numba. Importing this fails where Numba is not installed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])
# Sums may be reordered and multiplications fused; infinities stay what they are.
_FAST_MATH = {"reassoc", "contract", "arcp", "nsz"}


def compiled(function: Function) -> Function:
    """Compile a function at its first call; the machine code is kept on disk where there is a place for it."""

    def compile_now(cache: bool) -> Function:
        result: Any = numba.njit(fastmath=_FAST_MATH, nogil=True, cache=cache)(function)
        return cast(Function, result)

    try:
        return compile_now(cache=True)
    except RuntimeError as error:
        logger.info("compiled code is not kept: %s", error)
        return compile_now(cache=False)
