"""Corpus of Python sources present on every machine, split by a hash of the file name."""

from __future__ import annotations

import hashlib
import logging
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

# One file in this many is held out. The split depends on the name only, so versions of a file in different Python
# releases are on the same side.
HELD_OUT_ONE_IN = 40

# Machine-written tables, vendored copies and tests full of literals are poor training data.
SKIPPED_DIRECTORIES = frozenset(
    {"__pycache__", "_vendor", "encodings", "idlelib", "lib2to3", "pydoc_data", "test", "tests", "testing"}
)
SKIPPED_SUFFIXES = ("_pb2.py", "_pb2_grpc.py", "_generated.py")
MIN_FILE_BYTES = 400
MAX_FILE_BYTES = 200_000
# Near copies of each other, which would leak held-out text into training.
SKIPPED_FRAGMENTS = ("transformers/models/", "transformers/modeling_", "torch/_inductor/kernel/vendored")
# Limit per package; further files, in hash order, are skipped.
MAX_BYTES_PER_PACKAGE = 9_000_000


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One source file: its name relative to the corpus root, and its text."""

    name: str
    text: str

    @property
    def is_held_out(self) -> bool:
        """Whether the file belongs to the held-out split."""
        return name_hash(self.name) % HELD_OUT_ONE_IN == 0


def name_hash(name: str) -> int:
    """Hash of a relative file name, equal on all machines and processes."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def standard_library() -> Path:
    """The standard library of the running interpreter."""
    return Path(sysconfig.get_paths()["stdlib"])


def default_roots() -> list[Path]:
    """The standard library and the installed packages of the running interpreter."""
    return [standard_library(), Path(sysconfig.get_paths()["purelib"])]


def read_corpus(roots: Sequence[Path]) -> list[SourceFile]:
    """All usable files under `roots` without duplicates, in an order independent of the machine.

    Raises FileNotFoundError if a root is not a directory, or no root holds a usable file.
    """
    files: dict[str, SourceFile] = {}
    for root in roots:
        if not root.is_dir():
            raise FileNotFoundError(f"corpus directory {root} does not exist")
        for file in _limit_packages(_walk(root)):
            digest = hashlib.sha256(file.text.encode()).hexdigest()
            files.setdefault(digest, file)
    if not files:
        raise FileNotFoundError(f"no usable Python source under {[str(root) for root in roots]}")
    return sorted(files.values(), key=lambda file: name_hash(file.name))


def corpus_digest(files: Iterable[SourceFile]) -> str:
    """Hash of all names and texts, in order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.name.encode()).digest() + hashlib.sha256(file.text.encode()).digest())
    return digest.hexdigest()


def _walk(root: Path) -> Iterator[SourceFile]:
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if "site-packages" in relative.parts or SKIPPED_DIRECTORIES & set(relative.parts[:-1]):
            continue
        name = relative.as_posix()
        if name.endswith(SKIPPED_SUFFIXES) or any(part in name for part in SKIPPED_FRAGMENTS):
            continue
        text = _read_text(path)
        if text is not None:
            yield SourceFile(name, text)


def _read_text(path: Path) -> str | None:
    try:
        if not MIN_FILE_BYTES <= path.stat().st_size <= MAX_FILE_BYTES:
            return None
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("skipping %s: %s", path, error)
        return None


def _limit_packages(files: Iterable[SourceFile]) -> Iterator[SourceFile]:
    used: dict[str, int] = {}
    for file in sorted(files, key=lambda file: name_hash(file.name)):
        package = file.name.split("/")[0] if "/" in file.name else ""
        used[package] = used.get(package, 0) + len(file.text)
        if used[package] <= MAX_BYTES_PER_PACKAGE or file.is_held_out:
            yield file
