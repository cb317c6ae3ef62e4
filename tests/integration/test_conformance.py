"""The conformance suite itself: an honest deployment passes, a broken promise is caught by the case that names it."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from conformance.catalogue import all_groups, cases_like
from conformance.deployment import connected
from conformance.runner import Result, run_cases
from coppice.errors import CoppiceError, InvalidRequestError
from coppice.log_probs import TokenLogProbs
from coppice.v1 import sampling_pb2
from coppice.v1.inference_pb2 import GenerateRequest, GenerateResponse, SpeculationPolicy
from orchestrator.validation import GenerationRequest
from tests.toy_deployment import MAX_NODES, ToyDeployment, serving_toy, toy_logits
from tests.toy_target import EOS, VOCAB
from verifier_svc.log_probs import token_log_probs
from verifier_svc.token_choice import Constraint, Mask, TokenChooser

LIMIT_S = 60.0
SPECULATION_CASES = "greedy/with-and-without-speculation"


# Streams are left here, and a stream that takes no time would be over by then.
UNDER_WAY = ("cancellation/", "resume/", "streaming/")
PASS_S = 0.0003


async def results(toy: ToyDeployment, *patterns: str) -> dict[str, Result]:
    cases = cases_like(patterns)
    assert cases
    if any(pattern.startswith(UNDER_WAY) for pattern in patterns):
        toy.pass_s = PASS_S
    async with serving_toy(toy) as address, connected(address, LIMIT_S) as deployment:
        ended = await run_cases(cases, deployment, LIMIT_S, lambda result: None)
    return {result.name: result for result in ended}


@pytest.mark.parametrize("group", [group.name for group in all_groups()])
async def test_an_honest_deployment_passes_every_case(group: str) -> None:
    ended = await results(ToyDeployment(), f"{group}/*")
    skipped = {name for name, result in ended.items() if result.status == "skipped"}
    assert not [result for result in ended.values() if result.status == "failed"]
    # The toy is no checkpoint, and has no cache that could be too small.
    cannot = {*fnmatch.filter(ended, "reference/*"), *fnmatch.filter(ended, "pressure/sequences-that-made-room-*")}
    assert skipped == cannot


def parts(request: GenerateRequest) -> Sequence[Any]:
    return (request, request.sampling, request.stopping, request.speculation)


class Deaf(ToyDeployment):
    """Does not hear one field, always or when it speculates."""

    def __init__(self, field: str, *, only_speculating: bool = False) -> None:
        super().__init__()
        self._field, self._only_speculating = field, only_speculating

    def hear(self, request: GenerateRequest) -> None:
        if self._only_speculating and request.speculation.mode == SpeculationPolicy.MODE_OFF:
            return
        [part] = [part for part in parts(request) if self._field in part.DESCRIPTOR.fields_by_name]
        part.ClearField(self._field)


IGNORED = {
    "temperature": "seeds/other-seeds-differ",
    "top_k": "sampling/top-k-keeps-the-k-likeliest",
    "top_p": "sampling/top-p-keeps-what-reaches-the-sum",
    "min_p": "sampling/min-p-keeps-what-is-near-the-likeliest",
    "repetition_penalty": "penalties/repetition-counts-prompt-and-output-alike",
    "presence_penalty": "penalties/presence-is-subtracted-once",
    "frequency_penalty": "penalties/frequency-is-subtracted-each-time",
    "logit_bias": "tokens/a-bias-of-100-forces-a-token",
    "allowed_token_ids": "tokens/allowed-token-ids-alone-appear",
    "bad_token_ids": "tokens/bad-token-ids-never-appear",
    "seed": "seeds/same-seed-same-answer",
    "max_tokens": "limits/max-tokens-1-to-16-at-temperature-0",
    "min_tokens": "limits/min-tokens-holds-off-stop-tokens",
    "stop_strings": "stops/three-characters-at-every-place-at-temperature-1",
    "stop_token_ids": "stops/a-stop-token-at-every-place-at-temperature-1",
    "ignore_eos": "limits/ignore-eos-goes-on",
    "resume_token_ids": "resume/from-every-split-at-temperature-0",
    "cache_salt": "prefix/another-salt-shares-nothing",
    "request_id": "streaming/the-first-message-alone-has-id-and-seed",
    "response": "streaming/tokens-without-text",
    "mode": "speculation/off-drafts-nothing",
    "max_nodes": "speculation/a-budget-of-0-drafts-nothing",
}


@pytest.mark.parametrize("field", IGNORED)
async def test_a_field_that_is_ignored_is_noticed(field: str) -> None:
    [result] = (await results(Deaf(field), IGNORED[field])).values()
    assert result.status == "failed"
    assert result.reason


IGNORED_BY_SPECULATION = {
    "temperature": "lossless/temperature-2",
    "top_k": "lossless/top-k",
    "top_p": "lossless/top-p",
    "min_p": "lossless/min-p",
    "repetition_penalty": "lossless/repetition-penalty",
    "presence_penalty": "lossless/presence-penalty",
    "frequency_penalty": "lossless/frequency-penalty",
    "logit_bias": "lossless/logit-bias*",
    "allowed_token_ids": "lossless/allowed-token-ids*",
    "bad_token_ids": "lossless/bad-token-ids*",
    "min_tokens": "lossless/min-tokens*",
    "seed": "seeds/with-and-without-speculation",
    "stop_strings": "stops/three-characters-*",
    "stop_token_ids": "stops/a-stop-token-*",
    "resume_token_ids": "resume/text-is-neither-lost-nor-repeated",
}


@pytest.mark.parametrize("field", IGNORED_BY_SPECULATION)
async def test_a_field_that_speculation_ignores_is_noticed(field: str) -> None:
    ended = await results(Deaf(field, only_speculating=True), IGNORED_BY_SPECULATION[field])
    assert {result.status for result in ended.values()} == {"failed"}


class WrongDraftAccepted(ToyDeployment):
    """Now and then keeps a draft token that the target did not draw."""

    def draw(self, chooser: TokenChooser, tokens: Sequence[int], request: GenerationRequest, depth: int) -> int:
        token = super().draw(chooser, tokens, request, depth)
        return ord("z") if depth == 2 and len(tokens) % 3 == 0 else token


class WrongAtTheLargestBudget(WrongDraftAccepted):
    """The same in rounds of the largest budget only."""

    def draw(self, chooser: TokenChooser, tokens: Sequence[int], request: GenerationRequest, depth: int) -> int:
        return super().draw(chooser, tokens, request, depth if request.max_nodes == MAX_NODES else 0)


class NoiseByOutputLength(ToyDeployment):
    """Draws by the place in the output, not by the absolute position."""

    def draw(self, chooser: TokenChooser, tokens: Sequence[int], request: GenerationRequest, depth: int) -> int:
        return chooser.choose(toy_logits(tuple(tokens[-3:])), len(tokens) - len(request.prompt_ids))


class ImpressedByCompany(ToyDeployment):
    """Draws other tokens in company."""

    def draw(self, chooser: TokenChooser, tokens: Sequence[int], request: GenerationRequest, depth: int) -> int:
        token = super().draw(chooser, tokens, request, depth)
        return ord("z") if self.num_running > 1 and len(tokens) % 5 == 0 else token


class SpoiltByReuse(ToyDeployment):
    """Reads a prompt that was read before, and takes it for another."""

    def reused(self, request: GenerationRequest) -> int:
        reused = super().reused(request)
        self._spoilt = reused > 100
        return reused

    def draw(self, chooser: TokenChooser, tokens: Sequence[int], request: GenerationRequest, depth: int) -> int:
        return super().draw(chooser, [*tokens[:-1], 5] if self._spoilt else tokens, request, depth)


class OneTokenTooMany(ToyDeployment):
    """Ends an accepted block one token behind the limit."""

    def hear(self, request: GenerateRequest) -> None:
        if request.speculation.mode != SpeculationPolicy.MODE_OFF and request.stopping.max_tokens % 4 == 3:
            request.stopping.max_tokens += 1


class LosesATokenAtResume(ToyDeployment):
    """Takes one more token for delivered than was."""

    def say(self, message: GenerateResponse, request: GenerateRequest) -> None:
        if request.resume_token_ids and message.HasField("finished"):
            del message.token_ids[-1:]


class RepeatsATokenAtResume(ToyDeployment):
    """Delivers the last resumed token again."""

    def hear(self, request: GenerateRequest) -> None:
        del request.resume_token_ids[-1:]


class ForgetsPenaltiesAtResume(ToyDeployment):
    """Does not see resumed tokens as output."""

    def hear(self, request: GenerateRequest) -> None:
        if request.resume_token_ids:
            request.sampling.ClearField("presence_penalty")


class Talker(ToyDeployment):
    """Says something else than is true, as `edit` has it."""

    def __init__(self, edit: Callable[[GenerateResponse], None], *, last: bool = True) -> None:
        super().__init__()
        self._edit, self._last = edit, last

    def say(self, message: GenerateResponse, request: GenerateRequest) -> None:
        if message.HasField("finished") or not self._last:
            self._edit(message)


class AddsText(ToyDeployment):
    """Says more when its token ids are not wanted."""

    def say(self, message: GenerateResponse, request: GenerateRequest) -> None:
        if message.HasField("finished") and request.response.HasField("token_ids"):
            message.text += "!"


def miscounts(part: str, name: str, by: int) -> Callable[[], ToyDeployment]:
    def edit(message: GenerateResponse) -> None:
        holder = getattr(message, part)
        setattr(holder, name, getattr(holder, name) + by)

    return lambda: Talker(edit)


def says_stop(message: GenerateResponse) -> None:
    message.finished.reason = sampling_pb2.FINISH_REASON_STOP


def says_twice(message: GenerateResponse) -> None:
    message.text = message.text * 2


def says_another_seed(message: GenerateResponse) -> None:
    message.seed += 1


def counts_all_along(message: GenerateResponse) -> None:
    message.usage.prompt_tokens = 1


class Leaky(ToyDeployment):
    """Never frees what a cancelled stream held."""

    def leave(self, ended: bool) -> None:
        self.num_running -= ended


class BlamesTheRequest(ToyDeployment):
    """Knows that a request is wrong, and not where."""

    async def check(self, request: GenerateRequest) -> GenerationRequest:
        try:
            return await super().check(request)
        except InvalidRequestError as error:
            raise InvalidRequestError("request", str(error)) from error


class BlamesItself(ToyDeployment):
    """Answers a client's mistake with INTERNAL."""

    async def check(self, request: GenerateRequest) -> GenerationRequest:
        try:
            return await super().check(request)
        except InvalidRequestError as error:
            raise CoppiceError(str(error)) from error


