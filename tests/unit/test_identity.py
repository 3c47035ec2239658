"""The identities that hosts compare: all that must be equal, and nothing that a host may choose."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from tf2dist.cluster import addresses
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config.schema import ClusterConfig, RunConfig, SimulateConfig, TaskConfig
from tf2dist.errors import ClusterError, ConfigError
from tf2dist.hosts import identity
from tf2dist.hosts.identity import differences, explain, identity_of
from tf2dist.hosts.protocol import Call, Difference, Identity, Join, Process, TaskAddress
from tf2dist.messages import pack, unpack

CLUSTER = Cluster("sync", {"worker": ("a:1", "b:1")})
TRAIN = "mnist-train.tfrecord-00000-of-00001"


def config(**values: Any) -> RunConfig:
    made = RunConfig(mode="sync", **values)
    made.data.name = "digits"
    return made


def test_an_identity_can_be_sent() -> None:
    identity = identity_of(config(), CLUSTER)
    place = TaskAddress(Task("worker", 1), "b:1")
    join = Join(place, place, Process("b", 1, "x"), identity)
    assert unpack(pack(join), Call) == join
    assert set(identity.versions) == {"tf2dist", "python", "tensorflow", "keras", "numpy"}
    assert "missing" not in identity.versions.values()
    assert identity.data == {"digits.csv.gz": (identity.data or {})["digits.csv.gz"]}


def test_options_that_a_host_may_choose(tmp_path: Path) -> None:
    one, other = config(), config(run_dir="/elsewhere", startup_timeout_secs=5.0, grace_secs=1.0)
    other.task = TaskConfig(type="worker", index=1)
    other.cluster = ClusterConfig(kind="hosts", worker=["a:1", "b:1"], check_address=False)
    other.data = dataclasses.replace(other.data, dir=str(tmp_path), offline="fail")
    other.devices.gpu_memory_fraction, other.devices.onednn = 0.3, True
    assert differences(identity_of(one, CLUSTER), identity_of(other, CLUSTER)) == []


def test_options_that_must_be_equal() -> None:
    one, other = config(), config(seed=1, model={"name": "dnn", "hidden_units": [3]}, optimizer={"name": "sgd"})
    other.train.batch_size_per_worker = 7
    other.cluster.transfer_dtype = "bfloat16"
    diffs = differences(identity_of(one, CLUSTER), identity_of(other, Cluster("sync", {"worker": ("b:1", "a:1")})))
    assert explain(diffs, "at worker-0", "here") == (
        "cluster.worker: [a:1, b:1] at worker-0, [b:1, a:1] here; "
        "cluster.transfer_dtype: float32 at worker-0, bfloat16 here; "
        "model.hidden_units: nothing at worker-0, [3] here; optimizer.name: adam at worker-0, sgd here; "
        "seed: 0 at worker-0, 1 here; train.batch_size_per_worker: 100 at worker-0, 7 here"
    )


def test_of_a_path_only_its_presence_is_compared() -> None:
    given, other, nothing = (identity._shared({"init_from": place}) for place in ("/a", "/b", None))
    assert given == other != nothing


def test_an_argument_that_is_an_empty_mapping_is_compared() -> None:
    assert identity._shared({"model": {"name": "mine", "given": {}}}) == {"model": {"name": "mine", "given": {}}}


def test_plugins_are_compared_by_their_content(tmp_path: Path) -> None:
    for folder, text in (("a", "x = 1"), ("b", "x = 1"), ("c", "x = 2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "plugin.py").write_text(text)
    a, b, c = (identity_of(config(plugins=[str(tmp_path / name / "plugin.py")]), CLUSTER) for name in "abc")
    assert differences(a, b) == []
    assert [found.name for found in differences(a, c)] == ["plugins"]
    with pytest.raises(ConfigError, match=r"plugins .*: cannot be read"):
        identity_of(config(plugins=["/no/such.py"]), CLUSTER)


def test_data_is_compared_by_the_sizes_of_its_files(tmp_path: Path) -> None:
    made = []
    for size in (3, 4):
        folder = tmp_path / str(size) / "mnist" / "3.0.1"
        folder.mkdir(parents=True)
        for name in ("dataset_info.json", TRAIN, "mnist-test.tfrecord-00000-of-00001"):
            (folder / name).write_bytes(b"x" * (size if name == TRAIN else 1))
        host = config()
        host.data = dataclasses.replace(host.data, name="mnist", dir=str(tmp_path / str(size)))
        made.append((identity_of(host, CLUSTER), identity_of(host, CLUSTER, Task("ps", 0))))
    assert differences(made[0][0], made[1][0]) == [Difference(f"data.mnist/3.0.1/{TRAIN}", "3", "4")]
    assert differences(made[0][0], made[1][1]) == [], "a ps reads none"


def test_the_text_of_differences_is_limited() -> None:
    full, empty = (Identity({}, {}, {str(i): "x" * 9999 for i in range(count)}, (), {}) for count in (50, 0))
    diffs = differences(full, empty)
    text = explain(diffs, "here", "there")
    assert len(text) < 3000
    assert text.endswith("and 42 more")


def test_control_ports() -> None:
    assert addresses.control_address("host:2222") == ("host", 3222)
    assert addresses.control_address("[::1]:65000") == ("::1", 64000)
    assert addresses.control_address("host:5", 10) == ("host", 15)
    addresses.check_control_ports(Cluster("sync", {"worker": ("a:2222", "b:3222")}), 1000)
    with pytest.raises(ClusterError, match=r"worker 0 \(a:2222\): its control port 3222 is the port of worker-1"):
        addresses.check_control_ports(Cluster("sync", {"worker": ("a:2222", "a:3222")}), 1000)
    with pytest.raises(ClusterError, match="is the control port of worker-0"):
        addresses.check_control_ports(Cluster("sync", {"worker": ("a:64000", "a:65990", "a:63990")}), 995)


def listens_at(address: str) -> str:
    cluster = Cluster("sync", {"worker": (address,)})
    with addresses.listen_at_control_port(cluster, Task("worker", 0), 1000) as listener:
        return str(listener.getsockname()[0])


def test_a_name_of_this_host_that_means_loopback_is_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = addresses.resolve("127.0.0.1", 0)
    monkeypatch.setattr(addresses, "resolve", lambda host, port: [found])
    assert listens_at("some-host:20001") == "0.0.0.0"
    assert listens_at("localhost:20001") == "127.0.0.1"


def test_a_proxied_address_listens_everywhere() -> None:
    assert listens_at("10.255.255.1:20001") == "0.0.0.0"


SECRET = "0123456789abcdef"


def key(environ: dict[str, str], cluster: Cluster = CLUSTER) -> tuple[bytes, list[str]]:
    messages: list[str] = []
    return identity.job_key(environ, cluster, messages.append), messages


def test_a_token_from_the_environment_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    made, told = key({"TF2DIST_TOKEN": SECRET})
    assert key({"TF2DIST_TOKEN_FILE": str(file)}) == (made, [])
    assert not told
    assert made != key({"TF2DIST_TOKEN": SECRET + "x"})[0]


@pytest.mark.parametrize(
    ("mode", "words"),
    [(0o600, ""), (0o440, ""), (0o640, ""), (0o660, ""), (0o604, "mode 0604"), (0o602, "mode 0602"), (0o444, "others")],
)
def test_modes_of_a_token_file(tmp_path: Path, mode: int, words: str) -> None:
    """A mounted Secret belongs to root and the pod's group and is read by the group."""
    file = tmp_path / "token"
    file.write_text(SECRET)
    file.chmod(mode)
    if not words:
        assert key({"TF2DIST_TOKEN_FILE": str(file)}) == key({"TF2DIST_TOKEN": SECRET})
        return
    with pytest.raises(ClusterError, match=words):
        key({"TF2DIST_TOKEN_FILE": str(file)})


