"""The verifier's settings, read once from the environment."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from coppice.net.tls import ServerTls, server_tls
from coppice.obs.metrics_tls import OFF, check_metrics_tls

DEVICES = ("auto", "cpu", "cuda")
SWITCH = ("on", "off")
PRUNING = ("auto", "on", "compare", "off")
EXACTNESS = ("auto", "strict", "fast")
# Fewer rows are no faster, and there would be none to set aside for prompts.
MIN_ROWS = 4
MAX_PORT = (1 << 16) - 1

# Exit codes of the process: an address that is taken; a setting or a model that cannot be served; a process that held a
# part of the target is gone; the thread that runs the target has ended.
UNAVAILABLE_ERROR = 1
CONFIGURATION_ERROR = 2
WORKER_LOST = 3
ENGINE_LOST = 4


@dataclass(frozen=True)
class VerifierConfig:
    """Settings of the verifier process; each field's environment variable is its name in capitals.

    Raises:
        ValueError: a value is missing or out of range; the message names the variable.
    """

    model: str
    listen_address: str = "127.0.0.1:0"
    device: str = "auto"
    # 0 picks by the number of rows, see cpu_threads.py.
    threads: int = 0
    # auto is strict on CPU and fast on CUDA.
    exactness: str = "auto"
    # Upper limit of a round's nodes, whatever a draft's budget says.
    max_nodes: int = 64
    # 0 means what the model's configuration says; it is less where the KV cache does not hold as much.
    max_context_tokens: int = 0
    max_sequences: int = 64
    max_queued: int = 1024
    # Prompt tokens of all sequences in one pass; longer prompts take several passes.
    prefill_chunk: int = 512
    # Rows of one pass over all sequences, before padding; 0 sets no limit. Trees shrink first, then prompts wait.
    max_rows: int = 0
    kv_cache_mib: int = 1024
    # Whether prompts that begin alike share what is computed for their beginning.
    prefix_reuse: str = "on"
    grace_s: float = 20.0
    # Processes that hold a part of the target each; KV_CACHE_MIB and THREADS are those of one.
    tensor_parallel: int = 1
    # How long one of them may keep the others waiting in a pass before the server gives up.
    collective_timeout_s: float = 120.0
    # In fast mode, tokens are counted whose two best scores are less than this apart, in units of logits; 0 means what
    # rounding in the model's own precision can do, see loading.py.
    near_tie_gap: float = 0.0
    # Metrics are served over HTTP there, on the host of LISTEN_ADDRESS; 0 serves none.
    metrics_port: int = 0
    # How they are served there: plain HTTP (off), HTTPS with the certificate below (on), or that for those who show
    # one of TLS_CLIENT_CA alone (mutual).
    metrics_tls: str = OFF
    # PEM files: this service's certificate, its key, and the CA of those who may call. All three, or plaintext.
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    # Health alone is served there in plaintext, on the host of LISTEN_ADDRESS, for probes without a certificate; 0
    # serves none.
    health_port: int = 0
    # A directory with an adapter that lets the target draft for itself in its own passes, see space_adapter.py; empty:
    # it does not.
    space_adapter: str = ""
    # At most: masks behind each likely end of the accepted path, 0 for as many as the adapter has; ends in a round;
    # nodes of a re-draft; and the least probability of a node's path. Costs decide which of these are worth their
    # rows; with 0 all are.
    redraft_tokens: int = 3
    redraft_groups: int = 3
    redraft_nodes: int = 7
    redraft_min_probability: float = 0.02
    # Masks are computed while a pass has no more rows than this with them; 0 means what fits the device.
    redraft_rows: int = 0
    # A directory with a head that prunes nodes behind an early layer, see early_head.py; empty: none is.
    early_head: str = ""
    # auto prunes the passes where that pays, on all of them, compare runs each both ways, for measurement.
    early_pruning: str = "auto"

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("MODEL must name a checkpoint directory or hub id")
        choices_by_name = {
            "device": DEVICES,
            "exactness": EXACTNESS,
            "prefix_reuse": SWITCH,
            "early_pruning": PRUNING,
        }
        for name, choices in choices_by_name.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name.upper()} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        self._require(1, "max_nodes", "max_sequences", "max_queued", "prefill_chunk", "kv_cache_mib", "tensor_parallel")
        self._require(0, "threads", "max_context_tokens", "max_rows", "grace_s", "near_tie_gap")
        self._require(0, "metrics_port", "health_port", most=MAX_PORT)
        self._require(0, "redraft_tokens", "redraft_rows")
        self._require(1, "redraft_groups", "redraft_nodes")
        self._require(0, "redraft_min_probability", most=1)
        for name in ("space_adapter", "early_head"):
            if getattr(self, name) and self.tensor_parallel > 1:
                raise ValueError(f"{name.upper()} needs a target that one process holds: TENSOR_PARALLEL must be 1")
        if 0 < self.max_rows < MIN_ROWS:
            raise ValueError(f"MAX_ROWS must be 0 or at least {MIN_ROWS}, got {self.max_rows}")
        if self.collective_timeout_s <= 0:
            raise ValueError(f"COLLECTIVE_TIMEOUT_S must be more than 0, got {self.collective_timeout_s}")
        check_metrics_tls(self.metrics_tls, self.tls)

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings; unset variables keep their defaults."""
        return cls(
            model=env.get("MODEL", ""),
            listen_address=env.get("LISTEN_ADDRESS", cls.listen_address),
            device=env.get("DEVICE", cls.device),
            threads=_integer(env, "THREADS", cls.threads),
            exactness=env.get("EXACTNESS", cls.exactness),
            max_nodes=_integer(env, "MAX_NODES", cls.max_nodes),
            max_context_tokens=_integer(env, "MAX_CONTEXT_TOKENS", cls.max_context_tokens),
            max_sequences=_integer(env, "MAX_SEQUENCES", cls.max_sequences),
            max_queued=_integer(env, "MAX_QUEUED", cls.max_queued),
            prefill_chunk=_integer(env, "PREFILL_CHUNK", cls.prefill_chunk),
            max_rows=_integer(env, "MAX_ROWS", cls.max_rows),
            prefix_reuse=env.get("PREFIX_REUSE", cls.prefix_reuse),
            kv_cache_mib=_integer(env, "KV_CACHE_MIB", cls.kv_cache_mib),
            grace_s=_number(env, "GRACE_S", cls.grace_s),
            tensor_parallel=_integer(env, "TENSOR_PARALLEL", cls.tensor_parallel),
            collective_timeout_s=_number(env, "COLLECTIVE_TIMEOUT_S", cls.collective_timeout_s),
            near_tie_gap=_number(env, "NEAR_TIE_GAP", cls.near_tie_gap),
            space_adapter=env.get("SPACE_ADAPTER", cls.space_adapter),
            redraft_tokens=_integer(env, "REDRAFT_TOKENS", cls.redraft_tokens),
            redraft_groups=_integer(env, "REDRAFT_GROUPS", cls.redraft_groups),
            redraft_nodes=_integer(env, "REDRAFT_NODES", cls.redraft_nodes),
            redraft_min_probability=_number(env, "REDRAFT_MIN_PROBABILITY", cls.redraft_min_probability),
            redraft_rows=_integer(env, "REDRAFT_ROWS", cls.redraft_rows),
            early_head=env.get("EARLY_HEAD", cls.early_head),
            early_pruning=env.get("EARLY_PRUNING", cls.early_pruning),
            metrics_port=_integer(env, "METRICS_PORT", cls.metrics_port),
            metrics_tls=env.get("METRICS_TLS", cls.metrics_tls),
            tls_cert=env.get("TLS_CERT", cls.tls_cert),
            tls_key=env.get("TLS_KEY", cls.tls_key),
            tls_client_ca=env.get("TLS_CLIENT_CA", cls.tls_client_ca),
            health_port=_integer(env, "HEALTH_PORT", cls.health_port),
        )

    @property
    def tls(self) -> ServerTls | None:
        """The files of TLS; None for plaintext."""
        return server_tls(self.tls_cert, self.tls_key, self.tls_client_ca, is_internal=True)

    def _require(self, least: float, *names: str, most: float = math.inf) -> None:
        for name in names:
            value = getattr(self, name)
            if not value >= least:  # so that NaN is refused, too
                raise ValueError(f"{name.upper()} must be at least {least}, got {value}")
            if value > most:
                raise ValueError(f"{name.upper()} must be at most {most}, got {value}")


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    value = _number(env, name, default)
    if value != int(value):
        raise ValueError(f"{name} must be a whole number, got {env[name]!r}")
    return int(value)


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(env.get(name, default))
    except ValueError:
        raise ValueError(f"{name} must be a number, got {env[name]!r}") from None
