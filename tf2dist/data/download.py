"""Lets tensorflow-datasets prepare MNIST, in a process of its own with the arguments DIR PARENT_PID.

If that fails, the last line on stdout is the reason.
"""

import os
import socket
import sys
import urllib.parse
import urllib.request

from tf2dist.errors import first_line
from tf2dist.linux import die_with_parent
from tf2dist.tf_constants import NO_GOOGLE


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    # Otherwise TensorFlow asks metadata.google.internal for credentials, on machines that are not Google's, too.
    os.environ.setdefault(NO_GOOGLE, "true")
    import tensorflow_datasets as tfds

    # Without a network tensorflow-datasets retries for minutes. Behind a proxy the name may be unknown here.
    host = urllib.parse.urlparse(tfds.builder_cls("mnist").URL).hostname
    if host and not set(urllib.request.getproxies()) - {"no"}:
        try:
            socket.getaddrinfo(host, 443)
        except OSError:
            print(f"no network: the name {host} is unknown")
            sys.exit(1)
    # By default tensorflow-datasets accepts a file for which it has no checksum.
    config = tfds.download.DownloadConfig(verify_ssl=True, force_checksums_validation=True)
    try:
        # Otherwise a prepared copy is looked for first, on another host than the one that the doctor names.
        with tfds.testing.disable_gcs_access():
            tfds.builder("mnist", data_dir=sys.argv[1]).download_and_prepare(download_config=config)
    except Exception as error:
        print(f"{type(error).__name__}: {first_line(str(error))}")
        sys.exit(1)
