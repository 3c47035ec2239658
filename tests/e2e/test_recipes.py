"""The recipes of docs/recipes.md: their commands, with the environment that each engine sets for its tasks."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PAGES
from tests.hosts import Hosts, hosts
from tests.pods import Pod, Pods
from tf2dist.cluster.sources import find_place, of_engine
from tf2dist.config.load import load

IPS = [f"10.77.0.{number}" for number in range(1, 5)]  # of the private hosts
ROLES = [("chief", 0), ("ps", 0), ("worker", 0), ("worker", 1)]
# What the test adds to the command of the page.
SMALL = ("data=digits", "model=softmax", "figure=false", "devices.onednn=false", "train.steps=200")
pytestmark = pytest.mark.timeout(300)
Tasks = list[tuple[str, str, dict[str, str]]]  # host name, name for the others or "", environment


def with_roles(names: list[str], task: dict[str, Any] | None = None, chief: str = "chief", **more: Any) -> Tasks:
    """Four tasks with TF_CONFIG: the chief, the ps and two workers have these names, at port 2222."""
    addresses = [f"{name}:2222" for name in names]
    cluster = {chief: addresses[:1], "ps": addresses[1:2], "worker": addresses[2:]}
    tasks = [{"type": chief if job == "chief" else job, "index": index} | (task or {}) for job, index in ROLES]
    texts = [json.dumps({"cluster": cluster, "task": task} | more) for task in tasks]
    return [(name.partition(".")[0], name, {"TF_CONFIG": text}) for name, text in zip(names, texts, strict=True)]


def by_rank(variables: Callable[[int], dict[str, str]], names: list[str] | None = None) -> Tasks:
    """Four tasks with the variables that an engine sets for each rank."""
    return [(f"node-{rank}", names[rank] if names else "", variables(rank)) for rank in range(4)]


VERTEX = [f"cmle-training-workerpool{pool}-ab12-{index}" for pool, index in ((0, 0), (2, 0), (1, 0), (1, 1))]
ALGO = [f"algo-{number}" for number in range(1, 5)]
# By the title of the section. The examples are those of the engines' documentation and source.
ENGINES: dict[str, Tasks] = {
    "Vertex AI": with_roles(VERTEX, {"cloud": "ab12", "trial": "1"}, environment="cloud", job={"job_args": ["a"]}),
    "TFJob": with_roles([f"mine-{job}-{index}.default.svc" for job, index in ROLES], environment="cloud"),
    "TFJob with Master": with_roles(
        [f"mine-{'master' if job == 'chief' else job}-{index}.default.svc" for job, index in ROLES],
        chief="master",
        environment="cloud",
    ),
    "Volcano": with_roles([f"mine-{job}-{index}.mine" for job, index in ROLES]),
    "Azure Machine Learning": by_rank(
        lambda rank: {
            "TF_CONFIG": json.dumps(
                {
                    "cluster": {"worker": [f"{ip}:2222" for ip in IPS]},
                    "task": {"type": "worker", "index": rank},
                    "environment": "cloud",
                }
            )
        }
    ),
    "SageMaker": by_rank(lambda rank: {"SM_HOSTS": json.dumps(ALGO), "SM_CURRENT_HOST": ALGO[rank]}, ALGO),
    "SkyPilot": by_rank(
        lambda rank: {"SKYPILOT_NODE_IPS": "\n".join(IPS), "SKYPILOT_NODE_RANK": f"{rank}", "SKYPILOT_NUM_NODES": "4"}
    ),
    "dstack": by_rank(
        lambda rank: {
            "DSTACK_NODES_IPS": "\n".join(IPS),
            "DSTACK_NODE_RANK": str(rank),
            "DSTACK_MASTER_NODE_IP": IPS[0],
            "DSTACK_NODES_NUM": "4",
        }
    ),
}


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


@pytest.fixture(scope="module")
def places() -> Iterator[Hosts]:
    with hosts(5) as made:
        yield made


def command(engine: str) -> list[str]:
    """The words of the command in the section of the page."""
    title = engine.partition(" with ")[0]
    section = PAGES["docs/recipes.md"].partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    (found,) = re.findall(r"python -m tf2dist .*|\[python, -m, tf2dist, .*\]", section)
    return [word.strip(",") for word in str(found).strip("[]").split()]


def pods(engine: str, *options: str) -> list[Pod]:
    tasks = ENGINES[engine]
    token = {"TF2DIST_TOKEN": "of sixteen or more characters"}
    words = [*command(engine), *options]
    return [Pod(name, address, words, env | token, {"runs": "/shared/runs"}) for name, address, env in tasks]


def assert_exact(run: Pods, **cluster: int) -> None:
    """All tasks have ended well, and every step has been made once."""
    assert set(run.codes().values()) == {0}, str(run)
    summary = json.loads((run.folder / "runs" / "mine" / "summary.json").read_text())
    assert summary["cluster"] == cluster
    assert summary["global_step"] == summary["updates_applied"] == 200, str(run)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_task_finds_its_place(engine: str) -> None:
    its = pods(engine)
    found = [find_place(load(pod.command[3:], pod.env.get("TF_CONFIG")), pod.env) for pod in its]
    assert [(place.task.job, place.task.index) for place in found] == ROLES
    assert all(place.cluster == found[0].cluster for place in found)
    for place, pod, ip in zip(found, its, IPS, strict=True):
        assert place.cluster.address(place.task).rpartition(":")[0] == (pod.address or ip)
        assert "TF_CONFIG" in pod.env or of_engine(pod.env) == "ranks", "for calls of fit"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_the_command_trains_to_the_end(places: Hosts, tmp_path: Path, engine: str) -> None:
    run = Pods(places, tmp_path, pods(engine, *SMALL))
    run.start_all()
    assert_exact(run, worker=2, ps=1)


@pytest.mark.slow
def test_a_synchronous_run(places: Hosts, tmp_path: Path) -> None:
    its = pods("SkyPilot", *SMALL, "mode=sync")
    two = [pod._replace(env=pod.env | {"SKYPILOT_NODE_IPS": "\n".join(IPS[:2])}) for pod in its[:2]]
    run = Pods(places, tmp_path, two)
    run.start_all()
    assert_exact(run, worker=2, ps=0)


@pytest.mark.slow
def test_an_evaluator_that_the_cluster_leaves_out(places: Hosts, tmp_path: Path) -> None:
    """As in pool 3 of Vertex AI."""
    its = pods("Vertex AI", *SMALL, "checkpoint.every_steps=50")
    tf_config = json.loads(its[0].env["TF_CONFIG"])
    tf_config["task"] |= {"type": "evaluator", "index": 0}
    evaluator = its[0]._replace(name="evaluator", address="", env=its[0].env | {"TF_CONFIG": json.dumps(tf_config)})
    run = Pods(places, tmp_path, [*its, evaluator])
    run.start_all()
    assert_exact(run, worker=2, ps=1)
    lines = (tmp_path / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
    assert "evaluator-0" in {json.loads(line)["task"] for line in lines}
