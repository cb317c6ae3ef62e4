"""The orchestrator's metrics beside what clients were told, at a real orchestrator between fakes."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from collections.abc import AsyncIterator

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from coppice.client import Client, Completion, Options, RequestFailedError
from orchestrator.app import Orchestrator
from tests import metrics
from tests.conftest import StartFakes
from tests.fakes import FakeDrafter, FakeVerifier, eventually, perfect, wrong

PROMPT = [ord(character) for character in "def "]
ENDLESS = Options(max_tokens=300, seed=1, ignore_eos=True)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def read(orchestrator: Orchestrator) -> dict[str, float]:
    return metrics.values(orchestrator.service.metrics(), "coppice_orchestrator_")


def total(completions: list[Completion], name: str) -> int:
    return sum(getattr(completion.speculation, name) for completion in completions)


async def begin(client: Client, options: Options = ENDLESS) -> AsyncIterator[object]:
    chunks = aiter(client.stream(PROMPT, options))
    await anext(chunks)
    return chunks


async def test_counts_are_the_sums_of_what_requests_were_told(start_fakes: StartFakes) -> None:
    drafters = FakeDrafter(propose=perfect()), FakeDrafter(kind="other", propose=wrong(after=1))
    settings = {"metrics_port": free_port(), "linger_ms": 200}
    async with start_fakes(FakeVerifier(near_ties=1), *drafters, **settings) as (client, orchestrator):
        calls = [client.generate(PROMPT, Options(max_tokens=40, seed=seed, ignore_eos=True)) for seed in range(4)]
        completions = list(await asyncio.gather(*calls))
        plain = await client.generate(PROMPT, Options(max_tokens=30, seed=9, ignore_eos=True, speculation="off"))
        values = read(orchestrator)
    completions.append(plain)
    assert values["requests_total"] == values["requests_finished_total,reason=length"] == 5
    assert values["prompt_tokens_total"] == 5 * len(PROMPT)
    assert values["generation_tokens_total"] == 4 * 40 + 30
    assert values["rounds_total"] == total(completions, "rounds")
    assert values["near_ties_total"] == total(completions, "near_ties") > 0
    assert values["spec_decode_num_draft_tokens_total"] == total(completions, "draft_tokens") > 0
    accepted = values["spec_decode_num_accepted_tokens_total"]
    assert accepted == total(completions, "accepted_tokens") > 0
    # A token is accepted at one depth, and none of these trees is deeper than what is counted apart.
    by_depth = [value for key, value in values.items() if key.startswith("spec_decode_num_accepted_tokens_per_pos")]
    assert accepted == sum(by_depth)
    assert 0 < values["spec_decode_num_drafts_total"] < values["rounds_total"]
    for source in ("small-lm", "other"):
        told = [completion.speculation.sources.get(source) for completion in completions]
        for count in ("proposed", "accepted"):
            here = values[f"source_{count}_tokens_total,source={source}"]
            assert here == sum(getattr(one, count) for one in told if one is not None) > 0
    # Tokens of a round come together; of the gaps of an output there is one less than of its rounds.
    assert values["time_to_first_token_seconds_count"] == values["e2e_request_latency_seconds_count"] == 5
    assert values["inter_token_latency_seconds_count"] == values["rounds_total"] - 5
    assert values["drafters_connected,kind=other"] == values["drafters_connected,kind=small-lm"] == 1


async def test_running_requests_are_counted_before_they_end(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(pass_s=0.005), FakeDrafter(), max_requests=1) as (client, orchestrator):
        stream = client.stream(PROMPT, ENDLESS)
        chunks = aiter(stream)
        await anext(chunks)
        waiting = client.stream(PROMPT, ENDLESS)
        call = asyncio.create_task(anext(aiter(waiting)))
        await eventually(lambda: read(orchestrator)["num_requests_waiting"] == 1)
        while_running = read(orchestrator)
        assert while_running["num_requests_running"] == 1
        assert while_running["rounds_total"] > 0
        assert while_running["generation_tokens_total"] > 0
        assert while_running["planned_nodes"] == 15
        assert while_running["drafting_outputs"] == 1
        waiting.cancel()
        await asyncio.wait({call})
        stream.cancel()
        await eventually(lambda: read(orchestrator)["num_requests_running"] == 0)
        ended = read(orchestrator)
    assert ended["rounds_total"] >= while_running["rounds_total"]
    assert ended["generation_tokens_total"] >= while_running["generation_tokens_total"]
    assert ended["requests_finished_total,reason=cancelled"] == 1
    assert ended["requests_refused_total,reason=cancelled"] == 1
    assert ended["planned_nodes"] == 0


async def test_refusals_are_counted_by_reason(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(pass_s=0.005), max_requests=1, max_queued=0) as (client, orchestrator):
        running = await begin(client)
        with pytest.raises(RequestFailedError):
            await client.generate(PROMPT, ENDLESS)
        await running.aclose()  # type: ignore[attr-defined]
        await eventually(lambda: read(orchestrator)["num_requests_running"] == 0)
        with pytest.raises(RequestFailedError):
            await client.generate([], ENDLESS)
        values = read(orchestrator)
    refused = {key.partition("=")[2]: value for key, value in values.items() if key.startswith("requests_refused")}
    assert {reason: count for reason, count in refused.items() if count} == {"queue_full": 1, "invalid": 1}
    assert values["requests_total"] == 3


async def test_failed_requests_are_counted_by_reason(start_fakes: StartFakes) -> None:
    failing = FakeVerifier(fails_with=grpc.StatusCode.INVALID_ARGUMENT.value[0], fails_seed=5)
    async with start_fakes(failing) as (client, orchestrator):
        with pytest.raises(RequestFailedError):
            await client.generate(PROMPT, Options(max_tokens=5, seed=5))
        failed = read(orchestrator)
    assert failed["requests_finished_total,reason=invalid"] == 1


async def test_lost_peers_and_moved_sequences_are_counted(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier(drops=1)
    drafters = FakeDrafter(dies_after=2), FakeDrafter(gives_up=True, kind="shy")
    async with start_fakes(verifier, *drafters) as (client, orchestrator):
        await client.generate(PROMPT, Options(max_tokens=40, seed=1, ignore_eos=True))
        await eventually(lambda: read(orchestrator)["drafters_connected,kind=small-lm"] == 1)
        values = read(orchestrator)
    assert values["verifier_streams_lost_total"] == values["rehomed_sequences_total"] == 1
    assert values["drafter_streams_lost_total"] >= 1
    assert values["drafter_errors_total"] >= 1
    assert values["verifiers_connected"] == values["verifiers"] == 1
    assert values["drafters"] == 2


async def test_the_adaptive_planner_and_the_cache_show_what_they_do(start_fakes: StartFakes) -> None:
    settings = {"planner": "adaptive", "cache_drafter": True, "linger_ms": 20}
    drafters = FakeDrafter(propose=perfect(depth=2)), FakeDrafter(propose=wrong(), kind="wrong")
    # A pass takes long enough for drafts to pay on a busy machine, too.
    async with start_fakes(FakeVerifier(pass_s=0.01), *drafters, **settings) as (client, orchestrator):
        verifier = f"verifier={orchestrator.verifiers.clients[0].address}"
        before = read(orchestrator)
        assert before[f"planner_rate,{verifier}"] == before[f"planner_source_comparisons_total,{verifier}"] == 0
        assert not any(name.startswith("planner_source_share") for name in before)
        tried = f"planner_pauses_total,{verifier}", f"planner_probes_total,{verifier},who=all"
        # When the first trial comes depends on the rates that it measures, and one may find that drafts do not pay
        # where a verifier without a model was slow: a later one finds that they do.
        for number in range(60):
            await client.generate(PROMPT, Options(max_tokens=200, seed=1, ignore_eos=True))
            values = read(orchestrator)
            if number and sum(values[name] for name in tried) > 0 and values[f"planner_pays,{verifier}"] == 1:
                break
        assert orchestrator.cache is not None
        assert values["prefix_cache_reads_total"] == orchestrator.cache.counts.reads > 0
        assert values["prefix_cache_hits_total"] + values["prefix_cache_misses_total"] > 0
    assert values[f"planner_rate,{verifier}"] > 0
    shares = {kind: values[f"planner_source_share,{verifier},source={kind}"] for kind in ("small-lm", "wrong")}
    assert max(shares.values()) == 1
    assert values[f"planner_source_comparisons_total,{verifier}"] >= 1
    assert sum(values[name] for name in tried) > 0


async def test_without_a_port_no_times_are_kept(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier()) as (client, orchestrator):
        await client.generate(PROMPT, Options(max_tokens=5, seed=1))
        assert orchestrator.service.tally.latencies is None
        times = {name for name in read(orchestrator) if "_seconds" in name}
        assert times <= {"cpu_seconds_total", "linger_seconds_total"}


async def test_metrics_are_served_where_the_port_says_until_the_orchestrator_stops(start_fakes: StartFakes) -> None:
    port = free_port()

    def scrape() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            content: bytes = answer.read()
            return content.decode()

    async with start_fakes(FakeVerifier(), FakeDrafter(), metrics_port=port) as (client, _):
        stream = client.stream(PROMPT, ENDLESS)
        chunks = aiter(stream)
        await anext(chunks)
        texts = [await asyncio.to_thread(scrape) for _ in range(3)]
        stream.cancel()
    for text in texts:
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert families["coppice_orchestrator_time_to_first_token_seconds"].type == "histogram"
        [running] = families["coppice_orchestrator_num_requests_running"].samples
        assert running.value == 1.0
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(scrape)
