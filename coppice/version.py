"""Version of the package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("coppice")
except PackageNotFoundError:  # a source tree that is not installed
    VERSION = "0+unknown"