class Lenient(ToyDeployment):
    """Puts wrong values right."""

    def hear(self, request: GenerateRequest) -> None:
        request.sampling.top_p = min(request.sampling.top_p or 1.0, 1.0)


class DraftsAnyway(ToyDeployment):
    """Drafts as much as it likes."""

    def nodes(self, request: GenerationRequest) -> int:
        return MAX_NODES


class Changing(ToyDeployment):
    """Has another version each time."""

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        info = await super().GetModelInfo(request, context)
        self.num_requests += 1
        info.version = str(self.num_requests)
        return info


class Boasting(ToyDeployment):
    """Says that its vocabulary is larger than it is."""

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        info = await super().GetModelInfo(request, context)
        info.vocab_size = VOCAB + 1
        return info


class OtherLogProbs(ToyDeployment):
    """Alters what it says of a token's place, as `edit` has it."""

    def __init__(self, edit: Callable[[TokenLogProbs, int], TokenLogProbs], *, speculating: bool = False) -> None:
        super().__init__()
        self._edit, self._only_speculating = edit, speculating

    def log_probs(self, context: Sequence[int], token: int, request: GenerationRequest) -> TokenLogProbs:
        one = super().log_probs(context, token, request)
        return one if self._only_speculating and not request.speculates else self._edit(one, token)


