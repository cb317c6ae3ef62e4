"""Some rounds in a row as a picture: who was busy, who waited, and what went from whom to whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from coppice.lab.bench.plot import DPI, FIGURE_INCHES
from coppice.lab.bench.timeline.rounds import Round
from coppice.obs.timeline import TimelineEvent
from coppice.picture import save

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

# A bar: lane, what it is, from, to.
Bar = tuple[str, str, float, float]
# A message: what it is, from which lane when, to which lane when.
Message = tuple[str, str, float, str, float]


def plot_timeline(rounds: Sequence[Round], ahead: Sequence[TimelineEvent], path: Path) -> None:
    """Draw rounds; `ahead` is what the drafter computed besides."""
    figure, axes = plt.subplots(figsize=FIGURE_INCHES, dpi=DPI)
    zero = rounds[0].outcome_left
    for lane, kind, start, end in bars(rounds, ahead):
        bottom = LANES.index(lane) - HEIGHT / 2
        axes.broken_barh([((start - zero) / 1000, (end - start) / 1000)], (bottom, HEIGHT), color=COLOURS[kind])
    for what, lane, start, other, end in messages(rounds):
        times, lanes = [(start - zero) / 1000, (end - zero) / 1000], [LANES.index(lane), LANES.index(other)]
        axes.plot(times, lanes, color=MESSAGES[what], linewidth=0.8)
        # Where it arrives, so that its direction can be seen.
        axes.plot(times[1], lanes[1], color=MESSAGES[what], marker="o", markersize=2.5)
    _label(axes, len(rounds))
    figure.tight_layout()
    save(figure, path)


def bars(rounds: Sequence[Round], ahead: Sequence[TimelineEvent]) -> Iterator[Bar]:
    """Who was busy, or waited, from when to when."""
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


def messages(rounds: Sequence[Round]) -> Iterator[Message]:
    """What went from whom to whom, from the first round's beginning to the last one's end."""
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


def _label(axes: Axes, number: int) -> None:
    axes.set_yticks(range(len(LANES)), LANES)
    axes.set(xlabel="ms", title=f"{number} rounds of one request; a message ends at its dot")
    kinds = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    lines = [Line2D([], [], color=colour, label=what) for what, colour in MESSAGES.items()]
    axes.legend(
        handles=[*kinds, *lines],
        fontsize="small",
        ncols=5,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.15),
    )
