"""What is checked in: no machine's paths, bounded size, cards with facts, and a README whose commands exist."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from coppice.cli.__main__ import app
from drafter_svc.model.layers_checkpoint import base_of
from tests.conftest import ALONE, LONG, TESTS

ROOT = Path(__file__).resolve().parents[2]
MIB = 1024 * 1024
MAX_TREE_BYTES = 60 * MIB
MAX_MODELS_BYTES = 52 * MIB
EVERY_MODEL = sorted(path.parent for path in (ROOT / "models").glob("*/config.json"))
# Heads made by `coppice adapt` belong to other targets.
ADAPTED = [path for path in EVERY_MODEL if "speculators_model_type" in (path / "config.json").read_text()]
MODELS = [path for path in EVERY_MODEL if path not in ADAPTED]

# Written so that this file does not find itself.
MACHINE_PATH = re.compile(r"(?<![\w.~}])/(?:" + "|".join(["wo" + "rk", "ho" + "me", "Us" + "ers"]) + r")/\w")
REGISTRY_HOST = re.compile("|".join(["py" + "pi.org", "pythonho" + "sted", "npm" + "js.", "download.pyt" + "orch"]))


def tracked_files() -> list[Path]:
    """Every file that git would carry: tracked, or new and not ignored."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout.decode()
    return [path for name in output.split("\0") if name and (path := ROOT / name).is_file()]


def offences(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}"
            for number, line in enumerate(text.splitlines(), start=1)
            if pattern.search(line)
        ]
    return found


def test_no_file_names_a_path_of_somebody_s_machine() -> None:
    assert not offences(MACHINE_PATH)


def test_no_file_names_a_package_registry() -> None:
    assert not offences(REGISTRY_HOST)


def test_the_tree_stays_small() -> None:
    files = tracked_files()
    assert sum(path.stat().st_size for path in files) < MAX_TREE_BYTES
    models = [path for path in files if (ROOT / "models") in path.parents]
    assert sum(path.stat().st_size for path in models) < MAX_MODELS_BYTES


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.name)
def test_every_bundled_model_has_a_card_with_its_facts(model: Path) -> None:
    card = (model / "README.md").read_text()
    for fact in ("data", "held-out", "bits per byte", "command", "seed", "steps", "date"):
        assert fact in card, fact
    assert re.search(r"`coppice train [\w-]+", card)
    assert re.search(r"\d\.\d+ bits per byte", card)
    assert re.search(r"20\d\d-\d\d-\d\d", card)
    recipe = json.loads((model / "recipe.json").read_text())
    assert {"command", "versions", "curve", "seed", "steps"} <= recipe.keys()


@pytest.mark.parametrize("model", ADAPTED, ids=lambda path: path.name)
def test_every_adapted_head_has_a_card_with_its_facts(model: Path) -> None:
    card = (model / "README.md").read_text()
    for fact in ("data", "held-out", "target's weights", "`coppice adapt --target", "seed", "steps", "licence"):
        assert fact in card, fact
    assert re.search(r"20\d\d-\d\d-\d\d", card)
    recipe = json.loads((model / "recipe.json").read_text())
    assert {"command", "versions", "curve", "recipe", "steps"} <= recipe.keys()


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.name)
def test_a_bundled_model_carries_the_bundled_tokenizer(model: Path) -> None:
    bundled = json.loads((ROOT / "models" / "target" / "tokenizer.json").read_text())
    # A checkpoint of layers alone has that of the model whose embeddings it uses, which is bundled, too.
    home = Path(base_of(str(model))).resolve()
    assert home in MODELS
    own = json.loads((home / "tokenizer.json").read_text())
    assert own["model"] == bundled["model"]


def test_generated_code_and_the_tool_that_writes_it_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [tool] = [item for item in project["optional-dependencies"]["dev"] if item.startswith("grpcio-tools")]
    version = tool.removeprefix("grpcio-tools==")
    stub = (ROOT / "coppice" / "v1" / "inference_pb2_grpc.py").read_text()
    assert f"GRPC_GENERATED_VERSION = '{version}'" in stub
    runtime = [item for item in project["dependencies"] if item.startswith("grpcio")]
    assert len(runtime) == 4
    assert all(item.endswith(f">={version}") for item in runtime)


