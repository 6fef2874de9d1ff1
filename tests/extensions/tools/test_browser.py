import asyncio
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from oscine.chat.toolbox import Citation, Source, ToolResult, WebFind, WebOpen, WebSearch
from oscine.extensions.tools.browser import BrowserTool, Hit
from oscine.extensions.tools.browser_folder import Folder
from oscine.extensions.tools.browser_page import Document, document_of, page_of

WRENS = "file:///birds/wrens.md"
LONG = "\n".join(f"Line {i} of the log." for i in range(2000))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("documents")
    (root / "birds").mkdir()
    (root / "birds" / "wrens.md").write_text(
        "# Wrens\n\nWrens are small brown birds.\nThey sing loudly; see [owls](owls.html#night) and\n"
        "[the register](https://birds.example/wren 'x').\n\nA wren weighs nine grams.\n" + "Filler. " * 40
    )
    (root / "birds" / "owls.html").write_text(
        "<html><head><title>Owls &amp; co</title><style>p {}</style></head><body><script>evil()</script>"
        "<h1>Owls</h1><p>Owls   hunt\nat <b>night</b>.<ul><li>barn owl<li><a href='../log.txt'>the <i>log</i></a></ul>"
        "<pre>  kept\n  as is</pre></body></html>"
    )
    (root / "log.txt").write_text(LONG)
    (root / "picture.png").write_bytes(b"wren")
    (root / "odd name é.txt").write_bytes(b"a wren \xff here")
    outside = tmp_path_factory.mktemp("outside") / "secret.txt"
    outside.write_text("wren secret")
    (root / "link.txt").symlink_to(outside)
    (root / "loop").symlink_to(root)
    return root


@pytest.fixture
def browser(folder: Path) -> BrowserTool:
    return BrowserTool(Folder(str(folder)), 5.0)


def call(browser: BrowserTool, name: str, **arguments: Any) -> ToolResult:
    return asyncio.run(browser.call(f"browser.{name}", json.dumps(arguments)))


def test_results_are_a_page_of_links(browser: BrowserTool) -> None:
    result = call(browser, "search", query="small brown wren birds", topn=2)
    assert result.text == (
        "[0] small brown wren birds\n**viewing lines [0 - 4] of 4**\n\n"
        "L0: # 【0†Wrens】\nL1: Wrens are small brown birds.\nL2: \nL3: # 【1†odd name é.txt】\nL4: a wren \ufffd here"
    )
    sources = (Source(WRENS, "Wrens"), Source("file:///odd%20name%20%C3%A9.txt", "odd name é.txt"))
    assert result.details == WebSearch("small brown wren birds", sources)


def test_links_lead_from_results_to_pages_and_on(browser: BrowserTool) -> None:
    call(browser, "search", query="wrens")
    wrens = call(browser, "open", id=0)
    assert wrens.details == WebOpen(WRENS)
    assert wrens.text.startswith(f"[1] Wrens ({WRENS})\n**viewing lines [0 - 10] of 10**\n\nL0: # Wrens\nL1: \n")
    assert "L3: They sing loudly; see 【0†owls】 and\nL4: 【1†the register†birds.example】." in wrens.text
    owls = call(browser, "open", id="0")  # as a model may write it
    assert owls.text == (
        "[2] Owls & co (file:///birds/owls.html)\n**viewing lines [0 - 8] of 8**\n\n"
        "L0: # Owls\nL1: \nL2: Owls hunt at night.\nL3: \nL4: * barn owl\nL5: * 【0†the log】\nL6: \nL7: kept\n"
        "L8: as is"
    )
    log = call(browser, "open", id=0, cursor=2, loc=1500, num_lines=2)
    assert log.text == (
        "[3] log.txt (file:///log.txt)\n**viewing lines [1500 - 1501] of 1999**\n\n"
        "L1500: Line 1500 of the log.\nL1501: Line 1501 of the log."
    )
    assert call(browser, "open", cursor=1, id=0).details == WebOpen("file:///birds/owls.html")


def test_a_view_is_bounded_and_can_be_scrolled(browser: BrowserTool) -> None:
    first = call(browser, "open", id="file:///log.txt").text
    assert len(first) < 8_200
    last = int(first.rsplit("\nL", 1)[1].split(":")[0])
    assert f"**viewing lines [0 - {last}] of 1999**" in first
    assert call(browser, "open", loc=last + 1).text.split("\n")[3] == f"L{last + 1}: Line {last + 1} of the log."
    assert call(browser, "open", num_lines=10**9).text.count("\n") < 500
    assert call(browser, "open", loc=2000).text == "Error: the page has lines 0 to 1999."


