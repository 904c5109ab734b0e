"""The one error type users see: what is wrong, where, and what to do about it."""

from __future__ import annotations


class StofError(Exception):
    """A problem the user can act on. The command line prints it as one message and exits with `exit_code`.

    Args:
        what: what was found, in one sentence.
        where: the file, node, tensor or option it was found in ("" when there is no better place than the command).
        advice: what to do about it ("" only when nothing can be done).
    """

    exit_code = 2

    def __init__(self, what: str, where: str = "", advice: str = "") -> None:
        self.what, self.where, self.advice = what, where, advice
        super().__init__(str(self))

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}. {self.advice}" if self.advice else head


class VerificationFailed(StofError):
    """The optimized model does not compute what the original does; exit code 1."""

    exit_code = 1
