"""The smallest deployment, a target that drafts for itself: one process, no drafter, the tokens of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from coppice.checkpoints.bundled import MODELS
from coppice.client import Client, Options
from coppice.colocated.app import load, running
from coppice.colocated.config import ColocatedConfig
from coppice.core.errors import IncompatibleError
from tests.unit.verifier_svc.adapters import random_adapter
from verifier_svc.config import VerifierConfig
from verifier_svc.extras.redraft.adapter import SpaceAdapter, Transition, load_adapter, save_adapter
from verifier_svc.model.loading import load_probed_target

pytestmark = pytest.mark.timeout(480)

PROMPT = "import os\n\n\ndef count_lines(path):\n"
GREEDY = Options(max_tokens=32, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=1.0, top_k=40, seed=13)
ENV = {
    "VERIFIER_MODEL": str(MODELS / "target"),
    "DRAFTERS": "",
    "CACHE_DRAFTER": "false",
    "DEVICE": "cpu",
    "KV_CACHE_MIB": "64",
    "THREADS": "1",
    "GRACE_S": "1",
}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the bundled target that has learned nothing: its re-drafts are about never right."""
    directory = tmp_path_factory.mktemp("space")
    model = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32)
    save_adapter(random_adapter(model, 3, scale=0.05), directory)
    return directory


async def test_a_target_alone_drafts_for_itself_and_says_what_it_would_have_said(adapter: Path) -> None:
    config = ColocatedConfig.from_env({**ENV, "SPACE_ADAPTER": str(adapter), "COPPICE_LAB": '{"redraft_nodes": 4}'})
    models = load(config)
    async with running(config, models, env={}) as deployment, Client(deployment.orchestrator.address) as client:
        for options in (GREEDY, SEEDED):
            plain = await client.generate(PROMPT, replace(options, speculation="off"))
            drafted = await client.generate(PROMPT, options)
            assert drafted.token_ids == plain.token_ids
            assert plain.speculation.redraft_tokens == plain.speculation.draft_tokens == 0
            stats = drafted.speculation
            assert stats.redraft_tokens > 0
            assert 0 < stats.draft_tokens <= stats.redraft_tokens
            assert stats.sources["redraft"].proposed == stats.draft_tokens
            assert stats.origins["redraft"].rounds > 0
            named = await client.generate(PROMPT, replace(options, speculation="redraft"))
            assert named.token_ids == plain.token_ids
            assert named.speculation.redraft_tokens > 0


def test_an_adapter_of_another_target_is_refused_at_start(tmp_path: Path) -> None:
    save_adapter(SpaceAdapter(torch.zeros(2, 8), {}, ((0.0, (1.0,)),)), tmp_path)
    target = str(MODELS / "target")
    config = VerifierConfig(model=target, device="cpu", threads=1, kv_cache_mib=16, space_adapter=str(tmp_path))
    with pytest.raises(IncompatibleError, match="masks have 8 numbers"):
        load_probed_target(config)


def test_an_adapter_for_other_embeddings_is_refused_at_start(tmp_path: Path, adapter: Path) -> None:
    narrow = Transition(torch.zeros(2, 99), torch.zeros(2, 99))
    save_adapter(replace(load_adapter(adapter), transition=narrow), tmp_path)
    target = str(MODELS / "target")
    config = VerifierConfig(model=target, device="cpu", threads=1, kv_cache_mib=16, space_adapter=str(tmp_path))
    with pytest.raises(IncompatibleError, match=r"\(2, 99\) do not fit embeddings of \(512,\)"):
        load_probed_target(config)
