"""``python -m tf2dist.doctor [options] [--json]``: the problems that would prevent a run, one line for each finding.

Takes the options and the environment of ``python -m tf2dist``. Starts no training and creates no file, and
ends within four minutes, however slow the name server and TensorFlow are, or within a quarter of an hour
where TensorFlow is not compiled to byte code yet. Plugins are loaded in a process of their own. Exit code 0
if no check failed, otherwise 2. With --json the output is one JSON array of
{"level", "topic", "text", "fix"}. A peer that does not listen yet is a warning: it may start later. A
name that cannot be resolved, or a host without a route to it, is a failure.
"""

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import NoReturn

from tf2dist import files, linux
from tf2dist.cluster import addresses, reachability
from tf2dist.cluster.sources import find_place, of_engine
from tf2dist.cluster.spec import Cluster, Place, Task
from tf2dist.config.compose import ConfigSource
from tf2dist.config.flags import check_for_one_run, parse, source_of
from tf2dist.config.load import BUILT_IN, load
from tf2dist.config.schema import MODES, ClusterConfig, RunConfig
from tf2dist.data import location
from tf2dist.errors import ClusterError, ConfigError, RequestError, TaskLostError, TfDistError, first_line
from tf2dist.hosts import identity
from tf2dist.launch import findings, single_run
from tf2dist.launch.console import prepare_streams, show_lines
from tf2dist.launch.findings import Finding
from tf2dist.signals import reset_inherited

PEERS_TIMEOUT_SECS = 15.0  # for all of them together; a broken name server alone may take as long
# Answers that no waiting changes: a connection that is refused may be accepted later.
UNREACHABLE = ("name unknown", *map(os.strerror, (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)))
Check = Callable[[], Iterator[Finding]]


def main(argv: list[str] | None = None) -> NoReturn:
    """Prints the findings of one command line as they come, and exits."""
    arguments = sys.argv[1:] if argv is None else argv
    reset_inherited()
    prepare_streams()
    files.set_keras_home()
    try:
        sys.exit(report(arguments))
    except TfDistError as error:
        sys.exit(single_run.report(error))
    except KeyboardInterrupt:
        os._exit(130)  # a thread may be in the look-up of a name, which cannot be cancelled


def report(arguments: list[str]) -> int:
    """Prints the findings for one command line; returns the exit code.

    Raises:
        ConfigError: it cannot be read.
        TfDistError: the standard output cannot be written.
    """
    is_json = "--json" in arguments
    args = parse([argument for argument in arguments if argument != "--json"])
    check_for_one_run(args, "is not for the doctor, which looks at one run; leave it out")
    source = source_of(args)
    if args.help:
        show_lines((__doc__ or "").strip())
        return 0
    findings = []
    for finding in examine(args.overrides, os.environ, source):
        findings.append(finding)
        # Each line is printed at once, since a later check may take a minute; JSON is one array and has to wait.
        if not is_json:
            show_lines(str(finding))
    if is_json:
        show_lines(json.dumps([asdict(finding) for finding in findings], indent=1))
    return 2 if any(finding.level == "fail" for finding in findings) else 0


def examine(overrides: list[str], environ: Mapping[str, str], source: ConfigSource = BUILT_IN) -> Iterator[Finding]:
    """All findings, the quick ones first."""
    config, place, mistakes = request(overrides, environ, source)
    yield from mistakes
    checks: list[Check] = [findings.versions, findings.internals]
    if config:
        checks += [lambda: data(config, place), lambda: findings.run_folder(config.run_dir)]
        checks += [lambda: findings.plugins(config)] if config.plugins else []
    if config and place and place.has_peers:
        checks += [
            lambda: own_address(config, *place),
            lambda: meeting(config, *place),
            lambda: other_addresses(*place),
        ]
    if config and place:
        checks += [lambda: stragglers(config, place.cluster)]
    if place and place.cluster.is_managed:
        checks += [lambda: findings.processors(len(place.cluster.tasks), place.cluster.num_workers), findings.isolation]
    elif place:
        checks += [lambda: findings.processors(1, int(place.task in place.cluster.training_tasks))]
    # The GPUs come last: TensorFlow has to be imported to list them.
    shared_by = place.cluster.num_workers if place and place.cluster.is_managed else 0
    checks += [lambda: findings.gpus(shared_by)]
    for check in checks:
        try:
            yield from check()
        except Exception as error:  # an unusual system must not keep the user from the other findings
            yield Finding("warn", "doctor", f"could not look: {type(error).__name__}: {first_line(str(error))}")


def request(
    overrides: list[str], environ: Mapping[str, str], source: ConfigSource = BUILT_IN
) -> tuple[RunConfig | None, Place | None, list[Finding]]:
    """The configuration and this process's place, each None if it is invalid, and the findings about both."""
    config, place, findings = None, None, []
    try:
        config = load(overrides, environ.get("TF_CONFIG"), source)
        location.check(config.data)
        findings.append(Finding("ok", "configuration", f"mode={config.mode}, model={config.model['name']}"))
    except RequestError as error:
        findings += failures("configuration", error)
    # The cluster is checked even if the options are wrong, so that the user learns of all mistakes at once.
    if config is None and not environ.get("TF_CONFIG"):
        return None, None, findings
    mode = config.mode if config else next((mode for mode in MODES if f"mode={mode}" in overrides), MODES[0])
    try:
        # A mistake in the configuration has been found above.
        config_or_default = config or RunConfig(mode=mode, run_dir=".", cluster=ClusterConfig(kind="tf_config"))
        place = find_place(config_or_default, environ)
        if not place.cluster.is_managed:
            counts = ", ".join(f"{len(hosts)} {job}" for job, hosts in sorted(place.cluster.jobs.items()))
            findings.append(Finding("ok", "cluster", f"{counts}; this is {place.task}"))
        elif engine := of_engine(environ):
            text = "an engine has started this process as one of several, each of which would train alone"
            findings.append(Finding("warn", "cluster", text, f"add cluster={engine}"))
    except RequestError as error:
        findings += failures("cluster", error)
    return config, place, findings


