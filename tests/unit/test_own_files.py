"""A folder of the user's own, and values that name other options."""

from pathlib import Path

import pytest

from tf2dist import cli
from tf2dist.config.compose import ConfigSource
from tf2dist.config.load import load
from tf2dist.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    files = {
        "conf/experiment/mine.yaml": "# @package _global_\ndefaults:\n  - override /optimizer: sgd\n"
        "train: {steps: 40, log_every_steps: '${train.steps}'}\n",
        "conf/experiment/mine/deeper.yaml": "# @package _global_\nseed: 5\n",
        "conf/experiment/wrong.yaml": "# @package _global_\ntrain: {stepss: 40}\n",
        "conf/experiment/lost.yaml": "# @package _global_\ndefaults: [{override /model: none_such}]\n",
        "conf/experiment/bare.yaml": "train: {steps: 40}\n",
        "conf/experiment/torn.yaml": "# @package _global_\ntrain:\n  steps: [40\n",
        "conf/experiment/env.yaml": "# @package _global_\nrun_dir: ${oc.env:A_FOLDER}/${oc.select:nothing,x}\n",
        "conf/experiment/ranked.yaml": "# @package _global_\ndefaults: [{override /cluster: ranks}]\n",
        "conf/experiment/five.yaml": "# @package _global_\ncluster: {num_workers: 5}\n",
        "conf/model/small.yaml": "name: dnn\nhidden_units: [7, 8]\n",
        "conf/model/cnn.yaml": "name: dnn\nhidden_units: [1]\n",
        "conf/model/listed.yaml": "name: [a]\n",
        "conf/model/nameless.yaml": "units: 3\n",
        "conf/length/short.yaml": "# @package _global_\ntrain: {steps: 3}\n",
        "conf/mine.yaml": "defaults: [config, _self_]\nseed: 9\n",
        "conf/bare.yaml": "seed: 9\n",
        "conf/without_self.yaml": "defaults: [config]\nseed: 9\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


OWN = ConfigSource("conf")


def test_an_own_experiment(folder: Path) -> None:
    config = load(["experiment=mine"], None, OWN)
    assert (config.optimizer["name"], config.train.steps, config.train.log_every_steps) == ("sgd", 40, 40)
    assert load(["experiment=mine", "train.steps=7"], None, OWN).train.log_every_steps == 7
    assert load(["experiment=mine/deeper"], None, OWN).seed == 5
    assert load(["experiment=book_sync"], None, OWN) == load(["experiment=book_sync"], None)


def test_an_own_experiment_chooses_the_cluster_before_tf_config_does(folder: Path) -> None:
    text = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
    assert load(["experiment=ranked", "mode=sync"], text, OWN).cluster.kind == "ranks"
    assert load(["experiment=ranked", "cluster=tf_config"], text, OWN).cluster.kind == "tf_config"
    assert load(["experiment=mine"], text, OWN).cluster.kind == "tf_config"
    with pytest.raises(ConfigError, match=r"cluster \(local\): .* give cluster=tf_config, or unset TF_CONFIG to train"):
        load(["experiment=staleness"], text)


def test_the_workers_in_a_file_are_those_of_a_local_cluster(folder: Path) -> None:
    assert load(["experiment=five"], None, OWN).cluster.num_workers == 5
    assert load(["experiment=five", "cluster=slurm"], None, OWN).cluster.kind == "slurm"
    with pytest.raises(ConfigError, match=r"cluster.num_workers \(5\): is not for cluster=slurm, which says it itself"):
        load(["cluster.num_workers=5", "cluster=slurm"], None, OWN)


def test_an_own_choice(folder: Path) -> None:
    assert load(["model=small"], None, OWN).model == {"name": "dnn", "hidden_units": [7, 8]}
    assert load(["+length=short"], None, OWN).train.steps == 3


@pytest.mark.filterwarnings("error")
def test_an_own_choice_of_a_plugin_is_the_file_alone(folder: Path) -> None:
    (folder / "mine.py").touch()
    assert load(["plugins=[mine.py]", "model=small"], None, OWN).model == {"name": "dnn", "hidden_units": [7, 8]}


def test_of_two_files_with_one_name_ours_is_taken_as_with_hydra(folder: Path) -> None:
    assert load(["model=cnn"], None, OWN).model["name"] == "cnn"


def test_an_own_beginning(folder: Path) -> None:
    config = load(["train.steps=4"], None, ConfigSource("conf", "mine"))
    assert (config.seed, config.train.steps, config.model["name"]) == (9, 4, "dnn")


@pytest.mark.parametrize(
    ("overrides", "source", "words"),
    [
        (
            ["model=listed", "plugins=[conf/mine.yaml]"],
            OWN,
            "model (['a']): must be a name of letters, digits, _ . and",
        ),
        (["model=nameless"], OWN, "model: its file lacks a name; add a line such as name: mine"),
        (
            ["model=smal"],
            OWN,
            "must be one of cnn, dnn, listed, nameless, small, softmax, tanh, two_tower; did you mean small?",
        ),
        (["experiment=mien"], OWN, "mine, ranked, regression, staleness, torn, wrong; did you mean mine?"),
        (
            ["experiment=wrong"],
            OWN,
            "train.stepss (in experiment/wrong.yaml): there is no such option; did you mean train.st",
        ),
        (
            ["experiment=lost"],
            OWN,
            "model (none_such): must be one of cnn, dnn, listed, nameless, small, softmax, tanh, two_tower (in exper",
        ),
        (["length=short"], OWN, "length (short): is not a group of tf2dist; write +length=short for one of yours"),
        (["+length=long"], OWN, "length (long): must be one of short"),
        (["experiment=mine"], ConfigSource(), "experiment (mine): must be one of book_async, book_sync, clicks, cnn"),
        (
            ["experiment=bare"],
            OWN,
            'experiment.train (in experiment/bare.yaml): there is no such option; begin the file with "# @package _gl',
        ),
        (["experiment=torn"], OWN, "conf/experiment/torn.yaml, line 4: cannot be read (expected"),
        ([], ConfigSource("conf", "bare"), 'begin the file with "defaults: [config, _self_]"'),
    ],
)
def test_what_is_wrong_has_a_line(folder: Path, overrides: list[str], source: ConfigSource, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(overrides, None, source)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("run_dir=runs/${model.name}-${seed}", "run_dir", "runs/dnn-3"),
        ("init_layers='hidden[${seed}]'", "init_layers", "hidden[3]"),
        ("grace_secs=${checkpoint.every_secs}", "grace_secs", 600.0),
        ("max_restarts=${.seed}", "max_restarts", 3),
        ("max_restarts=${model.hidden_units[1]}", "max_restarts", 50),
        ("run_dir=${oc.env:TF2DIST_NOT_SET,here}", "run_dir", "here"),
    ],
)
def test_a_value_names_other_options(override: str, name: str, value: object) -> None:
    config = load([override, "init_from=.", "seed=3"], None)
    assert getattr(config, name) == value
    assert "${" not in config.to_yaml()