def test_matches_are_found_across_lines_and_opened(browser: BrowserTool) -> None:
    call(browser, "open", id=WRENS)
    found = call(browser, "find", pattern="OWLS】 and\n【1†the")
    assert found.details == WebFind(WRENS, "OWLS】 and\n【1†the")
    assert found.text.splitlines()[3:] == [
        *("L0: # 【0†match at L3】", "L1: They sing loudly; see 【0†owls】 and"),
        *("L2: 【1†the register†birds.example】.", "L3: ", "L4: "),
    ]
    assert "**viewing lines [3 - " in call(browser, "open", id=0).text
    call(browser, "open", id="file:///log.txt")
    assert "(1970 more matches)" in call(browser, "find", pattern="line").text
    assert call(browser, "find", pattern="wren").text == "Error: 'wren' is not on the page 'log.txt'."
    assert call(browser, "find", pattern=" ").is_error


def test_citations_are_resolved(browser: BrowserTool) -> None:
    call(browser, "search", query="wrens")
    call(browser, "open", id=0)
    text = "Small【1†L2】 and loud【1†L3-L4】, one of【0†L0-L1】 many【7†L1】, 【1†nothing】."
    wrens = Source(WRENS, "Wrens")
    expected = [Citation(m.start(), m.end(), wrens) for m in re.finditer("【1†L[^】]*】|【0[^】]*】", text)]
    assert sorted(browser.citations(text), key=lambda c: c.start) == expected


class Hits:
    """A backend with the search results of a test, and no pages."""

    def __init__(self, *hits: Hit) -> None:
        self._hits = hits

    async def search(self, query: str, topn: int) -> Sequence[Hit]:
        return self._hits[:topn]

    async def open(self, url: str) -> Document:
        raise LookupError


def test_a_line_of_results_cites_the_result_that_it_belongs_to() -> None:
    snippets = ("One.\nStill one.", "See 【0†this】 " + "word " * 40, "")
    sources = [Source(f"http://{i}.test/", f"Title {i} " + "long " * 20 * i) for i in range(3)]
    browser = BrowserTool(Hits(*(Hit(s.url, s.title, text) for s, text in zip(sources, snippets, strict=True))), 5.0)
    shown = call(browser, "search", query="q").text.splitlines()[3:]
    begins = [i for i, line in enumerate(shown) if ": # 【" in line]
    assert len(begins) == 3
    later = BrowserTool(Hits(), 5.0, json.loads(json.dumps(browser.state())))
    for line, text in enumerate(shown):
        hit = sum(begin <= line for begin in begins) - 1
        expected = [] if text.endswith(": ") and line + 1 in begins else [sources[hit]]
        assert [c.source for c in browser.citations(f"【0†L{line}】")] == expected, text
        assert [c.source for c in later.citations(f"【0†L{line}】")] == expected, text
    first = [c.source for c in browser.citations("【0†L1-L3】 【0†L2-L2】 【0†L3-L9】")]
    assert first == [sources[0], sources[0], sources[1]]
    assert [*browser.citations(f"【0†L{len(shown)}】")] == []
    of_earlier_version = BrowserTool(Hits(), 5.0, [["search:q", "q"], ["http://0.test/", "Page"]])
    assert [c.source.title for c in of_earlier_version.citations("【0†L0】 【1†L0】")] == ["Page"]


def test_citations_that_are_none(browser: BrowserTool) -> None:
    call(browser, "search", query="wrens")
    call(browser, "open", id=0)
    assert [*browser.citations(f"【{'9' * 5000}†L1】 【1†L{'9' * 5000}】 【1†L1{'x' * 5000}】")] == []


def test_a_browser_goes_on_where_another_ended(browser: BrowserTool, folder: Path) -> None:
    call(browser, "search", query="wrens")
    call(browser, "open", id=0)
    state = json.loads(json.dumps(browser.state()))
    later = BrowserTool(Folder(str(folder)), 5.0, state)
    assert [c.source for c in later.citations("【1†L2】")] == [Source(WRENS, "Wrens")]
    assert call(later, "open", loc=2, num_lines=1).text.endswith("\nL2: Wrens are small brown birds.")
    assert call(later, "open", cursor=0, id=0).details == WebOpen(WRENS)


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("open", "{}", "no page is open yet"),
        ("open", '{"id": "file:///none.txt"}', "there is no page file:///none.txt"),
        ("open", '{"id": "file:///link.txt"}', "there is no page"),  # leads out of the folder
        ("open", '{"id": "file:///../outside/secret.txt"}', "there is no page"),
        ("open", '{"id": "file:///..%2F..%2Fetc%2Fpasswd"}', "there is no page"),
        ("open", '{"id": "file:///%00"}', "there is no page"),
        ("open", '{"id": "/etc/passwd"}', "there is no page"),
        ("open", '{"id": "file://host/log.txt"}', "there is no page"),
        ("open", '{"id": "http://["}', ""),
        ("open", '{"id": "https://example.com/"}', "there is no page"),
        ("open", '{"id": "file:///picture.png"}', "there is no page"),
        ("open", '{"id": 1.5}', "Expected `int | str`, got `float`"),
        ("find", "{}", "missing required field `pattern`"),
        ("search", '{"query": "zebra"}', "nothing was found for 'zebra'"),
        ("search", '{"query": ["wren"]}', "Expected `str`"),
        ("search", "wrens", "JSON is malformed"),
        ("search", "[" * 10_000, ""),
        ("click", "{}", "there is no browser.click"),
    ],
)
def test_errors_are_told_to_the_model(browser: BrowserTool, name: str, arguments: str, error: str) -> None:
    result = asyncio.run(browser.call(f"browser.{name}", arguments))
    assert result.is_error
    assert result.text.startswith("Error: ")
    assert error in result.text


