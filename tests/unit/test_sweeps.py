"""The jobs of a sweep, in Hydra's order, and the table of their results."""

import csv
import io
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from hydra.types import RunMode

from tf2dist.config.compose import ConfigSource, open_hydra, prepare_overrides
from tf2dist.config.sweeps import Job, expanded, jobs_of
from tf2dist.errors import ConfigError, SomeFailed
from tf2dist.launch import single_run
from tf2dist.launch.host_run import HostRun
from tf2dist.launch.run_dir import finished_summary
from tf2dist.launch.sweep import check_same, compared_value, run_sweep, sweep_dir, sweep_job
from tf2dist.launch.sweep_report import Failed, Row, as_csv, as_table, read_rows
from tf2dist.signals import Signals

NO_FOLDER = ConfigSource()


def jobs(*overrides: str, source: ConfigSource = NO_FOLDER) -> list[Job]:
    with open_hydra(source) as hydra:
        arguments = [*prepare_overrides(hydra, source.name, list(overrides), None), "hydra.mode=MULTIRUN"]
        return jobs_of(hydra, hydra.compose_config(source.name, arguments, RunMode.MULTIRUN), lambda config: None)


EXPANDED = [
    (["mode=async,sync", "seed=range(2)"], [f"mode={mode} seed={n}" for mode in ("async", "sync") for n in (0, 1)]),
    (["optimizer=glob(ad*)"], ["optimizer=adagrad", "optimizer=adam", "optimizer=adamw"]),
    (["model=glob(*)"], ["model=cnn", "model=dnn", "model=softmax", "model=tanh", "model=two_tower"]),
    (["optimizer=glob([*s*,adam],exclude=rms*)"], ["optimizer=adam", "optimizer=sgd"]),
    (["model=choice(dnn,cnn)", "seed=7"], ["model=dnn seed=7", "model=cnn seed=7"]),
    (["seed=sort(3,1,2)"], ["seed=1", "seed=2", "seed=3"]),
    (["optimizer.learning_rate=range(0.1,0.3,0.1)"], ["optimizer.learning_rate=0.1", "optimizer.learning_rate=0.2"]),
    (["model.hidden_units=[300,50],[100]"], ["model.hidden_units=[300,50]", "model.hidden_units=[100]"]),
    (["seed=1,2", "seed=3"], ["seed=3"]),
    (["train.steps=${seed},4", "seed=7"], [r"train.steps=$\{seed\} seed=7", "train.steps=4 seed=7"]),
    (["init_from=/tmp,.", "init_layers=h[1]"], ["init_from=/tmp init_layers='h[1]'", "init_from=. init_layers='h[1]'"]),
    (["seed=5"], ["seed=5"]),
    ([], [""]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "lines"), EXPANDED, ids=lambda value: " ".join(value))
def test_the_jobs_are_the_same_as_with_hydra(overrides: list[str], lines: list[str]) -> None:
    assert [" ".join(line) for line, _ in expanded(overrides, NO_FOLDER)] == lines


def test_each_job_has_the_configuration_of_its_line() -> None:
    sweep_jobs = jobs("mode=async,sync", "train.steps=${seed},4", "seed=7", "init_from=/tmp,.")
    assert [(job.config.mode, job.config.train.steps, job.config.init_from) for job in sweep_jobs] == [
        (mode, steps, source) for mode in ("async", "sync") for steps in (7, 4) for source in ("/tmp", str(Path.cwd()))
    ]
    assert sweep_jobs[1].varying == {"mode": "async", "train.steps": "${seed}", "init_from": "."}
    assert [job.folder for job in sweep_jobs] == [str(number) for number in range(8)]
    in_quotes = r"'/a=b\c'"
    assert [job.varying for job in jobs(f"data.dir={in_quotes},.")] == [{"data.dir": in_quotes}, {"data.dir": "."}]


def test_folders_after_the_options() -> None:
    sweep_jobs = jobs("seed=1,2", "mode=sync", "hydra.sweep.subdir=${hydra:job.num}-${hydra.job.override_dirname}")
    assert [job.folder for job in sweep_jobs] == ["0-mode=sync,seed=1", "1-mode=sync,seed=2"]


