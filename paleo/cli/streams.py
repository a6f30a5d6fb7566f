"""Standard streams as they may be: closed, full, without a reader, or of a terminal that knows ASCII alone."""

from __future__ import annotations

import codecs
import os
import signal
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

#: What characters of ours become where a terminal does not know them; all others become a question mark.
_PLAIN = {
    "×": "x", "−": "-", "–": "-", "—": "-", "…": "...", "·": "*", "µ": "u", "→": "->", "≥": ">=", "≤": "<=",
    "’": "'", "“": '"', "”": '"', "²": "2", "±": "+-", "≈": "~", "✓": "yes", "•": "*",
}  # fmt: skip
#: Longer messages are cut.
LONGEST = 1200
TERMINATED = 128 + signal.SIGTERM


def _plainer(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in text), error.end


class _Closed:
    """A stream that was closed before the program began: what is written to it fails as it does on a full disk."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        raise OSError(9, "it is closed")

    def flush(self) -> None:
        """Nothing waits here."""

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        raise OSError(9, "it is closed")


def prepare() -> None:
    """Make the streams fit for any text, and let SIGTERM be an exception, so that unfinished files are removed."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:  # a file opened later must not take a closed stream's number
        pass
    os.close(number)
    codecs.register_error("paleo", _plainer)
    sys.stdout = cast(TextIO, sys.stdout or _Closed())
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="paleo")
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, frame: object) -> None:
    raise SystemExit(TERMINATED)


def say(text: str) -> None:
    """A line on stderr; where that cannot be written there is nobody to tell."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def discard_output() -> None:
    """Send what is still buffered for stdout nowhere, so that the interpreter does not fail over it at its end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def printable(message: str) -> str:
    """A message as one line of bounded length, without what would steer a terminal.

    >>> printable("name\\n\\x1b[31mred")
    'name ?[31mred'
    """
    line = " ".join(message.split())
    return "".join(character if character.isprintable() else "?" for character in line[:LONGEST])
