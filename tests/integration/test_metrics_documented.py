"""`docs/metrics.md` lists what the services serve: nothing more, nothing less, under the same names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import trustme
from prometheus_client.metrics_core import Metric
from transformers import PreTrainedModel

from coppice.client import Client, Options
from coppice.gateway.counts import GatewayCounts
from coppice.gateway.exchange import HttpExchange
from coppice.net.access_token import token_digest
from coppice.net.certificates import Certificates
from coppice.obs.metrics import Prefix
from drafter_svc.metrics import drafter_metrics
from drafter_svc.model.model_thread import ModelThread
from drafter_svc.service import DrafterService
from tests.certificates import directory
from tests.conftest import StartFakes
from tests.fakes import FakeDrafter, FakeVerifier
from tests.integration.test_drafter_metrics import ChainDrafter
from tests.integration.test_orchestrator_metrics import PROMPT, free_port
from tests.tiny_checkpoint import tiny_llama
from tests.unit.verifier_svc.test_preemption import INFO
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.scheduler import SchedulerLimits
from verifier_svc.metrics import verifier_metrics
from verifier_svc.model.target_model import TargetModel

DOCS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
NewModel = Callable[[str], PreTrainedModel]


def rows(metrics: Iterable[Metric]) -> list[str]:
    """The lines of the table that describe these metrics, in the order in which they are served."""
    return list(dict.fromkeys(map(row, metrics)))


def row(metric: Metric) -> str:
    """A histogram's bounds are no label to a reader."""
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    labels = [label for label in metric.samples[0].labels if label != "le"]
    return f"| `{name}` | {metric.type} | {', '.join(labels) or '-'} | {metric.documentation} |"


def documented(service: str) -> list[str]:
    return re.findall(rf"^\| `coppice_{service}_.*\|$", DOCS.read_text(), re.MULTILINE)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(directory(tmp_path / "tls", trustme.CA()).mutual())


async def test_the_orchestrator_s_table_is_what_it_serves(
    start_fakes: StartFakes, certificates: Certificates, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(json.dumps({"tenant": "a", "sha256": [token_digest("a!")]}))
    settings = {
        "planner": "adaptive",
        "cache_drafter": True,
        "metrics_port": free_port(),
        "tokens_file": str(tokens),
    }
    async with (
        start_fakes(FakeVerifier(), FakeDrafter(), FakeDrafter(kind="other"), **settings) as (_, orchestrator),
        Client(orchestrator.address, token="a!") as client,
    ):
        await client.generate(PROMPT, Options(max_tokens=20, seed=1, ignore_eos=True))
        ends = Prefix("coppice_orchestrator_").certificates(server=certificates)
        assert documented("orchestrator") == rows([*orchestrator.service.metrics(), *ends])


def test_the_drafters_table_is_what_they_serve(certificates: Certificates) -> None:
    service = DrafterService(ChainDrafter(), ModelThread(), 8, 2)
    assert documented("drafter") == rows(drafter_metrics(service, certificates))


def test_the_verifier_s_table_is_what_it_serves(certificates: Certificates) -> None:
    model = tiny_llama(vocab_size=INFO.vocab_size, max_context_tokens=INFO.max_context_tokens, eos_token_id=0)
    limits = SchedulerLimits(max_sequences=8, max_queued=100, prefill_chunk=64)
    engine = Engine(TargetModel(model, exact=False, num_blocks=7), INFO, limits, max_nodes=4)
    # Fast mode has everything that strict mode has, and more.
    info = replace(INFO, exact=False, bit_exact=False, near_tie_gap=0.01)
    assert documented("verifier") == rows(verifier_metrics(engine, info, certificates))


async def test_the_gateway_s_table_is_what_it_serves() -> None:
    counts = GatewayCounts()
    scope = {"type": "http", "headers": []}
    await one_request(counts, scope)
    assert documented("gateway") == rows(counts.metrics())


async def one_request(counts: GatewayCounts, scope: dict[str, Any]) -> None:
    with counts.request("/tokenize", HttpExchange(scope, AsyncMock(), AsyncMock())):
        pass


@pytest.mark.parametrize("label", ["tenant", "request", "user", "prompt"])
def test_no_label_has_as_many_values_as_there_are_clients(label: str) -> None:
    labels = [line.split("|")[3] for line in DOCS.read_text().splitlines() if line.startswith("| `coppice_")]
    assert len(labels) > 60
    assert not [text for text in labels if label in text]
