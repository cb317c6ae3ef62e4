"""Figures as small PNG files; those of results and of training are committed.

Needs no display.
"""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

# Figures have few colours: a palette takes a third of the space.
NUM_COLOURS = 128


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file, create its directory if needed, and close the figure."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    plt.close(figure)
    picture = Image.open(drawn).convert("RGB").quantize(NUM_COLOURS, dither=Image.Dither.NONE)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, format="PNG", optimize=True)
