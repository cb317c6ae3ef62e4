"""Traversal verification on real services in one process: the law of what a client gets, and everything around it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from coppice.client import Client, Options, RequestFailedError
from coppice.core.draft_distribution import DraftDistribution
from coppice.core.sampled_tree import SampledTree
from coppice.core.sampling import SamplingParams
from coppice.core.tree import TokenTree
from coppice.net import rpc
from coppice.search.tree_limits import TreeLimits
from coppice.v1 import drafter_pb2, drafter_pb2_grpc, sampling_pb2, verifier_pb2_grpc
from coppice.wire.convert import tree_from_proto
from drafter_svc.drafters.base import Drafter, DrafterInfo, DraftSequence, SamplingDrafter
from drafter_svc.drafters.small_lm.drafter import SmallLm
from drafter_svc.model.checkpoint import Calibration
from drafter_svc.model.llama_forward import LlamaForward
from drafter_svc.model.model_thread import ModelThread
from drafter_svc.service import SERVICE_NAME as DRAFTER_SERVICE
from drafter_svc.service import DrafterService
from orchestrator.app import running
from orchestrator.config import Config
from tests.fakes import FakeDrafter
from tests.fakes import serving as serving_fake
from tests.tiny_checkpoint import write_tiny_llama
from verifier_svc.config import VerifierConfig
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.scheduler import SchedulerLimits
from verifier_svc.model.loading import load_probed_target
from verifier_svc.model.target_model import TargetInfo, TargetModel
from verifier_svc.service import VerifierServicer

VOCAB = 61
CONTEXT = 64
MAX_NODES = 8
PROMPT = (4, 8, 15, 16, 23)
TOP_K = 3
# Of the law of the first tokens that is compared.
LENGTH = 3
TRAVERSAL = Options(temperature=1.0, max_tokens=12, ignore_eos=True, acceptance="traversal")


@dataclass(frozen=True)
class Pair:
    """A target, and a drafter whose weights are the target's with noise."""

    target: TargetModel
    info: TargetInfo
    reference: LlamaForCausalLM
    drafter: SmallLm


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("target")
    write_tiny_llama(directory, vocab_size=VOCAB, max_context_tokens=CONTEXT)
    target, info = load_probed_target(VerifierConfig(model=str(directory), device="cpu", threads=1, kv_cache_mib=8))
    reference = LlamaForCausalLM.from_pretrained(directory).eval()
    model = LlamaForCausalLM.from_pretrained(directory).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.06 * torch.randn(weight.shape, generator=generator)
    drafter_info = DrafterInfo(
        "small-lm", "tiny", info.tokenizer_fingerprint, VOCAB, CONTEXT, acceptance_by_rank=(0.6, 0.3)
    )
    limits = TreeLimits(max_nodes=MAX_NODES, max_steps=1)
    drafter = SmallLm(LlamaForward(model), drafter_info, Calibration(((0.0, 0.5),), (0.6, 0.3)), limits)
    return Pair(target, info, reference, drafter)


@contextlib.asynccontextmanager
async def serving_drafter(drafter: Drafter) -> AsyncIterator[str]:
    thread = ModelThread()
    thread.start()
    server = rpc.Server([DRAFTER_SERVICE])
    service = DrafterService(drafter, thread, MAX_NODES, max_sequences=64)
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(service, server.grpc)
    try:
        yield f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    finally:
        await server.stop(0)
        await asyncio.to_thread(thread.stop)


@contextlib.asynccontextmanager
async def serving_target(pair: Pair) -> AsyncIterator[str]:
    engine = Engine(pair.target, pair.info, SchedulerLimits(16, 16, prefill_chunk=64), MAX_NODES)
    engine.start()
    server = rpc.Server(["coppice.v1.VerifierService"])
    servicer = VerifierServicer(engine, pair.info, MAX_NODES)
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server.grpc)
    try:
        yield f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    finally:
        await server.stop(0)
        async with asyncio.timeout(20):
            while pair.target.cache.num_free_blocks < pair.target.cache.num_blocks:  # noqa: ASYNC110 nothing to wait on
                await asyncio.sleep(0.01)
        await asyncio.to_thread(engine.stop)


@contextlib.asynccontextmanager
async def client_of(pair: Pair, drafter: Drafter | None, *addresses: str) -> AsyncIterator[Client]:
    """A client of an orchestrator on the pair's target, a drafter, and drafters that run already."""
    async with contextlib.AsyncExitStack() as stack:
        verifier = await stack.enter_async_context(serving_target(pair))
        own = () if drafter is None else (await stack.enter_async_context(serving_drafter(drafter)),)
        # Nobody is meant to come late here.
        config = Config(verifier_address=verifier, drafter_addresses=(*own, *addresses), linger_ms=2000.0, grace_s=0.0)
        orchestrator = await stack.enter_async_context(running(config))
        yield await stack.enter_async_context(Client(orchestrator.address))


