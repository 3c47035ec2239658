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
    fields = {"type": type(message).__name__, **dataclasses.asdict(message)}
    return json.dumps(fields, separators=(",", ":")).encode()


def unpack(data: bytes, allowed: Any) -> Any:
    """The message that `data` holds.

    Args:
        allowed: the messages that may come, a union of classes.

    Raises:
        MessageError: it is none of these, or a field is missing, unknown or of another type.
    """
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):  # RecursionError: a thousand brackets
        raise MessageError("a message that is not JSON") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("type"), str):
        raise MessageError("a message without a type")
    if (kind := fields.pop("type")) not in (classes := _by_name(allowed)):
        raise MessageError(f"a message of unknown type ({kind:.40})")
    try:
        return from_json(classes[kind], fields, kind)
    except UndeclaredError as error:
        raise MessageError(f"a malformed message ({error})") from None


@cache
def _by_name(allowed: Any) -> dict[str, Any]:
    return {kind.__name__: kind for kind in typing.get_args(allowed) or (allowed,)}
