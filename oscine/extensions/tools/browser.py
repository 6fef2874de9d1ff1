"""gpt-oss's browser tool: search, open and find, in views of numbered lines that answers can cite.

A Backend does the searching; this module renders its results for the model and keeps the open pages of a conversation.
"""

import asyncio
import re
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import msgspec

from oscine.chat.messages import FunctionTool, ToolNamespace
from oscine.chat.toolbox import CITATION_END, Citation, Details, Source, Tool, ToolResult, WebFind, WebOpen, WebSearch
from oscine.extensions.tools.browser_page import Document, Page, lines_of, link, page_of
from oscine.system.json_text import decode_json

NAMESPACE = "browser"
_VIEW = 8_000  # characters of a view, about 2,000 tokens
_MAX_HITS = 20
_MAX_MATCHES = 30
_AROUND = 3  # lines shown with a match
_SEARCH = "search:"  # how the URL of a page of results begins
_CITATION = re.compile(r"【(\d{1,9})†L(\d{1,9})(?:-L?(\d{1,9}))?[^】]{0,200}" + CITATION_END)


@dataclass(frozen=True, slots=True)
class Hit:
    url: str
    title: str
    snippet: str


class Backend(Protocol):
    """Searches and opens pages. Both methods raise LookupError, with a sentence for the model, if nothing is found."""

    async def search(self, query: str, topn: int) -> Sequence[Hit]:
        """At most `topn`, best first."""
        ...

    async def open(self, url: str) -> Document: ...


class _SearchArguments(msgspec.Struct):
    query: str
    topn: int = 10


class _OpenArguments(msgspec.Struct):
    id: int | str = -1
    cursor: int = -1
    loc: int = -1
    num_lines: int = -1


class _FindArguments(msgspec.Struct):
    pattern: str
    cursor: int = -1


class _Result(NamedTuple):
    """One search result on a page of results."""

    url: str
    title: str
    first: int  # line
    last: int  # line


@dataclass(slots=True)
class _Shown:
    """The page of a cursor. A page of an earlier request is loaded when it is needed."""

    url: str
    title: str
    results: Sequence[_Result] = ()  # of a search
    page: Page | None = None
    matches: list[int] = field(default_factory=list)  # of a find: the matching lines of the searched page


