"""Compares what a server sent with the types of `openai` and `anthropic`, field by field.

The packages accept any JSON. Here a field that a type lacks, one that it needs, and a value that it does not allow are
violations. Of the alternatives of a union, the one with the object's own `type` must match.
"""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

PAGED = ("FileObject", "Batch", "VectorStore", "VectorStoreFile")
# What answers have beyond the types. Most are fields of OpenAI's reference that the package leaves out, or had in
# earlier versions. Those of responses and of log probabilities in events are OpenResponses', those of models and the
# reasoning are vLLM's and our own.
MORE = {
    "ResponseFunctionCallArgumentsDoneEvent": {"name"},
    "ResponseCustomToolCallOutput": {"status"},
    "BetaInvalidRequestErrorObject": {"details"},  # by which the package chooses its exception
    "VectorStore": {"description"},
    "SyncPage[VectorStoreSearchResponse]": {"has_more", "next_page", "search_query"},
    "SyncPage[FileContentResponse]": {"has_more", "next_page"},
    "Logprob": {"bytes"},
    "LogprobTopLogprob": {"bytes"},
    "Response": {"store", "frequency_penalty", "presence_penalty"},
    "ResponseCustomToolCall": {"status"},
    "Model": {"root", "parent", "max_model_len", "state"},
    "ChatCompletionMessage": {"reasoning"},
    "ChoiceDelta": {"reasoning"},
    **{f"SyncCursorPage[{kind}]": {"object", "first_id", "last_id"} for kind in PAGED},
}

_adapter = cache(TypeAdapter)


def violations(kind: Any, text: str | bytes) -> list[str]:
    """One sentence for each; `text` is JSON."""
    try:
        parsed = _adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        return [f"{_at(one['loc'])}: {one['msg']}, not {one['input']!r:.200}" for one in _meant(error)]
    return [*_differences(parsed, json.loads(text), getattr(kind, "__name__", str(kind)))]


def check_type(kind: Any, text: str | bytes) -> None:
    """Fails unless the JSON has exactly the fields and values of the type."""
    found = violations(kind, text)
    assert not found, found


def _at(loc: Sequence[int | str]) -> str:
    return ".".join(map(str, loc))


def _meant(error: ValidationError) -> list[Any]:
    """Without those of alternatives that have another type or role, if any other is left."""
    errors = error.errors()
    others = {one["loc"][:-1] for one in errors if one["loc"][-1:] == ("type",) and one["type"] == "literal_error"}
    return [one for one in errors if not any(one["loc"][: len(other)] == other for other in others)] or errors[:5]


def _differences(parsed: Any, given: Any, where: str) -> Iterator[str]:
    if isinstance(parsed, BaseModel):
        more = {name for kind in type(parsed).__mro__ for name in MORE.get(kind.__name__, ())}
        for name in {*(parsed.model_extra or ())} - more:
            yield f"{where}: {type(parsed).__name__} has no field {name!r}"
        if "type" in given and "type" not in type(parsed).model_fields:
            yield f"{where}: {type(parsed).__name__} was read for an object of type {given['type']!r}"
        for name, field in type(parsed).model_fields.items():
            if (key := field.alias or name) in given:
                yield from _differences(getattr(parsed, name), given[key], f"{where}.{key}")
    elif isinstance(parsed, list):
        for i, (one, other) in enumerate(zip(parsed, given, strict=True)):
            yield from _differences(one, other, f"{where}[{i}]")
    elif isinstance(parsed, dict):
        for key, value in parsed.items():
            yield from _differences(value, given[key], f"{where}.{key}")
