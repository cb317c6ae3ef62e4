"""What a verifier says that it runs on."""

from __future__ import annotations

import torch

from verifier_svc.app import hardware


def test_it_is_the_same_each_time_and_another_with_other_threads_or_processes() -> None:
    cpu = torch.device("cpu")
    said = hardware(cpu, 0, 1)
    assert said == hardware(cpu, 0, 1)
    assert said.startswith("cpu ")
    assert len({said, hardware(cpu, 1, 1), hardware(cpu, 0, 2)}) == 3
