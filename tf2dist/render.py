"""``python -m tf2dist.render ENGINE [options]``

Prints the job script, manifest or program with which an engine starts this run. ENGINE is one of

    slurm         a script for sbatch
    kubernetes    an Indexed Job, for mode=sync
    jobset        a JobSet, for the modes with parameter servers
    trainjob      a TrainJob of Kubeflow Trainer 2, for mode=sync
    ray           a program for Ray Train
    compose       a file for Docker Compose, all on one machine

The options are those of python -m tf2dist, and become part of the command. cluster.num_workers and cluster.num_ps give
the number of tasks. Flags of the request itself:

    --command COMMAND   a program of your own that calls tf2dist.fit, such as "python train.py"; fit gets the options
    --name NAME         of the job (tf2dist)
    --restarts N        how often the engine starts lost tasks again (10)
    --gpus N            of each worker; with slurm and ray of each task
    --cpus N            the same for cores
    --memory SIZE       of each worker, such as 8Gi; not with slurm and ray
    --image IMAGE       that has tf2dist; not with slurm and ray
    --queue NAME        of Kueue, with kubernetes, jobset and trainjob
    --line LINE         with slurm, any number of times: one more line, such as '#SBATCH --partition=gpu'
    --out FILE          write it to a new file
    --submit            also hand it to sbatch, kubectl, ray job submit or docker compose, exactly as printed

    python -m tf2dist.render slurm mode=sync cluster.num_workers=8 --gpus 1 --line '#SBATCH --time=8:00:00' --submit
    python -m tf2dist.render jobset mode=async cluster.num_workers=8 cluster.num_ps=2 --out job.yaml
    python -m tf2dist.render slurm mode=sync cluster.num_workers=2 --command "python train.py" --submit
"""

import argparse
import contextlib
import functools
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tf2dist import files, signals
from tf2dist.cluster.sources import check_workers
from tf2dist.cluster.spec import Cluster
from tf2dist.config import for_fit
from tf2dist.config.compose import name_of
from tf2dist.config.flags import check_for_one_run, parse, source_of
from tf2dist.config.load import load
from tf2dist.config.schema import OPTIONS
from tf2dist.data.location import check_batch_size
from tf2dist.errors import ConfigError, TfDistError, nearest
from tf2dist.launch.console import show, show_lines
from tf2dist.launch.single_run import check_simulated, report
from tf2dist.tools.engines import docker_compose, kubernetes, ray, sbatch
from tf2dist.tools.engines.job_request import JobRequest

KUBECTL = ("kubectl", "apply", "--filename", "-")
OF_PODS = ("gpus", "cpus", "memory", "image", "queue")
# Options that the request sets, and that the user must not.
PLACES = tuple(name.removesuffix(".kind") for name, option in OPTIONS.items() if option.scope == "place")
MAX_TASKS = 10_000
COUNT = re.compile(r"[1-9][0-9]{0,4}")
# By flag: the form of its value.
FORMS = {
    "name": (re.compile(r"[a-z]([-a-z0-9]{0,30}[a-z0-9])?"), "small letters, digits and -, at most 32 of them"),
    "restarts": (re.compile(r"[0-9]{1,4}"), "a whole number"),
    "gpus": (COUNT, "a whole number from 1 on"),
    "cpus": (COUNT, "a whole number from 1 on"),
    "memory": (re.compile(r"[1-9][0-9]{0,6}(Mi|Gi|Ti)"), "a size such as 8Gi"),
    "image": (re.compile(r"[a-z0-9][\w./:@-]{0,400}"), "the name of an image"),
    "queue": (re.compile(r"[a-z0-9]([-a-z0-9.]{0,60}[a-z0-9])?"), "the name of a local queue"),
    "line": (re.compile(r"#SBATCH -[ -~]+"), "a line such as '#SBATCH --partition=gpu'"),
}
SHELL = re.compile(r"[;&|]+|\d?[<>]+(&\d)?|.*;")  # words that mean something to a shell alone
BUILT_IN = ("cd", "source", ".", "export")  # and commands
NUMBERS = ("restarts", "gpus", "cpus")


