"""Freed memory stays with a process that asked for that, and all its threads use it again."""

import os
import subprocess
import sys

from tf2dist.config.schema import DevicesConfig, RunConfig
from tf2dist.launch.launcher import environment_of

# Prints how many pages the kernel had to map for a block of 100 MB in a thread, after another one was freed.
A_BLOCK = """
import resource, sys, threading
import numpy as np
from tf2dist import linux

def allocate_twice():
    block = np.ones(100 << 20, np.uint8)
    del block
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = np.ones(100 << 20, np.uint8)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

if sys.argv[1] == "kept":
    linux.keep_freed_memory()
thread = threading.Thread(target=allocate_twice)
thread.start()
thread.join()
"""
# Prints the MB of the process after four threads, one after the other, have received 50 MB in pieces and freed them.
PIECES = """
import ctypes, re, threading
from tf2dist import linux

linux.keep_freed_memory()
libc, turn, end = ctypes.CDLL(None), threading.Lock(), threading.Barrier(4)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def receive():
    with turn:
        pieces = [libc.malloc(1 << 16) for _ in range(800)]
        for piece in pieces:
            ctypes.memset(piece, 1, 1 << 16)
        for piece in pieces:
            libc.free(piece)
    end.wait()

threads = [threading.Thread(target=receive) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(int(re.search(r"RssAnon:\\s*(\\d+)", open("/proc/self/status").read())[1]) >> 10)
"""


def printed_by(program: str, *arguments: str) -> int:
    """The number that a program prints in the environment of a task of a large model."""
    config = RunConfig(devices=DevicesConfig(onednn=True))
    command, environment = [sys.executable, "-c", program, *arguments], os.environ | environment_of(config)
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, env=environment)
    return int(done.stdout)


def test_a_block_that_was_freed_is_used_again() -> None:
    assert printed_by(A_BLOCK, "kept") * 10 < printed_by(A_BLOCK, "by default")


def test_what_one_thread_has_freed_serves_the_others() -> None:
    assert printed_by(PIECES) < 2 * 50 + 40
