"""What a re-draft calls is compiled while the target is loaded: no round waits for it, however new the machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os
from coppice.kernels.cpu.transition_search import search_behind_token
from coppice.core.sampling import SamplingParams, StoppingOptions
from tests.unit.verifier_svc.engine_harness import Harness
from verifier_svc.extras.redraft.low_rank import add_low_rank, put_inputs
from verifier_svc.config import VerifierConfig
from verifier_svc.engine.engine import Engine
from verifier_svc.model.loading import load_probed_target
from verifier_svc.extras.redraft.choice import count_masks
from verifier_svc.engine.scheduler import SchedulerLimits

def compiled():
    return [len(one.signatures) for one in (search_behind_token, count_masks, put_inputs, add_low_rank)]

config = VerifierConfig(model="models/target", threads=1, kv_cache_mib=32, space_adapter="models/space")
target, info = load_probed_target(config)
before = compiled()
limits = SchedulerLimits(max_sequences=2, max_queued=2, prefill_chunk=64, free_rows=info.redraft.free_rows)
engine = Engine(target, info, limits, max_nodes=16)
engine.start()
harness = Harness(engine)
stopping = StoppingOptions(max_tokens=24)
for temperature in (0.0, 1.0):
    sampling = SamplingParams(temperature=temperature, seed=1)
    done = harness.generate([[5, 6, 7, 8]], sampling, stopping, redraft_nodes=16)[0]
    print("rounds", done.rounds < len(done.token_ids))
print(before, compiled())
os._exit(0)
"""


@pytest.mark.timeout(260)
def test_nothing_is_compiled_once_requests_run() -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["rounds True", "rounds True", "[1, 1, 1, 1] [1, 1, 1, 1]"]
