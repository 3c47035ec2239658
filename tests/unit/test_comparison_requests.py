"""What `tf2dist.compare` is asked for: its contenders, its refusals, and the commands of the pages."""

import re
import shlex
from pathlib import Path

import pytest

from tests.compared import contenders
from tests.conftest import PAGES
from tests.unit.bad_requests import IN_A_STEP
from tf2dist import compare
from tf2dist.config.compose import ConfigSource
from tf2dist.errors import ConfigError
from tf2dist.tools.comparing.matrix import PARSERS, Contender, runs_of
from tf2dist.tools.comparing.running import earlier_plan, prepare_folder

SMALL = ("data=digits", "model=softmax")


def names(*arguments: str) -> list[str]:
    return [contender.name for contender in contenders(*SMALL, *arguments)[1]]


def override_of(contender: Contender, name: str) -> str:
    (match,) = (override for override in contender.overrides if override.startswith(f"{name}="))
    return match.partition("=")[2]


def test_the_default_contenders() -> None:
    assert names() == [
        "sync, equal workers",
        "sync, one worker 50 ms slower",
        "async, equal workers",
        "async, one worker 50 ms slower",
        "sync_replicas (1 backup), equal workers",
        "sync_replicas (1 backup), one worker 50 ms slower",
    ]


def test_every_mode_is_evaluated_after_as_many_examples() -> None:
    _, selected = contenders(*SMALL, "workers=4", "delays=[0]", "eval_every_examples=2000", "until=0.9")
    assert [
        (contender.mode, contender.batches, override_of(contender, "train.eval_every_steps")) for contender in selected
    ] == [
        ("sync", 4, "5"),
        ("async", 1, "20"),
        ("sync_replicas", 3, "7"),
    ]
    assert {override_of(contender, "train.until_accuracy") for contender in selected} == {"0.9"}


def test_the_last_worker_is_slow_and_others_are_not_delayed() -> None:
    even, slow = contenders(*SMALL, "modes=sync", "delays=0,0.02", "simulate.distribution=exponential")[1]
    assert not any(override.startswith("simulate.") for override in even.overrides)
    assert override_of(slow, "simulate.delay_secs") == "[0,0,0.02]"
    assert override_of(slow, "simulate.distribution") == "exponential"


def test_every_worker_has_the_common_delay() -> None:
    even, slow = contenders(*SMALL, "modes=sync", "delays=0,0.02", "common_delay=0.05")[1]
    assert override_of(even, "simulate.delay_secs") == "[0.05,0.05,0.05]"
    assert override_of(slow, "simulate.delay_secs") == "[0.05,0.05,0.07]"
    assert (even.name, slow.name) == ("sync, equal workers", "sync, one worker 20 ms slower")


def test_the_delays_of_a_file_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    settings = "simulate: {delay_secs: [0.036, 0.036, 0.036], distribution: exponential}"
    (tmp_path / "experiment" / "slow.yaml").write_text(f"# @package _global_\n{settings}\n")
    arguments = ["experiment=slow", "modes=sync", "delays=0,0.02"]
    source = ConfigSource(str(tmp_path))
    even, slow = (contender.config.simulate for contender in contenders(*SMALL, *arguments, source=source)[1])
    assert (even.delay_secs, even.distribution) == ([], "constant")
    assert (slow.delay_secs, slow.distribution) == ([0, 0, 0.02], "exponential")


def test_an_option_of_a_mode_is_given_to_that_mode_alone() -> None:
    result = contenders(*SMALL, "algorithm=plain,staleness_aware", "delays=0", "modes=[sync,async]", "seed=5")[1]
    assert [contender.mode_label for contender in result] == ["sync", "async", "async (algorithm=staleness_aware)"]
    assert [contender.config.algorithm.kind for contender in result] == ["plain", "plain", "staleness_aware"]
    assert [contender.config.seed for contender in result] == [5, 5, 5]


