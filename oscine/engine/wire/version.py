"""The version of the messages between processes. It follows from their records, so it cannot be forgotten."""

import json
from functools import cache
from hashlib import blake2b
from typing import Any

import msgspec

from oscine.engine.wire.messages import ToClient, ToEngine


@cache
def version_of(*types: Any) -> str:
    """Of messages of these types, and of those between engines and their clients: equal where all fields are.

    Sixteen hexadecimal digits. Texts of documentation do not count.
    """
    _, records = msgspec.json.schema_components((ToEngine, ToClient, *types))
    return blake2b(json.dumps(_fields(records), sort_keys=True).encode(), digest_size=8).hexdigest()


def _fields(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: _fields(value) for key, value in schema.items() if key != "description"}
    return [_fields(one) for one in schema] if isinstance(schema, list) else schema
