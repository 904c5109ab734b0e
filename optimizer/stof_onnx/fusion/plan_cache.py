"""Times that outlive a process: a SQLite file keyed by timer (device, versions, precision), segment and configuration.

Several processes may use one file. A cache is never worth an error: one that is damaged, of another format or not
writable is ignored with a warning, and the search measures anew.
"""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

from stof_onnx import __version__
from stof_onnx.files import cache_root

_log = logging.getLogger(__name__)
_FORMAT = 1
_WAIT_S = 5.0  # for another process's write
_ERRORS = (sqlite3.Error, OSError, UnicodeError)  # the last: SQLite's message about damaged text may not be UTF-8
_TABLE = (
    "CREATE TABLE IF NOT EXISTS times "
    "(timer TEXT, segment TEXT, config TEXT, us REAL, PRIMARY KEY (timer, segment, config))"
)


class PlanCache:
    """A `TimeStore` in the file `path`, which is made where it does not exist.

    Attributes:
        problem: why it holds nothing and keeps nothing; empty while it works.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.problem = path, ""
        self._db: sqlite3.Connection | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None)
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _FORMAT):
                raise sqlite3.DatabaseError(f"it has format {version}, this is {_FORMAT}")
            self._db.execute(
                "PRAGMA synchronous = OFF"
            )  # several processes wait less; what a power cut damages is ignored
            self._db.execute(_TABLE)
            self._db.execute(f"PRAGMA user_version = {_FORMAT}")
        except _ERRORS as error:
            self._give_up(error)

    def get(self, timer: str, segment: str, what: str) -> float | None:
        """Microseconds, or None where they are not known."""
        row = self._execute("SELECT us FROM times WHERE timer=? AND segment=? AND config=?", _key(timer, segment, what))
        known = row[0] if row else None
        return float(known) if isinstance(known, (int, float)) and known >= 0 else None

    def put(self, timer: str, segment: str, what: str, us: float) -> None:
        """Keeps a time."""
        self._execute("INSERT OR REPLACE INTO times VALUES (?, ?, ?, ?)", (*_key(timer, segment, what), us))

    def close(self) -> None:
        """Closes the file; nothing is known and nothing is kept from then on."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def _execute(self, statement: str, values: tuple[object, ...]) -> tuple[object, ...] | None:
        if self._db is None:
            return None
        try:
            found: tuple[object, ...] | None = self._db.execute(statement, values).fetchone()
            return found
        except _ERRORS as error:
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        self.close()
        self.problem = f"the plan cache {self.path} is not used: {error}"
        _log.warning("%s", self.problem)


def default_path() -> Path:
    """plans.sqlite in the cache folder."""
    return cache_root() / "plans.sqlite"


def _key(timer: str, segment: str, what: str) -> tuple[str, str, str]:
    return f"{timer}; stof-onnx {__version__}", segment, what
