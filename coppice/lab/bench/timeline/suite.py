"""The timeline: requests one after another, the events that services kept of them, where the time of a round goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from coppice.cli.topology import TopologySpec
from coppice.client import Client, RequestFailedError
from coppice.lab.bench.client import Mode, Policy, Task, model_info
from coppice.lab.bench.environment import describe_machine
from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.lab.bench.harness.plots import Panel
from coppice.lab.bench.harness.report import Report, Shown, document
from coppice.lab.bench.harness.tables import Table
from coppice.lab.bench.prompts import Prompt, encoded_prompts
from coppice.lab.bench.services import kept_events
from coppice.lab.bench.timeline.rounds import Round, Watched, hop_rows, ratios, rounds_of, shown_rounds
from coppice.obs.timeline import VARIABLE, Timeline, TimelineEvent

NUM_WARM_UP_REQUESTS = 2
NOTES = (
    "Times are of one clock, read in four processes. A message leaves when it has been handed to gRPC, and comes when "
    "its handler is called: what lies between is the network, gRPC on both sides and the event loop.",
    "A hop's median is over the rounds in which it came in this order; a pass that began with what an earlier tree had "
    "left over did so before this round's draft.",
)


LANES = ("verifier", "drafter", "orchestrator", "client")
COLOURS = {
    "pass": "tab:blue",
    "choosing tokens": "lightskyblue",
    "no draft yet": "tab:red",
    "draft": "tab:green",
    "preparing the next draft": "palegreen",
    "orchestrator": "tab:orange",
}
MESSAGES = {"outcome": "black", "tree": "darkgreen", "delta": "tab:purple"}
HEIGHT = 0.6


@dataclass(frozen=True, slots=True)
class TimelineSuite:
    """Requests one after another to services that keep their events in `directory`; the client's are in `client`."""

    target: Path
    prompts: tuple[Prompt, ...]
    directory: Path
    client: Timeline
    max_tokens: int = 96
    temperature: float = 0.0
    seed: int = 0

    async def run(self, address: str) -> Report:
        """Send the requests and return what the report says of the run; the services' events come when they stop.

        Raises BenchmarkError if a request failed.
        """
        machine, policy = describe_machine(), Policy("timeline", Mode.MODE_FORCED)
        async with Client(address) as client:
            context = (await model_info(client)).max_context_tokens
            encoded, _ = encoded_prompts(self.target, self.prompts, self.max_tokens, context)
            for number, prompt_ids in enumerate([*encoded[:1] * NUM_WARM_UP_REQUESTS, *encoded]):
                task = Task(tuple(prompt_ids), self.max_tokens, self.temperature, self.seed)
                stream = client.stream_request(policy.message(task))
                try:
                    async for chunk in stream:
                        self.client.mark("delta", size=len(chunk.token_ids))
                except RequestFailedError as error:
                    raise BenchmarkError(f"request {number} failed: {error}") from error
        settings = {name: getattr(self, name) for name in ("max_tokens", "temperature", "seed")}
        settings["prompts"] = [one.origin for one in self.prompts]
        return document("timeline", machine, settings, [], notes=NOTES)

    def read_events(self) -> Watched:
        """What the services have written, which have stopped by now.

        Raises BenchmarkError if one of them has written nothing.
        """
        services = ("orchestrator", "drafter", "verifier")
        return Watched(self.client.events(), *(kept_events(self.directory, service) for service in services))


def services_spec(spec: TopologySpec, directory: Path) -> TopologySpec:
    """Services that keep their events in a directory, without a prefix cache that would draft next to the drafter."""
    return replace(spec, env={**spec.env, VARIABLE: str(directory), "CACHE_DRAFTER": "false"})


def add_rounds(report: dict[str, Any], watched: Watched) -> list[Any]:
    """Complete the report with what the events say; returns the rounds of each request that counts.

    Raises BenchmarkError if they have no rounds.
    """
    requests = [rounds for rounds in rounds_of(watched)[NUM_WARM_UP_REQUESTS:] if len(rounds) > 1]
    if not requests:
        raise BenchmarkError("no request had two rounds: take more tokens")
    report["rows"] = hop_rows([one for rounds in requests for one in rounds])
    report["ratios"] = ratios(requests)
    return requests


