"""The checked-in code under `coppice/v1` is what the .proto files generate."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def contents(package: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in package.iterdir() if path.is_file()}


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    generate = runpy.run_path(str(ROOT / "protos" / "generate.py"))["generate"]
    generate(tmp_path)
    fresh, checked_in = contents(tmp_path / "coppice" / "v1"), contents(ROOT / "coppice" / "v1")
    assert fresh.keys() == checked_in.keys()
    stale = sorted(name for name in fresh if fresh[name] != checked_in[name])
    assert not stale, "run `make proto`"


def test_every_contract_file_is_generated() -> None:
    protos = {path.stem for path in (ROOT / "protos" / "coppice" / "v1").glob("*.proto")}
    generated = {path.name.removesuffix("_pb2.py") for path in (ROOT / "coppice" / "v1").glob("*_pb2.py")}
    assert protos == generated
