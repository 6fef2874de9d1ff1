"""Python classes as the form of an answer, and as parameters of functions."""

from collections.abc import Callable
from typing import Any

import msgspec

from oscine.llm.errors import RequestError

Schema = dict[str, Any]
Parse = Callable[[str], Any]


def response_format(given: Any) -> tuple[Any, Parse | None]:
    """The parameter of the HTTP API, and how to read the answer.

    A class may be one of pydantic, a dataclass, a TypedDict or a msgspec.Struct. Other values stay as they are.
    """
    if not isinstance(given, type) and not hasattr(given, "__annotations__"):
        return given, None
    schema, parse = _of_class(given)
    return {"type": "json_schema", "json_schema": {"name": given.__name__[:64], "schema": _closed(schema)}}, parse


def _of_class(kind: Any) -> tuple[Schema, Parse]:
    if hasattr(kind, "model_json_schema"):  # pydantic's
        return kind.model_json_schema(), kind.model_validate_json
    return schema_of(kind, "response_format"), lambda text: msgspec.json.decode(text, type=kind)


def schema_of(kind: Any, param: str) -> Schema:
    """The JSON schema of a type. Raises RequestError for a type that JSON does not have."""
    try:
        schema = msgspec.json.schema(kind)
    except (TypeError, NameError) as error:
        raise RequestError(f"Invalid value for '{param}': {kind!r} has no JSON schema: {error}.", param) from None
    definitions = schema.pop("$defs", {})
    if "$ref" in schema:
        schema = definitions.pop(schema["$ref"].rpartition("/")[2])
    return schema | ({"$defs": definitions} if definitions else {})


def _closed(schema: Any) -> Any:
    """The same schema with objects that have no other properties than the declared ones."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(part) for key, part in schema.items()}
    if schema.get("type") == "object" and "properties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed
