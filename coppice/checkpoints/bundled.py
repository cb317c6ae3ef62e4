"""Where the bundled checkpoints are."""

from __future__ import annotations

import os
from pathlib import Path

MODELS = Path(os.environ.get("COPPICE_MODELS", Path(__file__).resolve().parents[2] / "models"))
