"""The prompts of the cache benchmark: what they share, and what they do not."""

from __future__ import annotations

from coppice.lab.bench.cache import make_workload
from coppice.lab.bench.prompts import Prompt

PROMPTS = [Prompt(f"def name_{number}(value):\n    return value", f"file:{number}") for number in range(40)]


def _common(one: Prompt, other: Prompt) -> str:
    for at, (mine, theirs) in enumerate(zip(one.text, other.text, strict=False)):
        if mine != theirs:
            return one.text[:at]
    return min(one.text, other.text, key=len)


def test_prompts_share_their_system_prompt_and_nothing_more() -> None:
    workload = make_workload(PROMPTS, num_systems=3, num_endings=4)
    assert [len(workload.first), len(workload.shifted)] == [12, 6]
    assert len({prompt.text for prompt in (*workload.first, *workload.shifted)}) == 18
    for at, one in enumerate(workload.first):
        for other_at, other in enumerate(workload.first[:at]):
            shared = _common(one, other)
            is_same_system = at // 4 == other_at // 4
            # Both pieces of the system prompt, and of the ending what all endings begin with; or nothing of either.
            assert shared.count("\n\n\n") == (2 if is_same_system else 0)
            assert "return" not in shared.rpartition("\n\n\n")[2]


def test_shifted_prompts_have_new_endings_and_those_of_others_after_the_same_system_prompts() -> None:
    workload = make_workload(PROMPTS, num_systems=2, num_endings=2)
    sent = {prompt.text.rpartition("\n\n\n")[2]: prompt for prompt in workload.first}
    systems = [workload.first[0].text.rpartition("\n\n\n")[0], workload.first[2].text.rpartition("\n\n\n")[0]]
    for at, prompt in enumerate(workload.shifted):
        system, _, ending = prompt.text.rpartition("\n\n\n")
        assert system == systems[at // 2]
        if at % 2:
            assert not sent[ending].text.startswith(system)
        else:
            assert ending not in sent
