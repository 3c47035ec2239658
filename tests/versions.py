"""make versions: private names, equality with Keras and a run of each mode, on other releases of TensorFlow and Keras.

Each set of releases has an environment in build/versions, which stays for the next time. What passed becomes its row in
the table of docs/versions.md; the rows of sets that are not run stay as they are.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime

from packaging.requirements import Requirement

from tests.conftest import REPOSITORY

PAGE = REPOSITORY / "docs" / "versions.md"
FOLDER = REPOSITORY / "build" / "versions"
NAMED = ("tensorflow", "keras", "hydra-core")
TESTING = ("pytest>=9", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis", "pandas>=2.2")
SETS = {
    "oldest": "the lower bounds of pyproject.toml",
    "locked": "requirements.lock",
    "newest": "what pip finds, pre-releases included",
    "nightly": "keras-nightly, on the newest TensorFlow",
}
PRE_RELEASES = {"newest": "keras", "nightly": "keras-nightly"}  # by set, the package of Keras
# By the head of a column. Each is a call of pytest of its own, as one that hangs must not hide the others.
RUNS = {
    "private names": ["tests/replica/test_missing_api.py", "-k", "nothing_is_missing"],
    "like Keras": ["tests/replica/test_like_keras.py"],
    "public reports": ["tests/replica/test_public_reports.py"],
    "async": ["tests/e2e/test_train.py", "-k", "test_the_main_command and async"],
    "sync": ["tests/e2e/test_train.py", "-k", "test_the_main_command and not async"],
    "sync_replicas": ["tests/e2e/test_old_runs.py", "-k", "sync_replicas"],
}
HEADS = ("releases", "Python", "TensorFlow", "Keras", "Hydra", "NumPy", "date", *RUNS)
LIMIT_SECS = 1800
VERSIONS = """
import platform
from importlib.metadata import version
from tf2dist.tf_constants import installed_version
names = [installed_version("tensorflow"), installed_version("keras"), version("hydra-core"), version("numpy")]
print(platform.python_version(), *names)
"""


def requirements() -> list[Requirement]:
    """What the package needs, as pyproject.toml says."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return [Requirement(line) for line in project["dependencies"]]


def lowest(requirement: Requirement) -> str:
    """The oldest release that a requirement allows, with its last correction."""
    (bound,) = (one.version for one in requirement.specifier if one.operator == ">=")
    return f"{requirement.name}=={bound}" + ".*" * (bound.count(".") == 1)


def packages(name: str) -> list[str]:
    """The arguments of pip for a set of releases."""
    needed = requirements()
    others = [str(one) for one in needed if one.name not in (*NAMED, "omegaconf")]
    if name == "oldest":
        return [*(lowest(one) for one in needed if one.name in NAMED), *others, *TESTING]
    return ["--pre", *NAMED, "omegaconf", *others, *TESTING]  # pip chooses pre-releases of the others, too


def environment(name: str) -> str:
    """The interpreter of a set of releases, whose environment is made if it is not there."""
    if name == "locked":
        return sys.executable
    folder = FOLDER / name
    python, made = str(folder / "bin" / "python"), folder / "made"
    if not made.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *packages(name)], check=True)
        if name in PRE_RELEASES:
            # TensorFlow's pre-releases require keras-nightly, whose module is that of keras: each replaces the other.
            subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "keras", "keras-nightly"], check=True)
            subprocess.run([*pip, "--pre", "--no-deps", PRE_RELEASES[name]], check=True)
        subprocess.run([*pip, "--no-deps", "--editable", str(REPOSITORY)], check=True)
        made.touch()
    return python


def outcome(code: int, output: str) -> str:
    """A cell of the table for a call of pytest."""
    last = output.splitlines()[-1]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", last)}
    return ", ".join(f"{number} {word}" for word, number in counts.items()) or f"ended with {code}"


def run(name: str) -> list[str]:
    """The row of a set of releases."""
    python = environment(name)
    told = subprocess.run([python, "-c", VERSIONS], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    cells = [name, *told.stdout.split(), f"{datetime.now(UTC):%Y-%m-%d}"]
    for head, arguments in RUNS.items():
        log = FOLDER / f"{name}, {head}.log"
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        try:
            done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_SECS)
            cells.append(outcome(done.returncode, done.stdout or "\n"))
            log.write_text(done.stdout + done.stderr)
        except subprocess.TimeoutExpired:
            cells.append(f"not done in {LIMIT_SECS} s")
        print(f"{name}: {head}: {cells[-1]}", flush=True)
    return cells


def merged(text: str, rows: Sequence[Sequence[str]]) -> str:
    """The page with these rows in its table, in the order of `SETS`."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(f"| {HEADS[0]} |"))
    end = next((number for number, line in enumerate(lines) if number > first and not line.startswith("|")), len(lines))
    found = {line.strip("| ").split(" | ")[0]: line for line in lines[first + 2 : end]}
    found |= {row[0]: f"| {' | '.join(row)} |" for row in rows}
    table = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|", *(found[name] for name in SETS if name in found)]
    return "\n".join([*lines[:first], *table, *lines[end:]]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make versions", description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("sets", nargs="*", metavar="set", help=f"by default all of {', '.join(SETS)}")
    chosen = parser.parse_args().sets or list(SETS)
    if unknown := set(chosen) - SETS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: choose of {', '.join(SETS)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = [run(name) for name in chosen]
    PAGE.write_text(merged(PAGE.read_text(), rows))
    return 0 if all(re.fullmatch(r"\d+ passed", cell) for row in rows for cell in row[-len(RUNS) :]) else 1


if __name__ == "__main__":
    sys.exit(main())
