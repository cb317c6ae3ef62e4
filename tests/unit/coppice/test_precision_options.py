"""In which numbers verifiers serve the target: what `coppice up` was told, or their own environment."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from coppice.cli import options, up
from coppice.cli.__main__ import app
from coppice.cli.topology import Topology, TopologySpec

RUN = CliRunner()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[TopologySpec]:
    """What `coppice up` would run."""
    specs: list[TopologySpec] = []

    async def serve(spec: TopologySpec, *_: Any, **__: Any) -> None:
        specs.append(spec)

    monkeypatch.setattr(up, "serve", serve)
    for name in ("DTYPE", "QUANTIZATION", "SPACE_ADAPTER"):
        monkeypatch.delenv(name, raising=False)
    return specs


def test_verifiers_are_told_and_drafters_are_not(served: list[TopologySpec]) -> None:
    assert RUN.invoke(app, ["up", "--dtype", "bfloat16", "--quantization", "int8"]).exit_code == 0
    (spec,) = served
    wanted = {"DTYPE": "bfloat16", "QUANTIZATION": "int8"}
    topology = Topology(spec)
    assert wanted.items() <= topology._verifier_env().items()
    assert not wanted.keys() & topology._drafter_env(spec.drafters[0]).keys()
    assert {f"VERIFIER_{name}": value for name, value in wanted.items()}.items() <= topology._colocated_env().items()


def test_without_options_the_environment_has_its_say(served: list[TopologySpec]) -> None:
    assert RUN.invoke(app, ["up"]).exit_code == 0
    assert not {"DTYPE", "QUANTIZATION"} & Topology(served[0])._verifier_env().keys()


def test_a_target_in_8_bits_does_not_draft_for_itself(
    served: list[TopologySpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter is for modules in single precision: the verifier would refuse both together."""
    monkeypatch.setattr(options, "DEFAULT_SPACE", options.DEFAULT_SPACE.parent)
    for arguments in ([], ["--quantization", "int8"]):
        assert RUN.invoke(app, ["up", "--drafter", "none", *arguments]).exit_code == 0
    assert [spec.space for spec in served] == [str(options.DEFAULT_SPACE), ""]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--dtype", "float16"], "--dtype: must be auto, float32 or bfloat16, got 'float16'"),
        (["--quantization", "int4"], "--quantization: must be none or int8, got 'int4'"),
    ],
)
def test_other_numbers_are_refused_before_anything_starts(
    arguments: list[str], why: str, served: list[TopologySpec]
) -> None:
    result = RUN.invoke(app, ["up", *arguments])
    assert result.exit_code == 2
    assert why in " ".join(result.output.replace("│", " ").split())
    assert not served
