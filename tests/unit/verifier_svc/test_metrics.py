"""What operators see of a verifier, for both modes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from transformers import PreTrainedModel

from coppice.sampling import SamplingParams, StoppingOptions
from tests.unit.verifier_svc.engine_harness import Harness
from tests.unit.verifier_svc.test_preemption import INFO
from verifier_svc.engine import Engine
from verifier_svc.metrics import verifier_metrics
from verifier_svc.scheduler import SchedulerLimits
from verifier_svc.target_model import TargetInfo, TargetModel

LIMITS = SchedulerLimits(max_sequences=8, max_queued=100, prefill_chunk=64)
STRICT = replace(INFO, exact=True, bit_exact=True)
# Every choice is a near-tie.
FAST = replace(INFO, exact=False, bit_exact=False, near_tie_gap=1e9)


@pytest.mark.parametrize("info", [STRICT, FAST], ids=["strict", "fast"])
def test_metrics_are_the_engine_s_counts(info: TargetInfo, new_model: Callable[[str], PreTrainedModel]) -> None:
    target = TargetModel(new_model("llama"), exact=info.exact, num_blocks=7)
    engine = Engine(target, info, LIMITS, max_nodes=4)
    engine.start()
    stopping = StoppingOptions(max_tokens=150, ignore_eos=True)
    results = Harness(engine).generate([[index + 3] * 40 for index in range(6)], SamplingParams(), stopping)
    engine.stop()
    num_tokens = sum(len(result.token_ids) for result in results)
    assert num_tokens == 6 * 150
    metrics = {metric.name.removeprefix("coppice_verifier_"): metric for metric in verifier_metrics(engine, info)}
    assert dict(metrics.pop("exactness").labels) == {"mode": "strict" if info.exact else "fast"}
    values = {name: metric.value for name, metric in metrics.items()}
    counted = {"near_tie_gap": 1e9, "near_ties_total": num_tokens} if info is FAST else {}
    assert engine.num_preemptions > 0
    assert values == {
        **counted,
        "bit_exact": info.bit_exact,
        "committed_tokens_total": num_tokens,
        "preemptions_total": engine.num_preemptions,
        "recomputed_tokens_total": engine.num_recomputed_tokens,
        "free_kv_blocks": 7,
        "waiting_sequences": 0,
        "running_sequences": 0,
    }
