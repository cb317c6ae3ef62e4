"""Nothing that is read can bring code along: no pickle, no eval, no remote code, weights as safetensors alone."""

from __future__ import annotations

import ast
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from coppice.core.errors import IncompatibleError
from drafter_svc.config import DrafterConfig
from drafter_svc.drafters.registry import load_drafter
from drafter_svc.model.checkpoint import load_fingerprint, load_model
from tests.tiny_checkpoint import write_tiny_llama
from verifier_svc.config import VerifierConfig
from verifier_svc.model.loading import load_probed_target

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [
    "coppice",
    "drafter_svc",
    "orchestrator",
    "protos",
    "scripts",
    "verifier_svc",
]
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
# They write objects down with the code that makes them again.
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle"}
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}
RUNS_SHELL = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}


def name_of(node: ast.AST) -> str:
    """A dotted name, as far as it is one."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def constants(call: ast.Call) -> dict[str, Any]:
    """Keyword arguments that are written out."""
    return {one.arg: one.value.value for one in call.keywords if one.arg and isinstance(one.value, ast.Constant)}


def offences_of_call(call: ast.Call) -> Iterator[str]:
    name, given = name_of(call.func), constants(call)
    last = name.rpartition(".")[2]
    if name in RUNS_TEXT | RUNS_SHELL:
        yield name
    if given.get("shell"):
        yield "shell"
    if name == "torch.load" and given.get("weights_only") is not True:
        yield "torch.load without weights_only"
    if name in {"yaml.load", "yaml.unsafe_load", "yaml.full_load"}:
        yield name
    if given.get("allow_pickle"):
        yield "allow_pickle"
    if given.get("trust_remote_code"):
        yield "trust_remote_code"
    if last == "from_pretrained" and ".Auto" in f".{name}" and given.get("trust_remote_code") is not False:
        yield "trust_remote_code is left to the library"
    if last == "from_pretrained" and "AutoModel" in name and given.get("use_safetensors") is not True:
        yield "use_safetensors is left to the library"


def parsed(text: str) -> ast.Module:
    """The tree of a source. CPython 3.11 counts the depth for all threads together, and may find it miscounted."""
    try:
        return ast.parse(text)
    except SystemError:
        return ast.parse(text)


def offences(text: str) -> list[str]:
    """What in a source could run what it reads."""
    found: list[str] = []
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in PICKLES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PICKLES:
            found.append(node.module or "")
        elif isinstance(node, ast.Call):
            found += offences_of_call(node)
    return found


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from dill import loads",
        "eval(text)",
        "exec(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text)",
        "np.load(path, allow_pickle=True)",
        "f(trust_remote_code=True)",
        "AutoTokenizer.from_pretrained(name)",
        "transformers.AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False)",
    ],
)
def test_the_search_finds_what_it_is_for(text: str) -> None:
    assert offences(text)


def test_no_source_runs_what_it_reads() -> None:
    assert len(SOURCES) > 300
    found = {str(path.relative_to(ROOT)): offences(path.read_text()) for path in SOURCES}
    assert not {path: what for path, what in found.items() if what}


class Planted:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def load(service: str, directory: Path) -> None:
    if service == "verifier":
        load_probed_target(VerifierConfig(model=str(directory), device="cpu", kv_cache_mib=1))
    else:
        load_drafter(DrafterConfig(model=str(directory), device="cpu"))


both_services = pytest.mark.parametrize("service", ["verifier", "drafter"])


@both_services
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_weights_that_are_no_safetensors_are_refused_unread(service: str, name: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    checkpoint = tmp_path / "checkpoint"
    write_tiny_llama(checkpoint, vocab_size=61, max_context_tokens=64)
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / name).write_bytes(pickle.dumps(Planted(trace)))
    with pytest.raises(IncompatibleError, match="safetensors"):
        load(service, checkpoint)
    assert not trace.exists()
    # It would have.
    pickle.loads((checkpoint / name).read_bytes())
    assert trace.exists()


def plant_code(checkpoint: Path, trace: Path, **changes: str) -> None:
    """Code beside the weights, which the configuration asks for."""
    code = f"from pathlib import Path\nPath({str(trace)!r}).touch()\nclass Planted: pass\n"
    (checkpoint / "planted.py").write_text(code)
    config = json.loads((checkpoint / "config.json").read_text())
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    config |= {"auto_map": dict.fromkeys(names, "planted.Planted"), **changes}
    (checkpoint / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((checkpoint / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": ["planted.Planted", "planted.Planted"]}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(tokenizer))


@both_services
def test_a_model_that_needs_code_of_its_own_is_refused_and_the_code_not_run(service: str, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "checkpoint", vocab_size=61, max_context_tokens=64)
    plant_code(tmp_path / "checkpoint", tmp_path / "trace", model_type="planted")
    with pytest.raises(IncompatibleError, match="needs code of its own, which is never run"):
        load(service, tmp_path / "checkpoint")
    assert not (tmp_path / "trace").exists()


def test_code_beside_a_model_that_is_known_is_not_run_either(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "checkpoint", vocab_size=61, max_context_tokens=64)
    plant_code(tmp_path / "checkpoint", tmp_path / "trace")
    assert load_model(str(tmp_path / "checkpoint"), torch.device("cpu")).config.vocab_size == 61
    load_fingerprint(str(tmp_path / "checkpoint"))
    assert not (tmp_path / "trace").exists()