def test_set_up_installs_the_torch_that_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [torch] = [item for item in project["optional-dependencies"]["model"] if item.startswith("torch")]
    assert f'TORCH = "{torch}"' in (ROOT / "scripts" / "setup_venv.py").read_text()


def test_set_up_names_extras_that_exist_and_leaves_the_large_ones_to_tests() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    script = (ROOT / "scripts" / "setup_venv.py").read_text()
    everyone, tests = (re.findall(rf'^{name} = "(.*)"$', script, re.MULTILINE)[0] for name in ("EXTRAS", "TEST_EXTRAS"))
    assert set(everyone.split(",")) < set(tests.split(",")) <= extras.keys()
    assert not any(item.startswith("triton") for name in everyone.split(",") for item in extras[name])


def test_what_tests_begin_with_and_what_runs_alone_is_there() -> None:
    assert all((TESTS / name).is_file() for name in LONG)
    assert all((TESTS / name).is_dir() for name in ALONE)
    # In one of the two runs or the other.
    recipe = (ROOT / "Makefile").read_text()
    assert re.findall(r"pytest -m (\"[^\"]+\"|\S+)", recipe) == ['"not processes"', "processes"]


def pages_of_docs() -> list[str]:
    """Pages of docs/, without those of results, which a command writes."""
    pages = (path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md"))
    return sorted(page.as_posix() for page in pages if page.parts[0] != "results")


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def shell_lines_of_readme() -> list[str]:
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]


def test_every_make_target_is_explained_and_has_no_file_of_its_name() -> None:
    makefile = (ROOT / "Makefile").read_text()
    explained = set(re.findall(r"^([a-z]+):.* ## ", makefile, re.MULTILINE))
    [phony] = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert make_targets() == explained == set(phony.split())


def test_the_readme_names_only_make_targets_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"`make ([a-z]+)", text))
    named |= {line.split()[1] for line in shell_lines_of_readme() if line.startswith("make ")}
    assert named
    assert named <= make_targets()


def commands(prefix: str, group: typer.core.TyperGroup) -> set[str]:
    names = set()
    for name, command in group.commands.items():
        names.add(f"{prefix}{name}")
        if isinstance(command, typer.core.TyperGroup):
            names |= commands(f"{prefix}{name} ", command)
    return names


def coppice_lines_of_readme() -> list[list[str]]:
    lines = [line for line in shell_lines_of_readme() if line.startswith("coppice ")]
    return [shlex.split(line)[1:] for line in lines]


@pytest.mark.parametrize("words", coppice_lines_of_readme(), ids=" ".join)
def test_the_readme_names_only_commands_and_options_that_exist(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    while isinstance(command, typer.core.TyperGroup):
        assert words[0] in command.commands
        command, words = command.commands[words[0]], words[1:]
    options = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options


def test_every_command_explains_itself() -> None:
    runner = CliRunner()
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    for name in commands("", group):
        result = runner.invoke(app, [*name.split(), "--help"])
        assert result.exit_code == 0, name


# All that is written by hand.
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *(f"docs/{page}" for page in pages_of_docs())]
# The kind of drafter that a reader of docs/adding-a-drafter.md makes.
EXAMPLE = "bigram"


def files_named_in(document: str) -> set[str]:
    return set(re.findall(r"`((?:\w+/)+(?:\w+\.(?:py|proto|md))?)`", (ROOT / document).read_text()))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_name_only_files_that_exist(document: str) -> None:
    missing = sorted(name for name in files_named_in(document) if not (ROOT / name).exists() and EXAMPLE not in name)
    links = set(re.findall(r"\]\(([\w/.-]+)\)", (ROOT / document).read_text()))
    missing += sorted(link for link in links if not ((ROOT / document).parent / link).exists())
    # Parts of tests/ are named relative to it, in its own row of the layout.
    missing = [name for name in missing if not (ROOT / "tests" / name).exists()]
    assert not missing


def test_documents_name_files_of_every_package() -> None:
    packages = {name.split("/")[0] for document in DOCUMENTS for name in files_named_in(document)}
    assert {"coppice", "orchestrator", "verifier_svc", "drafter_svc"} <= packages


def test_the_readme_s_python_imports_what_exists() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    imports = [node for block in blocks for node in ast.parse(block).body if isinstance(node, ast.ImportFrom)]
    assert imports
    for node in imports:
        module = importlib.import_module(node.module or "")
        assert all(hasattr(module, alias.name) for alias in node.names)
