"""The form of the option simulate.pause."""

import re
from dataclasses import dataclass

from tf2dist.config.option import MAX_COUNT, MAX_SECS

FORM = re.compile(r"((?:chief|worker)-[0-9]{1,9}) at ([0-9]{1,15}) for ([0-9]{1,15}(?:\.[0-9]{1,15})?)")


@dataclass(frozen=True)
class Pause:
    """A worker that freezes once.

    Attributes:
        task: its name, such as "worker-2".
        step: the number of the step in which it does, among its own steps, from 1.
        secs: for how long.
    """

    task: str
    step: int
    secs: float

    @classmethod
    def parse(cls, text: str) -> "Pause":
        """The pause that a text such as "worker-2 at 300 for 5" asks for.

        Raises:
            ValueError: the text has another form, or its numbers are out of range.
        """
        match = FORM.fullmatch(text)
        if not match:
            raise ValueError(f"{text} has not the form of a pause")
        pause = cls(match[1], int(match[2]), float(match[3]))
        if not (1 <= pause.step <= MAX_COUNT and 0 < pause.secs <= MAX_SECS):
            raise ValueError(f"{text} has a number out of range")
        return pause


def is_pause(text: str) -> bool:
    try:
        Pause.parse(text)
    except ValueError:
        return False
    return True