def test_null_arguments_are_absent_ones(browser: BrowserTool) -> None:
    assert not call(browser, "search", query="wrens", topn=None, source=None).is_error
    assert call(browser, "open", id=0, cursor=9).text == "Error: there is no cursor 9; the last one is 0."
    assert call(browser, "open", id=9).text == "Error: the page has no link 9."


def test_a_backend_that_hangs_is_given_up() -> None:
    class Hanging:
        async def search(self, query: str, topn: int) -> Sequence[Hit]:
            await asyncio.sleep(60)
            return ()

        async def open(self, url: str) -> Document:
            raise LookupError("nothing here")

    browser = BrowserTool(Hanging(), 0.05)
    result = call(browser, "search", query="wrens")
    assert result == ToolResult("Error: no answer within 0.05 seconds.", WebSearch("wrens"), is_error=True)
    assert call(browser, "open", id="x").text == "Error: nothing here"


def test_ranking_is_bm25(tmp_path: Path) -> None:
    """Against the formula, counted out over the texts themselves."""
    texts = [
        "red fox fox",
        "red red red red red red red red",
        "blue fox in a long tale of many words",
        "blue",
        "green sea",
    ]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    words = [[str(i), "txt", *text.split()] for i, text in enumerate(texts)]  # the title counts
    mean = sum(map(len, words)) / len(words)

    def score(query: list[str], document: list[str]) -> float:
        total = 0.0
        for word in query:
            holders = sum(word in other for other in words)
            idf = math.log(1 + (len(words) - holders + 0.5) / (holders + 0.5))
            times = document.count(word)
            total += idf * times * 2.2 / (times + 1.2 * (0.25 + 0.75 * len(document) / mean))
        return total

    folder = Folder(str(tmp_path))
    for query in ("red fox", "fox", "blue fox", "red", "tale green", "FOX, blue!"):
        wanted = re.findall(r"\w+", query.lower())
        scores = {i: score(wanted, document) for i, document in enumerate(words) if set(wanted) & set(document)}
        expected = [f"{i}.txt" for i in sorted(scores, key=lambda i: -scores[i])]
        assert [hit.title for hit in asyncio.run(folder.search(query, 10))] == expected
        assert [hit.title for hit in asyncio.run(folder.search(query, 1))] == expected[:1]


def test_a_long_line_is_shown_around_the_words(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x " * 500 + "the wren sings " + "y " * 500)
    (hit,) = asyncio.run(Folder(str(tmp_path)).search("wren", 10))
    assert "the wren sings" in hit.snippet
    assert len(hit.snippet) < 250


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--browser-folder .*there is no such folder"):
        Folder(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("html", "title", "lines"),
    [
        ("<p>x<p><b>y", "a", ("x", "y")),
        ("<a href=>x</a>", "a", ("x",)),
        ("</ul></pre><p>x", "a", ("x",)),
        ("<a href='http://['>x</a>", "a", ("x",)),
        ("<title>t", "t", ()),
        ("", "a", ()),
    ],
)
def test_malformed_html_is_read(html: str, title: str, lines: tuple[str, ...]) -> None:
    """Malformed HTML is read as far as possible; a link without a target is text."""
    page = page_of(document_of("file:///a.html", html, "html", "a"))
    assert (page.title, page.lines, page.links) == (title, lines, ())


@pytest.mark.parametrize(
    ("heading", "title"),
    [
        ("# Wrens", "Wrens"),
        ("#\tWrens  ##  ", "Wrens"),
        ("# C#", "C#"),
        ("# C# #", "C#"),
        ("#Wrens", "log.md"),
        ("# ##", "log.md"),
        ("# " + " " * 100_000 + "x" + "#" * 100_000 + "y", "x" + "#" * 100_000 + "y"),
    ],
)
def test_titles_of_markdown(heading: str, title: str) -> None:
    assert document_of("file:///log.md", f"Begin.\n{heading}\nEnd.", "markdown", "log.md").title == title


def test_long_lines_are_wrapped() -> None:
    page = page_of(Document("u", "t", "word " * 40 + "\n" + "x" * 200))
    assert [len(line) for line in page.lines] == [79, 79, 39, 200]
