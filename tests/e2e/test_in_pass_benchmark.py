"""The in-pass benchmark as a command, on tiny random models: too small to say how much anything gains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.tiny_checkpoint import write_tiny_llama
from tests.unit.verifier_svc.adapters import random_adapter
from verifier_svc.extras.redraft.adapter import save_adapter

TIMEOUT_S = 460


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_a_target_that_drafts_for_itself_takes_turns_with_plain_decoding_and_says_the_same(tmp_path: Path) -> None:
    target, drafter, adapter = (tmp_path / name for name in ("target", "drafter", "adapter"))
    for directory in (target, drafter):
        write_tiny_llama(directory, vocab_size=64, max_context_tokens=128)
    (drafter / "drafter.json").write_text('{"sigmas": {"0": 0.7}, "acceptance_by_rank": [0.5, 0.25]}')
    save_adapter(random_adapter(AutoModelForCausalLM.from_pretrained(target), 2), adapter)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "A"}\n{"prompt": "B"}\n')
    command = [
        *(sys.executable, "-m", "coppice.cli", "bench", "ablation", "--suite", "in-pass", "--quick"),
        *("--target", str(target), "--drafter", f"small-lm={drafter}", "--space", str(adapter)),
        *("--prompts", str(prompts), "--max-tokens", "64", "--threads", "1", "--out", str(tmp_path)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    report = json.loads((tmp_path / "in-pass.json").read_text())
    rows = {(row["contender"].removeprefix("coppice-on "), row["temperature"]): row for row in report["rows"]}
    names = ["coppice-off", "space", "space k=2 g=1", "space+small-lm", "small-lm"]
    assert list(rows) == [(name, temperature) for temperature in (0.0, 1.0) for name in names]
    assert all(row["identical"] and row["num_requests"] == 2 for row in rows.values())
    for temperature in (0.0, 1.0):
        plain, one_group = rows["coppice-off", temperature], rows["space k=2 g=1", temperature]
        # A window without a prompt: plain passes have one row each, the others masks and the draft that came of them.
        assert plain["rows_per_pass"] == 1
        assert plain["redraft_rounds"] == plain["redraft_tokens"] == plain["masks_per_pass"] == 0
        assert one_group["redraft_rounds"] > 0
        # Of the first and the last pass of a window, the masks may be counted and not the pass.
        assert 0 < one_group["masks_per_pass"] <= 2 + 2 * 2 * one_group["num_requests"] / one_group["passes"]
        assert one_group["rows_per_pass"] > 1
        # The drafter is the target: what it drafts is right.
        assert rows["small-lm", temperature]["mean_acceptance_length"] > 2
    assert {"space/off", "space/off@T1", "space.tau", "space+small-lm/small-lm"} <= set(report["ratios"])
