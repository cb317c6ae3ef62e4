"""Tests of device code in Triton's interpreter. It has to be chosen before Triton is imported, and so has a process of
its own: `test_triton_interpreter.py` runs these tests, and without it they are not collected."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
