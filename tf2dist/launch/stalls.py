"""Tasks that make no progress: what they stand in, for people, and which of them is to blame."""

from collections.abc import Callable
from typing import Any

Event = dict[str, Any]

GATHER_SECS = 1.0  # tasks that stand in the same function say so at about the same time
BLAME_SECS = 3.0  # who waits for a task that stands in the user's code may complain before it


class Stalls:
    """Gathers the events "standing" and "stalled"; see `heartbeat`.

    Args:
        tell: takes a line for the user.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._standing: dict[str, Event] = {}
        self._stalled: dict[str, Event] = {}
        self._standing_since = self._stalled_since = 0.0

    def heard(self, event: Event, now: float) -> None:
        if event["event"] == "standing":
            self._standing_since = self._standing_since if self._standing else now
            self._standing[event["task"]] = event
        else:
            self._stalled_since = self._stalled_since if self._stalled else now
            self._stalled[event["task"]] = event

    def forget(self, task: str) -> None:
        self._standing.pop(task, None)
        self._stalled.pop(task, None)

    def clear(self) -> None:
        self._standing.clear()
        self._stalled.clear()

    def look(self, now: float) -> list[Event]:
        """Tells who stands where; returns the stalled that are to blame, as soon as that is clear."""
        if self._standing and now - self._standing_since > GATHER_SECS:
            self._tell_standing()
        found = users(self._stalled)
        if found or (self._stalled and now - self._stalled_since > BLAME_SECS):
            found = found or list(self._stalled.values())
            self._stalled.clear()
        return found

    def _tell_standing(self) -> None:
        """Those that stand in the user's code, if there are any: the others may wait for them."""
        places: dict[str, list[Event]] = {}
        for event in users(self._standing) or self._standing.values():
            places.setdefault(event["where"], []).append(event)
        for where, events in places.items():
            names, secs = ", ".join(event["task"] for event in events), min(event["secs"] for event in events)
            self._tell(f"{names}: in {where} for {secs:.0f} s")
        self._standing.clear()


def users(events: dict[str, Event]) -> list[Event]:
    return [event for event in events.values() if event.get("is_users")]
