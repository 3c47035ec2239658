"""The configuration: defaults, choices, and one line for each mistake."""

import contextlib
import json
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hydra
import pytest
from hydra.core.hydra_config import HydraConfig
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.scripted import host_run
from tf2dist import cli
from tf2dist.config import decode, for_fit
from tf2dist.config.checks import check
from tf2dist.config.load import load
from tf2dist.config.schema import RunConfig
from tf2dist.errors import ConfigError
from tf2dist.launch.host_tasks import payload_of
from tf2dist.linux import without_warnings

TF_CONFIG = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'


def test_defaults() -> None:
    config = load([], None)
    assert (config.mode, config.cluster.kind, config.cluster.num_workers, config.data.name) == (
        "async",
        "local",
        3,
        "mnist",
    )
    assert config.train.batch_size_per_worker == 100


def test_the_last_value_of_an_option_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """As in any command line; scripts append to their fixed options."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["--cfg", "job", "train.steps=5", "mode=async", "train.steps=6", "mode=sync"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert "steps: 6" in output
    assert "mode: sync" in output


@pytest.mark.parametrize(
    ("options", "length"),
    [
        (["experiment=book_async"], (82_500, None)),
        (["experiment=book_async", "train.epochs=5"], (None, 5)),
        (["experiment=book_async", "train.epochs=null"], (82_500, None)),
        (["experiment=cnn", "train.steps=7"], (7, None)),
        (["experiment=cnn", "train.steps=null"], (None, 10)),
    ],
)
def test_the_length_of_the_command_line_replaces_that_of_a_file(
    options: list[str], length: tuple[int | None, float | None]
) -> None:
    train = load(options, None).train
    assert (train.steps, train.epochs) == length


def test_tf_config_chooses_the_cluster() -> None:
    assert load([], TF_CONFIG).cluster.kind == "tf_config"
    assert load(["cluster=ranks", "mode=sync"], TF_CONFIG).cluster.kind == "ranks"


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_local_clusters_have_that_many_workers(number: int) -> None:
    assert load([f"cluster=local{number}"], None).cluster.num_workers == number


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw", "adagrad", "rmsprop"])
def test_optimizers(name: str) -> None:
    assert load([f"optimizer={name}", "optimizer.learning_rate=0.5"], None).optimizer["learning_rate"] == 0.5


def test_experiments() -> None:
    book = load(["experiment=book_sync"], None)
    assert (book.mode, book.model["name"], book.train.steps) == ("sync", "softmax", 27500)


def test_yaml_and_back() -> None:
    config = load(["model=cnn", "train.steps=5", "cluster.num_ps=2"], None)
    assert decode.from_yaml(config.to_yaml()) == config


def test_a_task_gets_the_configuration_as_json(tmp_path: Path) -> None:
    """It is read in each task of every start, and YAML takes thirty times as long."""
    config = load(["model=cnn", "train.steps=5", "optimizer.learning_rate=1e-7"], None)
    run = host_run(config, tmp_path)
    payload = json.loads(json.dumps(payload_of(run, *run.place)))
    assert decode.to_dataclass(RunConfig, payload["config"]) == config


def test_threads_compose_side_by_side_in_a_program_that_uses_hydra_itself(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine: 1\n")

    def run_dir(number: int) -> str | None:
        return load([f"seed={number}", f"hydra.job.name=j{number}", "run_dir=${seed}/${hydra:job.name}"], None).run_dir

    with hydra.initialize_config_dir(str(tmp_path), version_base="1.2"), ThreadPoolExecutor(4) as threads:
        before = HydraConfig.instance().cfg, hydra.version.getbase(), list(warnings.filters)
        assert list(threads.map(run_dir, range(12))) == [f"{number}/j{number}" for number in range(12)]
        assert (HydraConfig.instance().cfg, hydra.version.getbase(), list(warnings.filters)) == before
        assert hydra.compose("config").mine == 1


def test_the_filters_of_warnings_are_put_back_by_threads_side_by_side() -> None:
    is_inside, may_leave = threading.Event(), threading.Event()

    def ignore_too() -> None:
        with without_warnings("b"):
            is_inside.set()
            may_leave.wait()

    before = list(warnings.filters)
    other = threading.Thread(target=ignore_too)
    with without_warnings("a"):
        other.start()
        is_inside.wait(0.2)
    may_leave.set()
    other.join()
    assert warnings.filters == before


def test_names_of_plugins_are_accepted(tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text("")
    config = load([f"plugins=[{plugin}]", "model=mine", "+model.width=3"], None)
    assert config.model == {"name": "mine", "width": 3}


def test_a_plugin_has_options_of_any_kind(tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text("")
    arguments = ["model=mine", "+model.act=gelu", "+model.acts=[relu,gelu]", "+model.wide=true", "+optimizer.kind=lion"]
    config = load([f"plugins=[{plugin}]", *arguments, "data=mine", "+data.size=3", "+data.kind=[a,b]"], None)
    assert config.model == {"name": "mine", "act": "gelu", "acts": ["relu", "gelu"], "wide": True}
    assert config.optimizer["kind"] == "lion"
    assert config.data.arguments == {"size": 3, "kind": ["a", "b"]}
    assert config.as_tree()["data"]["size"] == 3
    assert decode.from_yaml(config.to_yaml()) == config


def test_a_plugin_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my own.py").write_text("")
    for text in ("[~/my own.py]", "['~/my own.py']"):
        assert load([f"plugins={text}"], None).plugins == [str(tmp_path / "my own.py")]


def test_a_whole_number_is_accepted_for_a_rate() -> None:
    """Keras refuses an int for a rate."""
    config = load(["optimizer.learning_rate=1", "optimizer.clipnorm=2", "model=cnn", "model.dropout=0"], None)
    numbers = [config.optimizer["learning_rate"], config.optimizer["clipnorm"], config.model["dropout"]]
    assert list(map(repr, numbers)) == ["1.0", "2.0", "0.0"]


BAD = [
    (["train.stepss=5"], "train.stepss: there is no such option; did you mean train.steps?"),
    (["stepss=5"], "stepss: there is no such option; did you mean train.steps?"),
    (["checkpoint.name=x"], "checkpoint.name: there is no such option"),
    (["name=foo"], "name: there is no such option; "),
    (["plugins=[tests/conftest.py]", "model=cnn", "model.dropuot=0.3"], "did you mean model.dropout?"),
    (["plugins=[tests/conftest.py]", "model=wide", "++model.width=1", "stepss=5"], "did you mean train.steps?"),
    (["epsilon=3"], "epsilon: there is no such option; did you mean optimizer.epsilon?"),
    (["keras=3"], "keras (3): holds several options; give them one by one, see --help"),
    (["expermient=book_async"], "did you mean experiment?"),
    (["optimizer.momentum=0.9"], "there is no such option; optimizer.momentum is an option of optimizer=momentum and"),
    (["momentum=0.9"], "momentum: there is no such option; optimizer.momentum is an option of optimizer=momentum and"),
    (["steps=100"], "did you mean train.steps?"),
    (["batch_size=32"], "did you mean train.batch_size_per_worker?"),
    (["optimizer.lr=0.1"], "there is no such option; it has learning_rate, schedule, "),
    (["lr=0.1"], "lr: there is no such option; see --help"),
    (["plugins=[tests/conftest.py]", "model=wide", "model.width=1"], "write +model.width if a plugin of yours has it"),
    (["+model.width=1"], "model.width: is not an option of model=dnn; it has hidden_units"),
    (["model.hidden_units=300,50"], "is several values; write a list in brackets, model.hidden_units=[300,50]"),
    (["plugins=[~/mine.py]"], "plugins (~/mine.py): there is no such Python file"),
    (["+data.size=3"], "data.size: is not an option of data=mnist; it has dir, offline, num_validation, "),
    (["optimizer.learning_rate=fast", "plugins=[tests/conftest.py]"], "must be a number, true or false, or null"),
    (
        ["+model.x={a: 1}", "model=x", "plugins=[tests/conftest.py]"],
        "must be a number, a word, true, false, null, or a",
    ),
    (["mode=sync", "cluster.num_ps=3"], "cluster.num_ps (3): is for modes with a ps; leave it out"),
    (
        ["sync_replicas.replicas_to_aggregate=2"],
        "sync_replicas.replicas_to_aggregate (2): is for mode=sync_replicas; add that",
    ),
    (
        ["mode=sync", "cluster.placement=balanced"],
        "cluster.placement (balanced): is for modes with a ps; leave it out",
    ),
    (
        ["cluster.placement=balanced", "cluster.min_part_bytes=1000"],
        "cluster.min_part_bytes (1000): is for cluster.placement=partitioned; add that",
    ),
    (["cluster.all_reduce=tensorflow"], "cluster.all_reduce (tensorflow): is for mode=sync; leave it out"),
    (
        ["mode=sync_replicas", "cluster.transfer_dtype=bfloat16"],
        "cluster.transfer_dtype (bfloat16): is not for mode=sync_replicas; leave it out",
    ),
    (
        ["mode=sync", "algorithm=local_sgd", "cluster.transfer_dtype=float16"],
        "cluster.transfer_dtype (float16): is not for algorithm=local_sgd; leave it out",
    ),
    (["cluster.transfer_dtype=int8"], "cluster.transfer_dtype (int8): must be one of float32, bfloat16, float16"),
    (["seed=glob(*)"], "seed (glob(*)): is several values; give one of them"),
    (["seed=1,2"], "seed (1,2): is several values; give one of them, or add --multirun for a run of each"),
    (["train.steps=0"], "train.steps (0): must be at least 1"),
    (["train.epochs=0"], "train.epochs (0.0): must be more than 0"),
    (["train.epochs=nan"], "train.epochs (nan)"),
    (["train.epochs=1", "train.steps=5"], "give one of the two"),
    (["train.batch_size_per_worker=0"], "train.batch_size_per_worker (0)"),
    (["train.log_every_steps=0"], "train.log_every_steps (0)"),
    (["train.eval_every_steps=0"], "train.eval_every_steps (0)"),
    (["train.steps_per_execution=0"], "train.steps_per_execution (0)"),
    (["cluster.num_workers=0"], "cluster.num_workers (0)"),
    (["cluster.num_ps=0"], "cluster.num_ps (0): mode=async keeps the variables on parameter servers"),
    (["mode=asynch"], "mode (asynch): must be one of async, sync, sync_replicas; did you mean async?"),
    (["experiment=regression", "data.points=0"], "data.points (0): must be a whole number from 1 to 1,000,000"),
    (["experiment=regression", "data.noise=-1"], "data.noise (-1): must be at least 0"),
    (
        ["experiment=clicks", "data.num_items=3e9"],
        "data.num_items (3000000000.0): must be a whole number from 1 to 2,147,",
    ),
    (["experiment=regression", "model.units=2.5"], "model.units (2.5): must be a whole number"),
    (["model=cnnn"], "model (cnnn): must be one of cnn, dnn, softmax, tanh, two_tower; did you mean cnn?"),
    (["data.offline=maybe"], "data.offline (maybe)"),
    (["data.num_validation=-1"], "data.num_validation (-1)"),
    (["data.download_timeout_secs=0"], "data.download_timeout_secs (0.0)"),
    (["devices.gpu_memory_fraction=2"], "devices.gpu_memory_fraction (2.0)"),
    (["devices.precision=int8"], "devices.precision (int8)"),
    (["devices.precision=float16"], "devices.precision (float16): needs a scale of the loss that all gradients decide"),
    (["cluster.placement=greedy"], "cluster.placement (greedy): must be one of round_robin, balanced, partitioned"),
    (["cluster.placement=partitioned", "cluster.min_part_bytes=0"], "cluster.min_part_bytes (0): must be at least 1"),
    (["cluster.all_reduce=gloo"], "cluster.all_reduce (gloo): must be one of auto, nccl, tf2dist, tensorflow"),
    (["model=null"], "model (null): must be one of"),
    (["model.name=null"], "model.name=null: is set by another option; choose with model=NAME"),
    (["mode=sync", "cluster.worker=[a:1,b:1]"], "cluster.worker (['a:1', 'b:1']): is for cluster=hosts"),
    (["task.type=worker", "task.index=0"], "task.type (worker): is for cluster=hosts; add that"),
    (["optimizer.schedule=linear"], "optimizer.schedule (linear): must be constant or cosine"),
    (["optimizer.learning_rate=fast"], "optimizer.learning_rate (fast): must be more than 0"),
    (["optimizer.learning_rate=0"], "optimizer.learning_rate (0): must be more than 0"),
    (["optimizer.learning_rate=null"], "optimizer.learning_rate (None)"),
    (["model.hidden_units=[10,0]"], "model.hidden_units ([10, 0])"),
    (["seed=-1"], "seed (-1)"),
    (["startup_timeout_secs=0"], "startup_timeout_secs (0.0)"),
    (["grace_secs=-1"], "grace_secs (-1.0)"),
    (["steps"], "steps: cannot be read"),
    (["train.steps=[1"], "train.steps=[1: cannot be read"),
]


# Those of which one of the same kind is above, or is shown by another test of what refuses it.
BAD_AGAIN = [
    (["train.steps=-5"], "train.steps (-5): must be at least 1"),
    (["train.steps=abc"], "train.steps (abc): must be a whole number"),
    (["train.steps=1.5"], "train.steps (1.5): must be a whole number"),
    (["train.epochs=inf"], "train.epochs (inf)"),
    (["train.epochs=many"], "train.epochs (many): must be a number"),
    (["devices.xla=maybe"], "devices.xla (maybe): must be true or false"),
    (
        ["mode=sync", "cluster.placement=partitioned"],
        "cluster.placement (partitioned): is for modes with a ps; leave it out",
    ),
    (["task=worker"], "task (worker): holds several options; give them one by one"),
    (["optimizer=sgd,adam"], "is several values; give one of them"),
    (["optimizer=choice(sgd,adam)"], "is several values; give one of them"),
    (
        ["optimizer.learning_rate=choice(0.1,0.2)"],
        "learning_rate (choice(0.1,0.2)): is several values; give one of them",
    ),
    (["model.dropout=0.3"], "model.dropout is an option of model=cnn"),
    (["plugins=[tests/conftest.py]", "data=mine", "data.num_validaton=3"], "did you mean data.num_validation?"),
    (["plugins=[tests/conftest.py]", "data=mine", "data.size=3"], "write +data.size if a plugin of yours has it"),
    (["plugins=[/nowhere.py]"], "plugins (/nowhere.py): there is no such Python file"),
    (["optimizer=adamm"], "did you mean adam?"),
    (["data=minst"], "did you mean mnist?"),
    (["cluster=locl3"], "did you mean local3?"),
    (["model=_target_"], "model (_target_)"),
    (["mode=null"], "mode (null): must be one of"),
    (["+_target_=os.system"], "_target_"),
    (["+model._target_=os.system"], "model._target_"),
]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [*BAD, *(pytest.param(*bad, marks=pytest.mark.thorough) for bad in BAD_AGAIN)],
    ids=[" ".join(overrides) for overrides, _ in BAD + BAD_AGAIN],
)
def test_each_mistake_is_named(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(overrides, None)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


def test_all_broken_rules_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check(RunConfig(seed=-1, grace_secs=0))
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("options", [["cluster=local3"], ["cluster=hosts", "task.type=worker", "task.index=0"]])
def test_a_cluster_inside_another_cluster_is_refused(options: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"TF_CONFIG is set.*; give cluster=tf_config, or unset TF_CONFIG to "):
        load(options, TF_CONFIG)


@settings(deadline=None, max_examples=20)
@given(st.text(max_size=40))
def test_any_override_is_either_accepted_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        load([text], None)


def test_the_parent_never_imports_tensorflow() -> None:
    code = "import sys, tf2dist.cli; sys.exit(sum(m in sys.modules for m in ('tensorflow', 'keras', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_what_depends_on_the_moment_is_composed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that calls `fit` twice has two times, and may have changed its working directory."""
    first, second = (load(["run_dir=run-${now:%H%M%S%f}"], None).run_dir for _ in range(2))
    assert first != second
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert load(["run_dir=${hydra:runtime.cwd}/run"], None).run_dir == f"{tmp_path}/{name}/run"


