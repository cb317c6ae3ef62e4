"""The timeline from end to end: requests one after another, the services' events, report."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc

from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tokenizer import TargetTokenizer, load_tokenizer_json
from coppice.lab.bench.contenders import BenchmarkError
from coppice.lab.bench.coppice_contender import DEADLINE_S, get_model_info
from coppice.lab.bench.environment import describe_machine, describe_run
from coppice.lab.bench.latency import fit_context
from coppice.lab.bench.prompts import Prompt
from coppice.lab.bench.report import machine_remarks
from coppice.lab.bench.timeline.figures import hop_rows, ratios
from coppice.lab.bench.timeline.rounds import Watched, rounds_of
from coppice.obs.timeline import SUFFIX, Timeline, TimelineEvent, read_timeline
from coppice.v1 import inference_pb2, inference_pb2_grpc
from coppice.wire.convert import sampling_to_proto, stopping_to_proto

DIRECTORY_VARIABLE = "TIMELINE_DIR"
NUM_WARM_UP_REQUESTS = 2
NOTES = (
    "Times are of one clock, read in four processes. A message leaves when it has been handed to gRPC, and comes when "
    "its handler is called: what lies between is the network, gRPC on both sides and the event loop.",
    "A hop's median is over the rounds in which it came in this order; a pass that began with what an earlier tree had "
    "left over did so before this round's draft.",
)


@dataclass(frozen=True, slots=True)
class TimelineSuite:
    """Requests one after another against services that keep their events; the client's own are kept in `client`."""

    target: Path
    prompts: tuple[Prompt, ...]
    client: Timeline
    max_tokens: int = 96
    temperature: float = 0.0
    seed: int = 0

    def run(self, address: str) -> dict[str, Any]:
        """Send the requests and return what the report says of the run; the services' events come when they stop.

        Raises:
            BenchmarkError: a request failed.
        """
        machine = describe_machine()
        tokenizer = TargetTokenizer(load_tokenizer_json(self.target))
        with grpc.insecure_channel(address) as channel:
            context = get_model_info(channel).max_context_tokens
            encoded, _ = fit_context([tokenizer.encode(one.text) for one in self.prompts], self.max_tokens, context)
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            for number, prompt_ids in enumerate([*encoded[:1] * NUM_WARM_UP_REQUESTS, *encoded]):
                self._complete(stub, number, prompt_ids)
        settings = {key: value for key, value in asdict(self).items() if key not in ("client", "prompts", "target")}
        return {
            "suite": "timeline",
            "notes": [*NOTES, *machine_remarks(machine)],
            "settings": {**settings, "prompts": [one.origin for one in self.prompts]},
            **describe_run(machine),
        }

    def _complete(self, stub: Any, number: int, prompt_ids: Sequence[int]) -> None:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt_ids),
            sampling=sampling_to_proto(SamplingParams(temperature=self.temperature, seed=self.seed)),
            stopping=stopping_to_proto(StoppingOptions(max_tokens=self.max_tokens, ignore_eos=True)),
            speculation=inference_pb2.SpeculationPolicy(mode=inference_pb2.SpeculationPolicy.MODE_FORCED),
            cache_salt=f"timeline {number}",
        )
        try:
            for response in stub.Generate(request, timeout=DEADLINE_S):
                self.client.mark("delta", size=len(response.token_ids))
        except grpc.RpcError as error:
            raise BenchmarkError(f"request {number} failed: {error}") from error


@contextlib.contextmanager
def keeping_events(directory: Path) -> Iterator[None]:
    """Services that are started meanwhile, which inherit our environment, keep their events and write them there."""
    before = os.environ.get(DIRECTORY_VARIABLE)
    os.environ[DIRECTORY_VARIABLE] = str(directory)
    try:
        yield
    finally:
        if before is None:
            del os.environ[DIRECTORY_VARIABLE]
        else:
            os.environ[DIRECTORY_VARIABLE] = before


def read_events(directory: Path, client: Timeline) -> Watched:
    """What the services have written, which have stopped by now.

    Raises:
        BenchmarkError: there is nothing of one of them.
    """
    return Watched(client.events(), *(_events(directory, name) for name in ("orchestrator", "drafter", "verifier")))


def add_rounds(report: dict[str, Any], watched: Watched) -> list[Any]:
    """Complete the report with what the events say; returns the rounds of each request that counts.

    Raises:
        BenchmarkError: they have no rounds.
    """
    requests = [rounds for rounds in rounds_of(watched)[NUM_WARM_UP_REQUESTS:] if len(rounds) > 1]
    if not requests:
        raise BenchmarkError("no request had two rounds: take more tokens")
    report["rows"] = hop_rows([one for rounds in requests for one in rounds])
    report["ratios"] = ratios(requests)
    return requests


def _events(directory: Path, service: str) -> list[TimelineEvent]:
    paths = list(directory.glob(f"{service}-*{SUFFIX}"))
    if len(paths) != 1:
        raise BenchmarkError(f"{len(paths)} timelines of the {service} where one was expected")
    return read_timeline(paths[0])
