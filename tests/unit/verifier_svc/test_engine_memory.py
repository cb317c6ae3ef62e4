"""What sequences leave in an engine's memory once they are over: nothing."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import numpy as np

from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tree import TokenTree
from tests.allocations import allocated_mib
from tests.unit.verifier_svc.engine_harness import Harness
from tests.unit.verifier_svc.oracles import random_tree
from tests.unit.verifier_svc.tiny_engine import VOCAB
from verifier_svc.engine.engine import Engine

# Products of matrices keep machine code for each size of pass, 2 MiB here. So every batch is of the same shapes, with
# other tokens; but which rows share a pass is a matter of timing, too, and some sizes come late.
NUM_WARM_BATCHES = 3
NUM_BATCHES = 9
BATCH_SIZE = 36
# Less than an object for each sequence, and far less than what one has for its prompt and tokens.
MAX_OBJECTS = 24
MAX_MIB = 0.05
AT_ONCE = 6


def test_sequences_leave_nothing_behind(engine: Engine) -> None:
    tokens = np.random.default_rng(0)
    harness = Harness(engine)

    def serve_a_batch() -> None:
        shapes = np.random.default_rng(1)

        def draft(_index: int, _generated: Sequence[int], _base: int) -> TokenTree:
            return random_tree(shapes, VOCAB, int(shapes.integers(1, 16)))

        for number in range(BATCH_SIZE // AT_ONCE):
            prompts = [tokens.integers(3, VOCAB, int(shapes.integers(1, 120))).tolist() for _ in range(AT_ONCE)]
            sampling = SamplingParams(temperature=float(number % 2), repetition_penalty=1.1, seed=number)
            results = harness.generate(
                prompts, sampling, StoppingOptions(max_tokens=8), draft, top_log_probs=number % 3
            )
            assert all(result.token_ids for result in results)

    def growth() -> tuple[float, int]:
        mib, objects = allocated_mib(), len(gc.get_objects())
        serve_a_batch()
        return allocated_mib() - mib, len(gc.get_objects()) - objects

    for _ in range(NUM_WARM_BATCHES):
        serve_a_batch()
    mib, objects = zip(*(growth() for _ in range(NUM_BATCHES)), strict=True)
    # What sequences leave, every batch leaves. One that met a size or filled a library's cache says nothing of them;
    # the least of all could be one in which a cache was given back.
    assert sorted(mib)[1] < MAX_MIB, mib
    assert sorted(objects)[1] < MAX_OBJECTS, objects