def test_other_options_make_scenarios() -> None:
    assert names("modes=sync", "delays=[0]", "train.batch_size_per_worker=10,20") == [
        "sync, equal workers, train.batch_size_per_worker=10",
        "sync, equal workers, train.batch_size_per_worker=20",
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ("momentum", 0.04, None)),
        (["optimizer.learning_rate=0.02"], ("momentum", 0.02, None)),
        (["++optimizer.clipnorm=1"], ("momentum", 0.04, 1.0)),
        (["optimizer=adam"], ("adam", 0.001, None)),
        (["experiment=dnn"], ("adam", 0.001, None)),
    ],
)
def test_the_optimizer_of_a_comparison(options: list[str], expected: tuple[str, float, float | None]) -> None:
    for contender in contenders(*SMALL, "modes=sync", "delays=0", *options)[1]:
        optimizer = contender.config.optimizer
        assert (optimizer["name"], optimizer["learning_rate"], optimizer["clipnorm"]) == expected


def test_the_contenders_take_turns() -> None:
    _, found = contenders(*SMALL, "modes=[sync,async]", "delays=[0]", "seed=3")
    runs = list(runs_of(found, 3))
    assert [(run.contender.mode, run.seed) for run in runs] == [
        ("sync", 3), ("async", 3), ("async", 4), ("sync", 4), ("sync", 5), ("async", 5),
    ]  # fmt: skip
    assert len({run.folder for run in runs}) == 6


@pytest.mark.parametrize(
    ("experiment", "ends", "length"),
    [
        ("cnn", ["until=50steps"], (50, None, None)),
        ("book_async", ["until=50steps"], (50, None, None)),
        ("cnn", ["until=30s"], (None, 10_000, 30)),
        ("book_async", ["until=30s"], (None, 10_000, 30)),
        ("cnn", ["until=0.9"], (None, 10, None)),
        ("book_async", ["until=0.9"], (82_500, None, None)),
        ("book_async", ["until=0.9", "train.epochs=5"], (None, 5, None)),
        ("book_async", ["until=30s", "train.epochs=5"], (None, 5, 30)),
    ],
)
def test_the_end_of_the_runs_replaces_the_length_in_a_file(
    experiment: str, ends: list[str], length: tuple[float | None, ...]
) -> None:
    options = (f"experiment={experiment}", *ends, "data=digits", "modes=async", "delays=0")
    train = contenders(*options)[1][0].config.train
    assert (train.steps, train.epochs, train.until_secs) == length


@pytest.mark.parametrize(
    ("until", "expected"),
    [
        *(("0.9", "train.until_accuracy=0.9"), ("30s", "train.until_secs=30"), ("50steps", "train.steps=50")),
        ("12345678steps", "train.steps=12345678"),
    ],
)
def test_the_end_of_the_runs(until: str, expected: str) -> None:
    assert expected in contenders(*SMALL, f"until={until}", "modes=sync", "delays=0")[1][0].overrides


