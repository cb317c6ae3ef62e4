"""Named ratios of the forms, and what has to be said beside them.

`async/sync`, `async/off`, `sync/off`, `ahead/off`, `ahead/async` and `colocated/async` are ratios of tokens/s;
`forward-share-async`, `-sync` and `-ahead` shares of the wall time inside the target's forward; `early-drafts` of the
asynchronous rounds, those that began with a draft that was there when the outcome before was known, and
`early-drafts-ahead` the same where drafters draft ahead; `draft-ahead-hits` of the rounds that those were told to
expect, the ones with a draft behind their outcome before it was known; `rerooted-tokens` of the asynchronous tokens,
those accepted from re-rooted drafts. `@20ms` marks a delay, `@T1` a temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median

from coppice.lab.bench import figures
from coppice.lab.bench.contenders import Completion
from coppice.lab.bench.forms.form import Form, Kind
from coppice.lab.bench.summary import OFF, Samples, ratio_name, speed_ratios

# Less than this is slower than plain decoding beyond what runs differ by.
NEVER_SLOWER = 0.97
NOTES = (
    "Forms take turns with all others on the same prompts, and have no prefix cache. A delay is added to every message "
    "between orchestrator and drafter, each way, so that a draft takes twice that longer. Synchronous rounds always "
    "draft (FORCED); all other forms leave it to the planner (AUTO). In the form draft-ahead drafters draft behind "
    "likely outcomes while the verifier is busy; in the others only where DRAFT_AHEAD=auto says so.",
    "early-drafts: rounds whose draft was there when the outcome before was known (left over from the last tree, late "
    "and re-rooted, or made ahead), of all rounds. draft-ahead-hits: rounds with a draft behind their outcome before "
    "it was known, of those whose tree a drafter was told to expect; 0 where none was. bubble: time per round between "
    "two passes.",
)
SHARES: Mapping[str, tuple[Kind, Callable[[list[Completion]], float]]] = {
    "forward-share-async": (Kind.ASYNCHRONOUS, figures.forward_share),
    "forward-share-sync": (Kind.SYNCHRONOUS, figures.forward_share),
    "forward-share-ahead": (Kind.DRAFT_AHEAD, figures.forward_share),
    "draft-ahead-hits": (Kind.DRAFT_AHEAD, figures.draft_ahead_hits),
    "early-drafts-ahead": (Kind.DRAFT_AHEAD, figures.early_drafts),
    "early-drafts": (Kind.ASYNCHRONOUS, figures.early_drafts),
    "rerooted-tokens": (Kind.ASYNCHRONOUS, figures.rerooted_tokens),
}


def form_ratios(samples: Samples, forms: Iterable[Form]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The named ratios, medians over runs, and the smallest and largest value of each."""
    by_run: dict[str, list[float]] = {}
    delays = list(dict.fromkeys(form.delay_ms for form in forms))
    for temperature in samples.temperatures:
        for delay in delays:
            for name, values in _at(samples, delay, temperature):
                if values:
                    by_run[ratio_name(form_ratio_name(name, delay), temperature)] = values
    middle = {name: round(median(values), 4) for name, values in by_run.items()}
    return middle, {name: [round(min(v), 4), round(max(v), 4)] for name, v in by_run.items()}


def form_ratio_name(name: str, delay_ms: int) -> str:
    """A ratio's name at a delay."""
    return f"{name}@{delay_ms}ms" if delay_ms else name


def form_remarks(samples: Samples, forms: Sequence[Form]) -> list[str]:
    """What a reader has to know, and what must not be."""
    if not forms:
        return []
    found = list(NOTES)
    values, _ = form_ratios(samples, forms)
    for name, value in values.items():
        if name.startswith("async/off") and value < NEVER_SLOWER:
            found.append(f"{name} is {value:.3f}: asynchronous rounds are slower than plain decoding.")
    for form in forms:
        if form.kind is Kind.SYNCHRONOUS and any(_hits(samples, form)):
            found.append(f"{form.name} began rounds with drafts that were there already: it is not synchronous.")
    return found


def _at(samples: Samples, delay_ms: int, temperature: float) -> Iterator[tuple[str, list[float]]]:
    on, off = Form(Kind.ASYNCHRONOUS, delay_ms).name, Form(Kind.SYNCHRONOUS, delay_ms).name
    yield "async/sync", speed_ratios(samples, on, off, temperature)
    yield "async/off", speed_ratios(samples, on, OFF, temperature)
    yield "sync/off", speed_ratios(samples, off, OFF, temperature)
    ahead = Form(Kind.DRAFT_AHEAD, delay_ms).name
    yield "ahead/off", speed_ratios(samples, ahead, OFF, temperature)
    yield "ahead/async", speed_ratios(samples, ahead, on, temperature)
    if not delay_ms:
        yield "colocated/async", speed_ratios(samples, Form(Kind.COLOCATED).name, on, temperature)
    for name, (kind, figure) in SHARES.items():
        yield name, figures.by_run(samples.of(Form(kind, delay_ms).name, temperature), figure)


def _hits(samples: Samples, form: Form) -> Iterator[float]:
    for temperature in samples.temperatures:
        yield from figures.by_run(samples.of(form.name, temperature), figures.early_drafts)
