"""The file of a profile, there and back."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from coppice.core.tree import EMPTY_TREE, TokenTree
from coppice.lab.simulator.profile import Profile, ProfileError, Trace, profile_from_json, profile_to_json, read_profile
from tests.unit.coppice.lab.simulator.machines import right_trace, usual_machine


def random_trace(seed: int) -> Trace:
    generator = random.Random(seed)

    def tree() -> TokenTree:
        size = generator.randrange(40)
        parents = tuple(generator.randrange(-1, node) if node else -1 for node in range(size))
        # Of 16 bits, which is what the file keeps.
        logs = tuple(-generator.randrange(64) / 16 for _ in range(size))
        return TokenTree(tuple(generator.sample(range(1 << 17), size)), parents, logs)

    prompt = tuple(generator.randrange(1 << 17) for _ in range(7 * (seed % 2)))
    said = tuple(generator.randrange(1 << 17) for _ in range(9))
    return Trace(7, said, (EMPTY_TREE, *(tree() for _ in range(8))), prompt)


def test_a_profile_comes_back_as_it_was() -> None:
    profile = Profile(usual_machine(), tuple(random_trace(seed) for seed in range(5)))
    assert profile_from_json(json.loads(json.dumps(profile_to_json(profile)))) == profile


def record() -> dict[str, Any]:
    return profile_to_json(Profile(usual_machine(), (right_trace(3),)))


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("verifier",), None, "verifier"),
        (("orchestrator",), None, "orchestrator"),
        (("traces", 0, "prompt"), None, "prompt"),
        (("verifier", "gap_s"), -1.0, "verifier.gap_s"),
        (("verifier", "gap_s"), float("nan"), "verifier.gap_s"),
        (("verifier", "speed"), 1.0, "speed"),
        (("verifier", "passes", "seconds"), [1.0], "sizes"),
        (("drafter", "drafts"), None, "drafts"),
        (("message_s",), "soon", "soon"),
        (("contention", "draft_factor"), float("inf"), "contention.draft_factor"),
        (("traces",), [], "trace"),
        (("traces", 0, "trees"), "AAAA", "trees"),
        (("traces", 0, "trees"), "no base64", "trees"),
        (("traces", 0, "token_ids"), [1, 2], "trees"),
        (("traces", 0, "num_prompt"), 0, "prompt"),
    ],
)
def test_what_is_no_profile_is_refused_by_name(path: tuple[str | int, ...], value: object, named: str) -> None:
    broken = copy.deepcopy(record())
    inner: Any = broken
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    with pytest.raises(ProfileError, match=named):
        profile_from_json(broken)


def test_a_file_that_is_not_there_or_no_json_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(ProfileError, match=r"profile\.json"):
        read_profile(path)
    path.write_text("{")
    with pytest.raises(ProfileError, match=r"profile\.json"):
        read_profile(path)
