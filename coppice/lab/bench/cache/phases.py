"""What is sent in which order: every phase finds in the cache what those before it have left there."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.lab.bench.cache.workload import CacheWorkload

OFF = "off"
COLD = "cold"
FILL = "fill"
AGAIN = "again"
SHIFTED = "shifted"
SECOND = "second"
KILLED = "killed"

EXPLANATIONS = {
    OFF: "speculation off, nothing remembered and nothing shared",
    COLD: "every prompt under a salt of its own: nothing of any other request is known",
    FILL: "the prompts for the first time, all under one salt",
    AGAIN: "the same requests again",
    SHIFTED: "the same system prompts with new, repeated and edited endings",
    SECOND: "all of them in a second orchestrator, which knows of them through Redis alone",
    KILLED: "the prompts for the first time under another salt; Redis is killed in the middle and comes back empty",
}


@dataclass(frozen=True, slots=True)
class Phase:
    """Prompts of the workload, by number, in turn through one orchestrator."""

    name: str
    prompts: range
    # Whose requests find what: of the cold phase every request's own.
    salt: str = ""
    in_second: bool = False
    kills_redis: bool = False

    def salt_of(self, session: str, prompt: int) -> str:
        """The `cache_salt` of a request."""
        return f"{session} {self.salt or prompt}"


def phases(workload: CacheWorkload, with_redis: bool) -> tuple[Phase, ...]:
    """All phases in order; without a Redis, those that one orchestrator can show by itself."""
    num_first, num_all = len(workload.first), len(workload.first) + len(workload.shifted)
    first, shifted = range(num_first), range(num_first, num_all)
    alone = (
        Phase(COLD, range(num_all)),
        Phase(FILL, first, "shared"),
        Phase(AGAIN, first, "shared"),
        Phase(SHIFTED, shifted, "shared"),
    )
    if not with_redis:
        return alone
    return (
        *alone,
        Phase(SECOND, range(num_all), "shared", in_second=True),
        Phase(KILLED, first, "killed", kills_redis=True),
    )