class BrowserTool(Tool):
    """The browser of one conversation."""

    def __init__(self, backend: Backend, timeout_s: float, state: Any = None) -> None:
        self._backend = backend
        self._timeout_s = timeout_s
        self._shown = [_shown(*kept) for kept in state or ()]
        self.namespace = DECLARATION
        self._functions: dict[str, tuple[type[Any], Callable[[Any], Awaitable[ToolResult]]]] = {
            "search": (_SearchArguments, self._search),
            "open": (_OpenArguments, self._open),
            "find": (_FindArguments, self._find),
        }

    def state(self) -> list[tuple[str, str, Sequence[_Result]]]:
        return [(shown.url, shown.title, shown.results) for shown in self._shown]

    async def call(self, recipient: str, content: str) -> ToolResult:
        name = recipient.partition(".")[2]
        if name not in self._functions:
            return ToolResult(f"Error: there is no {recipient}; there are search, open and find.", None, is_error=True)
        kind, function = self._functions[name]
        details: Details | None = None
        try:
            given = {key: value for key, value in _object(content).items() if value is not None}
            arguments = msgspec.convert(given, kind, strict=False)
            details = _attempt(arguments)
            async with asyncio.timeout(self._timeout_s):
                return await function(arguments)
        except TimeoutError:
            return ToolResult(f"Error: no answer within {self._timeout_s:g} seconds.", details, is_error=True)
        except (LookupError, ValueError, OSError) as error:
            return ToolResult(f"Error: {error.args[0] if error.args else error}", details, is_error=True)

    def citations(self, text: str) -> Iterator[Citation]:
        for match in _CITATION.finditer(text):
            number, first = int(match[1]), int(match[2])
            if number < len(self._shown):
                source = self._source(self._shown[number], first, int(match[3] or first))
                if source is not None:
                    yield Citation(match.start(), match.end(), source)

    def _source(self, shown: _Shown, first: int, last: int) -> Source | None:
        """The source of cited lines. On a page of results it is the first result that has one of the lines."""
        if not shown.url.startswith(_SEARCH):
            return Source(shown.url, shown.title)
        cited = (result for result in shown.results if result.first <= last and result.last >= first)
        return next((Source(result.url, result.title) for result in cited), None)

    async def _search(self, arguments: _SearchArguments) -> ToolResult:
        hits = await self._backend.search(arguments.query, max(1, min(arguments.topn, _MAX_HITS)))
        sources = tuple(Source(hit.url, hit.title) for hit in hits)
        page, results = _results(arguments.query, hits)
        return self._show(page, WebSearch(arguments.query, sources), results=results)

    async def _open(self, arguments: _OpenArguments) -> ToolResult:
        target, loc = arguments.id, arguments.loc
        if isinstance(target, str) and re.fullmatch(r"-?\d+", target):
            target = int(target)
        if isinstance(target, str):
            page = await self._load(target)
        else:
            shown = self._at(arguments.cursor)
            page = await self._page(shown)
            if 0 <= target < len(shown.matches):
                loc = shown.matches[target] if loc < 0 else loc
            elif target >= 0:
                if target >= len(page.links):
                    raise LookupError(f"the page has no link {target}.")
                page = await self._load(page.links[target])
        return self._show(page, WebOpen(page.url), loc, arguments.num_lines)

    async def _find(self, arguments: _FindArguments) -> ToolResult:
        page = await self._page(self._at(arguments.cursor))
        matches, found = await asyncio.to_thread(_matches, page, arguments.pattern)
        return self._show(found, WebFind(page.url, arguments.pattern), title=page.title, matches=matches)

    def _show(self, page: Page, details: Details, loc: int = -1, num_lines: int = -1, **shown: Any) -> ToolResult:
        """Gives a page its cursor and returns its view. Raises ValueError for a line that does not exist."""
        view = _view(page, len(self._shown), max(loc, 0), num_lines)
        self._shown.append(_Shown(page.url, page=page, **{"title": page.title} | shown))
        return ToolResult(view, details)

    def _at(self, cursor: int) -> _Shown:
        if not self._shown:
            raise LookupError("no page is open yet.")
        if cursor >= len(self._shown):
            raise LookupError(f"there is no cursor {cursor}; the last one is {len(self._shown) - 1}.")
        return self._shown[cursor if cursor >= 0 else -1]

    async def _page(self, shown: _Shown) -> Page:
        """The page of a cursor; for the matches of a find, the searched page."""
        if shown.page is None or shown.matches:
            return await self._load(shown.url)
        return shown.page

    async def _load(self, url: str) -> Page:
        """The page as it was when it was first opened."""
        for shown in reversed(self._shown):
            if shown.url == url and shown.page is not None and not shown.matches:
                return shown.page
        if url.startswith(_SEARCH):
            query = url.removeprefix(_SEARCH)
            page, _ = _results(query, await self._backend.search(query, _SearchArguments(query).topn))
            return page
        document = await self._backend.open(url)
        return await asyncio.to_thread(page_of, document)


def _shown(url: str, title: str, results: Sequence[Any] = ()) -> _Shown:
    """A page restored from `state`; earlier versions stored no results."""
    return _Shown(url, title, [_Result(*result) for result in results])


def _object(content: str) -> dict[str, Any]:
    """Raises ValueError unless this is a JSON object."""
    try:
        return decode_json(content, dict[str, Any])
    except RecursionError:
        raise ValueError("the arguments are nested too deeply.") from None


def _attempt(arguments: Any) -> Details:
    """The parts of a call that are known before it has an answer."""
    match arguments:
        case _SearchArguments():
            return WebSearch(arguments.query)
        case _FindArguments():
            return WebFind(None, arguments.pattern)
    return WebOpen(arguments.id if isinstance(arguments.id, str) else None)


def _results(query: str, hits: Sequence[Hit]) -> tuple[Page, list[_Result]]:
    if not hits:
        raise LookupError(f"nothing was found for {query!r}.")
    lines: list[str] = []
    results: list[_Result] = []
    for i, hit in enumerate(hits):
        entry = [*lines_of(f"# {link(i, hit.title, hit.url)}\n{hit.snippet}")]
        results.append(_Result(hit.url, hit.title, len(lines), len(lines) + len(entry) - 1))
        lines += [*entry, ""]
    return Page(_SEARCH + query, query, tuple(lines[:-1]), tuple(hit.url for hit in hits)), results


