"""What sequences leave in an engine's memory once they are over: nothing."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import numpy as np

from coppice.sampling import SamplingParams, StoppingOptions
from coppice.tree import TokenTree
from tests.allocations import allocated_mib
from tests.unit.verifier_svc.engine_harness import Harness
from tests.unit.verifier_svc.oracles import random_tree
from tests.unit.verifier_svc.tiny_engine import VOCAB
from verifier_svc.engine import Engine

# Until then, passes of every size have been seen: products of matrices keep machine code for each.
NUM_WARM = 480
NUM_MEASURED = 240
# Less than an object for each sequence, and far less than what one has for its prompt and tokens.
MAX_OBJECTS = 120
MAX_MIB = 0.25
AT_ONCE = 6


def test_sequences_leave_nothing_behind(engine: Engine) -> None:
    generator = np.random.default_rng(0)
    harness = Harness(engine)

    def draft(_index: int, _generated: Sequence[int], _base: int) -> TokenTree:
        return random_tree(generator, VOCAB, int(generator.integers(1, 16)))

    def serve(count: int) -> None:
        for number in range(count // AT_ONCE):
            prompts = [generator.integers(3, VOCAB, int(generator.integers(1, 120))).tolist() for _ in range(AT_ONCE)]
            sampling = SamplingParams(temperature=float(number % 2), repetition_penalty=1.1, seed=number)
            results = harness.generate(
                prompts, sampling, StoppingOptions(max_tokens=8), draft, top_log_probs=number % 3
            )
            assert all(result.token_ids for result in results)

    serve(NUM_WARM)
    mib, objects = allocated_mib(), len(gc.get_objects())
    serve(NUM_MEASURED)
    assert allocated_mib() - mib < MAX_MIB
    assert len(gc.get_objects()) - objects < MAX_OBJECTS
