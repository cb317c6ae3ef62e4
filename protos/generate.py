"""Regenerate `coppice/v1` from the .proto files: `python protos/generate.py [OUT]`, OUT being the repo."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent


def generate(out: Path) -> None:
    """Write messages, stubs and type stubs below `out`, replacing what was generated before."""
    package = out / "coppice" / "v1"
    package.mkdir(parents=True, exist_ok=True)
    for stale in package.glob("*_pb2*"):
        stale.unlink()
    (package / "__init__.py").write_text('"""Generated from protos/coppice/v1 by `make proto`; do not edit."""\n')
    sources = sorted(path.relative_to(PROTOS).as_posix() for path in PROTOS.glob("coppice/v1/*.proto"))
    well_known = files("grpc_tools") / "_proto"
    arguments = ["protoc", f"-I{PROTOS}", f"-I{well_known}", f"--python_out={out}", f"--pyi_out={out}"]
    if protoc.main([*arguments, f"--grpc_python_out={out}", *sources]) != 0:
        raise SystemExit("protoc failed")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTOS.parent)