REFUSED = [
    (["modes=[asink]"], "modes (asink): must be among async, sync, sync_replicas; did you mean async?"),
    (["modes=[]"], "modes ([]): must be a list such as modes=[sync,async]"),
    (["modes=sync,sync"], "modes (sync,sync): has a value twice"),
    (["delays=[0,slow]"], "delays ([0,slow]): must be seconds from 0 on"),
    (["delays=nan"], "delays (nan): must be seconds from 0 on"),
    (["common_delay=fast"], "common_delay (fast): must be seconds from 0 on, such as common_delay=0.05"),
    (["common_delay=0,0.1"], "common_delay (0,0.1): must be one number; give several to delays"),
    (["backups=[3]"], "backups (3): must be less than the 3 workers"),
    (["backups=[1]", "modes=sync"], "backups ([1]): is for mode sync_replicas; add it to modes"),
    (["until=2"], "until (2): must be an accuracy above 0 and up to 1"),
    (["until=fast"], "until (fast): must be"),
    (["until=0steps"], "until (0steps): must be"),
    (["seeds=0"], "seeds (0): must be a whole number from 1 to 100"),
    (["workers=1.5"], "workers (1.5): must be a whole number"),
    (["seed=1,2"], "seed (1): the runs of a contender have seeds in a row; give seeds=3"),
    (["mode=sync"], "mode (sync): is set by the comparison; give modes=[async,sync]"),
    (["cluster=local4"], "cluster (local4): is set by the comparison; give workers=3"),
    (["train.steps=5"], "train.steps (5): is set by the comparison; give until=2000steps"),
    (["run_dir=x"], "run_dir (x): is set by the comparison; give compare_dir=DIR"),
    (["train.epochs=2", "until=50steps"], "train.epochs: until=50steps is the end of the runs"),
    (["delay=[0]"], "delay: there is no such option; did you mean delays?"),
    (["train.stepz=5"], "train.stepz: there is no such option; did you mean train.steps?"),
    (["model=nope,dnn"], "model (nope): must be one of cnn, dnn"),
    (["algorithm=staleness_aware", "modes=sync"], "algorithm (staleness_aware): is for mode=async"),
    (["data=parabola", "modes=sync", "delays=0"], "until (0.95): data=parabola has no classes; give until=2000steps"),
    (["--json"], "--json: there is no such flag"),
    (["-m"], "--multirun: is not for a comparison"),
    (["-sc", "install=bash"], "--shell-completion: is not for a comparison"),
    (["train.batch_size_per_worker=1000"], "train.batch_size_per_worker (1000): each of 3 workers has only"),
]


CLICKS = (["data=clicks", "model=two_tower"], "until (0.95): data=clicks has no classes; give until=2000steps")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [*REFUSED, pytest.param(*CLICKS, marks=pytest.mark.thorough)],
    ids=[" ".join(arguments) for arguments, _ in (*REFUSED, CLICKS)],
)
def test_a_wrong_request_is_refused_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    data = [] if any(argument.startswith("data=") for argument in arguments) else ["data=digits"]
    with pytest.raises(SystemExit) as ended:
        compare.main([*data, *arguments])
    assert ended.value.code == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"tf2dist: error: {message}")
    assert stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_comparison_in_each_task_of_an_engine_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in IN_A_STEP.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        compare.main(["data=digits", "train.batch_size_per_worker=1000"])  # which is refused later
    assert ended.value.code == 2
    assert "cluster (slurm): an engine has started this process as one of several" in capsys.readouterr().err


def test_a_folder_of_another_comparison_is_refused(tmp_path: Path) -> None:
    def runs(*arguments: str) -> list[object]:
        return list(runs_of(contenders(*SMALL, "modes=sync", "delays=0", *arguments)[1], 2))

    prepare_folder(tmp_path / "a", runs("until=0.9"))  # type: ignore[arg-type]
    before = earlier_plan(tmp_path / "a")
    prepare_folder(tmp_path / "a", runs("until=0.9", "modes=async"))  # type: ignore[arg-type]
    assert earlier_plan(tmp_path / "a").items() > before.items(), "more contenders may join"
    with pytest.raises(ConfigError, match=r"is of another comparison \(train.until_accuracy=0.9 there, .*0.8 here\)"):
        prepare_folder(tmp_path / "a", runs("until=0.8"))  # type: ignore[arg-type]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").touch()
    with pytest.raises(ConfigError, match="has files, and is not of a comparison"):
        prepare_folder(tmp_path / "b", runs())  # type: ignore[arg-type]


TEXT = "\n".join(PAGES.values()).replace("\\\n", "")  # a command may go on in the next line
LINES = re.findall(r"^(?:\$ )?python -m tf2dist\.compare(.*)", TEXT, re.MULTILINE)


# The first one has no options: that is `test_the_default_contenders`.
@pytest.mark.parametrize(
    "line", [LINES[1], *(pytest.param(line, marks=pytest.mark.thorough) for line in (LINES[0], *LINES[2:]))]
)
def test_the_commands_of_the_pages_are_accepted(line: str) -> None:
    assert len(contenders(*shlex.split(line))[1]) > 2


def test_the_help_names_every_option() -> None:
    assert all(re.search(rf"^    {name}=", compare.__doc__ or "", re.MULTILINE) for name in PARSERS)