@pytest.mark.parametrize("name", ["20260101_120000", "2024_01", "1.50", "1e3", "true", "No", "nan", "007"])
def test_a_path_that_looks_like_another_value_stays_as_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `run_dir=$(date +%Y%m%d_%H%M%S)` does."""
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    config = load([f"run_dir={name}", f"data.dir={name}", f"init_from={name}"], None)
    assert (config.run_dir, config.data.dir, config.init_from) == (name, name, str(tmp_path / name))


@pytest.mark.parametrize("text", [r"hidden[\d]+", r"a\b: c", r"it's a\'b", "[a\\"])
def test_a_backslash_of_a_text_stays_as_it_is(text: str) -> None:
    assert load([f"run_dir={text}"], None).run_dir == text
    assert load(for_fit.listed(for_fit.joined([f"run_dir={text}"])), None).run_dir == text, "for calls of fit"


def test_the_run_directory_has_another_name() -> None:
    assert load(["hydra.run.dir=runs/${mode}", "mode=sync"], None).run_dir == "runs/sync"
    assert load(["hydra.run.dir=20260101_120000"], None).run_dir == "20260101_120000"
    with pytest.raises(ConfigError, match=r"hydra\.run\.dir \(a\): is another name of run_dir, which is b; give one"):
        load(["hydra.run.dir=a", "run_dir=b"], None)


def test_null_is_no_path() -> None:
    assert load(["data.dir=null"], None).data.dir is None
