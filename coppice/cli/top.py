"""`coppice top`: load, speed and the last round's tree of a running orchestrator, in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from coppice.cli.options import AccessOptions
from coppice.client import Client
from coppice.v1 import inference_pb2

# Reports of the load, two a second: of the graphs, and those that a figure is the mean over.
KEPT_LOADS = 60
MEAN_OVER = 4
# Requests of the table, by their last rounds.
KEPT_ROUNDS = 500
SHOWN_REQUESTS = 8
BARS = "▁▂▃▄▅▆▇█"
_STYLES = {
    inference_pb2.NODE_STATE_ACCEPTED: ("✓", "bold green"),
    inference_pb2.NODE_STATE_REJECTED: ("✗", "red"),
    inference_pb2.NODE_STATE_PRUNED: ("-", "dim"),
}

Load = inference_pb2.LoadReport
Round = inference_pb2.RoundReport


def top(
    access: AccessOptions,
    address: Annotated[str, typer.Option(help="Orchestrator to watch, which has WATCH_ROUNDS.")] = "127.0.0.1:50050",
    request_id: Annotated[str, typer.Option(help="Rounds of this request alone.")] = "",
    count: Annotated[int, typer.Option(min=0, help="End after this many reports of the load; 0: at Ctrl-C.")] = 0,
) -> None:
    """Watch tokens/s, τ, running requests, budget, price and the last round's tree; Ctrl-C ends."""
    secured = access.channel_tls(address)
    console = Console()

    async def run() -> None:
        view = View(address)
        async with Client(address, token=access.token, tls=secured) as client:
            with _shown(console, view.picture) as refresh:
                await view.follow(client, request_id, count, refresh)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


@contextlib.contextmanager
def _shown(console: Console, picture: Callable[[], RenderableType]) -> Iterator[Callable[[], None]]:
    """A way to show the picture anew: in place, or its last state at the end where output is no terminal."""
    if not console.is_terminal:
        yield lambda: None
        console.print(picture())
        return
    with Live(picture(), console=console, screen=True, auto_refresh=False) as live:
        yield lambda: live.update(picture(), refresh=True)


