"""Every command and program of README.md and of the pages in docs/ runs, and prints what is shown.

The blocks of a page run in their order, in one shell and in one folder. A block that an earlier page has, too, perhaps
with comments in another language, runs there. How outputs are compared is written in docs/development.md.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import BLOCKS, REPOSITORY, Block, ports_of_tasks, slowness
from tests.hosts import hosts
from tests.pods import Pod, Pods
from tests.shown import is_as_shown
from tests.twins import meaning

HOME = "/home/me"  # what pages show in place of the folder
# These take seconds. All other pages, and new ones, are slow.
MARKS = {
    page: [pytest.mark.timeout(240), pytest.mark.thorough] for page in ("README.md", "docs/engines.md", "docs/hosts.md")
}
# Without MNIST a local run trains on other data, and says so.
NEED_MNIST = {
    "README.md",
    "docs/compare.md",
    "docs/hosts.md",
    "docs/results.md",
    "docs/train_step.md",
}
# A page that uses the files of another one.
AFTER = {"docs/results.md": "README.md"}
# What does not run here, as a pattern of "page: command", with the test that runs it or the reason why none does.
ELSEWHERE = {
    r"^README\.md: make train": "tests/e2e/test_page_commands.py::test_make_train",
    r"^README\.md: make test": "not tested: it runs all tests",
    r"^README\.md: (python3 -m venv|pip install)": "tests/e2e/test_install.py::test_the_wheel",
    r"^docs/fit\.md: python stream\.py": "tests/e2e/test_docs.py::test_the_example_of_a_stream",
    r"^docs/fit_recipes\.md: python \w*tracke[rd]\.py": "tests/e2e/test_fit_recipes.py::test_a_tracker_has_one_run",
    r"^docs/api\.md: python \w+\.py": "tests/e2e/test_docs.py::test_the_example_of_the_fixtures",
    r": .*(=lion|=discounted|MYJOB_)": "tests/e2e/test_docs.py::test_the_examples_of_contributing",
    r"^CONTRIBUTING\.md: make ": "not tested: it runs all tests",
    r"^docs/recipes\.md: python -m tf2dist ": "tests/e2e/test_recipes.py::test_the_command_trains_to_the_end",
    r": host\d\$ ": "tests/e2e/test_page_commands.py::test_the_commands_of_several_hosts",
    r": (chief|ps\d|worker\d)\$ ": "tests/e2e/test_page_commands.py::test_a_terminal_for_each_task",
    r": nft ": "not tested: changes the firewall of the machine",
    r": srun .*:": "tests/e2e/test_slurm.py::test_a_heterogeneous_job",
    r": srun python": "tests/e2e/test_slurm.py::test_sync_with_two_workers",
    r": sbatch ": "tests/e2e/test_slurm.py::test_the_rendered_script_trains_on_four_nodes",
    r": cat slurm-7": "tests/e2e/test_slurm.py::test_the_program_of_the_page",
    r": ray job ": "tests/e2e/test_ray.py::test_async_on_three_nodes",
    r": (kubectl|podman) ": "tests/e2e/test_pods.py::test_sync_pods_train_to_the_end",
    r": docker ": "not tested: needs images in a registry",
}
# What is replaced in commands, so that they take less time or need no engine.
REPLACED = {
    " --submit": "",
    "width=128 mode=sync": "width=128 mode=sync data=digits train.steps=20",
    "experiment=wide": "experiment=wide data=digits",
    "seeds=3 until=0.98": "seeds=1 until=20steps data=digits",
    "until=2000steps": "until=20steps seeds=1 data=digits",
    "until=30s": "until=5s seeds=1 data=digits",
    "optimizer.learning_rate=0.2 seeds=1": "until=20steps seeds=1 data=digits",
}
# The beginning of a line of which the rest is decided by the speed of the machine: which mode is first.
DECIDED_BY_SPEED = r"^(With (?:equal workers|one worker [\w ]+ slower), ).*"
# The loss at a step: what it is when Ctrl-C is pressed is decided by the speed of the machine, too.
LOSS = re.compile(r"(?<=^step )(.*  loss )[\d.]+", re.MULTILINE)


class Command(NamedTuple):
    """A command, and what the page shows as its output, or None where the page does not say it."""

    text: str
    shown: str | None


def commands(block: Block) -> Iterator[Command]:
    """Those of a block for a shell. A prompt may begin with the name of a host."""
    text = block.text.replace("\\\n", "\\\0")  # the command goes on in the next line
    if block.language == "sh":
        found = [("", line, None) for line in text.splitlines() if not line.startswith("#")]
    elif block.language == "console":
        found = re.findall(r"^(\w*\$ )(.*)\n((?:(?!\w*\$ ).*\n)*)", text, re.MULTILINE)
    else:
        found = []
    for prompt, command, shown in found:
        yield Command(prompt.removeprefix("$ ") + command.replace("\0", "\n"), shown)


def file_of(block: Block) -> str:
    """The name that a file of the page has in its first line, which in a file for Hydra is the second; or nothing."""
    found = re.match(r"(?:# @package \w+\n)?# ([\w/]+\.(?:py|yaml))\n", block.text)
    return found[1] if found else ""


def steps(page: str) -> list[Command]:
    """What a page has to run: its commands, and the programs that these do not name."""
    blocks = [block for block in BLOCKS if block.page == page]
    named = " ".join(command.text for block in blocks for command in commands(block))
    earlier = {meaning(block) for block in BLOCKS[: BLOCKS.index(blocks[0])]}
    result: list[Command] = []
    for block in blocks:
        if meaning(block) in earlier:
            continue
        if block.language == "python" and file_of(block) not in named:
            result.append(Command(f"python {file_of(block)}", None))
        if block.language == "pycon":
            # It compares itself what is shown; TensorFlow writes to stderr.
            result.append(Command(f"python -m doctest -o ELLIPSIS /dev/stdin <<'END'\n{block.text}END", None))
        result += commands(block)
    return result


STEPS = {page: steps(page) for page in dict.fromkeys(block.page for block in BLOCKS)}
NAMED_STEPS = [f"{page}: {step.text}" for page, found in STEPS.items() for step in found]


def runs_here(page: str, step: Command) -> bool:
    return not any(re.search(pattern, f"{page}: {step.text}") for pattern in ELSEWHERE)


class Shell:
    """A bash that keeps its variables and its directory from one command to the next."""

    END = "\036"  # before the exit code of a command

    def __init__(self, folder: Path) -> None:
        added = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        env = {name: value for name, value in os.environ.items() if name not in ("TF_CPP_MIN_LOG_LEVEL", "TF_CONFIG")}
        self._folder = folder
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env=env | added,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._send("trap : INT")  # Ctrl-C is for the command

    def run(self, command: str, ctrl_c_after: str | None = None) -> tuple[str, int]:
        """What a command prints, and its exit code; Ctrl-C is pressed after a line like the one that is given."""
        assert self._bash.stdout
        self._send(f"{{ {command}\n}} </dev/null; printf '{self.END}%s\\n' $?")
        printed = ""
        for line in self._bash.stdout:
            text, end, code = line.partition(self.END)
            printed += text.replace(str(self._folder), HOME)
            if end:
                return printed, int(code)
            if ctrl_c_after is not None and is_as_shown(*(LOSS.sub(r"\1...", line) for line in (ctrl_c_after, text))):
                os.killpg(self._bash.pid, signal.SIGINT)
                ctrl_c_after = None
        raise AssertionError(f"the shell has ended in {command}\n{printed}")

    def _send(self, line: str) -> None:
        assert self._bash.stdin
        self._bash.stdin.write(f"{line}\n")
        self._bash.stdin.flush()

    def close(self) -> None:
        os.killpg(self._bash.pid, signal.SIGKILL)
        self._bash.communicate()


def run_page(page: str, folder: Path, shell: Shell) -> None:
    """Runs what a page has to run, in a folder with its files."""
    for block in BLOCKS:
        if block.page == page and file_of(block):
            path = folder / file_of(block)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
    for step in STEPS[page]:
        if runs_here(page, step):
            run_step(step, shell)


def run_step(step: Command, shell: Shell) -> None:
    text = step.text
    for part, other in REPLACED.items():
        text = text.replace(part, other)
    before, ctrl_c, after = (step.shown or "").partition("^C")
    printed, code = shell.run(text, before.splitlines()[-1] if ctrl_c else None)
    shown = re.sub(DECIDED_BY_SPEED, r"\1...", before + after, flags=re.MULTILINE)
    context = f"$ {text}\n{printed}--- exit code {code}; shown is\n{step.shown}"
    assert (code != 0) == ("tf2dist: error: " in shown), context
    if ctrl_c:
        shown, printed = (LOSS.sub(r"\1...", each) for each in (shown, printed))
    assert step.shown is None or is_as_shown(shown, printed), context


@pytest.fixture
def shell(tmp_path: Path, no_leftovers: Callable[[], None]) -> Iterator[Shell]:
    started = Shell(tmp_path)
    yield started
    started.close()


def marks(page: str) -> list[pytest.MarkDecorator]:
    return MARKS.get(page, [pytest.mark.timeout(1100), pytest.mark.slow])


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=marks(page))
        for page, found in STEPS.items()
        if any(runs_here(page, step) for step in found)
    ],
)
def test_what_a_page_shows(page: str, tmp_path: Path, shell: Shell, real_data: str) -> None:
    if page in NEED_MNIST and real_data != "mnist":
        pytest.skip("MNIST is not on this machine")
    if page in AFTER:
        run_page(AFTER[page], tmp_path, shell)
    run_page(page, tmp_path, shell)
    for block in BLOCKS:
        top, *names = block.text.splitlines()
        if block.page == page and block.language == "text" and re.fullmatch(r"[\w/]+/", top):
            missing = [name for name in names if not (tmp_path / top / name.split()[0]).exists()]
            assert not missing, "files that are shown in a directory"


def test_what_is_not_as_shown_is_found(shell: Shell) -> None:
    run_step(Command("export THREE=3", ""), shell)
    run_step(Command("echo $THREE", "3\n"), shell)
    run_step(Command("echo tf2dist: error: no; (exit 2)", "tf2dist: error: no\n"), shell)
    wrong = [("echo 4", "3\n"), ("true", "3\n"), ("echo 3", ""), ("false", None)]
    wrong.append(("echo tf2dist: error: no", "tf2dist: error: no\n"))
    for text, shown in wrong:
        with pytest.raises(AssertionError, match="exit code"):
            run_step(Command(text, shown), shell)


def test_ctrl_c_is_for_the_command_alone(shell: Shell) -> None:
    command = "python -c \"import time; print('step 1', flush=True); time.sleep(100)\" || echo error: $?"
    run_step(
        Command(command, "step 7\n^CTraceback (most recent call last):\n...\nKeyboardInterrupt\nerror: 130\n"), shell
    )
    run_step(Command("echo 3", "3\n"), shell)


def test_the_tables_are_about_what_is_there() -> None:
    assert set(STEPS) >= set(MARKS) | NEED_MNIST | set(AFTER) | set(AFTER.values())
    for pattern in ELSEWHERE:
        assert any(re.search(pattern, step) for step in NAMED_STEPS), pattern
    for part in REPLACED:
        assert any(part in step for step in NAMED_STEPS), part
    shown = [step.shown or "" for found in STEPS.values() for step in found]
    assert any(re.search(DECIDED_BY_SPEED, text, re.MULTILINE) for text in shown)
    for where in ELSEWHERE.values():
        path, _, name = where.partition("::")
        assert where.startswith("not tested: ") or f"def {name}(" in (REPOSITORY / path).read_text(), where


STAMP = REPOSITORY / ".venv" / ".installed"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not STAMP.exists(), reason="make would install everything first")
def test_make_train(tmp_path: Path, real_data: str) -> None:
    options = f"run_dir={tmp_path}/run data={real_data}"
    command = ["make", "-C", str(REPOSITORY), "train", f"ARGS={options}"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=580 * slowness(), check=False)
    assert completed.returncode == 0, completed.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["cluster"] == {"worker": 3, "ps": 1}


# What is added to the commands of several hosts.
SMALL = "data=digits model=softmax figure=false devices.onednn=false"
ROLES = ["task.type=chief task.index=0", "task.type=ps task.index=0", "task.type=worker task.index=0"]
# By a text in the block: the hosts, and the words that differ from host to host.
TASKS: dict[str, dict[str, str]] = {
    "python train.py": {"host1": "", "host2": ""},
    "cluster=tf_config\n\nhost2": {"host1": "", "host2": ""},
    "waiting for": {"host1": "", "host2": ""},
    "is refused": {"host1": "", "host2": ""},
    "cluster=hosts": dict(
        zip(["host0", "host1", "host2", "host3"], [*ROLES, "task.type=worker task.index=1"], strict=True)
    ),
    "host2$ python -m tf2dist mode=async cluster=ranks": {
        f"host{rank + 1}": f"cluster.rank={rank}" for rank in range(4)
    },
    "six_hosts=": {f"host{rank}": f"cluster.rank={rank}" for rank in range(6)},
}
CLUSTER = {"worker": ["host1:2222", "host2:2222"]}
TWO_HOSTS = [
    {"TF_CONFIG": json.dumps({"task": {"type": "worker", "index": index}, "cluster": CLUSTER})} for index in (0, 1)
]
HOST_BLOCKS = [block for block in BLOCKS if block.page == "docs/hosts.md" and re.match(r"host\d\$ ", block.text)]


def of_several_hosts(part: str, options: str) -> tuple[dict[str, Pod], dict[str, str]]:
    """Every host with its script, and what is shown of its output. Hosts that are not shown have their own words."""
    (block,) = [block for block in HOST_BLOCKS if part in block.text]
    texts: dict[str, str] = {}
    shown: dict[str, str] = {}
    for step in commands(block):
        host, _, text = step.text.partition("$ ")
        texts[host] = texts.get(host, "") + text + (f" {SMALL} {options}\n" if "tf2dist" in text else "\n")
        shown[host] = shown.get(host, "") + (step.shown or "")
    words = TASKS[part]
    first = next(iter(texts))
    assert words[first] in texts[first]
    scripts = {host: texts.get(host, texts[first].replace(words[first], own)) for host, own in words.items()}
    env = {"TF2DIST_TOKEN": "of sixteen or more characters", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return {host: Pod(host, host, ["bash", "-c", script], env, {}) for host, script in scripts.items()}, shown


def test_every_block_of_several_hosts_is_run() -> None:
    assert sorted(part for block in HOST_BLOCKS for part in TASKS if part in block.text) == sorted(TASKS)
    assert len(HOST_BLOCKS) == len(TASKS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fit_on_two_hosts(tmp_path: Path) -> None:
    (program,) = [block for block in BLOCKS if block.page == "docs/hosts.md" and file_of(block) == "train.py"]
    (tmp_path / "train.py").write_text(program.text)
    pods, shown = of_several_hosts("python train.py", "")
    with hosts(len(pods)) as made:
        run = Pods(made, tmp_path, list(pods.values()))
        run.start_all()
        assert set(run.codes().values()) == {0}, str(run)
        for host in pods:
            assert is_as_shown(shown[host], run.running[host].output.replace(str(tmp_path), HOME)), str(run)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("part", "codes"), [("waiting for", {"host1": 138}), ("is refused", {"host1": 138, "host2": 2})]
)
def test_hosts_that_wait_or_differ(part: str, codes: dict[str, int], tmp_path: Path) -> None:
    pods, shown = of_several_hosts(part, f"startup_timeout_secs=20 run_dir={tmp_path}/runs/$HOSTNAME")
    with hosts(2) as made:
        placed = [pod._replace(env=pod.env | task) for pod, task in zip(pods.values(), TWO_HOSTS, strict=True)]
        run = Pods(made, tmp_path, placed)
        for place, host in enumerate(pods):
            run.publish(host, place)
        for place, host in enumerate(codes):
            run.start(host, place)
        assert run.codes() == codes, str(run)
        for host in codes:
            assert is_as_shown(shown[host], run.running[host].output), str(run)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", [part for part in TASKS if "cluster=" in part])
def test_the_commands_of_several_hosts(part: str, tmp_path: Path) -> None:
    pods, _ = of_several_hosts(part, f"train.steps=200 run_dir={tmp_path}/runs/$HOSTNAME")
    with hosts(len(pods)) as made:
        run = Pods(made, tmp_path, list(pods.values()))
        run.start_all()
        assert set(run.codes().values()) == {0}, str(run)
    (summary,) = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/summary.json")]
    assert summary["global_step"] == summary["updates_applied"] == 200
    assert summary["cluster"] == {"worker": 2, "ps": 0 if "tf_config" in part else 1}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_that_join_later(tmp_path: Path) -> None:
    delays = "simulate.delay_secs=[0.05,0.05,0.05,0.05]"
    pods, shown = of_several_hosts("six_hosts=", f"train.steps=1000 {delays} run_dir={tmp_path}/runs/$HOSTNAME")
    with hosts(len(pods)) as made:
        run = Pods(made, tmp_path, list(pods.values()))
        for place in (0, 1, 2, 3):
            run.publish(f"host{place}", place)
        for place in (0, 1, 2, 3):
            run.start(f"host{place}", place)
        run.wait("the run begins", lambda: "\nstep " in run.running["host0"].output)
        run.start("host4", 4)
        assert set(run.codes().values()) == {0}, str(run)
        assert is_as_shown(f"{shown['host0']}...", run.running["host0"].output), str(run)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_terminal_for_each_task(tmp_path: Path) -> None:
    page = "docs/coming_from/tf1.md"
    (program,) = [block for block in BLOCKS if block.page == page and block.language == "python"]
    (terminals,) = [block for block in BLOCKS if block.page == page and "\nchief$ " in block.text]
    text, shown = program.text, ""
    for number, port in zip(range(2221, 2226), ports_of_tasks(5), strict=True):
        text = text.replace(f":{number}", f":{port}")
    (tmp_path / file_of(program)).write_text(text)
    started: list[subprocess.Popen[str]] = []
    for step in commands(terminals):
        words = [sys.executable, *step.text.partition("$ python ")[2].split()]
        pipe, both = subprocess.PIPE, subprocess.STDOUT
        started.append(subprocess.Popen(words, cwd=tmp_path, stdout=pipe, stderr=both, text=True))
        shown = (step.shown or "").replace(":2221", ":...")
    printed = [process.communicate(timeout=500)[0] for process in started]
    assert [process.returncode for process in started] == [0] * 5, printed
    assert is_as_shown(shown, printed[-1].replace(str(tmp_path), HOME)), printed[-1]
