"""Commands and environments of child Python processes: the same module path as here, without the secrets."""

import json
import os
import sys

SECRETS = ("TF2DIST_TOKEN", "TF2DIST_TOKEN_FILE")  # the token of a job's control connections, or its file

SAME_PATH = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1))\n"
CALL_MAIN = "import importlib; importlib.import_module(sys.argv.pop(1)).main()"


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that calls the `main` of a module, with `arguments` in ``sys.argv[1:]``.

    Unlike ``python -m MODULE`` it does not import from the working directory, where there may be some other keras.py.
    """
    return code_command(CALL_MAIN, module, *arguments)


def code_command(code: str, *arguments: str) -> list[str]:
    """The command that runs a piece of code, with `arguments` in ``sys.argv[1:]``."""
    path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
    return [sys.executable, "-P", "-c", SAME_PATH + code, path, *arguments]


def child_environment() -> dict[str, str]:
    """This process's environment without the job token, since child processes run the user's code."""
    return {name: value for name, value in os.environ.items() if name not in SECRETS}
