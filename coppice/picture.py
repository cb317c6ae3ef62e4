"""A figure as a small PNG file; pictures of results and of training are committed.

Nothing that imports this needs a display.
"""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

# Lines, bars and letters have few colours, and take a third of the room so.
NUM_COLOURS = 128


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file, with its directory, and close it."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    plt.close(figure)
    picture = Image.open(drawn).convert("RGB").quantize(NUM_COLOURS, dither=Image.Dither.NONE)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, format="PNG", optimize=True)
