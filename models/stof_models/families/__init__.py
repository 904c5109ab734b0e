"""The architectures that can be exported, by name."""

from __future__ import annotations

from stof_models.errors import ExportError
from stof_models.families import cross, decoders, encoders, vision
from stof_models.families.base import Family

FAMILIES: dict[str, Family] = {
    family.name: family for family in (*encoders.FAMILIES, *decoders.FAMILIES, *cross.FAMILIES, *vision.FAMILIES)
}


def family(name: str) -> Family:
    if name not in FAMILIES:
        raise ExportError(f"unknown architecture {name!r}; known: {', '.join(FAMILIES)}")
    return FAMILIES[name]
