"""A disk that is full, as libraries meet it: the path is named, and nothing half-made is left."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer, models

from coppice.checkpoints.writing import whole_directory, whole_file, writing_to

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
TENSOR = torch.zeros(1 << 16)


def fail_as_torch(_: object) -> None:
    """Raises what `torch.save` does, whose buffers on a real disk hold nothing for the file's end to fail with."""
    error = RuntimeError("unexpected pos 704 vs 598")
    error.__context__ = OSError(errno.ENOSPC, "No space left on device")
    raise error


def refuse_tensors() -> None:
    """Raises what the library of weights says on a full disk; it replaces a link, and so does not meet the device."""
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    "write",
    [
        lambda file: file.write(bytes(1 << 20)),
        lambda file: file.write(b"kept until the file is closed"),
        lambda file: np.savez(file, a=TENSOR.numpy()),
        lambda file: torch.save(TENSOR, file),
        fail_as_torch,
    ],
    ids=["bytes", "few bytes", "numpy", "torch", "torch on a disk"],
)
def test_a_file_that_does_not_fit_is_named_and_leaves_the_old_one(write: Callable[..., object], tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"old")
    (tmp_path / "state.tmp").symlink_to(FULL)
    with pytest.raises(OSError, match="No space left") as caught, whole_file(path) as file:
        write(file)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert [one.name for one in tmp_path.iterdir()] == ["state"]
    assert path.read_bytes() == b"old"


def test_a_file_that_fits_in_part_on_a_real_disk_is_named_and_leaves_the_old_one(tmp_path: Path) -> None:
    """numpy says how much was written, and not why it was no more; only a disk with some room shows that."""
    program = """if True:
        from pathlib import Path
        import sys, numpy
        from coppice.checkpoints.writing import whole_file
        path = Path(sys.argv[1]) / "state"
        path.write_bytes(b"old")
        try:
            with whole_file(path) as file:
                numpy.save(file, numpy.zeros(1 << 20))
        except OSError as error:
            print(error.errno, error.filename == str(path), [one.name for one in path.parent.iterdir()])
        print(path.read_bytes())
    """
    alone = ("unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=64k none "$0" && exec "$@"', str(tmp_path))
    try:
        subprocess.run([*alone, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a file system of its own: `unshare -rm` and mount")
    done = subprocess.run([*alone, sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout == f"{errno.ENOSPC} True ['state']\nb'old'\n", done.stderr


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_text("x"),
        lambda _: refuse_tensors(),
        lambda path: Tokenizer(models.BPE()).save(str(path)),
    ],
    ids=["text", "safetensors", "tokenizers"],
)
@pytest.mark.parametrize("is_there", [False, True], ids=["new", "there"])
def test_a_directory_that_does_not_fit_is_named_and_stays_as_it_was(
    is_there: bool, write: Callable[[Path], object], tmp_path: Path
) -> None:
    out = tmp_path / "model"
    if is_there:
        out.mkdir()
        (out / "config.json").write_text("old")

    def write_both() -> None:
        with whole_directory(out) as whole:
            (whole / "config.json").write_text("new")
            (whole / "second").symlink_to(FULL)
            write(whole / "second")

    with pytest.raises(OSError, match="No space left") as caught:
        write_both()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(out))
    assert [path.name for path in tmp_path.iterdir()] == ["model"] * is_there
    assert not is_there or [(path.name, path.read_text()) for path in out.iterdir()] == [("config.json", "old")]


def test_a_whole_directory_replaces_files_and_keeps_others(tmp_path: Path) -> None:
    out = tmp_path / "model"
    (tmp_path / "model.tmp").mkdir()
    (tmp_path / "model.tmp" / "left").write_text("by a killed run")
    for content in ("old", "new"):
        with whole_directory(out) as whole:
            (whole / "config.json").write_text(content)
        (out / "own").touch()
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "own"]
    assert (out / "config.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as absent, writing_to(tmp_path):
        (tmp_path / "absent").read_text()
    assert absent.value.filename == str(tmp_path / "absent")
    with pytest.raises(ValueError, match="no tensor"), writing_to(tmp_path):
        raise ValueError("no tensor")