@torch.inference_mode()
def plain_law(model: LlamaForCausalLM) -> dict[tuple[int, ...], float]:
    """The oracle: the law of the first LENGTH tokens at T = 1 and top-k, by one plain forward per context."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for output, probability in law.items():
            row = model(input_ids=torch.tensor([[*PROMPT, *output]]), use_cache=False).logits[0, -1].double()
            values, tokens = row.topk(TOP_K)
            for share, token in zip(values.softmax(0).tolist(), tokens.tolist(), strict=True):
                longer[*output, token] = probability * share
        law = longer
    return law


async def outputs_of(client: Client, number: int) -> tuple[Counter[tuple[int, ...]], int]:
    """First tokens of many outputs of seeds that follow from the first alone, and the accepted nodes of all."""
    found: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for batch in range(number // 16):
        options = replace(TRAVERSAL, top_k=TOP_K, seed=1000 + batch, num_outputs=16, max_tokens=LENGTH + 1)
        for output in await client.generate_all(PROMPT, options):
            found[tuple(output.token_ids[:LENGTH])] += 1
            accepted += output.speculation.accepted_tokens
    return found, accepted


def chi_square(found: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """The statistic and its cells; cells that expect fewer than five outputs count as one."""
    number = found.total()
    assert set(found) <= set(law)
    cells = [(number * probability, found[output]) for output, probability in law.items()]
    large = [cell for cell in cells if cell[0] >= 5]
    rest = (sum(cell[0] for cell in cells if cell[0] < 5), sum(cell[1] for cell in cells if cell[0] < 5))
    large += [rest] if rest[0] else []
    return sum((seen - expected) ** 2 / expected for expected, seen in large), len(large)


def bound(num_cells: int) -> float:
    """What chi-square exceeds about once in a hundred thousand times (Wilson and Hilferty's approximation)."""
    degrees = num_cells - 1
    return degrees * (1 - 2 / (9 * degrees) + 4.265 * (2 / (9 * degrees)) ** 0.5) ** 3


class LyingSequence:
    """Says that every token was as likely to be drawn as any other."""

    def __init__(self, sequence: DraftSequence) -> None:
        self._sequence = sequence
        self.extend, self.prepare = sequence.extend, sequence.prepare
        self.read = sequence.read

    def draft(self, max_nodes: int, row_multiple: int = 1) -> TokenTree:
        tree = self._sequence.draft(max_nodes, row_multiple)
        level = tuple(one and DraftDistribution(one.token_ids, (1.0,) * len(one)) for one in tree.distributions)
        return replace(tree, distributions=level)


class LyingDrafter:
    """The pair's drafter, and a liar about its draws."""

    def __init__(self, drafter: SmallLm) -> None:
        self._drafter = drafter
        self.info, self.open, self.warm_up = drafter.info, drafter.open, drafter.warm_up
        self.prefixes = drafter.prefixes

    def open_sampled(self, prompt: Sequence[int], sampling: SamplingParams, cache_salt: str = "") -> DraftSequence:
        return LyingSequence(self._drafter.open_sampled(prompt, sampling, cache_salt))


@pytest.mark.parametrize("is_honest", [True, False], ids=["an honest drafter", "a drafter that lies"])
async def test_outputs_have_the_targets_law_exactly_when_the_drafter_sends_what_it_drew_from(
    pair: Pair, is_honest: bool
) -> None:
    drafter: Any = pair.drafter if is_honest else LyingDrafter(pair.drafter)
    async with client_of(pair, drafter) as client:
        found, accepted = await outputs_of(client, 160)
    statistic, num_cells = chi_square(found, plain_law(pair.reference))
    assert num_cells > 6
    assert accepted > 40
    assert (statistic < bound(num_cells)) == is_honest, (statistic, bound(num_cells))


async def test_at_temperature_0_tokens_are_those_of_plain_decoding(pair: Pair) -> None:
    options = replace(TRAVERSAL, temperature=0.0, max_tokens=40)
    ids = torch.tensor([PROMPT])
    expected = pair.reference.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    async with client_of(pair, pair.drafter) as client:
        completion = await client.generate(PROMPT, options)
    assert list(completion.token_ids) == expected[0, len(PROMPT) :].tolist()
    assert completion.speculation.accepted_tokens > 0


async def test_a_completion_is_told_in_full(pair: Pair) -> None:
    """Log-probabilities, counts, sources, and the end inside an accepted block."""
    options = replace(TRAVERSAL, seed=3, max_tokens=30, top_log_probs=2)
    stops = tuple("0123456789ABCDEF")
    async with client_of(pair, pair.drafter) as client:
        one = await client.generate(PROMPT, options)
        stopped = await client.generate(PROMPT, replace(options, stop=stops))
        rest = await client.generate(PROMPT, replace(options, resume_token_ids=tuple(one.token_ids[:11])))
    assert (stopped.finish_reason, stopped.stop_match in stops) == ("stop", True)
    assert not set(stopped.text) & set(stops)
    assert chr(33 + stopped.token_ids[-1]) == stopped.stop_match
    assert len(rest.token_ids) == 19
    stats = one.speculation
    assert len(one.token_ids) == stats.rounds + stats.accepted_tokens
    assert stats.sources["small-lm"].proposed == stats.draft_tokens > stats.accepted_tokens > 0
    assert stats.sources["small-lm"].accepted == stats.accepted_tokens
    with torch.inference_mode():
        rows = pair.reference(input_ids=torch.tensor([[*PROMPT, *one.token_ids]])).logits[0].double().log_softmax(-1)
    for place, (token, found) in enumerate(zip(one.token_ids, one.log_probs, strict=True)):
        row = rows[len(PROMPT) - 1 + place]
        assert found.log_prob == pytest.approx(float(row[token]), abs=1e-4)
        assert found.top_log_probs == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)


