"""Documents as the browser shows them: lines of text, with links numbered in brackets."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from urllib.parse import urljoin, urlsplit

_WIDTH = 80  # characters
_MARKDOWN_LINK = re.compile(r"(?<!!)\[([^\[\]\n]+)\]\(<?([^()\s<>]+)>?(?:\s+(?:\"[^\"\n]*\"|'[^'\n]*'))?\)")
_MARKDOWN_TITLE = re.compile(r"^#[ \t](.*)$", re.MULTILINE)
_BLOCKS = {
    *("address", "article", "aside", "blockquote", "br", "dd", "div", "dl", "dt", "figure", "footer", "form", "header"),
    *("hr", "li", "main", "nav", "ol", "p", "pre", "section", "table", "tr", "ul", "h1", "h2", "h3", "h4", "h5", "h6"),
}
_UNSEEN = {"script", "style", "noscript", "template", "svg", "head"}
_PREFIXES = {"li": "* ", **{f"h{n}": "#" * n + " " for n in range(1, 7)}}


@dataclass(frozen=True, slots=True)
class Document:
    url: str
    title: str
    text: str  # links as 【number†text】 or 【number†text†site】
    links: tuple[str, ...] = ()  # URLs, by number


@dataclass(frozen=True, slots=True)
class Page:
    """A document cut into lines that do not change as long as it is open."""

    url: str
    title: str
    lines: tuple[str, ...]
    links: tuple[str, ...]


def page_of(document: Document) -> Page:
    return Page(document.url, document.title, tuple(lines_of(document.text)), document.links)


def lines_of(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if len(line) > _WIDTH:
            yield from textwrap.wrap(line, _WIDTH, break_long_words=False, break_on_hyphens=False)
        else:
            yield line.rstrip()


def link(number: int, text: str, url: str, base: str = "") -> str:
    """A link as it is shown to the model: with its site, if that is not the page's own."""
    site = urlsplit(url).netloc
    away = f"†{site}" if site and site != urlsplit(base).netloc else ""
    return f"【{number}†{text}{away}】"


def document_of(url: str, text: str, kind: str, title: str) -> Document:
    """`kind` is html, markdown or text; `title` is for a document without one."""
    if kind == "html":
        reader = _HtmlText(url)
        reader.feed(text)
        reader.close()
        return Document(url, reader.title.strip() or title, reader.text(), tuple(reader.links))
    if kind == "markdown":
        links: list[str] = []

        def numbered(match: re.Match[str]) -> str:
            target = _joined(url, match[2])
            if target is None:
                return match[0]
            links.append(target)
            return link(len(links) - 1, match[1], target, url)

        shown = _MARKDOWN_LINK.sub(numbered, text)
        return Document(url, _markdown_title(text) or title, shown, tuple(links))
    return Document(url, title, text)


def _markdown_title(text: str) -> str:
    """The first heading of the first level, without its closing marks."""
    found = _MARKDOWN_TITLE.search(text)
    heading = found[1].strip() if found else ""
    opened = heading.rstrip("#")
    return heading if opened[-1:].strip() else opened.rstrip()


def _joined(base: str, target: str) -> str | None:
    """None if the text is not a URL."""
    try:
        return urlsplit(urljoin(base, target)).geturl()
    except ValueError:
        return None


class _HtmlText(HTMLParser):
    """Reads HTML: text by blocks, headings and list items marked, links numbered."""

    def __init__(self, url: str) -> None:
        super().__init__(convert_charrefs=True)
        self._url = url
        self._parts: list[str] = []
        self._unseen = 0  # depth of elements that are not shown
        self._in_title = False
        self._preformatted = 0
        self._link: tuple[str, int] | None = None  # URL, and the number of parts before its text
        self.title = ""
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._unseen += tag in _UNSEEN
        self._in_title = tag == "title"
        self._preformatted += tag == "pre"
        if tag == "body":
            self._unseen = 0  # also where a head was never closed
        elif tag == "a" and (target := dict(attributes).get("href")):
            url = _joined(self._url, target)
            self._link = (url, len(self._parts)) if url is not None else None
        elif tag in _BLOCKS:
            self._parts.append(f"\n{_PREFIXES.get(tag, '')}")

    def handle_endtag(self, tag: str) -> None:
        self._unseen -= tag in _UNSEEN and self._unseen > 0
        self._in_title = False
        self._preformatted -= tag == "pre" and self._preformatted > 0
        if tag == "a" and self._link is not None:
            url, before = self._link
            text = " ".join("".join(self._parts[before:]).split())
            self._link = None
            if text:
                self._parts[before:] = [link(len(self.links), text, url, self._url)]
                self.links.append(url)
        elif tag in _BLOCKS:
            self._parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data
        elif not self._unseen:
            self._parts.append(data if self._preformatted else re.sub(r"\s+", " ", data))

    def text(self) -> str:
        lines = "\n".join(line.strip() or "" for line in "".join(self._parts).split("\n"))
        return re.sub(r"\n{3,}", "\n\n", lines).strip()
