"""Commands for Python processes of our own, which import from where this process does, without its secrets."""

import json
import os
import sys

SECRETS = ("TF2DIST_TOKEN", "TF2DIST_TOKEN_FILE")  # the token of a job's control connections, or its file

SAME_PATH = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1))\n"
CALL_MAIN = "import importlib; importlib.import_module(sys.argv.pop(1)).main()"


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that calls the `main` of a module, which finds `arguments` behind ``sys.argv[0]``.

    Unlike ``python -m MODULE`` it does not look for modules in the working directory, where anybody's keras.py may lie.
    """
    return code_command(CALL_MAIN, module, *arguments)


def code_command(code: str, *arguments: str) -> list[str]:
    """The same for a piece of code."""
    path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
    return [sys.executable, "-P", "-c", SAME_PATH + code, path, *arguments]


def child_environment() -> dict[str, str]:
    """The environment without the token: these processes run users' code, and others may read theirs."""
    return {name: value for name, value in os.environ.items() if name not in SECRETS}
