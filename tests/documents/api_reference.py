"""The page of the site with all endpoints and parameters, from the server's own description.

`python -m tests.documents.api_reference` prints it.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from oscine.api.apis import make_service
from oscine.api.openapi import Operation, describe, plain_path
from oscine.api.routes import endpoints
from oscine.settings.config import Config

INTRODUCTION = """\
# API reference

Endpoints and parameters, as the server describes them at `/openapi.json` and `/docs`. [api.md](api.md) explains them.
A parameter that is not listed is ignored, as in OpenAI's own API.
"""
IGNORED, REFUSED = "Taken without effect: ", "Not supported"
BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "maxItems": "at most {} items",
    "maxLength": "at most {} characters",
}


def page() -> str:
    operations = endpoints(make_service(Config()))
    schemas = describe(operations, keys=True)["components"]["schemas"]
    return "\n".join((INTRODUCTION, *_endpoints(operations), *_requests(operations, schemas), ""))


def _endpoints(operations: Sequence[Operation]) -> Iterator[str]:
    yield "## Endpoints\n\n| endpoint | what it does | API key |\n|---|---|---|"
    for one in operations:
        yield f"| `{one.method} {plain_path(one)}` | {one.summary} | {'not needed' if one.open else 'needed'} |"


def _requests(operations: Sequence[Operation], schemas: dict[str, Any]) -> Iterator[str]:
    told: set[str] = set()
    for operation in operations:
        name = getattr(operation.body, "__name__", None)
        if name is None or name in told:
            continue
        told.add(name)
        yield f"\n## `{operation.method} {plain_path(operation)}`\n"
        yield from _parameters(schemas[name])
        for inner in _inner(schemas[name], schemas):
            if inner not in told and schemas[inner].get("properties"):
                told.add(inner)
                yield f"\n### {inner}\n"
                yield from _parameters(schemas[inner])


def _parameters(schema: dict[str, Any]) -> Iterator[str]:
    needed = schema.get("required", ())
    unused: dict[str, list[str]] = defaultdict(list)
    yield "| parameter | type | what it is |\n|---|---|---|"
    for name, one in schema["properties"].items():
        text = one.get("description", "")
        if text.startswith((IGNORED, REFUSED)):
            unused[text.rstrip(".")].append(f"`{name}`")
            continue
        cells = (f"`{name}`{' (required)' if name in needed else ''}", _type(one), text)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    if unused:
        yield "\n| without effect, or refused | parameters |\n|---|---|"
        yield from (f"| {why} | {', '.join(names)} |" for why, names in unused.items())


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = _name(schema)
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"] if one.get("type") != "null"))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"] if value is not None)
    kind = schema.get("type", "any")
    text = f"array of {_type(schema['items'])}" if kind == "array" and schema.get("items") else str(kind)
    limits = [form.format(schema[key]) for key, form in BOUNDS.items() if key in schema and abs(schema[key]) < 1 << 31]
    return ", ".join((text, *limits))


def _inner(schema: Any, schemas: dict[str, Any]) -> Iterator[str]:
    """The names of the structs within a struct, from outer to inner ones."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield _name(schema)
            yield from _inner(schemas[_name(schema)], {name: one for name, one in schemas.items() if one is not schema})
        for value in schema.values():
            yield from _inner(value, schemas)
    elif isinstance(schema, list):
        for value in schema:
            yield from _inner(value, schemas)


def _name(schema: dict[str, Any]) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


if __name__ == "__main__":
    print(page())
