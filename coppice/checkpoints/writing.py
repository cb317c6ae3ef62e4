"""Files and directories that are written whole or not at all, with errors that name them."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
NO_PERMISSION = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
# Libraries in Rust have no type for them, and no number but in the text.
_NUMBER = re.compile(r"os error (\d+)")
# numpy's words where less was written than asked for. It does not say why; for files that is want of space.
_CUT = re.compile(r"\d+ requested and \d+ written")


@contextlib.contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Turn what libraries raise where nothing can be written into an OSError that names `path`.

    Raises:
        OSError: writing failed.
    """
    try:
        yield
    except OSError as error:
        number = errno.ENOSPC if error.errno is None and _CUT.fullmatch(str(error)) else error.errno
        if number is None or (error.filename is not None and number not in NO_SPACE):
            raise
        raise OSError(number, os.strerror(number), str(path)) from error
    except Exception as error:
        # torch's has the cause as its context.
        cause, found = error.__context__, _NUMBER.search(str(error))
        number = cause.errno if isinstance(error, RuntimeError) and isinstance(cause, OSError) else None
        number = int(found[1]) if found else number
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file next to `path` to write to, which replaces it when all is written.

    Raises:
        OSError: writing failed; nothing of it is left.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with writing_to(path), temporary.open("wb") as file:
            yield file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """A directory next to `path` to write to, whose files replace those of `path` when all are written.

    Raises:
        OSError: writing failed; nothing of it is left.
    """
    path = path.resolve()
    temporary = path.with_name(path.name + ".tmp")
    # Left by a killed run.
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with writing_to(path):
            temporary.mkdir(parents=True)
            yield temporary
        path.mkdir(exist_ok=True)
        for file in temporary.iterdir():
            file.replace(path / file.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
