"""Work shared by several threads inside one compiled call: pieces are taken by atomic counters, without locks.

Every thread runs the same function over the same phases. It takes the next piece of a phase, computes it, and proceeds
to the next phase once all pieces are done, by any thread. A thread that starts late finds phases done and joins the
current one; no thread waits for it to start.

Counters are `counters` [phases, 2, `SPREAD`]: pieces taken and pieces done, each in its own cache line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from coppice.kernels.cpu.compiler import compiled_exactly
from coppice.kernels.cpu.vector_code import INT, cgutils

CounterArray = npt.NDArray[np.int64]

# Numbers per cache line.
SPREAD = 8
_BYTES = 8
# Polls of a counter before yielding the core: about ten microseconds, longer than most pieces.
_LOOKS = 4000


class SharedThreads:
    """Threads for compiled calls."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._num_helpers = 0

    def call(self, function: Callable[..., None], num_threads: int, *arguments: Any) -> None:
        """Call a compiled function here and on further threads, `num_threads` in all.

        Returns once the work is done: a thread that has not started by then finds no piece left.
        """
        if num_threads - 1 > self._num_helpers:
            self._num_helpers = num_threads - 1
            self._pool = ThreadPoolExecutor(self._num_helpers, "pass")
        helpers = [self._pool.submit(function, *arguments) for _ in range(num_threads - 1)] if self._pool else []
        function(*arguments)
        for helper in helpers:
            helper.cancel()


def new_counters(num_phases: int) -> CounterArray:
    """Zeroed counters."""
    return np.zeros((num_phases, 2, SPREAD), np.int64)


def _place(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Address of one phase's counter."""
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    phase, which = (context.cast(builder, arguments[at], signature.args[at], types.int64) for at in (1, 2))
    index = builder.add(builder.mul(phase, INT(2 * SPREAD)), builder.mul(which, INT(SPREAD)))
    return builder.gep(builder.bitcast(array.data, INT.as_pointer()), [index])


def _add_one(_typing: Any, counters: Any, phase: Any, which: Any) -> Any:
    """Increment a counter, returning its previous value; releases this thread's writes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _place(context, builder, signature, arguments), INT(1), "acq_rel")

    return types.int64(counters, phase, which), generate


def _look(_typing: Any, counters: Any, phase: Any, which: Any) -> Any:
    """Load a counter; acquires writes made before its increments."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_place(context, builder, signature, arguments), "acquire", _BYTES)

    return types.int64(counters, phase, which), generate


def _yield_core(_typing: Any) -> Any:
    """Yield the core to other threads."""

    def generate(_context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        if sys.platform != "win32":
            kind = ir.FunctionType(ir.IntType(32), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return _context.get_dummy_value()

    return types.void(), generate


# For compiled code only.
add_one: Any = intrinsic(_add_one)
look: Any = intrinsic(_look)
yield_core: Any = intrinsic(_yield_core)


@compiled_exactly
def take(counters: CounterArray, phase: int) -> int:
    """Index of the next piece of a phase; beyond the last piece none is left."""
    return int(add_one(counters, phase, 0))


@compiled_exactly
def done(counters: CounterArray, phase: int) -> None:
    """Count a piece of a phase as computed."""
    add_one(counters, phase, 1)


@compiled_exactly
def wait_for(counters: CounterArray, phase: int, num_pieces: int) -> None:
    """Wait until all pieces of a phase are computed."""
    looks = 0
    while look(counters, phase, 1) < num_pieces:
        looks += 1
        if looks > _LOOKS:
            yield_core()
