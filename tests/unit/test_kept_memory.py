"""Freed memory stays with a process that asked for that."""

import subprocess
import sys

# Prints how many pages the kernel had to map for a block of 100 MB, after another one was freed.
PROGRAM = """
import resource, sys
import numpy as np
from tf2dist import linux
if sys.argv[1] == "kept":
    linux.keep_freed_memory()
block = np.ones(100 << 20, np.uint8)
del block
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
block = np.ones(100 << 20, np.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages_mapped(how: str) -> int:
    command = [sys.executable, "-c", PROGRAM, how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)


def test_a_block_that_was_freed_is_used_again() -> None:
    assert pages_mapped("kept") * 10 < pages_mapped("by default")