def test_without_a_token_a_warning_unless_all_tasks_are_local() -> None:
    made, told = key({})
    assert made == identity.NO_TOKEN_KEY
    assert len(told) == 1
    assert "no job token" in told[0]
    local = Cluster("sync", {"worker": ("localhost:1", "127.0.0.1:2", "[::1]:3")})
    assert key({}, local) == (made, [])


def test_bad_tokens(tmp_path: Path) -> None:
    open_to_all, short, binary, pipe = (tmp_path / name for name in ("open", "short", "binary", "pipe"))
    for file, text in ((open_to_all, SECRET.encode()), (short, b"short"), (binary, b"\xff" * 32)):
        file.write_bytes(text)
        file.chmod(0o644 if file is open_to_all else 0o600)
    os.mkfifo(pipe, 0o600)
    cases = {
        str(open_to_all): r"others can read or write it \(mode 0644\); chmod o= ",
        str(short): "has 5 characters, the token must have at least 16",
        str(binary): "is not text",
        str(pipe): "is not a regular file",
        str(tmp_path): "is not a regular file",
        str(tmp_path / "none"): "No such file",
    }
    for path, words in cases.items():
        with pytest.raises(ClusterError, match=words):
            key({"TF2DIST_TOKEN_FILE": path})
    with pytest.raises(ClusterError, match="has 0 characters"):
        key({"TF2DIST_TOKEN": ""})
    with pytest.raises(ClusterError, match="both set"):
        key({"TF2DIST_TOKEN": SECRET, "TF2DIST_TOKEN_FILE": str(short)})


def test_all_hosts_must_simulate_the_same_delays() -> None:
    one, other = config(), config(simulate=SimulateConfig(delay_secs=[0.0, 1.0]))
    diffs = differences(identity_of(one, CLUSTER), identity_of(other, CLUSTER))
    assert explain(diffs, "at worker-0", "here") == "simulate.delay_secs: [] at worker-0, [0.0, 1.0] here"
