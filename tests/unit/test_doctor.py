"""The doctor: a line for each finding, with the fix; it starts no run and creates no file."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ports_of_tasks
from tests.tfds import NAMES, write_mnist
from tf2dist import doctor, linux
from tf2dist.cluster import reachability
from tf2dist.config.schema import DataConfig
from tf2dist.data.known import IMAGES
from tf2dist.errors import ConfigError
from tf2dist.launch import findings
from tf2dist.launch.findings import Finding


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without TensorFlow, in an empty directory that stays empty."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setattr(findings, "gpus", lambda num_local_workers: iter(()))
    yield
    assert list((tmp_path / "empty").iterdir()) == []


def examined(*overrides: str, tf_config: Any = None) -> list[str]:
    text = json.dumps(tf_config) if isinstance(tf_config, dict) else tf_config
    return [str(finding) for finding in doctor.examine(list(overrides), {"TF_CONFIG": text} if text else {})]


def hosts(*workers: str, index: int = 0) -> dict[str, Any]:
    return {"cluster": {"worker": list(workers)}, "task": {"type": "worker", "index": index}}


def only(lines: list[str], beginning: str) -> list[str]:
    return [line for line in lines if line.startswith(beginning)]


def test_a_healthy_local_cluster() -> None:
    lines = examined("data=digits", "mode=sync", "cluster=local1")
    assert not only(lines, "fail")
    for words in ("ok    configuration: mode=sync", "ok    versions: tensorflow", "ok    data: digits", "memory: "):
        assert any(words in line for line in lines), words
    can = subprocess.run(
        [sys.executable, "-c", "from tf2dist import linux; raise SystemExit(not linux.enter_private_network())"]
    )
    assert only(lines, f"{'warn' if can.returncode else 'ok  '}  isolation: ")


def test_all_mistakes_of_a_configuration_are_reported() -> None:
    lines = examined("train.steps=0", "seed=-1", "grace_secs=0", "data.offline=x")
    assert len(only(lines, "fail  configuration: ")) == 4
    assert only(lines, "ok    versions: python"), "the other checks are made too"


def test_the_fix_of_a_mistake_is_a_field_of_its_own() -> None:
    _, _, found = doctor.request(["data.dir=/no/such/folder"], {})
    assert found == [
        Finding(
            "fail",
            "configuration",
            "data.dir (/no/such/folder): there is no such directory",
            "create it, or leave the option out to use TFDS_DATA_DIR or ~/tensorflow_datasets",
        )
    ]


def test_the_cluster_is_checked_even_if_options_are_wrong() -> None:
    lines = examined("mode=sync", "stepss=1", tf_config=hosts("localhost", "localhost:99999"))
    assert len(only(lines, "fail  cluster: TF_CONFIG: worker")) == 2
    assert only(lines, "fail  configuration: stepss")


def test_a_shell_of_a_slurm_job_is_told_to_use_srun() -> None:
    lines = [str(each) for each in doctor.examine(["cluster=slurm", "data=digits"], {"SLURM_JOB_ID": "9"})]
    assert "the shell of job 9, not a task in it" in only(lines, "fail  cluster: ")[0]
    assert "start it with srun" in only(lines, "fail  cluster: ")[0]


def test_a_process_in_a_pod_is_told_of_the_others() -> None:
    (port,) = linux.unused_ports(1)
    pod = {"TF2DIST_ADDRESSES": f"localhost:{port},no-such-host.invalid", "TF2DIST_RANK": "0"}
    lines = [str(each) for each in doctor.examine(["data=digits", "mode=sync", "cluster=ranks"], pod)]
    assert only(lines, "ok    cluster: 2 worker; this is worker-0")
    assert only(lines, f"ok    ports: worker-0 can listen at localhost:{port}")
    alone = [str(each) for each in doctor.examine(["data=digits", "mode=sync"], pod)]
    assert "would train alone" in only(alone, "warn  cluster: an engine has started")[0]
    assert "add cluster=ranks" in only(alone, "warn  cluster: ")[0]


def test_peers_that_answer_that_may_answer_later_and_that_never_will() -> None:
    mine, quiet = linux.unused_ports(2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"localhost:{server.getsockname()[1]}"
        workers = (f"localhost:{mine}", there, f"localhost:{quiet}", "no-such-host.invalid:1")
        lines = examined("data=digits", "mode=sync", tf_config=hosts(*workers))
    assert only(lines, "ok    cluster: 4 worker; this is worker-0")
    assert only(lines, f"ok    ports: worker-0 can listen at localhost:{mine}")
    assert only(lines, f"ok    peers: worker-1 at {there}")
    assert "start it, or open the port" in only(lines, f"warn  peers: worker-2 at localhost:{quiet}")[0]
    assert "correct the name" in only(lines, "fail  peers: worker-3 at no-such-host.invalid:1")[0]


@pytest.mark.parametrize("why", ["No route to host", "Network is unreachable"])
def test_a_host_without_a_route_is_a_failure(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "why_unreachable", lambda address: why)
    mine, other = linux.unused_ports(2)
    lines = examined("data=digits", "mode=sync", tf_config=hosts(f"localhost:{mine}", f"localhost:{other}"))
    assert "correct the route" in only(lines, "fail  peers: worker-1")[0]


def test_a_peer_that_hangs_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gate:
        monkeypatch.setattr(doctor, "PEERS_TIMEOUT_SECS", 0.1)
        monkeypatch.setattr(reachability, "why_unreachable", lambda address: str(gate.accept()))
        mine, other = linux.unused_ports(2)
        lines = examined("data=digits", "mode=sync", tf_config=hosts(f"localhost:{mine}", f"localhost:{other}"))
        socket.create_connection(gate.getsockname()).close()  # lets the thread go
    assert "no answer in" in only(lines, "warn  peers: worker-1")[0]


def test_a_loopback_address_among_hosts_is_a_failure() -> None:
    options = ["data=digits", "mode=sync", "cluster.check_address=false"]
    lines = examined(*options, tf_config=hosts("127.0.0.1:2222", "10.0.0.1:2222", index=1))
    assert only(lines, "fail  peers: worker-0 at 127.0.0.1:2222")


def test_an_own_name_that_cannot_be_resolved() -> None:
    lines = examined("data=digits", "mode=sync", tf_config=hosts("no-such-host.invalid:2222"))
    assert only(lines, "fail  ports: worker-0 at no-such-host.invalid:2222: this host does not know the name")


def test_a_taken_port_names_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        lines = examined("data=digits", "mode=sync", tf_config=hosts(f"localhost:{server.getsockname()[1]}"))
    assert f"is taken on this host by pid {os.getpid()} (" in only(lines, "fail  ports: ")[0]


def test_a_port_of_the_ephemeral_range_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = linux.unused_ports(1)
    monkeypatch.setattr(linux, "ephemeral_ports", lambda: range(port, port + 10))
    lines = examined("data=digits", "mode=sync", tf_config=hosts(f"localhost:{port}"))
    assert "choose a lower one" in only(lines, f"warn  ports: port {port} of worker-0")[0]


def test_a_public_address_is_a_failure_and_a_private_one_a_warning() -> None:
    options = ["data=digits", "mode=sync", "cluster.check_address=false"]
    assert "cluster.allow_public=true" in only(examined(*options, tf_config=hosts("8.8.8.8:2222")), "fail  exposure")[0]
    assert "private network" in only(examined(*options, tf_config=hosts("10.0.0.1:2222")), "warn  exposure")[0]


@pytest.mark.parametrize(("offline", "level"), [("fallback", "warn"), ("fail", "fail")])
def test_data_that_is_missing_or_incomplete(
    offline: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(IMAGES, "mnist", replace(IMAGES["mnist"], host="no-such-host.invalid"))
    monkeypatch.setattr("urllib.request.getproxies", dict)
    (finding,) = findings.training_data(DataConfig(dir=str(tmp_path), offline=offline))
    assert (finding.level, finding.topic) == (level, "data")
    folder = tmp_path / "mnist" / "3.0.1"
    folder.mkdir(parents=True)
    for name in ("dataset_info.json", *NAMES):
        (finding,) = findings.training_data(DataConfig(dir=str(tmp_path), offline=offline))
        assert (
            str(finding).split() == f"{level} data: MNIST in {tmp_path} is incomplete; remove {tmp_path}/mnist".split()
        )
        (folder / name).touch()
    shutil.rmtree(tmp_path / "mnist")
    write_mnist(tmp_path, [b"example"])
    assert [finding.level for finding in findings.training_data(DataConfig(dir=str(tmp_path)))] == ["ok"]


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    names = ("a/b", "file", "file/x", "loop/x", os.fsdecode(b"\xff"))
    levels = [next(findings.run_folder(f"{tmp_path}/{name}")).level for name in names]
    assert levels == ["ok", "fail", "fail", "fail", "fail"]


def test_versions_that_do_not_match_the_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"tensorflow": "2.19.1", "keras": "3.15.1", "numpy": "2.0.0"}
    monkeypatch.setattr("importlib.metadata.version", there.__getitem__)
    wrong = [finding for finding in findings.versions() if finding.level == "fail"]
    assert [finding.text.partition(" is")[0] for finding in wrong] == ["tensorflow 2.19.1"]
    assert "install tensorflow" in wrong[0].fix


def test_a_package_of_another_name_than_its_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As keras-nightly and tensorflow-cpu are."""
    (tmp_path / "mine_nightly-1.5.dist-info").mkdir()
    for name, text in (("METADATA", "Name: mine-nightly\nVersion: 1.5\n"), ("top_level.txt", "mine\n")):
        (tmp_path / "mine_nightly-1.5.dist-info" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(findings, "PACKAGES", ("mine", "no-such"))
    _, *found = findings.versions()
    assert [(each.level, each.text) for each in found] == [("ok", "mine 1.5"), ("fail", "no-such is not installed")]


def test_too_many_tasks_for_the_machine() -> None:
    levels = {finding.topic: finding.level for finding in findings.processors(10**6, 10**6)}
    assert levels == {"cores": "warn", "memory": "warn"}


@pytest.mark.parametrize(("more", "level"), [(0, "ok"), (1, "warn")])
def test_a_core_for_each_task_is_enough(more: int, level: str) -> None:
    cores, _ = findings.processors(1, len(os.sched_getaffinity(0)) + more)
    assert (cores.topic, cores.level) == ("cores", level)


def test_a_check_that_raises_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "versions", lambda: iter([1 // 0]))
    assert only(examined("data=digits"), "warn  doctor: could not look: ZeroDivisionError")


def test_json_output_is_one_array(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{")
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--json"])
    assert ended.value.code == 2
    array = json.loads(capsys.readouterr().out)
    assert all(set(finding) == {"level", "topic", "text", "fix"} for finding in array)
    assert any("not valid JSON" in finding["text"] for finding in array if finding["level"] == "fail")


def test_exit_code_without_failures(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main(["data=digits", "cluster=local1"])
    assert ended.value.code == 0
    assert all(line[:6] in ("ok    ", "warn  ") for line in capsys.readouterr().out.splitlines())


def test_flags() -> None:
    with pytest.raises(ConfigError, match="--jsn: there is no such flag"):
        doctor.report(["--jsn"])
    with pytest.raises(ConfigError, match="--multirun: is not for the doctor, which looks at one run; leave it out"):
        doctor.report(["--multirun", "seed=1,2"])
    assert doctor.report(["--help"]) == 0


def test_own_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\nmode: sync\n")
    with pytest.raises(SystemExit) as ended:
        doctor.main(["-cd", str(tmp_path), "--config-name=mine", "data=digits", "cluster=local1"])
    assert ended.value.code == 0
    assert "mode=sync, model=dnn" in capsys.readouterr().out


@pytest.mark.parametrize(("interrupt", "code"), [(True, 130), (False, 0)])
def test_an_interrupt_or_a_closed_pipe_leaves_no_traceback(interrupt: bool, code: int) -> None:
    """In a process of its own, with findings that never end."""
    script = "from tf2dist import doctor; doctor.examine = lambda *a: iter(lambda: 'x' * 999, 1); doctor.main([])"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline().startswith("xxx")
        if interrupt:
            process.send_signal(signal.SIGINT)
            process.stdout.read()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(30) == code


def test_importing_the_doctor_imports_no_tensorflow() -> None:
    code = "import sys, tf2dist.doctor; sys.exit(sum(m in sys.modules for m in ('tensorflow', 'keras', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_problems_that_would_prevent_the_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ports_of_tasks(2)
    lines = examined("mode=sync", tf_config=hosts(f"localhost:{first}", f"localhost:{second}"))
    assert only(lines, f"ok    meeting: worker-0 can listen at its control port {first + 1000}")
    lines = examined("mode=sync", tf_config=hosts(f"localhost:{first}", f"localhost:{first + 1000}"))
    assert "is the port of worker-1" in only(lines, "fail  meeting: ")[0]
    with socket.create_server(("127.0.0.1", first + 1000)):
        lines = examined("mode=sync", tf_config=hosts(f"localhost:{first}", f"localhost:{second}"))
        assert "is taken on this host" in only(lines, "fail  meeting: ")[0]
    monkeypatch.setenv("TF2DIST_TOKEN", "short")
    lines = examined("mode=sync", tf_config=hosts(f"localhost:{first}", f"localhost:{second}"))
    assert "TF2DIST_TOKEN: has 5 characters" in only(lines, "fail  meeting: ")[0]
