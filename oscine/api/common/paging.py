"""Pages of lists, as OpenAI's clients ask for them. All lists have the same query.

The object at which a page begins or ends may be deleted in the meantime; see deleted_rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

from oscine.api.common import deleted_rows
from oscine.api.common.errors import APIError, invalid
from oscine.api.common.ids import Id

Order = Literal["asc", "desc"]
T = TypeVar("T")


class PageQuery(Struct):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Order = "desc"  # `asc`: the oldest object first
    after: Id | None = None  # the page begins behind this object
    before: Id | None = None  # the page ends in front of this object

    @property
    def descends(self) -> bool:
        return self.order == "desc"

    @property
    def is_last(self) -> bool:
        """Whether the page is the objects directly in front of `before`; then the search goes backwards."""
        return self.before is not None and self.after is None

    def in_order(self, found: list[T]) -> list[T]:
        """The objects in the order of the page. `found`: up to `limit` + 1 objects, in the order of the search."""
        return found[: self.limit][::-1] + found[self.limit :] if self.is_last else found


@dataclass(frozen=True, slots=True)
class Listing:
    """A list of objects in a database."""

    name: str  # of the list, for deleted_rows
    select: str  # query for its objects; ends with a WHERE clause
    anchor: str  # selects the number of the object `:id`
    number: str = "number"  # the column that grows with each new object

    def page(self, execute: deleted_rows.Execute, values: Mapping[str, Any], page: PageQuery) -> list[Any]:
        """The rows of the page, and one more behind them if there are more. `values`: of both queries.

        Raises APIError 400 for an unknown `after` or `before`.
        """
        query, places = self.select, dict[str, int]()
        for param, object_id, sign in (("after", page.after, "><"), ("before", page.before, "<>")):
            if object_id is not None:
                query += f" AND {self.number} {sign[page.descends]} :{param}"
                places[param] = self._place(execute, values, object_id, param)
        query += f" ORDER BY {self.number} {'DESC' if page.descends is not page.is_last else 'ASC'} LIMIT :limit"
        return page.in_order([*execute(query, {**values, **places, "limit": page.limit + 1})])

    def _place(self, execute: deleted_rows.Execute, values: Mapping[str, Any], object_id: str, param: str) -> int:
        for (place,) in execute(self.anchor, {**values, "id": object_id}):
            return int(place)
        deleted = deleted_rows.deleted_place(execute, self.name, object_id)
        if deleted is None:
            raise _unknown(param, object_id)
        return deleted


def page_of(objects: Sequence[T], id_of: Callable[[T], str], page: PageQuery) -> list[T]:
    """A page of a list in memory, oldest object first: up to `limit` + 1 objects.

    Raises APIError 400 for an unknown `after` or `before`.
    """
    ordered = [*(objects[::-1] if page.descends else objects)]
    ids = [id_of(each) for each in ordered]
    for param, object_id in (("after", page.after), ("before", page.before)):
        if object_id is not None and object_id not in ids:
            raise _unknown(param, object_id)
    begin = 0 if page.after is None else ids.index(page.after) + 1
    found = ordered[begin : None if page.before is None else ids.index(page.before)]
    return page.in_order((found[::-1] if page.is_last else found)[: page.limit + 1])


def _unknown(param: str, object_id: str) -> APIError:
    return invalid(param, f"there is no object {object_id!r} in this list")


def shown_page(found: list[T], limit: int, id_of: Callable[[T], str]) -> tuple[list[T], str | None, str | None, bool]:
    """The objects of a page, the ids of the first and the last one, and whether there are more.

    `found`: from Listing.page or page_of.
    """
    page = found[:limit]
    first, last = (id_of(page[0]), id_of(page[-1])) if page else (None, None)
    return page, first, last, len(found) > limit