class Engine(NamedTuple):
    """An engine, and how to ask it."""

    render: Callable[[JobRequest], str]
    submit: Sequence[str]  # the command that takes the text from its standard input
    flags: Sequence[str]  # of those that not every engine has
    in_file: bool = False  # whether the last argument of that command is a file with the text instead


ENGINES = {
    "slurm": Engine(sbatch.render, ("sbatch",), ("gpus", "cpus", "line")),
    "kubernetes": Engine(kubernetes.render_job, KUBECTL, OF_PODS),
    "jobset": Engine(kubernetes.render_job_set, KUBECTL, OF_PODS),
    "trainjob": Engine(kubernetes.render_train_job, KUBECTL, OF_PODS),
    "ray": Engine(
        ray.render,
        ("ray", "job", "submit", "--no-wait", "--working-dir", ".", "--", "python"),
        ("gpus", "cpus"),
        in_file=True,
    ),
    "compose": Engine(
        docker_compose.render,
        ("docker", "compose", "--file", "-", "up", "--detach"),
        ("gpus", "cpus", "memory", "image"),
    ),
}


def main(argv: list[str] | None = None) -> NoReturn:
    """Prints one request, and exits: 2 if it is wrong, and with --submit the exit code of the engine's command."""
    signals.end_at_once()
    files.set_keras_home()
    try:
        sys.exit(run(sys.argv[1:] if argv is None else argv))
    except TfDistError as error:
        sys.exit(report(error))


def run(arguments: list[str]) -> int:
    """Prints, writes and submits what a command line asks for; returns the exit code.

    Raises:
        RequestError: it is wrong; nothing has been submitted.
        TfDistError: it cannot be printed; the same.
    """
    own, rest = flags(arguments)
    if own.help or not rest:
        show_lines((__doc__ or "").strip())
        return 0
    engine, request = read(own, rest)
    text = engine.render(request)
    if own.out:
        write(text, own.out)
    else:
        with contextlib.suppress(SystemExit):  # a reader who leaves early still wants the job to be submitted
            show(text)
    return submit(text, engine, has_files=bool(request.program)) if own.submit else 0


