"""The service's configuration: one frozen dataclass, read from the environment once, in `__main__`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from coppice.core.denoising import MAX_BLOCK_TOKENS, MAX_DENOISING_STEPS
from coppice.net.tls import ServerTls, server_tls
from coppice.obs.metrics_tls import OFF, check_metrics_tls
from drafter_svc.drafters.registry import KINDS
from drafter_svc.model.draft_context import LEAST_CONTEXT

ON = "on"
SWITCHES = (ON, OFF)
DEVICES = ("cpu", "cuda", "auto")
DRAFT_AHEAD = ("auto", *SWITCHES)
# More nodes than any target pays for; it bounds what one message can make us compute.
MAX_NODES_LIMIT = 4096
# A terabyte: more is a mistyped number.
MAX_PREFIX_MIB = 1024 * 1024
# Of a drafter's positions, those that the context may take.
CONTEXT_SHARE = 0.875

_PARSERS: dict[str, Callable[[str], str | int | float]] = {"str": str, "int": int, "float": float}
_NOUNS = {"str": "text", "int": "a whole number", "float": "a number"}


class ConfigError(ValueError):
    """A bad value of an environment variable; the message names it."""


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """What one drafter process runs and how much it takes on. Each field is the variable of the same name.

    Raises:
        ConfigError: a value is missing or out of range.
    """

    model: str
    listen_address: str = "127.0.0.1:0"
    drafter_kind: str = "small-lm"
    device: str = "auto"
    # 0 picks: one thread on a CPU. A small drafter's steps are too short to be worth a barrier between threads,
    # and the verifier wants the other cores.
    threads: int = 0
    # Most nodes of one tree, whatever a request asks for.
    max_nodes: int = 64
    # Most sequences held at once, over all streams.
    max_sequences: int = 256
    # How long streams may go on after SIGTERM.
    grace_s: float = 5.0
    # Shape of the search: rows per forward step, most steps behind the root, and the least expected number of
    # further accepted tokens that a step must promise.
    draft_width: int = 4
    draft_steps: int = 12
    draft_min_gain: float = 0.2
    # Least probability of a node's whole path: what a row costs in tokens. With the bundled pair a row takes about
    # 0.4 ms of the target's pass and 0.1 ms of the draft, and a token 4 ms. Rows that would be padding cost nothing:
    # down to a quarter of this, nodes fill them.
    draft_min_probability: float = 0.12
    # Whether likely outcomes are drafted for while a tree is being verified: on, off, or auto, which is on where the
    # drafter has a processor of its own, on a GPU or with NICENESS 0. On the verifier's the steps slow its passes by as
    # much as the next tree gains, even with a core each.
    draft_ahead: str = "auto"
    # Most forward steps per round that are taken for it.
    draft_ahead_steps: int = 32
    # Most children of a node that are looked at; 1 drafts chains.
    draft_children: int = 16
    # Most sequences whose drafts are made together, in passes that they share; 0: as many as are sooner done so, which
    # is tried at start.
    draft_batch: int = 0
    # Most tokens of a sequence that are read: of a longer one the first few and the latest. 0: as many as the
    # checkpoint says that it is good for, or as many as it has positions for.
    draft_context: int = 0
    # Whether children are chosen with the request's noise (on), or by the drafter's own probabilities alone (off): what
    # coupling gains is measured so.
    coupling: str = ON
    # Whether trees are sent with the acceptance that was observed for nodes like theirs (on), or with the drafter's own
    # probabilities (off). Outcomes are counted in both cases.
    online_calibration: str = ON
    # Of a semi-ar drafter: most masks of a block, of those that it was trained with; 0 takes all.
    semi_ar_masks: int = 0
    # Of a diffusion drafter: passes over the block, and tokens of the block; 0 takes those that it was trained with, up
    # to 4. Two passes over 4 tokens were as quick as any, and had 9 to 23 % more accepted than one.
    diffusion_steps: int = 2
    diffusion_block: int = 0
    # Most passes that a request may ask for; more count as that.
    diffusion_max_steps: int = 8
    # How far the process steps back behind others on its machine, as `nice` counts. A drafter that shares cores with
    # the verifier should: reading a prompt beside the target's own pass over it holds that pass up.
    niceness: int = 0
    # Most tokens whose keys and values all sequences keep; beyond, those that were drafted for longest ago read theirs
    # again when they are drafted for. 0 keeps all. A token of the bundled drafter takes 2 KiB.
    max_cached_tokens: int = 131_072
    # Memory for keys and values of what prompts begin with, which prompts of the same cache_salt that begin alike use
    # again; 0 keeps nothing. A token of the bundled drafter takes 2 KiB.
    prefix_mib: int = 64
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

    def __post_init__(self) -> None:
        _require("MODEL", bool(self.model), "a checkpoint directory or hub id", self.model)
        _require("LISTEN_ADDRESS", _is_address(self.listen_address), "HOST:PORT", self.listen_address)
        _require("DRAFTER_KIND", self.drafter_kind in KINDS, f"one of {', '.join(sorted(KINDS))}", self.drafter_kind)
        _require("DEVICE", self.device in DEVICES, f"one of {', '.join(DEVICES)}", self.device)
        _require("THREADS", 0 <= self.threads <= 1024, "in 0..1024", self.threads)
        _require("MAX_NODES", 1 <= self.max_nodes <= MAX_NODES_LIMIT, f"in 1..{MAX_NODES_LIMIT}", self.max_nodes)
        _require("MAX_SEQUENCES", self.max_sequences >= 1, "at least 1", self.max_sequences)
        _require("GRACE_S", 0 <= self.grace_s < float("inf"), "at least 0 and finite", self.grace_s)
        _require("DRAFT_WIDTH", 1 <= self.draft_width <= 256, "in 1..256", self.draft_width)
        _require("DRAFT_STEPS", 0 <= self.draft_steps <= 256, "in 0..256", self.draft_steps)
        _require("DRAFT_MIN_PROBABILITY", 0 <= self.draft_min_probability < 1, "in [0, 1)", self.draft_min_probability)
        _require("DRAFT_AHEAD", self.draft_ahead in DRAFT_AHEAD, f"one of {', '.join(DRAFT_AHEAD)}", self.draft_ahead)
        _require("DRAFT_AHEAD_STEPS", 0 <= self.draft_ahead_steps <= 256, "in 0..256", self.draft_ahead_steps)
        _require("DRAFT_CHILDREN", 1 <= self.draft_children <= 256, "in 1..256", self.draft_children)
        _require("DRAFT_BATCH", 0 <= self.draft_batch <= 1024, "in 0..1024", self.draft_batch)
        is_context = self.draft_context == 0 or self.draft_context >= LEAST_CONTEXT
        _require("DRAFT_CONTEXT", is_context, f"0 or at least {LEAST_CONTEXT}", self.draft_context)
        _require("COUPLING", self.coupling in SWITCHES, "on or off", self.coupling)
        _require("ONLINE_CALIBRATION", self.online_calibration in SWITCHES, "on or off", self.online_calibration)
        _require("SEMI_AR_MASKS", 0 <= self.semi_ar_masks <= 64, "in 0..64", self.semi_ar_masks)
        for name, steps in (("STEPS", self.diffusion_steps), ("MAX_STEPS", self.diffusion_max_steps)):
            is_possible = 1 <= steps <= MAX_DENOISING_STEPS
            _require(f"DIFFUSION_{name}", is_possible, f"in 1..{MAX_DENOISING_STEPS}", steps)
        is_block = 0 <= self.diffusion_block <= MAX_BLOCK_TOKENS
        _require("DIFFUSION_BLOCK", is_block, f"in 0..{MAX_BLOCK_TOKENS}", self.diffusion_block)
        _require("NICENESS", 0 <= self.niceness <= 19, "in 0..19", self.niceness)
        _require("MAX_CACHED_TOKENS", self.max_cached_tokens >= 0, "at least 0", self.max_cached_tokens)
        _require("PREFIX_MIB", 0 <= self.prefix_mib <= MAX_PREFIX_MIB, f"in 0..{MAX_PREFIX_MIB}", self.prefix_mib)
        _require("METRICS_PORT", 0 <= self.metrics_port < 65536, "in 0..65535", self.metrics_port)
        _require("HEALTH_PORT", 0 <= self.health_port < 65536, "in 0..65535", self.health_port)
        try:
            check_metrics_tls(self.metrics_tls, self.tls)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        _require("DRAFT_MIN_GAIN", 0 <= self.draft_min_gain <= 1, "in [0, 1]", self.draft_min_gain)

    @property
    def tls(self) -> ServerTls | None:
        """The files of TLS; None for plaintext."""
        return server_tls(self.tls_cert, self.tls_key, self.tls_client_ca, is_internal=True)

    @property
    def num_threads(self) -> int:
        """Threads that a forward pass on the CPU uses."""
        return self.threads or 1

    def ahead_steps(self, *, on_gpu: bool) -> int:
        """Forward steps per round that are taken ahead; 0 where nothing is drafted ahead."""
        has_own_cores = self.niceness == 0 or on_gpu
        is_on = self.draft_ahead == "on" or (self.draft_ahead == "auto" and has_own_cores)
        return self.draft_ahead_steps if is_on else 0

    def context_tokens(self, measured: int, max_positions: int) -> int:
        """Most tokens of a sequence that are read, of a model with so many positions.

        `measured` is what the checkpoint is good for; 0 where nobody said. Positions have to be left for trees.
        Returns 0 where there is no room to leave some tokens out.
        """
        most = int(CONTEXT_SHARE * max_positions)
        most = min(self.draft_context or measured or most, most)
        return most if most >= LEAST_CONTEXT else 0

    @property
    def host(self) -> str:
        """The host part of the listen address."""
        return self.listen_address.rpartition(":")[0]

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> DrafterConfig:
        """Read the variables named after the fields, in capitals; unset and empty ones take the default.

        Raises:
            ConfigError: a value is missing, not a number where one is due, or out of range.
        """
        values: dict[str, Any] = {"model": ""}
        for field in fields(cls):
            if text := env.get(field.name.upper()):
                values[field.name] = _parse(field.name.upper(), str(field.type), text)
        return cls(**values)


def _parse(name: str, kind: str, text: str) -> str | int | float:
    try:
        return _PARSERS[kind](text)
    except ValueError as error:
        raise ConfigError(f"{name} must be {_NOUNS[kind]}, got {text!r}") from error


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and int(port) < 65536


def _require(name: str, holds: bool, rule: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"{name} must be {rule}, got {value!r}")
