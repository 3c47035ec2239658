"""Clusters as values: TF_CONFIG and host lists, and the mistakes in them."""

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from tf2dist.cluster.sources import SOURCES, find_place
from tf2dist.cluster.spec import Cluster, Place, Task
from tf2dist.config.schema import ClusterConfig, RunConfig, TaskConfig
from tf2dist.errors import ClusterError, ConfigError

ASYNC = {"chief": ["h0:1"], "ps": ["h1:1"], "worker": ["h2:1", "h3:1"]}
SYNC = {"worker": ["h2:1", "h3:1"]}


def parse(text: str | None, mode: str, run_dir: str | None = None) -> Place:
    config = RunConfig(mode=mode, cluster=ClusterConfig(kind="tf_config"), run_dir=run_dir)
    return find_place(config, {"TF_CONFIG": text} if text else {})


def tf_config(jobs: Any, job: Any = "worker", index: Any = 0) -> str:
    return json.dumps({"cluster": jobs, "task": {"type": job, "index": index}})


def test_tf_config_is_parsed() -> None:
    made, task = parse(tf_config(ASYNC, "worker", 1), "async")
    assert task == Task("worker", 1)
    assert made.address(task) == "h3:1"
    assert (made.num_workers, made.num_ps, made.leader) == (2, 1, Task("chief", 0))
    assert made.training_tasks == [Task("worker", 0), Task("worker", 1)]


def test_a_synchronous_chief_is_the_first_worker() -> None:
    made, _ = parse(tf_config({"worker": ["h2:1"], "chief": ["h0:1"]}), "sync")
    assert made.training_tasks == [Task("chief", 0), Task("worker", 0)]
    assert made.num_workers == 2
    assert made.leader == Task("chief", 0)


def test_an_index_may_be_a_string_as_in_tensorflow() -> None:
    assert parse(tf_config(SYNC, index="1"), "sync")[1] == Task("worker", 1)


def test_tensorflow_does_not_see_an_evaluator() -> None:
    made, task = parse(tf_config({**SYNC, "evaluator": ["h9:1"]}, "evaluator"), "sync", run_dir="shared")
    assert task.job == "evaluator"
    assert made.tf_jobs() == SYNC


@pytest.mark.parametrize("jobs", [{**SYNC, "evaluator": ["h9:1"]}, SYNC], ids=["listed", "apart"])
def test_an_evaluator_needs_a_run_dir(jobs: dict[str, list[str]]) -> None:
    with pytest.raises(ClusterError, match=r"run_dir \(null\): evaluator-0 .* give it and worker-0 the same"):
        parse(tf_config(jobs, "evaluator"), "sync")


@pytest.mark.parametrize("jobs", [ASYNC, {**ASYNC, "evaluator": []}], ids=["missing", "empty"])
def test_an_evaluator_may_be_left_out_of_the_cluster(jobs: dict[str, list[str]]) -> None:
    """TensorFlow's documentation, TFJob and Vertex AI leave it out."""
    result = parse(tf_config(jobs, "evaluator", 1), "async", run_dir="shared")
    assert result.task == Task("evaluator", 1)
    assert not result.has_address
    assert result.cluster == parse(tf_config(ASYNC), "async")[0], "the others do not know of it"


def test_master_is_the_old_name_of_chief() -> None:
    jobs = {"master" if job == "chief" else job: hosts for job, hosts in ASYNC.items()}
    for job in ("master", "chief", "worker"):
        renamed = "chief" if job == "master" else job
        assert parse(tf_config(jobs, job), "async") == parse(tf_config(ASYNC, renamed), "async")


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (None, "async", ["TF_CONFIG is not set"]),
        ("{", "async", ["not valid JSON at character 2"]),
        ("[]", "async", ['"cluster" is missing']),
        ('{"cluster": {}}', "sync", ['"task" is missing']),
        (tf_config([1]), "sync", ['"cluster" is missing or not an object']),
        (tf_config(SYNC, index=2), "sync", ["task index (2)", "from 0 to 1"]),
        (tf_config(SYNC, index=-1), "sync", ["task index (-1)"]),
        (tf_config(SYNC, index=True), "sync", ["task index (True)"]),
        (tf_config(SYNC, index="one"), "sync", ["task index (one)"]),
        (tf_config(SYNC, index=None), "sync", ["task index (None)"]),
        (tf_config(SYNC, "master"), "sync", ["task type (master)", "worker"]),
        (tf_config({"chief": ["a:1"], "master": ["b:1"]}, "chief"), "sync", ["job master: is the old name of chief"]),
        (tf_config(SYNC, "evaluator", -1), "sync", ["task index (-1)", "whole number"]),
        (
            '{"sparseCluster": {"worker": {"0": "h2:1"}, "ps": ["h1:1"]}, "task": {"type": "worker", "index": 0}}',
            "async",
            ["sparseCluster", 'every task needs the whole "cluster"', "enableDynamicWorker"],
        ),
        (tf_config(SYNC, None), "sync", ["task type (None)"]),
        (tf_config({**SYNC, "ps": ["h4:1"]}), "sync", ["job ps", "no parameter servers"]),
        (tf_config({**SYNC, "wroker": ["h4:1"]}), "sync", ["job wroker", "there is no such job"]),
        (tf_config({"worker": "h2:1"}), "sync", ["job worker (h2:1)", "list"]),
        (tf_config({"worker": [1]}), "sync", ["job worker ([1])"]),
        (tf_config({"worker": ["h2"]}), "sync", ["worker 0 (h2)", "must be host:port"]),
        (tf_config({"worker": ["h2:x"]}), "sync", ["worker 0 (h2:x)"]),
        (tf_config({"worker": ["http://h2:1"]}), "sync", ["worker 0 (http://h2:1)"]),
        (tf_config({"worker": ["h2:0"]}), "sync", ["port must be from 1 to 65535"]),
        (tf_config({"worker": ["h2:70000"]}), "sync", ["port must be from 1 to 65535"]),
        (tf_config({"worker": ["h2:1", "h2:1"]}), "sync", ["worker 1 (h2:1)", "same address as worker 0"]),
        (tf_config({"worker": ["0:2222"]}), "sync", ["worker 0 (0:2222)", "0 is another way to write 0.0.0.0"]),
        (tf_config({"worker": ["127.1:1"]}), "sync", ["127.1 is another way to write 127.0.0.1"]),
        (tf_config({"worker": ["0x7f000001:1"]}), "sync", ["0x7f000001 is another way to write 127.0.0.1"]),
        (tf_config({"worker": ["010.0.0.1:1"]}), "sync", ["010.0.0.1 is another way to write 8.0.0.1"]),
        (tf_config({"worker": ["224.0.0.1:1"]}), "sync", ["224.0.0.1 is an address of many hosts (multicast)"]),
        (tf_config({"worker": ["[ff02::1]:1"]}), "sync", ["[ff02::1] is an address of many hosts"]),
        (tf_config({"worker": ["255.255.255.255:1"]}), "sync", ["is an address of many hosts"]),
        (tf_config({"worker": ["[::]:1"]}), "sync", ["[::] means all interfaces and not one host"]),
        (tf_config({"worker": ["localhost:1", "127.0.0.1:1"]}), "sync", ["same address as worker 0 (localhost:1)"]),
        (tf_config({"worker": ["[::1]:1", "127.0.0.2:1"]}), "sync", ["same address as worker 0 ([::1]:1)"]),
        (tf_config({"worker": ["10.0.0.1:1", "[::ffff:a00:1]:01"]}), "sync", ["same address as worker 0"]),
        (tf_config({"worker": ["[fd00::1]:1", "[FD00:0::1]:1"]}), "sync", ["same address as worker 0"]),
        (tf_config({"worker": ["Host.:1", "host:1"]}), "sync", ["same address as worker 0 (Host.:1)"]),
        (tf_config({"worker": []}), "sync", ["job worker: is missing"]),
        (tf_config({"chief": ["a:1", "b:1"], "worker": ["c:1"]}), "sync", ["job chief: has 2 tasks"]),
        (tf_config(SYNC), "async", ["job chief: is missing", "job ps: is missing"]),
        (tf_config({"chief": ["h0:1"], "ps": ["h1:1"]}, "ps"), "async", ["job worker: is missing"]),
    ],
)
def test_each_mistake_is_named(text: str | None, mode: str, words: list[str]) -> None:
    with pytest.raises(ClusterError) as caught:
        parse(text, mode)
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


def test_a_job_that_is_no_list_is_the_only_mistake() -> None:
    with pytest.raises(ClusterError) as caught:
        parse(tf_config({"worker": {"0": "a:1", "2": "b:1"}}), "sync")
    (line,) = str(caught.value).splitlines()
    assert line.endswith('must be a list of "host:port" strings')


