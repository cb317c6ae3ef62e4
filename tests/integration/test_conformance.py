"""The conformance suite itself: an honest deployment passes, and what the suite makes of one that does not."""

from __future__ import annotations

import fnmatch

import pytest

from coppice.core.errors import OverloadedError
from coppice.lab.conformance.catalogue import all_groups, cases_like
from coppice.lab.conformance.deployment import connected
from coppice.lab.conformance.report import run_cases
from coppice.v1 import sampling_pb2
from coppice.v1.inference_pb2 import GenerateRequest, GenerateResponse, SpeculationPolicy
from orchestrator.api.validation import GenerationRequest
from tests.broken_toys.drawing import WrongDraftAccepted
from tests.broken_toys.log_probs import OtherLogProbs, rounded
from tests.broken_toys.telling import miscounts
from tests.integration.conformance_results import LIMIT_S, SPECULATION_CASES, results
from tests.toy_deployment import ToyDeployment, serving_toy


@pytest.mark.parametrize("group", [group.name for group in all_groups()])
async def test_an_honest_deployment_passes_every_case(group: str) -> None:
    ended = await results(ToyDeployment(), f"{group}/*")
    skipped = {name for name, result in ended.items() if result.status == "skipped"}
    assert not [result for result in ended.values() if result.status == "failed"]
    # The toy is no checkpoint, and has no cache that could be too small.
    cannot = {*fnmatch.filter(ended, "reference/*"), *fnmatch.filter(ended, "pressure/sequences-that-made-room-*")}
    assert skipped == cannot


async def test_a_difference_comes_with_the_request_that_shows_it() -> None:
    [result] = (await results(WrongDraftAccepted(), SPECULATION_CASES)).values()
    assert result.reason.startswith("token ")
    assert result.request is not None
    assert result.request.speculation.mode == SpeculationPolicy.MODE_FORCED


class Rounding(WrongDraftAccepted):
    """A deployment in fast mode that counts so many near-ties in an answer with speculation."""

    exactness = sampling_pb2.EXACTNESS_FAST

    def __init__(self, near_ties: int) -> None:
        super().__init__()
        self._near_ties = near_ties

    def say(self, message: GenerateResponse, request: GenerateRequest) -> None:
        if message.HasField("finished") and request.speculation.mode != SpeculationPolicy.MODE_OFF:
            message.speculation.near_ties = self._near_ties


@pytest.mark.parametrize(
    ("near_ties", "status", "reason"),
    [(0, "failed", "the answer counts no near-tie"), (2, "explained", "the answer counts 2 near-ties")],
)
async def test_a_difference_in_fast_mode_is_explained_by_near_ties_of_its_answer_alone(
    near_ties: int, status: str, reason: str
) -> None:
    for case in (
        SPECULATION_CASES,
        "stops/three-characters-at-every-place-at-temperature-0",
        "limits/max-tokens-1-to-16-at-temperature-0",
    ):
        [result] = (await results(Rounding(near_ties), case)).values()
        assert (result.status, reason in result.reason) == (status, True), result
        assert result.request is not None


async def test_what_no_rounding_can_do_fails_in_fast_mode_too() -> None:
    toy = miscounts("usage", "completion_tokens", 1)()
    toy.exactness = sampling_pb2.EXACTNESS_FAST
    [result] = (await results(toy, "usage/completion-tokens-are-*")).values()
    assert result.status == "failed"


async def test_other_bits_prove_nothing_in_fast_mode() -> None:
    toy = OtherLogProbs(rounded, speculating=True)
    toy.exactness = sampling_pb2.EXACTNESS_FAST
    [result] = (await results(toy, "log-probs/with-and-without-speculation")).values()
    assert result.status == "skipped"
    assert result.reason.endswith("fast mode does not promise bits")


async def test_what_needs_a_drafter_is_skipped_without_one_and_says_so() -> None:
    toy = ToyDeployment()
    toy.sources = ()
    ended = await results(toy, "lossless/*", "speculation/*", "stops/one-*")
    assert {result.reason for result in ended.values() if result.name.startswith("lossless/")} == {
        "no drafter is connected"
    }
    assert ended["speculation/off-drafts-nothing"].status == "passed"
    assert ended["stops/one-character-wherever-it-is"].status == "passed"
    assert not [result for result in ended.values() if result.status == "failed"]


async def test_what_needs_the_traversal_rule_is_skipped_where_it_is_not_offered_and_says_so() -> None:
    toy = ToyDeployment()
    toy.rules = ()
    ended = await results(toy, "traversal/*")
    assert {(result.status, result.reason) for result in ended.values()} == {
        ("skipped", "GetModelInfo does not offer the acceptance rule TRAVERSAL")
    }


async def test_traversal_without_drafts_shows_nothing_and_says_so() -> None:
    toy = ToyDeployment()
    toy.sources = ()
    ended = await results(toy, "traversal/outputs-*", "traversal/top-k-*", "traversal/the-first-*")
    assert {result.status for result in ended.values()} == {"skipped"}
    assert all("no sampled draft" in result.reason for result in ended.values())


class FewPlaces(ToyDeployment):
    """A deployment in which a client may have two outputs at once."""

    async def check(self, request: GenerateRequest) -> GenerationRequest:
        if self.num_running + max(1, request.num_outputs) > 2:
            raise OverloadedError("2 of your 2 outputs run")
        return await super().check(request)


async def test_what_needs_more_places_than_a_client_has_is_skipped_and_says_so() -> None:
    ended = await results(FewPlaces(), "cancellation/others-*", "outputs/as-many-*", "pressure/16-long-*")
    assert len(ended) == 3
    assert {result.status for result in ended.values()} == {"skipped"}
    assert all("2 of your 2 outputs run" in result.reason for result in ended.values())


async def test_a_deployment_that_stops_answering_fails_within_the_limit() -> None:
    toy = ToyDeployment()
    async with serving_toy(toy) as address, connected(address, LIMIT_S) as deployment:
        toy.pass_s = 100.0
        [result] = await run_cases(cases_like(["greedy/same-*"]), deployment, 0.2, lambda result: None)
    assert (result.status, result.reason) == ("failed", "not finished within 0.2 s")
