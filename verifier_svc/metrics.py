"""What operators see of a verifier."""

from __future__ import annotations

from collections.abc import Iterator

from coppice.telemetry import Metric
from verifier_svc.engine import Engine
from verifier_svc.target_model import TargetInfo


def verifier_metrics(engine: Engine, info: TargetInfo) -> Iterator[Metric]:
    """The verifier's metrics now. Safe on any thread: the engine's counts are numbers that are read once.

    Near-ties are left out where nobody counts them, rather than shown as 0.
    """
    mode = {"mode": "strict" if info.exact else "fast"}
    yield _gauge("exactness", "1 beside the mode that the server runs in, strict or fast.", 1, mode)
    yield _gauge("bit_exact", "Whether rows had the same bits alone and in company at start.", info.bit_exact)
    if info.near_tie_gap:
        yield _gauge("near_tie_gap", "Scores less than this apart, as logits, are near-ties.", info.near_tie_gap)
        yield _counter("near_ties", "Tokens chosen where rounding may choose another.", engine.num_near_ties)
    yield _counter("committed_tokens", "Tokens committed.", engine.num_tokens)
    yield _counter("preemptions", "How often a sequence had to make room for others.", engine.num_preemptions)
    yield _counter("recomputed_tokens", "Tokens computed again after preemptions.", engine.num_recomputed_tokens)
    yield _gauge("free_kv_blocks", "Blocks of the KV cache that no sequence uses.", engine.num_free_blocks)
    yield _gauge("waiting_sequences", "Sequences that wait for room.", engine.num_waiting)
    yield _gauge("running_sequences", "Sequences that take part in passes.", engine.num_running)


def _gauge(name: str, description: str, value: float, labels: dict[str, str] | None = None) -> Metric:
    return Metric(f"coppice_verifier_{name}", description, value, labels=labels or {})


def _counter(name: str, description: str, value: int) -> Metric:
    return Metric(f"coppice_verifier_{name}_total", description, value, is_counter=True)