def rounded(one: TokenLogProbs, token: int) -> TokenLogProbs:
    """Another last bit, here and there."""
    return replace(one, log_prob=one.log_prob * (1 + 2**-22)) if token % 7 == 0 else one


def backwards(one: TokenLogProbs, token: int) -> TokenLogProbs:
    return replace(one, top_token_ids=one.top_token_ids[::-1], top_log_probs=one.top_log_probs[::-1])


def too_likely(one: TokenLogProbs, token: int) -> TokenLogProbs:
    higher = tuple(min(value + 1.5, 0.0) for value in one.top_log_probs)
    return replace(one, log_prob=min(one.log_prob + 1.5, 0.0), top_log_probs=higher)


def one_fewer(one: TokenLogProbs, token: int) -> TokenLogProbs:
    return replace(one, top_token_ids=one.top_token_ids[:-1], top_log_probs=one.top_log_probs[:-1])


def of_the_rest(one: TokenLogProbs, token: int) -> TokenLogProbs:
    """Leaves the drawn token out of the likeliest."""
    kept = [index for index, other in enumerate(one.top_token_ids) if other != token]
    ids, values = (tuple(part[index] for index in kept) for part in (one.top_token_ids, one.top_log_probs))
    return replace(one, top_token_ids=ids, top_log_probs=values)


