"""Broken promises: each is caught by the case of the conformance suite that names it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.broken_toys.drawing import (
    DraftsAnyway,
    ImpressedByCompany,
    NextSeed,
    NoiseByOutputLength,
    SpoiltByReuse,
    WrongAtTheLargestBudget,
    WrongDraftAccepted,
)
from tests.broken_toys.grammars import EndsTooLate, FormFromTheStart, FreeForm
from tests.broken_toys.hearing import (
    BlamesItself,
    BlamesTheRequest,
    Deaf,
    ForgetsPenaltiesAtResume,
    Lenient,
    OneTokenTooMany,
    RepeatsATokenAtResume,
)
from tests.broken_toys.log_probs import (
    DrawsOtherwiseWhenAsked,
    LogProbsByOutputLength,
    LosesTheLast,
    OtherLogProbs,
    ProcessedLogProbs,
    SilentWithoutIds,
    backwards,
    of_the_rest,
    one_fewer,
    rounded,
    too_likely,
)
from tests.broken_toys.telling import (
    AddsText,
    Boasting,
    Changing,
    Leaky,
    LetsNobodyShare,
    LosesATokenAtResume,
    Talker,
    counts_all_along,
    miscounts,
    says_another_seed,
    says_stop,
    says_the_first_output,
    says_twice,
)
from tests.broken_toys.traversal import (
    BelievesItsDrafter,
    DeafToTheRule,
    ForgetsPaths,
    GoesBeyondTheEnd,
    MisjudgesItsDrafter,
)
from tests.integration.conformance_results import SPECULATION_CASES, results
from tests.toy_deployment import ToyDeployment

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
    ("limits/min-tokens-holds-off-stop-strings", lambda: Deaf("min_tokens")),
    ("limits/min-tokens-holds-off-stop-strings", lambda: Deaf("min_tokens", only_speculating=True)),
    ("traversal/temperature-0-is-plain-decoding", WrongDraftAccepted),
    ("traversal/*-is-greedy", BelievesItsDrafter),
    ("traversal/top-k-1-is-greedy", lambda: DeafToTheRule("top_k")),
    ("traversal/tiny-top-p-is-greedy", lambda: DeafToTheRule("top_p")),
    ("traversal/min-p-1-is-greedy", lambda: DeafToTheRule("min_p")),
    ("traversal/penalties-follow-each-path", ForgetsPaths),
    ("traversal/max-tokens-1-to-16", lambda: DeafToTheRule("max_tokens")),
    ("traversal/a-stop-token-at-every-place", GoesBeyondTheEnd),
    ("traversal/stop-strings-from-beginning-to-end", GoesBeyondTheEnd),
    ("traversal/the-model-s-end-token-*", lambda: DeafToTheRule("logit_bias")),
    ("traversal/the-model-s-end-token-*", lambda: DeafToTheRule("min_tokens")),
    ("traversal/resumed-from-every-split", lambda: DeafToTheRule("resume_token_ids")),
    ("traversal/log-probs-are-those-of-plain-decoding", lambda: OtherLogProbs(rounded, speculating=True)),
    ("traversal/log-probs-are-those-of-the-drawn-tokens", lambda: OtherLogProbs(rounded, speculating=True)),
    ("traversal/outputs-are-complete", lambda: DeafToTheRule("max_tokens")),
    ("traversal/outputs-are-complete", lambda: Talker(says_another_seed, last=False)),
    ("traversal/bad-token-ids-never-appear", lambda: DeafToTheRule("bad_token_ids")),
    ("traversal/allowed-token-ids-alone-appear", BelievesItsDrafter),
    ("traversal/counts-make-the-output", miscounts("speculation", "accepted_tokens", 1)),
    ("traversal/counts-make-the-output", miscounts("speculation", "draft_tokens", 1)),
    ("traversal/without-drafts-*", DraftsAnyway),
    ("traversal/a-grammar-is-refused-*", lambda: DeafToTheRule("grammar")),
    ("traversal/the-first-tokens-have-the-target-s-law", BelievesItsDrafter),
    ("traversal/the-first-tokens-have-the-target-s-law", MisjudgesItsDrafter),
    ("traversal/the-law-has-the-penalties-of-each-path", ForgetsPaths),
]


@pytest.mark.parametrize(
    ("pattern", "broken"), BROKEN, ids=[f"{number}-{pattern}" for number, (pattern, _) in enumerate(BROKEN)]
)
async def test_a_broken_promise_is_caught_by_the_case_that_names_it(
    pattern: str, broken: Callable[[], ToyDeployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coppice.lab.conformance.groups.cancellation.FREE_WITHIN_S", 0.5)
    ended = await results(broken(), pattern)
    assert {name: result.status for name, result in ended.items()} == dict.fromkeys(ended, "failed")
    assert all(result.reason for result in ended.values())
