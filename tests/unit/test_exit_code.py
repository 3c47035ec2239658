"""The exit code of a script whose call of `fit` has failed."""

import os
import pty
import subprocess
import sys

import pytest

SCRIPT = """
from tf2dist import errors
from tf2dist.fitting.exit_code import give_to_script
give_to_script()
give_to_script()
raise {error}
"""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("errors.TaskLostError('worker-1: is gone')", 138),
        ("errors.LeaderLostError('the leader is gone')", 139),
        ("errors.FitError('mode (x): is wrong')", 2),
        ("ValueError('of the user')", 1),
        ("SystemExit(7)", 7),
    ],
)
def test_a_script_ends_with_the_code_of_an_error_that_it_does_not_catch(error: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(error=error)], capture_output=True, text=True)
    assert done.returncode == code
    if code != 7:
        # Shown once, as without tf2dist.
        assert done.stderr.count("Traceback") == 1
        kind, _, text = error.partition("('")
        assert f"{kind.removeprefix('errors.')}: {text.removesuffix(chr(39) + ')')}\n" in done.stderr


def test_pythons_own_prompt_goes_on_after_an_error() -> None:
    ours, its = pty.openpty()
    with os.fdopen(ours, "r+b", buffering=0) as screen, os.fdopen(its) as terminal:
        given = f"{SCRIPT.format(error='errors.FitError(None)').strip()}\nprint(6 * 7)\n\x04"
        screen.write(given.encode())
        simple = {**os.environ, "TERM": "dumb"}  # without it newer Pythons draw their prompt with escape sequences
        done = subprocess.run([sys.executable, "-q"], stdin=terminal, stdout=subprocess.PIPE, env=simple, timeout=60)
    assert done.returncode == 0
    assert b"42" in done.stdout.split()