async def test_drafters_that_do_not_sample_are_not_asked(pair: Pair) -> None:
    other = FakeDrafter(kind="other", tokenizer_fingerprint=pair.info.tokenizer_fingerprint)
    async with serving_fake(other) as address, client_of(pair, pair.drafter, address) as client:
        sampled = await client.generate(PROMPT, replace(TRAVERSAL, seed=1))
        assert set(sampled.speculation.sources) == {"small-lm"}
        assert not other.opened
        plain = await client.generate(PROMPT, replace(TRAVERSAL, seed=1, speculation="other"))
        assert not other.opened
        off = await client.generate(PROMPT, replace(TRAVERSAL, seed=1, speculation="off", acceptance=None))
        # Plain rounds draw with the request's noise, whatever the rule.
        assert plain.token_ids == off.token_ids
        assert plain.speculation.draft_tokens == 0


async def test_what_is_offered_is_said_and_a_grammar_is_refused(pair: Pair) -> None:
    rules = [sampling_pb2.ACCEPTANCE_RULE_SAMPLE_AND_FOLLOW, sampling_pb2.ACCEPTANCE_RULE_TRAVERSAL]
    async with client_of(pair, None) as client:
        assert list((await client.model_info()).acceptance_rules) == rules
        with pytest.raises(RequestFailedError, match=r"sampling\.grammar") as caught:
            await client.generate(PROMPT, replace(TRAVERSAL, regex="[a-z]*"))
        assert caught.value.code == grpc.StatusCode.UNIMPLEMENTED


class PlainDrafter:
    """A drafter that samples no trees."""

    def __init__(self, drafter: SmallLm) -> None:
        self.info, self.open, self.warm_up = drafter.info, drafter.open, drafter.warm_up
        self.prefixes = drafter.prefixes


@pytest.mark.parametrize("samples", [True, False])
async def test_a_drafter_says_which_rules_it_drafts_for_and_refuses_the_others(pair: Pair, samples: bool) -> None:
    drafter: Any = pair.drafter if samples else PlainDrafter(pair.drafter)
    assert isinstance(drafter, SamplingDrafter) == samples
    sampling = sampling_pb2.SamplingParams(temperature=1.0, seed=4)
    opening = drafter_pb2.OpenDraft(
        prompt_token_ids=PROMPT, sampling=sampling, max_nodes=6, acceptance=sampling_pb2.ACCEPTANCE_RULE_TRAVERSAL
    )
    async with serving_drafter(drafter) as address, rpc.open_channel(address) as channel:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        described = await stub.Describe(drafter_pb2.DrafterServiceDescribeRequest(), timeout=10)
        assert (sampling_pb2.ACCEPTANCE_RULE_TRAVERSAL in described.acceptance_rules) == samples
        call = stub.Draft(timeout=10)
        await call.write(drafter_pb2.DraftRequest(sequence_id=1, open=opening))
        response = await call.read()
        await call.done_writing()
        if samples:
            tree = SampledTree.of(tree_from_proto(response.tree.tree))
            assert 0 < len(tree) <= 6
            assert response.tree.tree.ByteSize() < 1024
        else:
            assert response.error.code == grpc.StatusCode.UNIMPLEMENTED.value[0]
            assert "does not sample trees" in response.error.message


def test_the_bound_is_that_of_chi_square() -> None:
    """Against draws: squared normal numbers, ten degrees of freedom."""
    draws = (np.random.default_rng(0).normal(size=(50_000, 10)) ** 2).sum(1)
    assert draws.max() < bound(11) < draws.max() + 20
