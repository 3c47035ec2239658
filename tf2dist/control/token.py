"""The secret that all tasks of a job share, from the environment or a file, and the key derived from it."""

import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from tf2dist.cluster.spec import Cluster
from tf2dist.errors import ClusterError
from tf2dist.files import open_to_read
from tf2dist.interpreter import SECRETS

VARIABLE, FILE_VARIABLE = SECRETS
MIN_CHARACTERS = 16
LOOPBACK = ("localhost:", "127.", "[::1]:")
# This key is public. It does not depend on the cluster list, because lists are compared only after both sides
# have proved that they have the same key, and a difference can then be shown.
NO_TOKEN_KEY = hashlib.sha256(b"tf2dist: a job without a token").digest()


def job_key(environ: Mapping[str, str], cluster: Cluster, warn: Callable[[str], None]) -> bytes:
    """The key of the job's control connections; without a token a public one, which only prevents accidents.

    Raises:
        ClusterError: the token is too short, or its file is missing or accessible to others. The group may read it:
            Kubernetes mounts a Secret with mode 0440, owned by root and the pod's group.
    """
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
        with open_to_read(Path(path)) as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read().decode().strip()  # editors and openssl end the file with a newline
    except OSError as error:
        raise ClusterError(f"{name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ClusterError(f"{name}: is not text; make one with: openssl rand -hex 32") from None
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ClusterError(f"{name}: others can read or write it (mode {mode & 0o777:04o}); chmod o= {path}")
    return token
