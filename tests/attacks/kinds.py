"""Every attack by name: what it does, on which service, and what it may do to a good client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.attacks import frame_attacks, http_attacks, message_attacks, tls_attacks
from tests.attacks.http2 import Attempt

ORCHESTRATOR, VERIFIER, DRAFTER, GATEWAY = "orchestrator", "verifier", "drafter", "gateway"
PATHS = {
    ORCHESTRATOR: b"/coppice.v1.InferenceService/Generate",
    VERIFIER: b"/coppice.v1.VerifierService/Verify",
    DRAFTER: b"/coppice.v1.DrafterService/Draft",
    GATEWAY: b"/v1/completions",
}
# How much longer a request may take, at the 99th percentile, than beside a process that keeps the same core busy.
MAX_RATIO = 2.0
MAX_FLOOD_RATIO = 5.0
# Valid requests have a share of the machine.
MAX_VALID_RATIO = 10.0
# Grammars are compiled one after the other, and large messages take seconds to send.
LEAST_S = {
    "schemas": 12.0,
    "regexes": 12.0,
    "large-stop-strings": 8.0,
    "large-token-ids": 8.0,
    "many-medium": 8.0,
    "long-prompts": 8.0,
    "full": 15.0,
    # The good client has about twenty answers a second: enough of them for a 99th percentile.
    "users": 15.0,
    "greedy": 15.0,
    "unread": 15.0,
    # A service ends the call of a client that reads nothing after 10 s.
    "slow-streams": 15.0,
    "slow-connection": 15.0,
    "slow-reads": 15.0,
    "many-prompts": 15.0,
    "salts": 15.0,
    "biases": 15.0,
    "outputs": 15.0,
}


@dataclass(frozen=True)
class Attack:
    """One row: the attack's function, the service whose port it goes to, and the limit of the latency's ratio."""

    name: str
    service: str
    run: Callable[[Attempt], None]
    max_ratio: float
    # Whether the service's port speaks TLS.
    tls: bool = False

    @property
    def least_s(self) -> float:
        """Seconds that it needs to show what it does."""
        return LEAST_S.get(self.name.rpartition(":")[2], 0.0)

    @property
    def what(self) -> str:
        """What it does, in a sentence."""
        return (self.run.__doc__ or "").strip()


_ALL: dict[str, tuple[Callable[[Attempt], None], float]] = {
    "bad-path": (frame_attacks.bad_path, MAX_RATIO),
    "rapid-reset": (frame_attacks.rapid_reset, MAX_FLOOD_RATIO),
    "no-window": (message_attacks.no_window, MAX_RATIO),
    "small-window": (message_attacks.small_window, MAX_RATIO),
    "slow-streams": (message_attacks.slow_streams, MAX_RATIO),
    "slow-connection": (message_attacks.slow_connection, MAX_RATIO),
    "headers-only": (frame_attacks.headers_only, MAX_FLOOD_RATIO),
    "large-stop-strings": (message_attacks.large_stop_strings, MAX_RATIO),
    "large-token-ids": (message_attacks.large_token_ids, MAX_RATIO),
    "many-medium": (message_attacks.many_medium, MAX_RATIO),
    "long-prompts": (message_attacks.long_prompts, MAX_RATIO),
    "schemas": (message_attacks.schemas, MAX_RATIO),
    "regexes": (message_attacks.regexes, MAX_RATIO),
    "slow-headers": (frame_attacks.slow_headers, MAX_RATIO),
    "idle-tcp": (frame_attacks.idle_tcp, MAX_RATIO),
    "preface-only": (frame_attacks.preface_only, MAX_RATIO),
    "continuations": (frame_attacks.continuations, MAX_RATIO),
    "tiny-continuations": (frame_attacks.tiny_continuations, MAX_RATIO),
    "settings": (frame_attacks.settings, MAX_RATIO),
    "pings": (frame_attacks.pings, MAX_RATIO),
    "empty-data": (frame_attacks.empty_data, MAX_RATIO),
    "small-windows": (frame_attacks.small_windows, MAX_RATIO),
    "window-overflow": (frame_attacks.window_overflow, MAX_RATIO),
    "priorities": (frame_attacks.priorities, MAX_RATIO),
    "hpack-bomb": (frame_attacks.hpack_bomb, MAX_RATIO),
    "huge-header": (frame_attacks.huge_header, MAX_RATIO),
    "trickle": (frame_attacks.trickle, MAX_RATIO),
    "reconnects": (frame_attacks.reconnects, MAX_RATIO),
    "garbage": (frame_attacks.garbage, MAX_RATIO),
    "goaway": (frame_attacks.goaway, MAX_FLOOD_RATIO),
    "trailers": (frame_attacks.trailers, MAX_FLOOD_RATIO),
    "metadata": (frame_attacks.metadata, MAX_FLOOD_RATIO),
    "gzip-bomb": (message_attacks.gzip_bomb, MAX_RATIO),
    "groups": (message_attacks.groups, MAX_RATIO),
    "too-large-and-held": (message_attacks.too_large_and_held, MAX_RATIO),
    "watches": (message_attacks.watches, MAX_FLOOD_RATIO),
    "health": (message_attacks.health, MAX_FLOOD_RATIO),
    "reflection": (message_attacks.reflection, MAX_FLOOD_RATIO),
    "tenants": (message_attacks.tenants, MAX_VALID_RATIO),
    "salts": (message_attacks.salts, MAX_VALID_RATIO),
    "biases": (message_attacks.biases, MAX_VALID_RATIO),
    "outputs": (message_attacks.outputs, MAX_VALID_RATIO),
    "greedy": (message_attacks.greedy, MAX_VALID_RATIO),
}
# Those that are also tried on the ports of verifier and drafter, as `verifier:NAME` and `drafter:NAME`.
_INSIDE = (
    "bad-path",
    "rapid-reset",
    "headers-only",
    "large-stop-strings",
    "too-large-and-held",
    "slow-headers",
    "continuations",
    "settings",
)
# On the orchestrator's port when it speaks TLS, as `tls:NAME`.
_TLS: dict[str, tuple[Callable[[Attempt], None], float]] = {
    "full": (tls_attacks.tls_full, MAX_FLOOD_RATIO),
    "silent": (tls_attacks.tls_silent, MAX_RATIO),
    "stalled": (tls_attacks.tls_stalled, MAX_RATIO),
    "handshakes": (tls_attacks.tls_handshakes, MAX_FLOOD_RATIO),
    "half-handshakes": (tls_attacks.tls_half_handshakes, MAX_FLOOD_RATIO),
    "noise": (tls_attacks.tls_noise, MAX_RATIO),
    "rapid-reset": (frame_attacks.rapid_reset, MAX_FLOOD_RATIO),
    "headers-only": (frame_attacks.headers_only, MAX_FLOOD_RATIO),
}
# On the gateway's port, as `http:NAME`, with the good client there, too.
_HTTP: dict[str, tuple[Callable[[Attempt], None], float]] = {
    "idle": (http_attacks.idle, MAX_RATIO),
    "slow-head": (http_attacks.slow_head, MAX_RATIO),
    "slow-body": (http_attacks.slow_body, MAX_RATIO),
    "large-bodies": (http_attacks.large_bodies, MAX_RATIO),
    "endless-body": (http_attacks.endless_body, MAX_RATIO),
    "long-prompts": (http_attacks.long_prompts, MAX_RATIO),
    "stop-strings": (http_attacks.stop_strings, MAX_RATIO),
    "deep-json": (http_attacks.deep_json, MAX_RATIO),
    "huge-head": (http_attacks.huge_head, MAX_FLOOD_RATIO),
    "pipelined": (http_attacks.pipelined, MAX_FLOOD_RATIO),
    "health": (http_attacks.health, MAX_FLOOD_RATIO),
    "reconnects": (http_attacks.reconnects, MAX_RATIO),
    "aborts": (http_attacks.aborts, MAX_FLOOD_RATIO),
    "unread": (http_attacks.unread, MAX_VALID_RATIO),
    "slow-reads": (http_attacks.slow_reads, MAX_VALID_RATIO),
    "garbage": (http_attacks.garbage, MAX_RATIO),
    "schemas": (http_attacks.schemas, MAX_RATIO),
    "regexes": (http_attacks.regexes, MAX_RATIO),
    "many-prompts": (http_attacks.many_prompts, MAX_VALID_RATIO),
    "users": (http_attacks.users, MAX_VALID_RATIO),
    "greedy": (http_attacks.greedy, MAX_VALID_RATIO),
}


def _attacks() -> dict[str, Attack]:
    rows = [Attack(name, ORCHESTRATOR, run, ratio) for name, (run, ratio) in _ALL.items()]
    rows += [Attack(f"{service}:{name}", service, *_ALL[name]) for service in (VERIFIER, DRAFTER) for name in _INSIDE]
    rows += [Attack(f"tls:{name}", ORCHESTRATOR, run, ratio, tls=True) for name, (run, ratio) in _TLS.items()]
    rows += [Attack(f"http:{name}", GATEWAY, run, ratio) for name, (run, ratio) in _HTTP.items()]
    rows.append(Attack(f"{VERIFIER}:large-drafts", VERIFIER, message_attacks.large_drafts, MAX_RATIO))
    return {row.name: row for row in rows}


ATTACKS = _attacks()


def chosen(names: str) -> list[Attack]:
    """The attacks with these names, separated by commas; all where there is none.

    Raises:
        ValueError: there is no attack of such a name.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in ATTACKS:
            raise ValueError(f"there is no attack {name!r}; --list names them")
    return [ATTACKS[name] for name in wanted] if wanted else list(ATTACKS.values())
