"""A small picture of a mask: text for a terminal, PNG where matplotlib is installed."""

from __future__ import annotations

from os import PathLike

import numpy as np
import numpy.typing as npt

from stof_onnx.errors import StofError
from stof_onnx.mask.decode import decode_one
from stof_onnx.mask.encoded import EncodedMask
from stof_onnx.mask.statistics import tile_allowed

_SHADES = " ░▒▓█"
_SHADES_ASCII = " .:+#"
_DENSE_LIMIT = 1 << 22  # elements; larger masks are drawn from whole tiles


def shares(mask: EncodedMask, height: int, width: int, number: int = 0) -> npt.NDArray[np.float64]:
    """The share of allowed elements in each cell of a grid over one distinct mask, at most [height, width].

    Cells follow element bounds in small masks and tile bounds in large ones, so each share is exact for its cell.
    """
    if mask.s_q * mask.s_kv <= _DENSE_LIMIT:
        allowed = decode_one(mask, number).astype(np.int64)
        unit_m = unit_n = 1
    else:
        allowed = tile_allowed(mask, number)
        unit_m, unit_n = mask.tile_m, mask.tile_n
    row_starts = _starts(allowed.shape[0], height)
    col_starts = _starts(allowed.shape[1], width)
    sums = np.add.reduceat(np.add.reduceat(allowed, row_starts, axis=0), col_starts, axis=1)
    heights = np.diff(np.append(row_starts * unit_m, mask.s_q))
    widths = np.diff(np.append(col_starts * unit_n, mask.s_kv))
    return sums / (heights[:, None] * widths[None, :])


def text_picture(mask: EncodedMask, width: int = 48, number: int = 0, ascii_only: bool = False) -> str:
    """Lines of at most `width` characters: blank where nothing is allowed, solid where all is, three shades between.

    A character is about twice as high as wide, so a square mask has half as many lines as columns.
    """
    shades = _SHADES_ASCII if ascii_only else _SHADES
    height = max(1, min(width, round(width / 2 * mask.s_q / mask.s_kv)))
    share = shares(mask, height, width, number)
    # Shades 1..3 are for cells strictly between none and all.
    level = np.where(share <= 0, 0, np.where(share >= 1, 4, 1 + np.minimum(2, (share * 3).astype(int))))
    return "\n".join("".join(shades[x] for x in row) for row in level)


def check_pictures(where: str | PathLike[str]) -> None:
    """Refuses PNGs (in a folder, or a file) where they can not be drawn.

    Raises:
        StofError: matplotlib is not installed.
    """
    try:
        import matplotlib.backends.backend_agg  # noqa: F401
    except ImportError:
        advice = "pip install 'stof-onnx[report]'"
        raise StofError("pictures need matplotlib, which is not installed", str(where), advice) from None


def save_picture(mask: EncodedMask, path: str | PathLike[str], number: int = 0, title: str = "") -> None:
    """Writes one distinct mask as a PNG.

    Raises:
        StofError: matplotlib is not installed, or the file can not be written.
    """
    check_pictures(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot()
    extent = (0.0, float(mask.s_kv), float(mask.s_q), 0.0)
    axes.imshow(shares(mask, 512, 512, number), cmap="Blues", vmin=0, vmax=1, extent=extent, interpolation="nearest")
    axes.set(xlabel="key", ylabel="query", title=title)
    try:
        FigureCanvasAgg(figure).print_figure(str(path), format="png", dpi=120)
    except OSError as error:
        raise StofError(f"can not write the picture: {error.strerror}", str(path), "Choose a writable file") from None


def _starts(size: int, cells: int) -> npt.NDArray[np.int64]:
    """Where each of at most `cells` cells begins."""
    cells = min(size, cells)
    return np.arange(cells) * size // cells
