"""What a job tells the calls of `fit` in its script."""

import json

import pytest

from tf2dist.config.for_fit import VARIABLE
from tf2dist.errors import ClusterError, FitError
from tf2dist.fitting import job_options
from tf2dist.fitting.job_options import of_job
from tf2dist.fitting.refusals import overrides_of
from tf2dist.fitting.request import configuration

RANKS = {"TF2DIST_ADDRESSES": "127.0.0.1:12000,127.0.0.1:12001,127.0.0.1:12002,127.0.0.1:12003", "TF2DIST_RANK": "2"}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for name, value in RANKS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(job_options, "_run_dirs", iter(range(1, 9)))


def test_the_options_of_the_job_are_those_of_the_call() -> None:
    text = "mode=async cluster.num_ps=2 run_dir='/runs/a b' grace_secs=20 task.on_term=leave cluster=ranks"
    config, place = configuration("async", None, None, 0, ["grace_secs=30"], of_job({VARIABLE: text}, "async"))
    assert str(place.task) == "ps-1", "fit alone would take one ps"
    assert (config.run_dir, config.task.on_term) == ("/runs/a b", "leave")
    assert config.grace_secs == 30, "an option of the call itself comes first"


def test_every_call_has_a_run_directory_of_its_own() -> None:
    job = of_job({VARIABLE: "mode=sync run_dir=/runs/mine cluster=ranks"}, "sync")
    found = [configuration("sync", None, own, 0, [], job)[0].run_dir for own in (None, "own", None)]
    assert found == ["/runs/mine", "own", "/runs/mine-2"]


def test_a_job_of_one_task_is_no_cluster_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF2DIST_ADDRESSES", "127.0.0.1:12000")
    monkeypatch.setenv("TF2DIST_RANK", "0")
    _, (cluster, _) = configuration("sync", None, None, 0, [], of_job({VARIABLE: "mode=sync cluster=ranks"}, "sync"))
    assert cluster.num_workers == 1
    assert not cluster.is_managed
    assert configuration("sync", None, None, 0, [])[1].cluster.is_managed, "as without a job"


def test_the_workers_of_an_engine_can_be_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Azure's TF_CONFIG has workers alone."""
    workers = [f"127.0.0.1:{port}" for port in (2222, 2223, 2224)]
    task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    _, place = configuration("async", None, None, 0, [], of_job({VARIABLE: "cluster=ranks"}, "async"))
    assert str(place.task) == "ps-0"


def test_a_host_without_the_cluster_can_be_told_to_fail() -> None:
    with pytest.raises(ClusterError, match="the environment variable TF_CONFIG is not set"):
        configuration("sync", None, None, 0, [], of_job({VARIABLE: "cluster=tf_config"}, "sync"))


def test_values_of_python_are_those_of_the_command_line() -> None:
    given = {"simulate.delay_secs": (0, 0.5, 1), "checkpoint.every_secs": None, "timeline": True, "grace_secs": 7}
    config, _ = configuration("sync", None, None, 0, overrides_of(given), ["cluster=local"])
    assert config.simulate.delay_secs == [0.0, 0.5, 1.0]
    assert (config.checkpoint.every_secs, config.timeline, config.grace_secs) == (None, True, 7.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mode=async", r"mode \('sync'\): the job was requested with mode=async; give both the same"),
        ("model=cnn", f"{VARIABLE}: model belongs to the command line"),
        ("hydra.run.dir=x", f"{VARIABLE}: hydra.run.dir belongs to the command line; .* run_dir"),
        ("seed=1", f"{VARIABLE}: seed is the argument seed of fit"),
        ("run_dir='/a", f"{VARIABLE} .*: cannot be read at '; close the quotes"),
    ],
)
def test_what_does_not_suit_the_call_is_refused(text: str, message: str) -> None:
    with pytest.raises(FitError, match=message):
        of_job({VARIABLE: text}, "sync")
