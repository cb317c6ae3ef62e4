"""Which of the verifier's own drafts goes into the next round."""

from __future__ import annotations

from collections.abc import Sequence

from coppice.core.sampling import SamplingParams
from tests.unit.verifier_svc.extras.head.test_head_drafts import FakeHead, settings_of
from verifier_svc.extras.head.head import HeadSettings
from verifier_svc.extras.lookup.lookup import LookupSettings
from verifier_svc.extras.own_drafts import OwnDrafts

PROMPT = (1, 2, 3)
GREEDY = SamplingParams(temperature=0.0)
REPEATING = [5, 6, 7, 8, 9, 10, 11, 12] * 8


def own(head: HeadSettings | None, lookup: LookupSettings | None) -> OwnDrafts:
    return OwnDrafts(PROMPT, GREEDY, lookup, 8, head, 8)


def sources(drafts: OwnDrafts, tokens: Sequence[int], num_sequences: int = 1) -> tuple[str, ...]:
    return drafts.draft(tokens, num_sequences).source_names


def test_a_text_that_repeats_itself_is_looked_up_and_any_other_is_the_head_s() -> None:
    head = FakeHead()
    drafts = own(settings_of(head), LookupSettings(8))
    assert sources(drafts, REPEATING) == ("prompt-lookup",)
    assert head.now_s == 0
    drafts = own(settings_of(head), LookupSettings(8))
    assert sources(drafts, [*PROMPT, 4]) != ("prompt-lookup",)
    assert head.now_s > 0


def test_what_was_found_is_taken_where_the_head_does_not_pay() -> None:
    settings = settings_of(FakeHead(draft_s=1.0))
    drafts = own(settings, LookupSettings(8))
    settings.time.add(1.0)
    assert sources(drafts, REPEATING[:11], num_sequences=2) == ("prompt-lookup",)


def test_with_neither_there_are_none() -> None:
    drafts = own(None, None)
    assert len(drafts.draft(REPEATING, 1)) == 0
    assert (drafts.wants_features, drafts.max_prompt_features) == (False, 0)
    drafts.committed([1], b"", None)
    drafts.see_prompt(1, b"x")