def flags(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags of the request, and all other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in FORMS:
        parser.add_argument(f"--{name}", action="append" if name == "line" else "store")
    parser.add_argument("--command")
    parser.add_argument("--out")
    parser.add_argument("--submit", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}; see --help")

    parser.error = refuse  # type: ignore[method-assign]
    return parser.parse_known_args(arguments)


def read(own: argparse.Namespace, rest: list[str]) -> tuple[Engine, JobRequest]:
    """The engine and the checked request."""
    name, *others = rest
    if name not in ENGINES:
        raise ConfigError(f"{name[:60]}: must be the name of an engine, {', '.join(ENGINES)}{nearest(name, ENGINES)}")
    asked = parse(others)
    check_for_one_run(asked, "is not for a request, which is for one run; leave it out")
    for override in asked.overrides:
        key, value = name_of(override), override.partition("=")[2]
        if key in PLACES:
            raise ConfigError(
                f"{key} ({value[:60]}): is set by the request; leave it out, and give cluster.num_workers"
            )
    num_workers, overrides = size(asked.overrides)
    source = source_of(asked)
    program = [] if own.command is None else program_of(own.command, [*source.flags(), *overrides])
    config = load([*overrides, "cluster=slurm"], None, source)
    request = JobRequest(
        config=config,
        arguments=[*source.flags(), *overrides],
        num_workers=num_workers,
        program=program,
        **values(own, name),
    )
    if len(request.tasks) > MAX_TASKS:
        raise ConfigError(f"cluster.num_ps ({config.cluster.num_ps}): makes more than {MAX_TASKS:,} tasks; give fewer")
    counts = Counter(task.job for task in request.tasks)
    cluster = Cluster(config.mode, {job: ("",) * count for job, count in counts.items()})
    check_workers(config, cluster)
    check_simulated(config, cluster)
    if not program:  # which brings its own data
        check_batch_size(config, cluster.num_workers)
    return ENGINES[name], request


def size(overrides: list[str]) -> tuple[int, list[str]]:
    """The number of workers, and all other options: the engine tells each task how many there are."""
    own = [override for override in overrides if name_of(override) == "cluster.num_workers"]
    text = own[-1].partition("=")[2] if own else OPTIONS["cluster.num_workers"].default_text
    if not COUNT.fullmatch(text) or int(text) > MAX_TASKS:
        raise ConfigError(f"cluster.num_workers ({text[:40]}): must be a whole number from 1 to {MAX_TASKS:,}")
    return int(text), [override for override in overrides if override not in own]


def program_of(command: str, arguments: list[str]) -> list[str]:
    """The words of the user's own command. Raises ConfigError, also for options that `fit` does not take from a job."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--command ({command[:60]}): cannot be read ({error}); close the quotes") from None
    if not words:
        raise ConfigError('--command: is empty; give a program that calls tf2dist.fit, such as "python train.py"')
    if signs := [word for word in words if SHELL.fullmatch(word) or words[0] in BUILT_IN]:
        raise ConfigError(
            f"--command ({command[:60]}): no shell reads it, so {signs[0]} would be a word for the program; give one "
            "program, or bash -c '... && exec python train.py'"
        )
    if words[1:3] == ["-m", "tf2dist"]:
        raise ConfigError(f"--command ({command[:60]}): is what runs without --command; leave it out")
    if flags := [argument for argument in arguments if argument.startswith("-")]:
        raise ConfigError(f"--command: {flags[0]} is for python -m tf2dist, and fit does not read it; leave it out")
    for_fit.check(arguments, "--command", for_fit.OF_JOB)
    return words


def values(own: argparse.Namespace, name: str) -> dict[str, Any]:
    """The values of the flags that are given."""
    flags: dict[str, Any] = {}
    for flag, (form, described) in FORMS.items():
        value = getattr(own, flag)
        if value is None:
            continue
        if flag not in ("name", "restarts", *ENGINES[name].flags):
            raise ConfigError(f"--{flag}: is not for {name}; leave it out")
        for text in value if flag == "line" else [value]:
            if not form.fullmatch(text):
                raise ConfigError(f"--{flag} ({' '.join(text.split())[:60]}): must be {described}")
        flags["lines" if flag == "line" else flag] = int(value) if flag in NUMBERS else value
    return flags


def write(text: str, path: str) -> None:
    with files.raising(f"--out ({path}): cannot be written", "name a new file", also=(ValueError,)):
        out = files.path_of("--out", path)
        file = out.open("x", encoding="utf-8")
        try:
            with file:
                file.write(text)
        except (OSError, ValueError):
            out.unlink()  # or the next try would be refused, as the file is there
            raise


def submit(text: str, engine: Engine, *, has_files: bool) -> int:
    """Hands over the text; returns the exit code of the command.

    Args:
        has_files: whether files in the working directory belong to the job, such as the user's program.
    """
    program = engine.submit[0]
    if not shutil.which(program):
        raise ConfigError(f"--submit: there is no {program} here; use --out FILE, and submit that where there is one")
    if not engine.in_file:
        return subprocess.run(engine.submit, input=text, text=True, check=False).returncode
    with contextlib.ExitStack() as stack:
        folder = Path.cwd() if has_files else stack.enter_context(signals.temporary_folder())
        with files.raising(f"--submit ({folder}): no file can be written here", "change to another folder"):
            number, name = tempfile.mkstemp(dir=folder, prefix="tf2dist-", suffix=".py")
            stack.enter_context(signals.cleaned_up(functools.partial(Path(name).unlink, missing_ok=True)))
            with open(number, "w", encoding="utf-8") as file:
                file.write(text)
        process = stack.enter_context(subprocess.Popen([*engine.submit, Path(name).name], cwd=folder))
        # With a signal it ends, too: the file that it hands over is gone then.
        stack.enter_context(signals.cleaned_up(process.terminate))
        return process.wait()


if __name__ == "__main__":
    main()