def test_all_mistakes_are_reported_at_once() -> None:
    text = tf_config({"chief": ["h0:1"], "ps": ["h1"], "worker": ["h2:99999", "h0:1"]}, "worker", 5)
    with pytest.raises(ClusterError) as caught:
        parse(text, "async")
    assert len(str(caught.value).splitlines()) == 4


def test_host_lists_give_the_same_as_tf_config() -> None:
    lists = ClusterConfig(kind="hosts", **ASYNC)  # type: ignore[arg-type]
    config = RunConfig(cluster=lists, task=TaskConfig(type="ps", index=0))
    assert find_place(config, {}) == parse(tf_config(ASYNC, "ps", 0), "async")


def test_host_lists_need_a_task() -> None:
    config = RunConfig(mode="sync", cluster=ClusterConfig(kind="hosts", worker=["a:1"]))
    with pytest.raises(ClusterError, match=r"task\.type and task\.index"):
        find_place(config, {})


def test_each_task_of_a_local_cluster_has_its_own_address() -> None:
    place = find_place(RunConfig(cluster=ClusterConfig(num_workers=3, num_ps=2)), {})
    cluster = place.cluster.at_ports(range(2222, 2240))
    assert sorted(map(str, cluster.tasks)) == ["chief-0", "ps-0", "ps-1", "worker-0", "worker-1", "worker-2"]
    assert len({cluster.address(task) for task in cluster.tasks}) == 6
    assert {cluster.address(task).partition(":")[0] for task in cluster.tasks} == {"127.0.0.1"}, "no name to look up"
    assert set(find_place(RunConfig(mode="sync"), {}).cluster.jobs) == {"worker"}


def test_one_command_leads_a_local_cluster_and_meets_no_other() -> None:
    for mode in ("async", "sync"):
        place = find_place(RunConfig(mode=mode), {})
        assert (place.leads, place.has_peers) == (True, False)
        assert place.cluster.is_managed


def test_many_commands_make_the_cluster_of_tf_config() -> None:
    assert [parse(tf_config(SYNC, index=index), "sync").leads for index in range(2)] == [True, False]
    place = parse(tf_config(SYNC), "sync")
    assert (place.has_peers, place.cluster.is_managed) == (True, False)
    assert not parse(tf_config(SYNC, "evaluator"), "sync", run_dir="shared").has_peers, "nobody knows of it"


@pytest.mark.parametrize(("num_ps", "replicas", "refused"), [(1, 3, False), (2, 2, False), (2, 3, True)])
def test_several_gradients_of_a_worker_need_a_single_ps(num_ps: int, replicas: int, refused: bool) -> None:
    environ = {"TF_CONFIG": tf_config({**ASYNC, "ps": [f"p{index}:1" for index in range(num_ps)]})}
    text = (
        "sync_replicas.replicas_to_aggregate (3): is more than the 2 workers, which needs a single ps; give at most 2, "
        "or use one ps"
    )
    for kind in ("local", "tf_config"):
        config = RunConfig(mode="sync_replicas", cluster=ClusterConfig(kind=kind, num_workers=2, num_ps=num_ps))
        config.sync_replicas.replicas_to_aggregate = replicas
        with pytest.raises(ConfigError, match=f"^{re.escape(text)}$") if refused else contextlib.nullcontext():
            find_place(config, environ)


def test_a_source_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine adds a function; whatever follows works by the two facts about the cluster that it makes."""

    def find(config: RunConfig, environ: Mapping[str, str]) -> Place:
        addresses = tuple(environ["ADDRESSES"].split(","))
        return Place(Cluster(config.mode, {"worker": addresses}), Task("worker", int(environ["RANK"])))

    config = RunConfig(mode="sync", cluster=ClusterConfig(kind="mine"))
    with pytest.raises(ConfigError, match=rf"cluster\.kind \(mine\): must be one of {', '.join(SOURCES)}$"):
        find_place(config, {})
    monkeypatch.setitem(SOURCES, "mine", find)
    place = find_place(config, {"ADDRESSES": "a:1,b:1", "RANK": "1"})
    assert (place.task, place.cluster.num_workers, place.leads, place.has_peers) == (Task("worker", 1), 2, False, True)
