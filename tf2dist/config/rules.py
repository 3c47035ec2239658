"""A rule as a value, and those for numbers. Without an end a number is a mistake, or a call that fails much later."""

import math
import re
from typing import Any

Rule = tuple[str, Any, bool, str]  # name, value, whether it holds, what must be

MAX_COUNT = 10**12  # of steps: far more than anyone trains, far less than 64 bits hold
MAX_SECS = 366 * 24 * 3600.0  # a year; the system's calls take no endless waits


def at_least_one(name: str, value: int | None) -> Rule:
    if value is None or value < 1:
        return (name, value, value is None, "must be at least 1")
    return (name, value, value <= MAX_COUNT, f"must be at most {MAX_COUNT:,}")


def positive_secs(name: str, value: float | None) -> Rule:
    if value is None:
        return (name, value, True, "")
    if MAX_SECS < value < math.inf:
        return (name, value, False, f"must be at most {MAX_SECS:.0f}, a year")
    return (name, value, 0 < value <= MAX_SECS, "must be more than 0 and finite")


def is_pattern(text: str | None) -> bool:
    try:
        re.compile(text or "")
    except (re.error, OverflowError, RecursionError):  # a{99999999999} and 3,000 brackets are the last two
        return False
    return True
