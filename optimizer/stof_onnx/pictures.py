"""One small picture for each distinct mask that was found."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stof_onnx.attention.types import AttentionMatch
from stof_onnx.errors import StofError
from stof_onnx.mask.picture import check_pictures, save_picture, text_picture

_WIDTH = 48


@dataclass(frozen=True)
class MaskPicture:
    """`text` shows one distinct mask, `sites` are the attentions that have it, `file` is its PNG if one was drawn."""

    sites: tuple[str, ...]
    text: str
    file: Path | None = None


def draw_masks(matches: Sequence[AttentionMatch], folder: Path | None) -> list[MaskPicture]:
    """Draws every distinct mask (of a table of several, each one) as text, and as `mask_<n>.png` in `folder`.

    Raises:
        StofError: the folder can not be made, or pictures can not be drawn here.
    """
    by_mask: dict[str, list[AttentionMatch]] = {}
    for match in matches:
        if match.mask is not None:
            by_mask.setdefault(match.mask.digest, []).append(match)
    if folder is not None:
        check_pictures(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StofError(f"the folder can not be made ({error.strerror})", str(folder)) from error
    pictures: list[MaskPicture] = []
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    for sharing in by_mask.values():
        mask, sites = sharing[0].mask, tuple(m.name for m in sharing)
        if mask is None:
            continue
        for number in range(mask.n_masks):
            file = None
            if folder is not None:
                file = folder / f"mask_{len(pictures)}.png"
                save_picture(mask, file, number, title=f"{mask.s_q} x {mask.s_kv}")
            text = text_picture(mask, _WIDTH, number, ascii_only=not encoding.lower().startswith("utf"))
            pictures.append(MaskPicture(sites, text, file))
    return pictures
