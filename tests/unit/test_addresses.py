"""Who can reach an address, and the refusals and warnings about it."""

import os
import socket
import sys
from pathlib import Path

import pytest

from tf2dist import cli
from tf2dist.cluster import addresses
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config.schema import ClusterConfig, RunConfig, TaskConfig
from tf2dist.errors import ClusterError
from tf2dist.launch import single_run
from tf2dist.linux import unused_ports

WORKER = Task("worker", 0)
PUBLIC = ["8.8.8.8", "1.1.1.1", "[2606:4700::1111]", "[::ffff:8.8.8.8]"]
NOT_PUBLIC = ["127.0.0.1", "10.0.0.1", "172.16.5.5", "192.168.1.1", "169.254.1.1", "100.64.0.1", "[::1]", "[fd00::1]"]


def at(host: str) -> Cluster:
    return Cluster("sync", {"worker": (f"{host}:2222",)})


@pytest.mark.parametrize("host", PUBLIC)
def test_a_public_address_is_refused_unless_allowed(host: str) -> None:
    with pytest.raises(ClusterError, match=r"worker 0 \(.*:2222\):.*from the internet.*; .*cluster\.allow_public=true"):
        addresses.check_not_public(at(host), WORKER, allow_public=False)
    addresses.check_not_public(at(host), WORKER, allow_public=True)


@pytest.mark.parametrize("host", [*NOT_PUBLIC, "localhost", "no-such-host.invalid"])
def test_private_addresses_are_accepted(host: str) -> None:
    addresses.check_not_public(at(host), WORKER, allow_public=False)


def test_a_name_that_resolves_to_a_public_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    infos = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 0)) for ip in ("10.0.0.1", "8.8.8.8")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: infos)
    with pytest.raises(ClusterError, match=r"worker 0 \(two-faced:2222\): is 8\.8\.8\.8 and can be reached"):
        addresses.check_not_public(at("two-faced"), WORKER, allow_public=False)


def test_a_host_with_only_a_loopback_needs_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "interface_addresses", lambda: addresses.ips_of("127.0.0.1"))
    assert addresses.exposure_warning(at("localhost"), WORKER) == ""


@pytest.mark.parametrize("host", ["10.0.0.1", "localhost", "[::1]"])  # a server at localhost listens everywhere too
def test_the_user_is_warned_of_the_exposure(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "interface_addresses", lambda: addresses.ips_of("8.8.4.4"))
    text = addresses.exposure_warning(at(host), WORKER)
    for words in ("no password", "every interface", "8.8.4.4 included", "port 2222", "files with this user's rights"):
        assert words in text


@pytest.mark.parametrize(("allow", "lines"), [(False, 0), (True, 1)])
def test_the_command_refuses_or_warns_once(
    allow: bool, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(single_run, "run_host", lambda *args: {})
    monkeypatch.delenv("TF_CONFIG", raising=False)
    arguments = ["mode=sync", "cluster=hosts", "cluster.worker=[8.8.8.8:2222]", "task.type=worker", "task.index=0"]
    arguments += ["data=digits", "cluster.check_address=false", f"cluster.allow_public={allow}"]
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == (0 if allow else 2)
    assert capsys.readouterr().err.count("tf2dist: warning: TensorFlow's server has no password") == lines


def test_the_addresses_of_this_host_are_found() -> None:
    assert any(ip.is_loopback for ip in addresses.interface_addresses())


def test_the_holder_of_a_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        holder = addresses.port_holder(server.getsockname()[1])
    assert holder.startswith(f"pid {os.getpid()} (")
    assert Path(sys.executable).name in holder
    assert addresses.port_holder(unused_ports(1)[0]) == ""


def test_public_addresses_are_refused_by_default() -> None:
    assert not ClusterConfig().allow_public
    assert RunConfig(task=TaskConfig()).cluster.allow_public is False
