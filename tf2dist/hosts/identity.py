"""Identity of a job: the values that must be equal on all its hosts, how they differ, and the key that its tasks share.

The key is derived from a secret, the token, which all tasks have from the environment or a file.
"""

import hashlib
import importlib.metadata
import os
import platform
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tf2dist import __version__
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config.schema import OPTIONS, RunConfig
from tf2dist.data import image_files, location
from tf2dist.data.known import IMAGES
from tf2dist.errors import ClusterError
from tf2dist.files import open_to_read, raising
from tf2dist.hosts.protocol import Difference, Identity, Jobs
from tf2dist.linux import SECRETS
from tf2dist.tf_constants import installed_version

PACKAGES = ("tensorflow", "keras", "numpy")
MAX_SHOWN_CHARACTERS = 200
MAX_SHOWN = 8


def identity_of(
    config: RunConfig, cluster: Cluster, task: Task | None = None, fit: dict[str, Any] | None = None
) -> Identity:
    """The identity of this host.

    Args:
        task: if it is a ps, which reads no data, the data of its host is not compared.
        fit: the arguments of a call of `fit`, as JSON values; None for the command line.
    """
    return Identity(
        cluster={job: cluster.jobs[job] for job in sorted(cluster.jobs)},
        versions=versions(),
        config=_shared(config.as_tree()) | ({"fit": fit} if fit is not None else {}),
        plugins=tuple(map(_sha256, config.plugins)),
        data=None if task and task.job == "ps" else _data(config),
    )


def versions() -> dict[str, str]:
    """The versions by package, from the packages' metadata: importing them would take seconds."""
    by_package = {"tf2dist": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            by_package[package] = installed_version(package)
        except importlib.metadata.PackageNotFoundError:
            by_package[package] = "missing"
    return by_package


def _shared(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The configuration without the options that each host may choose for itself.

    The lists of addresses and the hashes of the plugins are compared instead of "cluster" and "plugins".
    """
    shared: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        scope = OPTIONS[name].scope if name in OPTIONS else "job"
        if isinstance(value, dict):
            if (section := _shared(value, f"{name}.")) or not value:
                shared[key] = section
        elif scope == "either" and value is not None:
            shared[key] = "given"
        elif scope in ("job", "either"):
            shared[key] = value
    return shared


def _sha256(path: str) -> str:
    with raising(f"plugins ({path}): cannot be read", "name a file that can be read"):
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _data(config: RunConfig) -> dict[str, int]:
    """Sizes of the data files in bytes by name: cheap to read, and another version or a partial copy differs."""
    if config.data.name in IMAGES:
        found = image_files.find(config.data)
        return found.sizes() if found else {}
    if config.data.name == "digits":
        file = location.digits_file()
        return {file.name: file.stat().st_size} if file.is_file() else {}
    return {}  # the data of a plugin: the hash of its code is compared instead


def differences(mine: Identity, theirs: Identity) -> list[Difference]:
    """Where two identities differ; a list counts as one value."""
    return _differences(vars(mine), vars(theirs), "")


def list_differences(mine: Jobs, theirs: Jobs) -> list[Difference]:
    """Where two cluster lists differ."""
    return _differences(mine, theirs, "cluster")


def _differences(mine: Any, theirs: Any, path: str) -> list[Difference]:
    # None: a ps reads no data, so it can have no other data.
    if mine == theirs or (path == "data" and None in (mine, theirs)):
        return []
    if not (isinstance(mine, dict) and isinstance(theirs, dict)):
        return [Difference(path.removeprefix("config."), _as_text(mine), _as_text(theirs))]
    diffs = []
    for key in sorted({*mine, *theirs}):
        name = f"{path}.{key}" if path else str(key)
        # Versions of tf2dist agree on the protocol and may still differ in their options.
        diffs += _differences(mine.get(key, "nothing"), theirs.get(key, "nothing"), name)
    return diffs


def _as_text(value: Any) -> str:
    # A host list may have hundreds of addresses, and the user reads all differences in one line.
    text = f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."


def explain(diffs: Sequence[Difference], mine_at: str, theirs_at: str) -> str:
    """One line, such as "versions.keras: 3.15.1 at chief-0, 3.14.0 here"."""
    texts = [f"{diff.name}: {diff.mine} {mine_at}, {diff.theirs} {theirs_at}" for diff in diffs[:MAX_SHOWN]]
    omitted = [f"and {len(diffs) - MAX_SHOWN} more"] if len(diffs) > MAX_SHOWN else []
    return "; ".join(texts + omitted)


VARIABLE, FILE_VARIABLE = SECRETS
MIN_CHARACTERS = 16
LOOPBACK = ("localhost:", "127.", "[::1]:")
# This key is public. It does not depend on the cluster list, because lists are compared only after both sides
# have proved that they have the same key, and a difference can then be shown.
NO_TOKEN_KEY = hashlib.sha256(b"tf2dist: a job without a token").digest()


def job_key(environ: Mapping[str, str], cluster: Cluster, warn: Callable[[str], None]) -> bytes:
    """The key of the job's control connections; without a token a public one, which only prevents accidents."""
    token = _token(environ)
    if token is not None:
        return hashlib.sha256(b"tf2dist token\0" + token.encode()).digest()
    if not all(cluster.address(task).startswith(LOOPBACK) for task in cluster.tasks):
        warn(
            "no job token: whoever reaches the control ports can join or stop the job; give every task the same "
            f"{VARIABLE} ({MIN_CHARACTERS} characters or more) or {FILE_VARIABLE}"
        )
    return NO_TOKEN_KEY


def _token(environ: Mapping[str, str]) -> str | None:
    """The token, or None if none is given.

    A variable that is set and empty is an error and does not mean "no token": `$(cat missing)` leaves one.
    """
    variables = [name for name in (VARIABLE, FILE_VARIABLE) if name in environ]
    if not variables:
        return None
    if len(variables) == 2:
        raise ClusterError(f"{VARIABLE} and {FILE_VARIABLE} are both set; give one of the two")
    if FILE_VARIABLE in environ:
        source, token = f"{FILE_VARIABLE} ({environ[FILE_VARIABLE]})", _read(environ[FILE_VARIABLE])
    else:
        source, token = VARIABLE, environ[VARIABLE].strip()
    if len(token) < MIN_CHARACTERS:
        raise ClusterError(f"{source}: has {len(token)} characters, the token must have at least {MIN_CHARACTERS}")
    return token


def _read(path: str) -> str:
    name = f"{FILE_VARIABLE} ({path})"
    try:
        with (
            raising(f"{name}: cannot be read", "name a file that can be read", ClusterError),
            open_to_read(Path(path)) as file,
        ):
            mode = os.fstat(file.fileno()).st_mode
            token = file.read().decode().strip()  # editors and openssl end the file with a newline
    except UnicodeDecodeError:
        raise ClusterError(f"{name}: is not text; make one with: openssl rand -hex 32") from None
    # The group may: Kubernetes mounts a Secret with mode 0440, owned by root and the group of the pod.
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ClusterError(f"{name}: others can read or write it (mode {mode & 0o777:04o}); chmod o= {path}")
    return token
