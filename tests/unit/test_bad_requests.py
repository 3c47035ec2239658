"""Whole requests that are wrong, through the real door: exit code 2, at most three lines, and nothing made."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit import test_config
from tf2dist import cli
from tf2dist.data import location
from tf2dist.launch import start

LONG = [*(f"+model.a{i}={'x' * 4000}" for i in range(10)), "plugins=[{files}/empty.py]"]
HOSTS = ["mode=sync", "cluster=hosts", "task.type=worker", "task.index=0"]
ADDRESS = "TF_CONFIG: worker 0 ({}): must be host:port"
TOO_MANY = ",".join(f'"h{i}:99999"' for i in range(5000))


def tf_config(addresses: Any, task: Any = None) -> str:
    return json.dumps({"cluster": {"worker": addresses}, "task": task or {"type": "worker", "index": 0}})


# {files} stands for a folder with: file, loop (a link to itself), folder.py, broken.py, bytes.py.
OPTIONS: list[tuple[list[str], str]] = [
    # Numbers.
    (["seed=1e99"], "seed (1e+99): must be a whole number"),
    (["seed=99999999999999999999999"], "must be from 0 to 2147483647"),
    (["seed=" + "9" * 4000], "seed"),
    (["seed=" + "9" * 5000], "is longer than 4096 characters"),
    (["seed="], "seed (): must be a whole number"),
    (["seed=nan"], "seed (nan): must be a whole number"),
    (["seed=null"], "seed (null): must be a whole number"),
    (["seed=true"], "seed (True): must be a whole number"),
    (["seed=\uff15"], "cannot be read"),
    (["train.steps=99999999999999999999"], "train.steps (99999999999999999999): must be at most 1,000,000,000,000"),
    (["train.steps=[5]"], "train.steps ([5]): must be a whole number"),
    (["train.steps={a: 1}"], "must be a whole number"),
    (["train.epochs=1e308"], "must be at most 1,000,000"),
    (["train.epochs=1" + "0" * 309], "must be a number of at most 308 digits; give fewer"),
    (["optimizer.learning_rate=1" + "0" * 309], "at most 308 digits"),
    (["model.hidden_units=[1" + "0" * 309 + "]"], "at most 308 digits"),
    (["grace_secs=-1" + "0" * 309], "at most 308 digits"),
    (["train.epochs=-inf"], "must be more than 0"),
    (["train.batch_size_per_worker=null"], "train.batch_size_per_worker (null): must be a whole number"),
    (["train.batch_size_per_worker=99999999999999999"], "must be at most"),
    (["startup_timeout_secs=1e400"], "startup_timeout_secs (inf): must be more than 0 and finite"),
    (["startup_timeout_secs=1e300"], "a year"),
    (["startup_timeout_secs=60s"], "startup_timeout_secs (60s): must be a number"),
    (["grace_secs=nan"], "grace_secs (nan)"),
    (["data.num_validation=60000"], "data.num_validation (60000): data=mnist has 60000 examples"),
    (["data=digits", "data.num_validation=1436"], "use fewer workers"),
    (["cluster.num_workers=99999999999999"], "must be at most"),
    (["cluster.num_workers=100"], "cluster.num_workers (100): a local cluster has at most 64 tasks"),
    (["cluster.num_ps=100"], "cluster.num_ps (100): a local cluster has at most 64 tasks"),
    (["mode=sync", "cluster.num_ps=-5"], "cluster.num_ps (-5): must be at least 0"),
    # Arguments of models and optimizers.
    (["model.hidden_units=5"], "must be a list such as [300,50]"),
    (["model.hidden_units=[1.5]"], "whole numbers"),
    (["model.hidden_units=[300,fifty]"], "must be a list such as [300,50]"),
    (["optimizer.learning_rate=fast"], "optimizer.learning_rate (fast): must be more than 0"),
    (["model.hidden_units=[1e99]"], "whole numbers"),
    (["model.hidden_units=[true]"], "whole numbers"),
    (["model.hidden_units=[99999999999]"], "up to 1,000,000"),
    (["model.hidden_units=" + "[" * 500 + "]" * 500], "model.hidden_units"),
    (["model=cnn", "model.dropout=1"], "model.dropout (1): must be at least 0 and less than 1"),
    (["model=cnn", "model.dropout=null"], "model.dropout (None)"),
    (["++task=null"], "task (null): holds two options"),
    (["++task=3"], "task (3): holds two options"),
    (["profile=2"], "profile (2): must be true or false"),
    (["devices.xla=0.5"], "devices.xla (0.5): must be true or false"),
    (["experiment=cnn", "model=dnn"], "it has hidden_units; experiment=cnn gives it"),
    (["experiment=dnn", "+model.foo=1"], "model.foo: is not an option of model=dnn; it has hidden_units\n"),
    (["model=cnn", "model.batch_norm=7"], "model.batch_norm (7): must be true or false"),
    (["optimizer.learning_rate=true"], "must be more than 0"),
    (["optimizer.learning_rate=[0.1]"], "must be more than 0"),
    (["optimizer.learning_rate=inf"], "must be a finite number"),
    (["optimizer.beta_1=2"], "must be at least 0 and less than 1"),
    (["optimizer.beta_2=nan"], "must be a finite number"),
    (["optimizer.epsilon=-1"], "must be more than 0"),
    (["optimizer.clipnorm=-1"], "must be more than 0, or null"),
    (["optimizer.amsgrad=5"], "must be true or false"),
    (["optimizer.schedule=[a]"], "must be constant or cosine"),
    # Choices and forms that are none.
    (["mode="], "mode (): must be one of async, sync"),
    (["mode=async,sync"], "must be one of"),
    (["mode=асинх"], "must be one of"),
    (["мода=async"], "cannot be read"),
    (["model={name: cnn}"], "must be one of"),
    (["model=/etc/passwd"], "must be one of"),
    (["model=../config"], "must be one of"),
    (["model=plugin"], "model.name (???): is missing"),
    (["model.name=../../x"], "choose with model=NAME"),
    (["++data.name=xyz"], "choose with data=NAME"),
    (["+model={name: ../../x}"], "leave out the +"),
    (["cluster.kind=foo"], "choose with cluster=NAME"),
    (["train=5"], "train (5): holds several options"),
    (["++mode=sync"], "leave out the +"),
    (["+model." + "x" * 4000 + "=1"], "model.xxxx"),
    (["+foo=1"], "foo: there is no such option"),
    (["~mode"], "options cannot be removed"),
    (["~optimizer.name"], "options cannot be removed"),
    (["hydra.run.dir=elsewhere"], "there is no such option"),
    (["hydra/launcher=basic"], "there is no such option"),
    (["model@data=cnn"], "there is no such option"),
    (["--multirn"], "--multirn: there is no such flag; did you mean --multirun?"),
    (["-sc", "install=tcsh"], "--shell-completion (install=tcsh): must be install=bash or uninstall=bash; write eval"),
    (["-m", "--cfg"], "--cfg: cannot be combined with --multirun; leave out one of them"),
    # Sweeps.
    (["-m", "mode=sync,asnc"], "mode (asnc): must be one of async, sync; did you mean async? (in job 1 of the sweep: "),
    (["-m", "mode=async,sync", "cluster.num_ps=2"], "cluster.num_ps (2): is for mode=async; leave it out (in job 1"),
    (["-m", "data=digits", "train.batch_size_per_worker=100,2000"], "(in job 1 of the sweep: data=digits train.batch"),
    (["-m", "seed=range(1000000000)"], "--multirun: would make more than 1,000 jobs; sweep over fewer values"),
    (["-m", "seed=shuffle(range(1000000000))"], "would make more than 1,000 jobs"),
    (["-m", "seed=range(100)", "max_restarts=range(100)"], "would make more than 1,000 jobs"),
    (["-m", "seed=range(1,1)"], "seed (range(1,1)): has no values; give at least one"),
    (["-m", "seed=glob(*)"], "seed (glob(*)): has no values; give at least one"),
    (["-m", "seed=range(0,1,0)"], "seed (range(0,1,0)): cannot be counted"),
    (["-m", "seed=interval(0,1)"], "seed (interval(0,1)): has no single values"),
    (["-m", "seed=[1"], "seed=[1: cannot be read"),
    (["-m", "stepss=3,4"], "stepss: there is no such option; did you mean train.steps? (in job 0"),
    (["-m", "run_dir=a,b"], "run_dir (a,b): each job of a sweep has its own; give hydra.sweep.dir=DIR"),
    (["-m", "cluster=local1,hosts"], "cluster (hosts): "),
    (["-m", "hydra/launcher=joblib"], "there is no such option"),
    (["-m", "hydra.sweep.dir=${x}"], "hydra.sweep.dir (${x}): only the time may be inserted"),
    (["-m", "hydra.sweep.dir="], "hydra.sweep.dir (): is not a valid name of a directory"),
    (["-m", "hydra.sweep.dir={files}"], "is the directory of one run; name another directory"),
    (["-m", "hydra.sweep.dir={files}/file"], "file): cannot be written"),
    (["-m", "seed=1,2", "hydra.sweep.subdir=x"], "hydra.sweep.subdir (x): is the same for two jobs"),
    (["-m", "seed=1,2", "hydra.sweep.subdir=../${hydra.job.num}"], "must be a folder in that of the sweep"),
    (["-m", "hydra.sweep.subdir=${oc.env:HOME}"], "only ${hydra.job.num} and ${hydra.job.override_dirname} may"),
    (["hydra.sweep.dir=x"], "hydra.sweep.dir=x: there is no such option; it is for --multirun; add that"),
    (["--config-path=x"], "--config-path=x: is not supported; conf/ is part of tf2dist; add a folder of your own with"),
    (["-cp", "x"], "-cp: is not supported"),
    (["--hydra-help"], "--hydra-help: is not supported"),
    (["--experimental-rerun=x"], "is not supported"),
    (["--config-dir"], "--config-dir: needs a value; give --config-dir DIR"),
    (["-cn", "--cfg"], "--config-name: needs a value"),
    (["--config-dir={files}/nowhere"], "nowhere): there is no such folder"),
    (["-cd", "{files}/file"], "there is no such folder"),
    (["-cd", "{files}", "-cn", "cfg"], "has broken, config; did you mean"),
    (["-cd", "{files}", "-cn", "broken"], "broken.yaml (in "),
    (["-cn", "mine"], "--config-name (mine): there is no such file; add --config-dir DIR"),
    (["-cn", "../conf/config"], "there is no such file"),
    (["-cn", "x" * 5000], "there is no such file"),
    (["-cn", "a\x00b"], "there is no such file"),
    (["--cfg", "hydra"], "--cfg (hydra): must be job"),
    (["--info=plugins"], "--info (plugins): must be all or config or defaults or"),
    (["--cfg", "--info"], "--info: cannot be combined with --cfg; leave out one of them"),
    (["--resolve"], "--resolve: is for --cfg; add that"),
    (["--cfg", "--package=nope"], "--package (nope): is not a part of the configuration"),
    (["--cfg", "--package=train.steps.x"], "is not a part of the configuration"),
    (["--resolve=yes", "--cfg"], "--resolve (yes): takes no value"),
    (["hydra.run.dir=x"], "hydra.run.dir=x: there is no such option; give run_dir=DIR"),
    # What is filled in.
    (["seed=${nope}"], "seed (${nope}): cannot be filled in (Interpolation key 'nope' not found); name an option"),
    (["seed=${seed}"], "seed (${seed}): cannot be filled in (Recursive"),
    (["seed=${train.log_every_steps}", "train.log_every_steps=${seed}"], "cannot be filled in (Recursive"),
    (["+model.x=${model}"], "model.x (${model}): cannot be filled in"),
    (["seed=${model.name}"], "seed (dnn): must be a whole number"),
    (["seed=${oc.env:TF2DIST_NOT_SET}"], "the environment has no TF2DIST_NOT_SET; set it, or"),
    (["seed=${train.steps"], "seed (${train.steps): has ${ without }"),
    (["seed=${train}"], "seed ({"),
    (["--ps_hosts=a:1"], "there is no such flag"),
    ([""], "cannot be read"),
    (["seed 5"], "cannot be read"),
    (["train.steps=5\nseed=3"], "cannot be read"),
    (["mode=\x1b[31m"], r"mode (\x1b[31m)"),
    (["run_dir=???"], "run_dir (???): is missing"),
    # Paths.
    (["run_dir=''"], "is not a valid name of a directory"),
    (["run_dir=" + "x" * 300], "is not a valid name of a directory"),
    (["run_dir='a\x00b'"], "run_dir"),
    (["run_dir='a\udcff'"], "is not a valid name of a directory"),
    (["run_dir='~nobody-of-this-name/x'"], "is not a valid name of a directory"),
    (["++run_dir=[a]"], "run_dir (['a']): must be a word or a path"),
    (["data=digits", "run_dir={files}/file"], "cannot be written"),
    (["data=digits", "run_dir={files}/file/x"], "cannot be written"),
    (["data=digits", "run_dir={files}/loop"], "cannot be written"),
    (["data=digits", "run_dir={files}/loop/x"], "cannot be written"),
    (["data=digits", "run_dir=/proc/x"], "cannot be written"),
    (["data=digits", "run_dir={files}"], "config.yaml of something else"),
    (["data.dir={files}/file"], "there is no such directory"),
    (["data.dir={files}/loop"], "there is no such directory"),
    (["data.dir="], "is not a valid name of a directory"),
    (["data.dir=" + "x" * 3000], "is not a valid name of a directory"),
    (["plugins={files}/broken.py"], "plugins: must be a list"),
    (["plugins=null"], "plugins: must be a list"),
    (["plugins=[null]"], "plugins[0] (null)"),
    (["plugins=['']"], "there is no such Python file"),
    (["plugins=[{files}]"], "there is no such Python file"),
    (["plugins=[{files}/folder.py]"], "there is no such Python file"),
    (["plugins=[{files}/loop]"], "there is no such Python file"),
    (["plugins=[{files}/broken.py]"], "line 1: "),
    (["plugins=[{files}/bytes.py]"], "plugins"),
    (["plugins=[/dev/zero]"], "there is no such Python file"),
    (["plugins=[/proc/uptime]"], "cannot be read (it is a device)"),
    (["plugins=[/proc/kmsg]"], "plugins (/proc/kmsg): cannot be read"),
    # Checkpoints.
    (["init_from={files}/file"], "there is no such run directory"),
    (["init_from=" + "x" * 3000], "there is no such run directory"),
    (["init_from={files}", "init_layers=("], "must be a regular expression"),
    (["init_from={files}", "init_layers=a{99999999999999}"], "must be a regular expression"),
    (["init_from={files}", "init_layers=" + "(" * 1500 + ")" * 1500], "must be a regular expression"),
    (["init_layers=hidden1"], "is for init_from=RUN_DIR; add that"),
    (["checkpoint.every_secs=nan"], "must be more than 0 and finite"),
    (["checkpoint.keep=0"], "must be at least 1"),
    (["checkpoint=often"], "holds several options"),
    (["max_restarts=-1"], "must be at least 0"),
    (["watchdog_secs=0"], "must be more than 0"),
    # Hosts.
    ([*HOSTS, "cluster.worker=[a:1]", "cluster.num_workers=7"], "cluster.num_workers (7): is for cluster=local"),
    (["cluster=hosts", "task.type=worker", "task.index=0"], "no host is named"),
    (["cluster=hosts", "cluster.worker=a:1"], "cluster.worker: must be a list"),
    ([*HOSTS, "cluster.worker=['a:1,b:1']"], "must be host:port"),
    ([*HOSTS, "cluster.worker=['a..b:22']"], "must be host:port"),
    ([*HOSTS, "cluster.worker=[" + "x" * 64 + ":22]"], "must be host:port"),
    ([*HOSTS, "cluster.worker=['a:" + "9" * 2000 + "']"], "must be host:port"),
    ([*HOSTS, "cluster.worker=['::1:2222']"], "must be host:port"),
    ([*HOSTS, "cluster.worker=['[::::]:2222']"], "must be host:port"),
    ([*HOSTS, "cluster.worker=['0.0.0.0:2222']"], "must be host:port"),
    ([*HOSTS, "cluster.worker=['a:1','A:01']"], "the same address as worker 0"),
    ([*HOSTS, "cluster.worker=['0:2222']"], "0 is another way to write 0.0.0.0"),
    ([*HOSTS, "cluster.worker=['224.0.0.1:2222']"], "is an address of many hosts (multicast)"),
    ([*HOSTS, "cluster.worker=['localhost:2222','127.0.0.1:2222']"], "the same address as worker 0 (localhost:2222)"),
    (["keras.floatx=float64"], "keras.floatx (float64): must be float32"),
    (["keras.image_data_format=NCHW"], "keras.image_data_format (NCHW): must be channels_last or channels_first"),
    ([*(f"+model.a{i}={'x' * 4000}" for i in range(40)), "plugins=[{files}/empty.py]"], "the configuration, with its "),
    (
        [*HOSTS, "cluster.worker=[" + ",".join(f"h{i}:1" for i in range(400)) + "]", *LONG],
        "the configuration, with its host list, has ",
    ),
    ([*HOSTS, "cluster.worker=[8.8.8.8:2222]"], "can be reached from the internet"),
    ([*HOSTS[:2], "cluster.worker=[a:1]", "task.type=wroker", "task.index=0"], "task type (wroker)"),
]

IN_A_CLUSTER = tf_config(["a:1"])
IN_TF_CONFIG: list[tuple[str, str]] = [
    ("[]", '"cluster" is missing'),
    ("5", '"cluster" is missing'),
    (" ", "not valid JSON"),
    ("[" * 100_000, "cannot be read"),
    ('{"a":' * 3000, "cannot be read"),
    ("\udcff\udcfe", "not valid JSON at character 1"),
    ("{'cluster': {}}", "not valid JSON"),
    ('{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}}', '"worker" occurs 2 times'),
    (tf_config("a:1"), "must be a list"),
    (tf_config([["a:1"]]), "must be a list"),
    (tf_config({"0": "a:1"}), "must be a list"),
    (tf_config(None), "must be a list"),
    (tf_config(["x" * 100_000 + ":1"]), "must be host:port"),
    (tf_config(["a\nb:1"]), ADDRESS.format("a b:1")),
    (tf_config(["\ud800:1"]), ADDRESS.format(r"\ud800:1")),
    (f'{{"cluster": {{"worker": [{TOO_MANY}]}}, "task": {{"type": "worker", "index": 0}}}}', "and 4998 more"),
    (tf_config(["a:1"], {"type": "worker", "index": 0.0}), "task index (0.0)"),
    (tf_config(["a:1"], {"type": "worker", "index": 1e99}), "task index (1e+99)"),
    (tf_config(["a:1"], {"type": "worker", "index": "9" * 6000}), "it must be from 0 to 0"),
    (tf_config(["a:1"], {"type": "worker", "index": "²"}), "task index (²)"),
    (tf_config(["a:1"], {"type": ["worker"], "index": 0}), "task type (['worker'])"),
    ('{"task": {"index": ' + "9" * 6000 + "}}", "cannot be read"),
]

REQUESTS = [
    (["--multirun", "seed=1,2"], IN_A_CLUSTER, "--multirun: a sweep runs on this machine alone; unset TF_CONFIG"),
    *[(options, None, words) for options, words in [*OPTIONS, *test_config.BAD]],
    *[(["mode=sync", "data=digits"], text, words) for text, words in IN_TF_CONFIG],
]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    (folder / "folder.py").mkdir(parents=True)
    (folder / "file").touch()
    (folder / "empty.py").touch()
    (folder / "config.yaml").touch()
    (folder / "broken.yaml").write_text("seed: [")
    (folder / "loop").symlink_to("loop")
    (folder / "broken.py").write_text("def x(:\n")
    (folder / "bytes.py").write_bytes(b"\xff\xfe\x00")
    return folder


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory; nothing is downloaded or started from it."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(location, "_download", lambda *args: pytest.fail("a download for a wrong request"))
    monkeypatch.setattr(start, "supervise", lambda *args: pytest.fail("a wrong request is run"))
    monkeypatch.setattr("tf2dist.launch.sweep.code_command", lambda *args: pytest.fail("a wrong request is run"))
    return folder


def first_words(text: str) -> str:
    return ascii(text[:40])[1:-1]


@pytest.mark.parametrize(
    ("options", "variable", "words"),
    REQUESTS,
    ids=[f"{first_words(' '.join(options))} {first_words(variable or '')}" for options, variable, _ in REQUESTS],
)
def test_a_wrong_request_is_refused(
    options: list[str],
    variable: str | None,
    words: str,
    files: Path,
    empty: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if variable is not None:
        monkeypatch.setitem(os.environ, "TF_CONFIG", variable)
    before = sorted(files.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        cli.main([option.replace("{files}", str(files)) for option in options])
    output = capsys.readouterr()
    assert ended.value.code == 2
    assert words in output.err
    assert len(output.err.splitlines()) <= 3
    assert max(map(len, output.err.splitlines())) < 350
    assert "Traceback" not in output.err
    assert output.out == ""
    assert list(empty.iterdir()) == []
    assert sorted(files.rglob("*")) == before, "nothing is half-made"


def test_there_are_enough_of_them() -> None:
    different = {(tuple(options), variable) for options, variable, _ in REQUESTS}
    assert len(different) >= 60
