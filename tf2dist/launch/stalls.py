"""Tasks that make no progress: which function each is in, and which of them the others are waiting for."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from tf2dist.messages import LongCall, Stalled

Message = TypeVar("Message", bound=LongCall)

GATHER_SECS = 1.0  # tasks in the same function report that at about the same time
BLAME_SECS = 3.0  # a task may report a stall before the task that it waits for, which is in the user's code, does


class Stalls:
    """Gathers the reports of tasks that make no progress; see `heartbeat`.

    Args:
        notify: takes a line for the user.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._long_calls: dict[str, LongCall] = {}
        self._stalled: dict[str, Stalled] = {}
        self._long_calls_since = 0.0
        self._stalled_since = 0.0

    def add(self, message: LongCall, now: float) -> None:
        # The times are those of the first reports: if every report renewed them, nothing would ever be shown.
        if isinstance(message, Stalled):
            self._stalled_since = self._stalled_since if self._stalled else now
            self._stalled[message.task] = message
        else:
            self._long_calls_since = self._long_calls_since if self._long_calls else now
            self._long_calls[message.task] = message

    def forget(self, task: str) -> None:
        self._long_calls.pop(task, None)
        self._stalled.pop(task, None)

    def clear(self) -> None:
        self._long_calls.clear()
        self._stalled.clear()

    def pop_blamed(self, now: float) -> list[Stalled]:
        """Shows the user where tasks are; returns the stalled tasks that are to blame, as soon as that is clear."""
        if self._long_calls and now - self._long_calls_since > GATHER_SECS:
            self._notify_long_calls()
        # A task in the user's code does not wait for another task: it can be blamed before the others have reported.
        blamed = in_users_code(self._stalled.values())
        if not blamed and self._stalled and now - self._stalled_since > BLAME_SECS:
            blamed = list(self._stalled.values())
        if blamed:
            self._stalled.clear()
        return blamed

    def _notify_long_calls(self) -> None:
        """Shows only the tasks in the user's code, if there are any: the others may be waiting for them."""
        places: dict[str, list[LongCall]] = {}
        for message in in_users_code(self._long_calls.values()) or self._long_calls.values():
            places.setdefault(message.where, []).append(message)
        for where, messages in places.items():
            names = ", ".join(message.task for message in messages)
            secs = min(message.secs for message in messages)
            self._notify(f"{names}: in {where} for {secs} s")
        self._long_calls.clear()


def in_users_code(messages: Iterable[Message]) -> list[Message]:
    return [message for message in messages if message.is_users]