def failures(topic: str, error: TfDistError) -> list[Finding]:
    """One finding for each line of an error; the text behind the last semicolon is the fix."""
    # The form of all errors: name (value): rule; way out.
    parts = [line.rpartition("; ") for line in str(error).splitlines()]
    return [Finding("fail", topic, text or fix, fix if text else "") for text, _, fix in parts]


def stragglers(config: RunConfig, cluster: Cluster) -> Iterator[Finding]:
    """The options simulate.*, against the workers of the cluster; no finding if they fit."""
    try:
        single_run.check_simulated(config, cluster)
    except ConfigError as error:
        yield from failures("configuration", error)


def data(config: RunConfig, place: Place | None) -> Iterator[Finding]:
    """The data, and whether each worker's share of it fills a batch."""
    try:
        location.check_batch_size(config, place.cluster.num_workers if place else config.cluster.num_workers)
    except RequestError as error:
        yield from failures("data", error)
    if place is None or place.cluster.is_managed:
        yield from findings.training_data(config.data)
    elif place.task.job != "ps":  # all hosts fall back to other data or none does, so none may
        yield from findings.training_data(replace(config.data, offline="fail"))


def own_address(config: RunConfig, cluster: Cluster, task: Task) -> Iterator[Finding]:
    """Whether this task can listen at its address, and who could reach it there."""
    address = cluster.address(task)
    host, port = addresses.split(address)
    ips = addresses.ips_of(host)
    if not ips:
        level = "fail" if config.cluster.check_address else "warn"
        yield Finding(level, "ports", f"{task} at {address}: this host does not know the name", "correct it, or add it")
        return
    try:
        if config.cluster.check_address:
            reachability.check_no_alias(cluster, task, timeout_secs=0.0, notify=lambda _: None)
            reachability.check_own_address(cluster, task)
        means = ", ".join(f"{ip} (IPv{ip.version})" for ip in ips)
        yield Finding("ok", "ports", f"{task} can listen at {address}, which is {means}")
    except ClusterError as error:
        yield from failures("ports", error)
    # The kernel may give such a port to any outgoing connection before the task binds it.
    if port in (ephemeral := linux.ephemeral_ports()):
        text = f"port {port} of {task} is from the range {ephemeral[0]} to {ephemeral[-1]} of outgoing connections"
        yield Finding("warn", "ports", text, "choose a lower one, or it may be taken")
    try:
        addresses.check_not_public(cluster, task, allow_public=config.cluster.allow_public)
        if text := addresses.exposure_warning(cluster, task):
            yield Finding("warn", "exposure", *text.rsplit("; ", 1))
    except ClusterError as error:
        yield from failures("exposure", error)


def meeting(config: RunConfig, cluster: Cluster, task: Task) -> Iterator[Finding]:
    """Whether the launching processes can meet: this one's control port, and the job token."""
    warnings: list[str] = []
    try:
        identity.job_key(os.environ, cluster, warnings.append)
        yield from (Finding("warn", "token", *text.rsplit("; ", 1)) for text in warnings)
        shift = config.cluster.control_port_shift
        addresses.check_control_ports(cluster, shift)
        # Closed again at once, so that a run can start while the doctor goes on.
        with addresses.listen_at_control_port(cluster, task, shift) as listener:
            yield Finding("ok", "meeting", f"{task} can listen at its control port {listener.getsockname()[1]}")
    except (ClusterError, TaskLostError) as error:
        yield from failures("meeting", error)


def other_addresses(cluster: Cluster, own_task: Task) -> Iterator[Finding]:
    """Which of the other tasks answer. All are asked at once, since each may take until the timeout."""
    others = [task for task in cluster.tasks if task != own_task]
    # With a loopback address of its own the whole cluster is on this machine, as in a trial.
    own_is_loopback = loopback(addresses.ips_of(addresses.split(cluster.address(own_task))[0]))

    def ask(task: Task) -> tuple[list[addresses.Ip], str]:
        address = cluster.address(task)
        return addresses.ips_of(addresses.split(address)[0]), reachability.why_unreachable(address)

    answers = reachability.ask_all(ask, others, PEERS_TIMEOUT_SECS)
    for task in others:
        ips, reason = answers.get(task, ([], f"no answer in {PEERS_TIMEOUT_SECS:.0f} s"))
        peer = f"{task} at {cluster.address(task)}" + (f" [{', '.join(map(str, ips))}]" if ips else "")
        if loopback(ips) and not own_is_loopback:
            fix = "give the name by which the other hosts know it"
            yield Finding("fail", "peers", f"{peer} is a loopback address, which means another host on each", fix)
        elif not reason:
            yield Finding("ok", "peers", f"{peer} answers")
        elif reason in UNREACHABLE:
            fix = "correct the name, or add it to DNS" if reason == UNREACHABLE[0] else "correct the route to that host"
            yield Finding("fail", "peers", f"{peer} cannot be reached ({reason})", fix)
        else:
            fix = "start it, or open the port in the firewall"
            yield Finding("warn", "peers", f"{peer} does not answer ({reason})", fix)


def loopback(ips: list[addresses.Ip]) -> bool:
    return bool(ips) and all(ip.is_loopback for ip in ips)


if __name__ == "__main__":
    main()