class View:
    """Reports so far, and their picture."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._loads: deque[Load] = deque(maxlen=KEPT_LOADS)
        self._rounds: deque[Round] = deque(maxlen=KEPT_ROUNDS)
        self._missed = 0

    async def follow(self, client: Client, request_id: str, count: int, refresh: Callable[[], None]) -> None:
        """Take reports until there were `count` of the load (0: without end), over as many calls as it takes."""
        num_loads = 0
        while True:
            async for message in client.watch_rounds(request_id):
                self.take(message)
                if message.HasField("load"):
                    num_loads += 1
                    refresh()
                    if num_loads == count:
                        return

    def take(self, message: inference_pb2.WatchRoundsResponse) -> None:
        """Add a message."""
        self._missed += message.missed_rounds
        if message.HasField("round"):
            self._rounds.append(message.round)
            return
        if self._loads and message.load.generated_tokens < self._loads[-1].generated_tokens:
            # Counts of another process begin again.
            self._loads.clear()
        self._loads.append(message.load)

    def picture(self) -> RenderableType:
        """Figures, graphs, requests and the newest round's tree."""
        if not self._loads:
            return Text(f"waiting for {self._address}")
        parts: list[RenderableType] = [self._figures(), self._graphs(), self._requests()]
        if self._rounds:
            parts.append(Panel(round_tree(self._rounds[-1]), title="last round", title_align="left"))
        if self._missed:
            parts.append(Text(f"{self._missed} rounds missed", style="dim"))
        return Group(*parts)

    def _figures(self) -> RenderableType:
        load, first = self._loads[-1], self._loads[-min(len(self._loads), MEAN_OVER + 1)]
        price = max((one.row_price for one in load.verifiers), default=0.0)
        told = {
            "tokens/s": _ratio(load.generated_tokens - first.generated_tokens, load.time_s - first.time_s, 1),
            "τ": _ratio(load.generated_tokens - first.generated_tokens, load.rounds - first.rounds, 2),
            "running": str(load.running),
            "waiting": str(load.waiting),
            "budget": _ratio(load.planned_nodes, load.drafting, 1),
            "row price": f"{price:.3f}" if price else "-",
            "rows": str(sum(one.rows for one in load.verifiers)),
            "pass ms": f"{max((one.pass_us for one in load.verifiers), default=0) / 1000:.1f}",
        }
        boxes = [Panel(Text(value, style="bold"), title=name, title_align="left") for name, value in told.items()]
        return Columns(boxes, equal=True)

    def _graphs(self) -> RenderableType:
        pairs = list(zip(self._loads, list(self._loads)[1:], strict=False))
        tokens = [new.generated_tokens - old.generated_tokens for old, new in pairs]
        speeds = [made / (new.time_s - old.time_s) for made, (old, new) in zip(tokens, pairs, strict=True)]
        rounds = [new.rounds - old.rounds for old, new in pairs]
        taus = [made / count if count else 0.0 for made, count in zip(tokens, rounds, strict=True)]
        table = Table.grid(padding=(0, 1))
        table.add_row("tokens/s", Text(bars(speeds), style="green"))
        table.add_row("τ", Text(bars(taus), style="green"))
        return table

    def _requests(self) -> RenderableType:
        table = Table("request", "rounds seen", "tokens", "τ", "sources that were right", box=None, pad_edge=False)
        ids = list(dict.fromkeys(one.request_id for one in reversed(self._rounds)))[:SHOWN_REQUESTS]
        for identity in ids:
            seen = [one for one in self._rounds if one.request_id == identity]
            tokens = sum(len(one.token_ids) for one in seen)
            right: Counter[str] = Counter()
            for one in seen:
                for node, state in enumerate(one.node_states):
                    if state == inference_pb2.NODE_STATE_ACCEPTED:
                        right.update(sources_of(one, node))
            names = ", ".join(f"{name} {number}" for name, number in right.most_common())
            table.add_row(identity, str(len(seen)), str(tokens), f"{tokens / len(seen):.2f}", names)
        return table


def bars(values: list[float]) -> str:
    """Values as a line of bars, the highest of them full."""
    highest = max(values, default=0.0)
    return "".join(BARS[round(value / highest * (len(BARS) - 1))] if highest > 0 else BARS[0] for value in values)


def sources_of(one: Round, node: int) -> list[str]:
    """Names of a node's sources."""
    names = list(one.tree.source_names)
    return [name for bit, name in enumerate(names) if not one.tree.sources or one.tree.sources[node] >> bit & 1]


def round_tree(one: Round) -> Tree:
    """A round's tree, the accepted path first, with the target's own token where that ends."""
    head = (
        f"{len(one.token_ids)} tokens kept, budget {one.budget}, {one.pass_us / 1000:.1f} ms for {one.pass_rows} rows"
    )
    branches = {-1: (root := Tree(head))}
    states = list(one.node_states)
    accepted = [node for node, state in enumerate(states) if state == inference_pb2.NODE_STATE_ACCEPTED]
    end = max(accepted, default=-1)
    for node, parent in enumerate(one.tree.parents):
        mark, style = _STYLES.get(states[node], ("?", ""))
        label = Text(f"{mark} {shown(one.node_tokens[node])}", style=style)
        label.append(f"  {', '.join(sources_of(one, node))}", style="dim")
        branches[node] = branches[parent].add(label)
    for token in one.tokens[len(accepted) :]:
        branches[end].add(Text(f"+ {shown(token)}  the target's own", style="blue"))
    return root


def shown(token: bytes) -> str:
    """A token's text on one line."""
    return repr(token.decode(errors="replace"))


def _ratio(over: float, under: float, digits: int) -> str:
    return f"{over / under:.{digits}f}" if under > 0 else "-"
