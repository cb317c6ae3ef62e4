"""What operators see of a verifier, for both modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from transformers import Lfm2Config, Lfm2ForCausalLM, PreTrainedModel

from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tree import TokenTree, chain
from tests.metrics import values
from tests.unit.verifier_svc.engine_harness import Harness
from tests.unit.verifier_svc.test_preemption import INFO
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.scheduler import SchedulerLimits
from verifier_svc.metrics import verifier_metrics
from verifier_svc.model.target_model import TargetInfo, TargetModel

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
    found = read(engine, info)
    assert found["exactness,mode=" + ("strict" if info.exact else "fast")] == 1
    counted = {"near_tie_gap": 1e9, "near_ties_total": num_tokens} if info is FAST else {}
    assert engine.scheduler.num_preemptions > 0
    # Without drafts a round is a token.
    distributions = ("pass_", "bubble_", "grammar_queue_")
    assert {name: value for name, value in found.items() if "," not in name and not name.startswith(distributions)} == {
        **counted,
        "bit_exact": info.bit_exact,
        "committed_tokens_total": num_tokens,
        "preemptions_total": engine.scheduler.num_preemptions,
        "recomputed_tokens_total": engine.scheduler.num_recomputed_tokens,
        "rounds_total": num_tokens,
        "spec_decode_num_drafts_total": 0,
        "spec_decode_num_draft_tokens_total": 0,
        "spec_decode_num_accepted_tokens_total": 0,
        "failed_passes_total": 0,
        "linger_seconds_total": 0.0,
        "masks_total": 0,
        "redraft_tokens_total": 0,
        "early_pruned_passes_total": 0,
        "early_pruned_nodes_total": 0,
        "prompt_tokens_total": 6 * 40,
        "cached_prompt_tokens_total": 0,
        "kv_blocks": 7,
        "reusable_kv_blocks": found["reusable_kv_blocks"],
        "free_kv_blocks": 7,
        # The model has no recurrent layers.
        "recurrent_states": 0,
        "free_recurrent_states": 0,
        "kept_recurrent_states": 0,
        "waiting_sequences": 0,
        "running_sequences": 0,
        "grammar_trials_total": 0,
        "waiting_grammars": 0,
        "grammar_cache_bytes": 0,
    }
    assert found["pass_seconds_count"] == found["pass_rows_count"]
    # A row per round, and those of prompts, some of them computed again.
    assert found["pass_rows_sum"] == num_tokens - 6 + 6 * 40 + engine.scheduler.num_recomputed_tokens
    # The first pass has none before it.
    assert found["bubble_seconds_count"] == found["pass_seconds_count"] - 1
    assert by_label(engine, info, "finished_sequences_total") == {"eos": 0, "stop": 0, "length": 6, "context_length": 0}
    assert set(by_label(engine, info, "failed_sequences_total").values()) == {0}


def test_recurrent_states_are_counted() -> None:
    model = Lfm2ForCausalLM(
        Lfm2Config(
            vocab_size=INFO.vocab_size,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            layer_types=["conv", "full_attention"],
        )
    ).eval()
    target = TargetModel(model, exact=False, num_blocks=20)
    target.set_num_states(3, 2)
    target.resize_cache(20)
    engine = Engine(target, FAST, LIMITS, max_nodes=4)
    engine.start()
    Harness(engine).generate([[5] * 100], SamplingParams(), StoppingOptions(max_tokens=3, ignore_eos=True))
    engine.stop()
    found = read(engine, FAST)
    # The prompt's last border is kept.
    names = ("recurrent_states", "free_recurrent_states", "kept_recurrent_states")
    assert [found[name] for name in names] == [3, 3, 1]
    target.cache.states.take()
    assert read(engine, FAST)["free_recurrent_states"] == 2


def read(engine: Engine, info: TargetInfo) -> dict[str, float]:
    return values(verifier_metrics(engine, info), "coppice_verifier_")


def by_label(engine: Engine, info: TargetInfo, name: str) -> dict[str, float]:
    """Values of a metric by those of its one label."""
    found = read(engine, info).items()
    return {key.partition("=")[2]: value for key, value in found if key.startswith(f"{name},")}


def test_drafts_are_counted_by_what_became_of_them(new_model: Callable[[str], PreTrainedModel]) -> None:
    target = TargetModel(new_model("llama"), exact=True, num_blocks=50)
    engine = Engine(target, STRICT, LIMITS, max_nodes=2)
    engine.start()
    stopping = StoppingOptions(max_tokens=40, ignore_eos=True)
    harness = Harness(engine)
    [plain] = harness.generate([[5] * 20], SamplingParams(), stopping)

    def drafter(index: int, tokens: Sequence[int], length: int) -> TokenTree:
        right = plain.token_ids[len(tokens) : len(tokens) + 3]
        return chain(right, [-0.1] * len(right))

    before = engine.counts.num_rounds
    [drafted] = harness.generate([[5] * 20], SamplingParams(), stopping, drafter)
    engine.stop()
    assert drafted.token_ids == plain.token_ids
    found = read(engine, STRICT)
    rounds = engine.counts.num_rounds - before
    assert drafted.rounds == rounds < 40
    drafted_rounds = found["spec_decode_num_drafts_total"]
    assert 0 < drafted_rounds <= rounds
    accepted = found["spec_decode_num_accepted_tokens_total"]
    # Every token is a round's own or an accepted one, and these drafts are always right.
    assert accepted == found["spec_decode_num_draft_tokens_total"] == 40 - rounds
    pruned = by_label(engine, STRICT, "pruned_nodes_total")
    # Of three nodes a round verifies two, until the output has no room for them.
    assert pruned["budget"] >= drafted_rounds - 2
    assert pruned["grammar"] == pruned["room"] == 0
    assert set(by_label(engine, STRICT, "stale_drafts_total").values()) == {0}


def test_failures_are_counted_by_their_status(new_model: Callable[[str], PreTrainedModel]) -> None:
    target = TargetModel(new_model("llama"), exact=True, num_blocks=2)
    engine = Engine(target, STRICT, LIMITS, max_nodes=4)
    engine.start()
    [result] = Harness(engine).generate([[5] * 20], SamplingParams(), StoppingOptions(max_tokens=400))
    engine.stop()
    assert result.error is not None
    failed = by_label(engine, STRICT, "failed_sequences_total")
    assert failed.pop("invalid_argument") == 1
    assert set(failed.values()) == {0}
