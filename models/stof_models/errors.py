"""The error users of the exporters see."""

from __future__ import annotations


class ExportError(Exception):
    """Something the user can act on: an impossible combination, or an exporter that failed (with its message)."""
