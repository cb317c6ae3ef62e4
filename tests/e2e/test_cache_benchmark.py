"""The cache benchmark as a command, on the bundled models: too small to say how much anything gains."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from coppice.checkpoints.bundled import MODELS

PHASES = ["cold", "fill", "again", "shifted", "second", "killed"]


@pytest.mark.redis
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server is installed")
def test_a_warm_cache_takes_fewer_rounds_here_and_elsewhere_and_a_killed_redis_fails_nothing(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    code = "\n".join(f"def method_{number}(self, value):\n    return self.value + {number}\n" for number in range(5))
    texts = [f"class Kind{number}:\n{code}" for number in range(5)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    command = [
        *(sys.executable, "-m", "coppice.cli", "bench", "cache", "--prompts", str(prompts), "--out", str(tmp_path)),
        *("--drafter", "none", "--target", str(MODELS / "target"), "--systems", "1", "--endings", "2", "--runs", "1"),
        *("--max-tokens", "24", "--temperature", "0", "--threads", "1"),
    ]
    # A calm Redis answers in one millisecond; tests share their machine.
    env = {**os.environ, "COPPICE_LAB": '{"redis_timeout_ms": 500}'}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=env)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    report = json.loads((tmp_path / "cache.json").read_text())
    rows = {row["phase"]: row for row in report["rows"]}
    assert list(rows) == ["off", *PHASES]
    assert all(row["identical"] and not row["num_failed"] for row in rows.values())
    assert rows["cold"]["cache_hits"] == 0
    assert rows["cold"]["cached_prompt_share"] == 0
    for phase in ("again", "second"):
        # What it reads is what was said; and the verifier has the blocks of every prompt but for the last of them.
        assert rows[phase]["cache_hits"] > 0
        assert rows[phase]["cached_prompt_share"] > 0.5
    assert report["ratios"]["again/cold.tau.cache.T0"] > 1
    assert report["ratios"]["second/cold.tau.cache.T0"] > 1
    assert report["ratios"]["failed-requests"] == 0
    assert rows["killed"]["cache_errors"] > 0