def test_own_experiments_are_swept(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    for seed in (3, 4):
        (tmp_path / "experiment" / f"mine{seed}.yaml").write_text(f"# @package _global_\nseed: {seed}\n")
    sweep_jobs = jobs("experiment=glob(mine*)", source=ConfigSource(str(tmp_path)))
    assert [job.config.seed for job in sweep_jobs] == [3, 4]


def test_values_of_a_file_are_swept(tmp_path: Path) -> None:
    (tmp_path / "search.yaml").write_text("defaults: [config, _self_]\nhydra: {sweeper: {params: {seed: '1,2'}}}\n")
    assert [job.config.seed for job in jobs(source=ConfigSource(str(tmp_path), "search"))] == [1, 2]


def finished(folder: Path, job: Job, saved_step: int = 5) -> None:
    (folder / job.folder).mkdir(parents=True)
    (folder / job.folder / "config.yaml").write_text(job.config.to_yaml())
    (folder / job.folder / "summary.json").write_text(json.dumps({"global_step": 5, "saved_step": saved_step}))


def test_a_directory_of_another_sweep_is_refused(tmp_path: Path) -> None:
    before, now = jobs("seed=1,2"), jobs("seed=1,3")
    for job in before:
        finished(tmp_path, job)
    check_same(tmp_path / "0", now[0].config, "0", has_data=True)
    check_same(tmp_path / "2", now[1].config, "2", has_data=True)
    with pytest.raises(ConfigError, match=r"1 is of another sweep \(seed=2 there, 3 here\); give the same"):
        check_same(tmp_path / "1", now[1].config, "1", has_data=True)
    (tmp_path / "1" / "config.yaml").write_text("[")
    with pytest.raises(ConfigError, match=r"1 has a config.yaml that cannot be read"):
        check_same(tmp_path / "1", now[1].config, "1", has_data=True)


def test_a_second_sweep_leaves_the_records_of_a_running_one_alone(tmp_path: Path) -> None:
    with sweep_dir(tmp_path, []):
        Row(0, "0", state="running").write(tmp_path)
        with pytest.raises(ConfigError, match="another run is using it"), sweep_dir(tmp_path, []):
            pass
        assert [row.state for row in read_rows(tmp_path)] == ["running"]


def test_a_job_whose_weights_are_lost_is_not_done(tmp_path: Path) -> None:
    one, other = jobs("seed=1,2")
    finished(tmp_path, one)
    finished(tmp_path, other, saved_step=4)
    assert finished_summary(tmp_path / "0")
    assert finished_summary(tmp_path / "1") is None
    assert finished_summary(tmp_path / "2") is None


RESULT = {"test_accuracy": 0.97654, "test_loss": 0.08775, "steps_per_sec": 1234.5, "wall_secs": 12.34}


@pytest.fixture
def rows() -> list[Row]:
    made = [Row(number, str(number), {"mode": mode, "model.hidden_units": "[3,4]"}) for number, mode in
            enumerate(("async", "sync", "async", "sync"))]  # fmt: skip
    made[0].finish(RESULT)
    made[1].fail(3)
    made[2].fail(130)
    return made


def test_the_table(rows: list[Row]) -> None:
    assert as_table(rows, None).splitlines() == [
        "job  mode   model.hidden_units  test accuracy    loss  steps/s  wall secs  state",
        "  0  async  [3,4]                      0.9765  0.0877    1,234       12.3  done",
        "  1  sync   [3,4]                           -       -        -          -  failed (3)",
        "  2  async  [3,4]                           -       -        -          -  stopped",
        "  3  sync   [3,4]                           -       -        -          -  waiting",
    ]
    assert as_table(rows, 100) == as_table(rows, None)


def test_the_table_on_a_narrow_terminal(rows: list[Row]) -> None:
    lines = as_table(rows, 40).splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[:3] == [
        "0  mode=async model.hidden_units=[3,4]",
        "   accuracy 0.9765, loss 0.0877, 1,234",
        "   steps/s, 12.3 s, done",
    ]
    assert lines[-1] == "   waiting"


def test_the_file(rows: list[Row]) -> None:
    read = list(csv.DictReader(io.StringIO(as_csv(rows))))
    assert [row["state"] for row in read] == ["done", "failed", "stopped", "waiting"]
    assert [row["exit_code"] for row in read] == ["0", "3", "130", ""]
    assert (read[0]["model.hidden_units"], read[0]["test_accuracy"], read[3]["wall_secs"]) == ("[3,4]", "0.97654", "")


def test_a_sweeper_compares_the_loss_where_there_is_no_accuracy() -> None:
    """Optuna's ends the search at a job without a number."""
    assert compared_value({"validation_accuracy": 0.9, "validation_loss": 0.3}) == 0.9
    assert compared_value({"validation_mae": 0.2, "validation_loss": 0.3}) == 0.3
    assert compared_value({"test_loss": 0.3}) is None


def test_relative_paths_are_those_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Hydra changes into the folder of each job."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    (tmp_path / "donor").mkdir()
    paths = ["plugins=[mine.py]", "init_from=donor", "data.dir=donor"]
    overrides = [*paths, "data=digits", "hydra.job.chdir=true", "hydra.sweep.dir=sweep", "hydra.mode=MULTIRUN"]
    seen = []

    def run_host(run: HostRun) -> dict[str, Any]:
        seen.append((run.config.plugins, run.config.init_from, Path.cwd()))
        (run.run_dir / "summary.json").write_text('{"global_step": 1}')
        return {}

    monkeypatch.setattr(single_run, "run_host", run_host)
    with open_hydra(NO_FOLDER) as hydra, Signals() as signals:
        run_sweep(hydra, NO_FOLDER.name, overrides, lambda job: sweep_job(job, lambda *_: None), signals)
    assert seen == [([str(tmp_path / "mine.py")], str(tmp_path / "donor"), tmp_path / "sweep" / "0")]


def test_a_sweep_with_a_job_that_was_stopped_alone_has_failed(tmp_path: Path) -> None:
    """As by a signal to one process of a launcher."""
    overrides = ["seed=1", f"hydra.sweep.dir='{tmp_path}/a sweep'", "hydra.mode=MULTIRUN"]
    again = re.escape(f"hydra.sweep.dir='{tmp_path}/a sweep'")  # as a shell reads it
    says = rf"1 of 1 jobs failed: job 0 \(exit code 143\); the same command with {again} tries them again"
    with open_hydra(NO_FOLDER) as hydra, Signals() as signals, pytest.raises(SomeFailed, match=says) as error:
        run_sweep(hydra, NO_FOLDER.name, overrides, lambda job: Failed(128 + signal.SIGTERM), signals)
    assert error.value.exit_code == 143
    assert [row.state for row in read_rows(tmp_path / "a sweep")] == ["stopped"]