class ProcessedLogProbs(ToyDeployment):
    """Divides the logits by the temperature first."""

    def log_probs(self, context: Sequence[int], token: int, request: GenerationRequest) -> TokenLogProbs:
        logits = toy_logits(tuple(context[-3:])) / max(request.sampling.temperature, 0.5)
        return token_log_probs(logits, token, request.top_log_probs or 0)


class LogProbsByOutputLength(ToyDeployment):
    """Counts the context's tokens wrongly when a call goes on after another."""

    def log_probs(self, context: Sequence[int], token: int, request: GenerationRequest) -> TokenLogProbs:
        return super().log_probs(context[:-1] if request.resume_ids else context, token, request)


class LosesTheLast(ToyDeployment):
    """Forgets the log-probabilities of a message's last token."""

    def say(self, message: GenerateResponse, request: GenerateRequest) -> None:
        del message.log_probs[-1:]


class SilentWithoutIds(ToyDeployment):
    """Sends log-probabilities with token ids alone."""

    def say(self, message: GenerateResponse, request: GenerateRequest) -> None:
        if request.response.HasField("token_ids"):
            del message.log_probs[:]


class DrawsOtherwiseWhenAsked(ToyDeployment):
    """Draws other tokens for those that want log-probabilities."""

    def draw(self, chooser: TokenChooser, tokens: Sequence[int], request: GenerationRequest, depth: int) -> int:
        token = super().draw(chooser, tokens, request, depth)
        return ord("z") if request.top_log_probs is not None and len(tokens) % 5 == 0 else token


class FreeForm(ToyDeployment):
    """Forgets a grammar, always or when it speculates."""

    def __init__(self, *, only_speculating: bool = False) -> None:
        super().__init__()
        self._only_speculating = only_speculating

    def constraint(self, request: GenerationRequest, end_token_ids: Sequence[int]) -> Constraint | None:
        if self._only_speculating and not request.speculates:
            return super().constraint(request, end_token_ids)
        return None


class FormFromTheStart(ToyDeployment):
    """Begins a grammar anew when a call goes on after another."""

    def constraint(self, request: GenerationRequest, end_token_ids: Sequence[int]) -> Constraint | None:
        return super().constraint(replace(request, resume_ids=()), end_token_ids)


class Incomplete:
    """A constraint that never says that nothing may follow."""

    is_complete = False

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint

    @property
    def allowed(self) -> Mask:
        return self._constraint.allowed

    def push(self, token: int) -> None:
        self._constraint.push(token)


class EndsTooLate(ToyDeployment):
    """Waits for a token that ends the output, though nothing else may follow."""

    def constraint(self, request: GenerationRequest, end_token_ids: Sequence[int]) -> Constraint | None:
        constraint = super().constraint(request, (EOS,))
        return None if constraint is None else Incomplete(constraint)


class NextSeed(ToyDeployment):
    """Gives outputs seeds that follow each other."""

    def seed(self, first: int, index: int) -> int:
        return (first + index) % 2**64


