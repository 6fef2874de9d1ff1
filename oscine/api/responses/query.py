"""What may stand behind the question mark of a request for a stored response."""

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.datastructures import QueryParams

from oscine.api.http.errors import from_validation

T = TypeVar("T", bound=Struct)


class NoQuery(Struct):
    """Nothing; the request can be refused all the same."""


class RetrieveQuery(Struct):
    include: list[str] = []
    stream: bool = False
    starting_after: Annotated[int, Meta(ge=0)] | None = None  # number of an event


class ItemsQuery(Struct):
    include: list[str] = []
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None  # id of an item


def read_query(params: QueryParams, kind: type[T]) -> T:
    """Raises APIError that names the parameter. Others are ignored; a list may be written with brackets."""
    given: dict[str, object] = {name: params[name] for name in kind.__struct_fields__ if name in params}
    given["include"] = [*params.getlist("include"), *params.getlist("include[]")]
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise from_validation(error) from None
