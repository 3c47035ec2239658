"""The cluster of the environment variable TF_CONFIG, as TensorFlow, TFJob, Vertex AI and others write it."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tf2dist.cluster.spec import Place
from tf2dist.cluster.validation import validated
from tf2dist.config.schema import RunConfig
from tf2dist.errors import ClusterError

EXAMPLE = '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'


def find(config: RunConfig, environ: Mapping[str, str]) -> Place:
    """The place that TF_CONFIG gives this process. Raises ClusterError, with one line for each mistake."""
    return validated("TF_CONFIG", *read(environ), config.mode)


def read(environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The jobs and the task in TF_CONFIG, both not yet checked. Raises ClusterError if they are not there."""
    text = environ.get("TF_CONFIG")
    if not text:
        raise ClusterError(
            f"cluster (tf_config): the environment variable TF_CONFIG is not set; set it, for example to {EXAMPLE}"
        )
    try:
        parsed = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 12) : error.pos + 12]
        raise ClusterError(
            f"TF_CONFIG: not valid JSON at character {error.pos + 1} (near {near!r}): {error.msg}; "
            f"it looks like {EXAMPLE}"
        ) from None
    except (ValueError, RecursionError) as error:  # for example a number of 5,000 digits, or 100,000 brackets
        raise ClusterError(f"TF_CONFIG: cannot be read ({error}); it looks like {EXAMPLE}") from None
    if isinstance(parsed, dict) and "sparseCluster" in parsed:
        raise ClusterError(
            'TF_CONFIG: "sparseCluster" lists this task and its ps alone, and every task needs the whole "cluster"; '
            "leave enableDynamicWorker out of the TFJob"
        )
    for key in ("cluster", "task"):
        if not isinstance(parsed, dict) or not isinstance(parsed.get(key), dict):
            raise ClusterError(f'TF_CONFIG: "{key}" is missing or not an object; it looks like {EXAMPLE}')
    return _with_chief(parsed["cluster"], parsed["task"])


def text_of(place: Place) -> str:
    """TF_CONFIG for the process at this place."""
    cluster, task = place
    return json.dumps({"cluster": cluster.jobs, "task": {"type": task.job, "index": task.index}})


def _with_chief(jobs: dict[str, Any], task: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The cluster and the task with "chief" for its old name "master", which TensorFlow and TFJob still accept."""
    if "master" in jobs and "chief" in jobs:
        raise ClusterError("TF_CONFIG: job master: is the old name of chief, which is given too; keep one")
    jobs = {"chief" if job == "master" else job: addresses for job, addresses in jobs.items()}
    return jobs, task | {"type": "chief"} if task.get("type") == "master" and "chief" in jobs else task


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; refuses duplicate names, of which Python would silently take the last."""
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ClusterError(f'TF_CONFIG: "{name}" occurs {count} times; keep one')
    return dict(pairs)