def says_the_first_output(message: GenerateResponse) -> None:
    message.output_index = 0


class LetsNobodyShare(ToyDeployment):
    """Says of a later output that nothing of its prompt was there, and of the first that all was."""

    def say(self, message: GenerateResponse, request: GenerateRequest) -> None:
        if message.HasField("finished") and request.num_outputs > 1:
            message.usage.cached_prompt_tokens = 0 if message.output_index == 1 else 10 * message.output_index


BROKEN: list[tuple[str, Callable[[], ToyDeployment]]] = [
    (SPECULATION_CASES, WrongDraftAccepted),
    ("lossless/everything-together", WrongDraftAccepted),
    ("speculation/every-mode-gives-the-same-answer", WrongDraftAccepted),
    ("speculation/every-budget-gives-the-same-answer", WrongAtTheLargestBudget),
    ("speculation/every-drafter-alone-gives-the-same-answer", WrongDraftAccepted),
    ("speculation/off-drafts-nothing", DraftsAnyway),
    ("speculation/budgets-are-kept", DraftsAnyway),
    ("seeds/noise-depends-on-the-position-alone", NoiseByOutputLength),
    ("seeds/seed-in-use-is-returned", lambda: Talker(says_another_seed)),
    ("seeds/returned-seed-repeats-the-answer", lambda: Talker(says_another_seed, last=False)),
    ("concurrency/16-*", ImpressedByCompany),
    ("cancellation/others-are-left-undisturbed", ImpressedByCompany),
    ("prefix/a-prompt-that-was-read-before-gives-the-same-answer", SpoiltByReuse),
    ("prefix/prompts-that-part-late-have-their-own-answers", SpoiltByReuse),
    ("prefix/cached-tokens-are-counted", miscounts("usage", "cached_prompt_tokens", 3)),
    ("limits/max-tokens-1-to-16-*", OneTokenTooMany),
    ("limits/max-tokens-1-to-16-*", lambda: Talker(says_stop)),
    ("resume/from-every-split-at-*", LosesATokenAtResume),
    ("resume/a-cancelled-stream-goes-on-where-it-was", LosesATokenAtResume),
    ("resume/from-every-split-at-*", RepeatsATokenAtResume),
    ("resume/from-every-split-with-penalties", ForgetsPenaltiesAtResume),
    ("resume/resumed-twice", RepeatsATokenAtResume),
    ("usage/completion-tokens-*", miscounts("usage", "completion_tokens", 1)),
    ("usage/resumed-tokens-are-not-counted-again", miscounts("usage", "completion_tokens", 1)),
    ("usage/prompt-tokens-are-those-sent", miscounts("usage", "prompt_tokens", 1)),
    ("usage/rounds-and-accepted-tokens-make-the-output", miscounts("speculation", "rounds", 2)),
    ("usage/no-more-is-accepted-than-drafted", miscounts("speculation", "accepted_tokens", 200)),
    ("usage/sources-account-for-every-draft-token", miscounts("speculation", "draft_tokens", 1)),
    ("usage/depths-account-for-every-accepted-token", miscounts("speculation", "accepted_tokens", 1)),
    ("usage/times-are-in-order", miscounts("timing", "ttft_ms", 60_000)),
    ("streaming/deltas-make-the-whole", lambda: Talker(says_twice, last=False)),
    ("streaming/text-without-tokens", AddsText),
    ("streaming/the-last-message-alone-has-the-end-and-the-counts", lambda: Talker(counts_all_along, last=False)),
    ("cancellation/cancelled-streams-free-their-place", Leaky),
    ("cancellation/deadlines-free-their-place", Leaky),
    ("cancellation/several-outputs-free-their-places", Leaky),
    ("log-probs/with-and-without-speculation", lambda: OtherLogProbs(rounded, speculating=True)),
    ("log-probs/fewer-are-the-first-of-more", lambda: OtherLogProbs(rounded, speculating=True)),
    ("log-probs/up-to-a-limit-*", lambda: OtherLogProbs(rounded, speculating=True)),
    ("log-probs/in-company-they-are-as-alone", lambda: OtherLogProbs(rounded, speculating=True)),
    ("log-probs/they-come-without-*", SilentWithoutIds),
    ("log-probs/asking-for-them-changes-no-token", DrawsOtherwiseWhenAsked),
    ("log-probs/every-token-has-its-own-in-its-message", LosesTheLast),
    ("log-probs/every-token-has-its-own-in-its-message", lambda: OtherLogProbs(one_fewer)),
    ("log-probs/the-likeliest-is-drawn-at-temperature-0", lambda: OtherLogProbs(of_the_rest)),
    ("log-probs/they-fit-together", lambda: OtherLogProbs(backwards)),
    ("log-probs/they-fit-together", lambda: OtherLogProbs(too_likely)),
    ("log-probs/they-fit-together", lambda: OtherLogProbs(rounded)),
    ("log-probs/they-fit-together", lambda: OtherLogProbs(of_the_rest)),
    ("log-probs/they-are-those-of-raw-logits", ProcessedLogProbs),
    ("log-probs/a-resumed-output-has-those-of-its-own-tokens", LogProbsByOutputLength),
    ("grammars/*-with-and-without-speculation", lambda: FreeForm(only_speculating=True)),
    ("grammars/outputs-*", FreeForm),
    ("grammars/max-tokens-*", lambda: FreeForm(only_speculating=True)),
    ("grammars/different-grammars-at-once", lambda: FreeForm(only_speculating=True)),
    ("grammars/a-regex-with-look-ahead-is-refused", FreeForm),
    ("grammars/a-schema-*-is-refused", FreeForm),
    ("grammars/*-are-refused", FreeForm),
    ("grammars/the-output-ends-where-nothing-may-follow", EndsTooLate),
    ("grammars/the-model-s-end-token-*", FreeForm),
    ("grammars/a-stop-string-inside-a-match", FreeForm),
    ("grammars/resumed-from-every-split", FormFromTheStart),
    ("outputs/each-is-*", NextSeed),
    ("outputs/a-seed-that-is-drawn-*", NextSeed),
    ("outputs/with-every-parameter-together", WrongDraftAccepted),
    ("outputs/at-temperature-0-*", WrongDraftAccepted),
    ("outputs/each-ends-where-it-ends", lambda: Deaf("stop_strings", only_speculating=True)),
    ("outputs/each-counts-its-own-tokens", miscounts("usage", "completion_tokens", 1)),
    ("outputs/messages-name-their-output", lambda: Talker(says_the_first_output, last=False)),
    ("outputs/as-many-as-there-may-be", NextSeed),
    ("prefix/outputs-of-one-request-share-its-prompt", LetsNobodyShare),
    ("prefix/a-conversation-that-goes-on-is-not-read-again", SpoiltByReuse),
    ("pressure/16-*", ImpressedByCompany),
    ("errors/*-temperature-*", BlamesTheRequest),
    ("errors/an-unknown-drafter", BlamesTheRequest),
    ("errors/max-tokens-of-0", BlamesItself),
    ("errors/a-top-p-*", Lenient),
    ("info/does-not-change", Changing),
    ("info/the-vocabulary-ends-where-it-says", Boasting),
]


@pytest.mark.parametrize(
    ("pattern", "broken"), BROKEN, ids=[f"{number}-{pattern}" for number, (pattern, _) in enumerate(BROKEN)]
)
async def test_a_broken_promise_is_caught_by_the_case_that_names_it(
    pattern: str, broken: Callable[[], ToyDeployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conformance.groups.cancellation.FREE_WITHIN_S", 0.5)
    ended = await results(broken(), pattern)
    assert {name: result.status for name, result in ended.items()} == dict.fromkeys(ended, "failed")
    assert all(result.reason for result in ended.values())


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


async def test_a_deployment_that_stops_answering_fails_within_the_limit() -> None:
    toy = ToyDeployment()
    async with serving_toy(toy) as address, connected(address, LIMIT_S) as deployment:
        toy.pass_s = 100.0
        [result] = await run_cases(cases_like(["greedy/same-*"]), deployment, 0.2, lambda result: None)
    assert (result.status, result.reason) == ("failed", "not finished within 0.2 s")
