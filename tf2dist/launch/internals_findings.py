"""The doctor's check of a TensorFlow or Keras of an untested version, in a process of its own."""

import json
import subprocess
from collections.abc import Iterator

from tf2dist.launch.machine import Finding
from tf2dist.launch.plugin_findings import run_with_tensorflow
from tf2dist.requirements import untested

INTERNALS_TIMEOUT_SECS = 40.0
# Ends when the doctor ends, for whatever reason; the last line says what is missing.
TRY_INTERNALS = """
import json, os, sys
from tf2dist.linux import die_with_parent
die_with_parent(os.getppid())
from tf2dist.process import tf_internals
print(json.dumps(tf_internals.missing()))
sys.stdout.flush()
os._exit(0)
"""


def of_internals() -> Iterator[Finding]:
    """Whether the private names that are used still exist; nothing for tested versions, in which they do."""
    if not (packages := " and ".join(untested(["tensorflow", "keras"]))):
        return
    try:
        done = run_with_tensorflow(TRY_INTERNALS, timeout_secs=INTERNALS_TIMEOUT_SECS)
        missing = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        text = f"{packages} could not be checked within {INTERNALS_TIMEOUT_SECS:.0f} s"
        yield Finding("warn", "versions", text, "try again when this machine is idle")
        return
    # No JSON at the end of the output: the import failed, and its exception is the last line of stderr.
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        yield Finding("fail", "versions", f"{packages} cannot be used ({last[:150]})", "install a tested version")
        return
    # Each line is an error message: the text, a semicolon, the way out.
    for line in missing:
        text, _, fix = line.rpartition("; ")
        yield Finding("fail", "versions", text, fix)
    if not missing:
        yield Finding("ok", "versions", f"{packages} has all internals that tf2dist uses")