def test_a_list_names_other_options() -> None:
    assert load(["model.hidden_units=[${seed},4]", "seed=3"], None).model["hidden_units"] == [3, 4]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    output = capsys.readouterr()
    assert ended.value.code == 0, output.err
    assert output.err == ""
    return output.out


def test_a_file_without_self_counts_and_nothing_is_said_about_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(capsys, "--cfg", "job", "-p", "seed", "-cd", "conf", "-cn", "without_self") == "9\n"


def test_a_part_of_the_configuration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--config-dir", "conf", "experiment=mine"]
    part = shown(capsys, "--cfg", "job", "-p", "train", *own)
    assert part.startswith("# @package train\nsteps: 40\n")
    assert "log_every_steps: ${train.steps}\n" in part
    assert "log_every_steps: 40\n" in shown(capsys, "-c", "job", "-p", "train", "--resolve", *own)
    assert shown(capsys, "-c", "job", "--package=train.log_every_steps", "--resolve", *own) == "40\n"
    assert shown(capsys, "--cfg", "job", "-p", "_global_", *own) == shown(capsys, "--cfg", "job", *own)


def test_where_the_configuration_comes_from(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["-cd=conf", "-cn=mine", "experiment=mine", "model=small"]
    path = shown(capsys, "--info", "searchpath", *own)
    assert f"| command-line | file://{folder}/conf" in path
    tree = shown(capsys, "--info", "defaults-tree", *own)
    assert "\n    config:\n      tf2dist_options\n      mode: async\n" in tree
    assert "\n      model: small\n      optimizer: sgd\n" in tree
    assert "| experiment/mine " in shown(capsys, "--info", "defaults", *own)
    assert "seed: 9\n" in shown(capsys, "--info", "config", *own)
    assert "    chdir: false\n" in shown(capsys, "--cfg", "hydra", *own)


def test_an_own_folder_may_come_first(folder: Path) -> None:
    first = ConfigSource(path="conf")
    assert load(["model=cnn"], None, first).model["hidden_units"] == [1]
    assert load([], None, ConfigSource(name="mine", path="conf")).seed == 9


def test_files_use_all_resolvers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_FOLDER", "here")
    assert load(["experiment=env"], None, OWN).run_dir == "here/x"
