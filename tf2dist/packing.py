"""Messages on their way between processes: a dataclass as one JSON object, and back.

The object has the name of the class as "type", and the fields. Who reads says which messages may come, and gets one
of these, with every field of its declared type, or an error that names what came instead.
"""

import dataclasses
import json
import typing
from functools import cache
from typing import Any

from tf2dist.declared import UndeclaredError, from_json


class MessageError(ValueError):
    """What has come is no message that may come."""


def pack(message: Any) -> bytes:
    """The JSON object of a message, without line breaks."""
    whole = {"type": type(message).__name__, **dataclasses.asdict(message)}
    return json.dumps(whole, separators=(",", ":")).encode()


def unpack(data: bytes, among: Any) -> Any:
    """The message that `data` holds.

    Args:
        among: the messages that may come, a union of classes.

    Raises:
        MessageError: it is none of these, or a field is missing, unknown or of another type.
    """
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):  # RecursionError: a thousand brackets
        raise MessageError("a message that is not JSON") from None
    if not isinstance(whole, dict) or not isinstance(whole.get("type"), str):
        raise MessageError("a message without a type")
    if (kind := whole.pop("type")) not in (known := _by_name(among)):
        raise MessageError(f"a message of unknown type ({kind:.40})")
    try:
        return from_json(known[kind], whole, kind)
    except UndeclaredError as error:
        raise MessageError(f"a malformed message ({error})") from None


@cache
def _by_name(among: Any) -> dict[str, Any]:
    return {kind.__name__: kind for kind in typing.get_args(among) or (among,)}
