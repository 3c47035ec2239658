"""make versions: private names, equality with Keras and a run of each mode, on other releases of TensorFlow and Keras.

Each set of releases has an environment in build/versions, which stays for the next time. What passed becomes its row in
the table of docs/versions.md; the rows of sets that are not run stay as they are. A set with another Python is run
where that is on the PATH.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from packaging.requirements import Requirement

from tests.conftest import REPOSITORY

PAGE = REPOSITORY / "docs" / "versions.md"
FOLDER = REPOSITORY / "build" / "versions"
NAMED = ("tensorflow", "keras", "hydra-core")
TESTING = ("pytest>=9", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis", "pandas>=2.2")


@dataclass(frozen=True)
class Releases:
    """A set of releases.

    Attributes:
        about: what they are, for the help.
        python: the interpreter; by default that of the development environment.
        is_oldest: whether the named packages are at the lower bounds of pyproject.toml, instead of within its ranges.
        keras: the package of Keras where pre-releases are taken and pyproject.toml's upper bounds do not hold.
    """

    about: str
    python: str = sys.executable
    is_oldest: bool = False
    keras: str | None = None


LOCKED = "locked"  # needs no environment of its own
SETS = {
    "oldest": Releases("the lower bounds of pyproject.toml", is_oldest=True),
    LOCKED: Releases("requirements.lock"),
    "newest": Releases("what pip finds, pre-releases included", keras="keras"),
    "nightly": Releases("keras-nightly, on the newest TensorFlow", keras="keras-nightly"),
    "python3.12": Releases("what pip finds in the ranges of pyproject.toml", python="python3.12"),
    "python3.13": Releases("the same on Python 3.13", python="python3.13"),
    "python3.14": Releases("as newest, on Python 3.14", python="python3.14", keras="keras"),
}
NOT_HERE = "not here"
# By the head of a column. Each is a call of pytest of its own, as one that hangs must not hide the others.
RUNS = {
    "private names": ["tests/replica/test_missing_api.py", "-k", "nothing_is_missing"],
    "like Keras": ["tests/replica/test_like_keras.py"],
    "public reports": ["tests/replica/test_public_reports.py"],
    "async": ["tests/e2e/test_train.py", "-k", "test_the_main_command and async and real"],
    "sync": ["tests/e2e/test_train.py", "-k", "test_the_main_command and not async and real"],
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


def packages(releases: Releases) -> list[str]:
    """The arguments of pip for a set of releases."""
    needed = requirements()
    if releases.keras:
        others = [str(one) for one in needed if one.name not in (*NAMED, "omegaconf")]
        return ["--pre", *NAMED, "omegaconf", *others, *TESTING]  # pip chooses pre-releases of the others, too
    is_lowest = {one.name: releases.is_oldest and one.name in NAMED for one in needed}
    return [*(lowest(one) if is_lowest[one.name] else str(one) for one in needed), *TESTING]


def is_here(releases: Releases) -> bool:
    """Whether its interpreter can be run: a version manager may have a program of that name that runs nothing."""
    try:
        return subprocess.run([releases.python, "-c", ""], capture_output=True).returncode == 0
    except OSError:
        return False


def environment(name: str) -> str:
    """The interpreter of a set of releases, whose environment is made if it is not there."""
    releases = SETS[name]
    if name == LOCKED:
        return releases.python
    folder = FOLDER / name
    python, made = str(folder / "bin" / "python"), folder / "made"
    if not made.exists():
        subprocess.run([releases.python, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *packages(releases)], check=True)
        if releases.keras:
            # TensorFlow's pre-releases require keras-nightly, whose module is that of keras: each replaces the other.
            subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "keras", "keras-nightly"], check=True)
            subprocess.run([*pip, "--pre", "--no-deps", releases.keras], check=True)
        own = ["--no-deps", "--ignore-requires-python", "--editable", str(REPOSITORY)]  # a Python that is not promised
        subprocess.run([*pip, *own], check=True)
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
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *arguments]
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
    not_run = " | ".join([NOT_HERE, *["-"] * (len(HEADS) - 2)])
    found = {name: f"| {name} | {not_run} |" for name in SETS} | found
    table = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|", *(found[name] for name in SETS)]
    return "\n".join([*lines[:first], *table, *lines[end:]]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make versions", description=str(__doc__).partition("\n\n")[0])
    told = "; ".join(f"{name}: {releases.about}" for name, releases in SETS.items())
    parser.add_argument("sets", nargs="*", metavar="set", help=f"by default all ({told})")
    asked = parser.parse_args().sets
    if unknown := set(asked) - SETS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: choose of {', '.join(SETS)}")
    missing = [name for name in asked or SETS if not is_here(SETS[name])]
    if asked and missing:
        parser.error(f"{', '.join(missing)}: there is no such Python on the PATH")
    print(*(f"{name}: {NOT_HERE}" for name in missing), sep="\n", end="\n" * bool(missing), flush=True)
    chosen = [name for name in asked or SETS if name not in missing]
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in chosen:
        rows.append(run(name))
        PAGE.write_text(merged(PAGE.read_text(), rows))
    return 0 if all(re.fullmatch(r"\d+ passed", cell) for row in rows for cell in row[-len(RUNS) :]) else 1


if __name__ == "__main__":
    sys.exit(main())
