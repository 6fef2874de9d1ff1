"""The tool `file_search`: the model asks, and reads the best chunks with the names of their files.

Each result begins with a mark, 【2:0†handbook.md】: the call and the result. The model cites a result by its mark.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Self

from msgspec import Meta, Struct

from oscine.api.common.errors import APIError
from oscine.api.common.ids import Id
from oscine.api.serving.schemas import convert
from oscine.chat.messages import FunctionTool, ToolNamespace
from oscine.chat.toolbox import Citation, FileSearch, FileSource, FoundText, Tool, ToolResult
from oscine.extensions.file_search.schemas.filters import read_filter
from oscine.extensions.file_search.schemas.objects import Filters, NumResults, Queries, RankingOptions
from oscine.extensions.file_search.search import Hit, Question
from oscine.extensions.file_search.storage.stores import StoreRow
from oscine.extensions.file_search.vector_stores import VectorStores
from oscine.system.json_text import decode_json

NAMESPACE = "file_search"
_VIEW = 48_000  # characters of the results of a call, about 12,000 tokens
_LONGEST_NAME = 100  # characters of a file's name in a mark
_CITATION = re.compile(r"【(\d{1,9}):(\d{1,9})(?:†[^】]{0,200})?】")
_DECLARATION = ToolNamespace(
    NAMESPACE,
    "Searches the user's files.\n"
    "Each result begins with a mark such as `【0:2†notes.md】`. Cite what you take from a result by its mark.",
    (
        FunctionTool(
            "search",
            "Searches for all of `queries` at once and shows the most relevant passages.",
            {
                "type": "object",
                "properties": {"queries": {"type": "array", "items": {"type": "string"}}},
                "required": ["queries"],
            },
        ),
    ),
)


class _Given(Struct):
    """The entry of a request's `tools`."""

    vector_store_ids: Annotated[list[Id], Meta(min_length=1, max_length=8)]
    filters: Filters | None = None
    max_num_results: NumResults = 20
    ranking_options: RankingOptions | None = None


class _Arguments(Struct):
    queries: Queries


class FileSearchTools:
    """OwnedTools."""

    def __init__(self, stores: VectorStores) -> None:
        self._stores = stores

    def open(self, tool: Mapping[str, Any], state: Mapping[str, Any], owner: str) -> Tool | None:
        """Raises APIError."""
        if tool["type"] != NAMESPACE:
            return None
        given = convert(dict(tool), _Given, "tools")
        ranking = given.ranking_options or RankingOptions()
        question = Question(
            queries=(),
            wanted=read_filter(given.filters, "tools.filters"),
            limit=given.max_num_results,
            threshold=ranking.score_threshold or 0.0,
            weights=ranking.hybrid_search,
        )
        return FileSearchTool(self._stores, given.vector_store_ids, owner, question, state.get(NAMESPACE))


class FileSearchTool(Tool):
    """The search of one conversation."""

    namespace = _DECLARATION

    def __init__(
        self, stores: VectorStores, store_ids: Sequence[str], owner: str, question: Question, state: Any
    ) -> None:
        self._stores, self._store_ids, self._owner, self._question = stores, store_ids, owner, question
        self._shown = [[FileSource(*source) for source in call] for call in state or ()]
        self._rows: list[StoreRow] = []

    async def __aenter__(self) -> Self:
        """Raises APIError for a store that the key does not have, or that has expired."""
        self._rows = [await self._stores.usable(store_id, self._owner) for store_id in dict.fromkeys(self._store_ids)]
        return self

    def state(self) -> list[list[FileSource]]:
        return self._shown

    async def call(self, recipient: str, content: str) -> ToolResult:
        try:
            queries = decode_json(content, _Arguments).queries
        except (ValueError, RecursionError):
            message = 'Error: the arguments must be JSON such as {"queries": ["a question"]}.'
            return ToolResult(message, FileSearch((), None), is_error=True)
        try:
            hits = await self._stores.search(self._rows, replace(self._question, queries=queries))
        except APIError as error:
            return ToolResult(f"Error: {error.message}", FileSearch(tuple(queries), None), is_error=True)
        text, shown = _view(len(self._shown), hits)
        self._shown.append([FileSource(hit.found.file_id, hit.found.filename) for hit in shown])
        results = tuple(
            FoundText(hit.found.file_id, hit.found.filename, hit.score, hit.found.attributes, hit.found.text)
            for hit in shown
        )
        return ToolResult(text, FileSearch(tuple(queries), results))

    def citations(self, text: str) -> Iterator[Citation]:
        for match in _CITATION.finditer(text):
            call, place = int(match[1]), int(match[2])
            if call < len(self._shown) and place < len(self._shown[call]):
                yield Citation(match.start(), match.end(), self._shown[call][place])


def _view(call: int, hits: Sequence[Hit]) -> tuple[str, list[Hit]]:
    """The results as the model reads them, and those that it reads."""
    if not hits:
        return "Nothing was found. Other words may help.", []
    texts: list[str] = []
    room = _VIEW
    for i, hit in enumerate(hits):
        name = hit.found.filename[:_LONGEST_NAME].translate({ord("】"): None, ord("\n"): None})
        text = f"【{call}:{i}†{name}】\n{hit.found.text.strip()}"
        if texts and len(text) > room:
            break
        texts.append(text[:_VIEW])
        room -= len(text)
    return "\n\n".join(texts), [*hits[: len(texts)]]