def shown(requests: Sequence[Sequence[Round]], drafter: Sequence[TimelineEvent], num_rounds: int) -> Shown:
    """A table of hops, and a picture of some rounds in a row with what the drafter computed ahead."""
    rounds = shown_rounds(requests, num_rounds)
    ahead = [event for event in drafter if event.what == "ahead"]
    title = f"{len(rounds)} rounds of one request; a message ends at its dot"
    return Shown(
        tables=(Table("One round, hop by hop: microseconds", "us_p50 us_p90 rounds"),),
        panels=(Panel(title, xlabel="ms", custom=partial(_draw, rounds=rounds, ahead=ahead)),),
        ratio_title="Over all rounds",
    )


def _draw(axes: Axes, report: Report, rounds: Sequence[Round], ahead: Sequence[TimelineEvent]) -> None:
    zero = rounds[0].outcome_left
    for lane, kind, start, end in bars(rounds, ahead):
        bottom = LANES.index(lane) - HEIGHT / 2
        axes.broken_barh([((start - zero) / 1000, (end - start) / 1000)], (bottom, HEIGHT), color=COLOURS[kind])
    for what, lane, start, other, end in messages(rounds):
        times, lanes = [(start - zero) / 1000, (end - zero) / 1000], [LANES.index(lane), LANES.index(other)]
        axes.plot(times, lanes, color=MESSAGES[what], linewidth=0.8)
        # Where it arrives, so that its direction can be seen.
        axes.plot(times[1], lanes[1], color=MESSAGES[what], marker="o", markersize=2.5)
    axes.set_yticks(range(len(LANES)), LANES)
    kinds = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    lines = [Line2D([], [], color=colour, label=what) for what, colour in MESSAGES.items()]
    axes.legend(handles=[*kinds, *lines], fontsize="small", ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.15))


def bars(rounds: Sequence[Round], ahead: Sequence[TimelineEvent]) -> Iterator[tuple[str, str, float, float]]:
    """Who was busy, or waited: lane, what it is, from, to."""
    first, last = rounds[0].outcome_left, rounds[-1].ended
    for event in ahead:
        if first <= event.at_us and event.end_us <= last:
            yield "drafter", "preparing the next draft", event.at_us, event.end_us
    for one in rounds:
        if one.waited_us:
            yield "verifier", "no draft yet", one.outcome_left, one.outcome_left + one.waited_us
        yield "verifier", "pass", one.pass_began, one.pass_ended
        yield "verifier", "choosing tokens", one.pass_ended, one.ended
        for lane, kind, start, end in (
            ("drafter", "draft", one.draft_began, one.draft_ended),
            ("orchestrator", "orchestrator", one.outcome_came, one.drafter_told),
            ("orchestrator", "orchestrator", one.tree_came, one.draft_left),
        ):
            if start is not None and end is not None and first <= start <= end:
                yield lane, kind, start, end


def messages(rounds: Sequence[Round]) -> Iterator[tuple[str, str, float, str, float]]:
    """What went, from which lane when to which lane when, from the first round's beginning to the last one's end."""
    first, last = rounds[0].outcome_left, rounds[-1].ended
    for one in rounds:
        for what, lane, start, other, end in (
            ("outcome", "verifier", one.outcome_left, "orchestrator", one.outcome_came),
            ("outcome", "orchestrator", one.drafter_told, "drafter", one.drafter_heard),
            ("tree", "drafter", one.tree_left, "orchestrator", one.tree_came),
            ("tree", "orchestrator", one.draft_left, "verifier", one.draft_came),
            ("delta", "orchestrator", one.delta_left, "client", one.delta_came),
        ):
            if start is not None and end is not None and first <= start <= end <= last:
                yield what, lane, start, other, end