def _matches(page: Page, pattern: str) -> tuple[list[int], Page]:
    """The lines in which a pattern begins, and a page that shows them. Case and line breaks are ignored.

    Raises LookupError when there are none.
    """
    text = "\n".join(page.lines)
    words = r"\s+".join(re.escape(word) for word in pattern.split())
    starts = [0, *accumulate(len(line) + 1 for line in page.lines)]
    places = (match.start() for match in re.finditer(words, text, re.IGNORECASE)) if words else ()
    matches = [*dict.fromkeys(bisect_right(starts, place) - 1 for place in places)]
    if not matches:
        raise LookupError(f"{pattern!r} is not on the page {page.title!r}.")
    lines: list[str] = []
    for i, line in enumerate(matches[:_MAX_MATCHES]):
        lines += [f"# 【{i}†match at L{line}】", *page.lines[line : line + _AROUND], ""]
    if len(matches) > _MAX_MATCHES:
        lines.append(f"({len(matches) - _MAX_MATCHES} more matches)")
    return matches, Page(page.url, f"Matches of {pattern!r} in {page.title}", tuple(lines), ())


def _view(page: Page, cursor: int, loc: int, num_lines: int) -> str:
    """Lines of a page from `loc` on: the number asked for, as far as they fit."""
    last = len(page.lines) - 1
    if loc > max(last, 0):
        raise ValueError(f"the page has lines 0 to {last}.")
    shown: list[str] = []
    room = _VIEW
    for number, line in enumerate(page.lines[loc : loc + num_lines if num_lines > 0 else None], loc):
        text = f"L{number}: {line}"
        if shown and len(text) >= room:
            break
        shown.append(text[:_VIEW])
        room -= len(text) + 1
    where = "" if page.url.startswith(_SEARCH) else f" ({page.url})"
    title = f"[{cursor}] {page.title}{where}\n**viewing lines [{loc} - {loc + len(shown) - 1}] of {last}**"
    return "\n".join([title, "", *shown])


def _parameters(**properties: tuple[Any, Any]) -> dict[str, Any]:
    """By name: type, and the default, or ... for a parameter that must be given."""
    schemas = {
        name: {"type": kind} | ({} if default in (None, ...) else {"default": default})
        for name, (kind, default) in properties.items()
    }
    required = [name for name, (_, default) in properties.items() if default is ...]
    return {"type": "object", "properties": schemas, "required": required}


# Exactly the text that gpt-oss was trained with.
DECLARATION = ToolNamespace(
    NAMESPACE,
    "Tool for browsing.\n"
    "The `cursor` appears in brackets before each browsing display: `[{cursor}]`.\n"
    "Cite information from the tool using the following format:\n"
    "`【{cursor}†L{line_start}(-L{line_end})?】`, for example: `【6†L9-L11】` or `【8†L3】`.\n"
    "Do not quote more than 10 words directly from the tool output.\n"
    "sources=web (default: web)",
    (
        FunctionTool(
            "search",
            "Searches for information related to `query` and displays `topn` results.",
            _parameters(query=("string", ...), topn=("number", 10), source=("string", None)),
        ),
        FunctionTool(
            "open",
            "Opens the link `id` from the page indicated by `cursor` starting at line number `loc`, showing "
            "`num_lines` lines.\n"
            "Valid link ids are displayed with the formatting: `【{id}†.*】`.\n"
            "If `cursor` is not provided, the most recent page is implied.\n"
            "If `id` is a string, it is treated as a fully qualified URL associated with `source`.\n"
            "If `loc` is not provided, the viewport will be positioned at the beginning of the document or centered on "
            "the most relevant passage, if available.\n"
            "Use this function without `id` to scroll to a new location of an opened page.",
            _parameters(
                id=(["number", "string"], -1),
                cursor=("number", -1),
                loc=("number", -1),
                num_lines=("number", -1),
                view_source=("boolean", False),
                source=("string", None),
            ),
        ),
        FunctionTool(
            "find",
            "Finds exact matches of `pattern` in the current page, or the page given by `cursor`.",
            _parameters(pattern=("string", ...), cursor=("number", -1)),
        ),
    ),
)
