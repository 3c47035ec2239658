"""What the processes of a run say to each other."""

from collections.abc import Callable
from typing import Any

Send = Callable[[dict[str, Any]], None]  # takes one packet from a task to its launcher
