"""Whether `coppice up` leaves its drafters cores of their own, which is where they draft ahead."""

from __future__ import annotations

from typing import Any

import pytest

from coppice.cli.topology import DrafterSpec, TopologySpec

ONE = (DrafterSpec("small-lm", "a"),)


@pytest.mark.parametrize(
    ("settings", "cores", "own"),
    [
        ({}, 2, False),
        ({"threads": 1}, 2, True),
        ({"threads": 2}, 2, False),
        ({}, 4, True),
        ({"drafters": ONE * 2}, 4, False),
        ({"threads": 1, "verifiers": 2}, 2, False),
        ({"threads": 1, "tensor_parallel": 2}, 3, True),
    ],
)
def test_drafters_have_cores_of_their_own_where_rounds_leave_them(
    settings: dict[str, Any], cores: int, *, own: bool
) -> None:
    assert TopologySpec(**{"drafters": ONE, **settings}).drafters_have_own_cores(cores) == own
