"""Positions of deleted rows, so that pagination continues after an object that was deleted in the meantime.

Clients page with the id of the last object that they got, and some delete each object as they receive it. Any SQLite
database may have this table. It keeps the newest MAX_OF_LIST rows of each list, so that many deletions in one list do
not invalidate the cursors of another, and the newest MAX_ROWS in all, because the number of lists is not bounded.
"""

from collections.abc import Callable
from typing import Any

from oscine.api.common.ids import MAX_ID

SCHEMA = """
CREATE TABLE IF NOT EXISTS deleted (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    list TEXT NOT NULL,
    id TEXT NOT NULL,
    place INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS deleted_by_id ON deleted (list, id);
CREATE INDEX IF NOT EXISTS deleted_by_list ON deleted (list, number);
"""
MAX_OF_LIST = 1000
MAX_ROWS = 50_000

Execute = Callable[[str, Any], Any]  # of a query and its values


def remember(execute: Execute, list_name: str, object_id: str, place: int) -> None:
    """Call it in the transaction that deletes the row. `place`: the row's sort key, never reused."""
    if len(object_id) > MAX_ID:  # of an item that an earlier version kept
        return
    execute("INSERT INTO deleted (list, id, place) VALUES (?, ?, ?)", (list_name, object_id, place))
    of_list = "SELECT number FROM deleted WHERE list = ? ORDER BY number DESC LIMIT 1 OFFSET ?"
    execute(f"DELETE FROM deleted WHERE list = ? AND number <= ({of_list})", (list_name, list_name, MAX_OF_LIST))
    newest = "SELECT number FROM deleted ORDER BY number DESC LIMIT 1 OFFSET ?"
    execute(f"DELETE FROM deleted WHERE number <= ({newest})", (MAX_ROWS,))


def deleted_place(execute: Execute, list_name: str, object_id: str) -> int | None:
    """The place of an object that is no longer in the list; None if it is not known."""
    found = execute("SELECT max(place) FROM deleted WHERE list = ? AND id = ?", (list_name, object_id))
    ((place,),) = found
    return None if place is None else int(place)
