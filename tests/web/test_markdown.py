"""The page's own Markdown in a real browser: the elements that it makes, and that no text becomes any other element."""

import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from tests.server import ServerProcess

_RENDER = """async (texts) => {
  const {MarkdownView} = await import(new URL("playground/markdown.js", document.baseURI).href);
  const view = new MarkdownView(document.createElement("div"));
  texts.forEach((text) => view.show(text));
  return view.element.innerHTML;
}"""
_LINK = 'target="_blank" rel="noopener noreferrer nofollow"'


@pytest.fixture(scope="module")
def page(browser: "Browser", fake_server: "ServerProcess") -> "Iterator[Page]":
    page = browser.new_page()
    page.goto(fake_server.url)
    yield page
    page.close()


def render(page: "Page", *texts: str) -> str:
    """The HTML after each of the texts was shown in turn, without the frames of code and tables."""
    html = str(page.evaluate(_RENDER, list(texts)))
    html = re.sub(r'<figure class="code"><figcaption><span>(.*?)</span><button.*?</button></figcaption>', r"[\1]", html)
    return re.sub(r'<pre tabindex="0">|</?pre>|</figure>|<div class="table".*?>|</div>', "", html)


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
        ("# A\n### B ##\nc", "<h2>A</h2><h4>B</h4><p>c</p>"),
        ("**b** *i* ***bi*** ~~d~~", "<p><strong>b</strong> <em>i</em> <strong><em>bi</em></strong> <del>d</del></p>"),
        ("__b__ _i_", "<p><strong>b</strong> <em>i</em></p>"),
        ("2 * 3 * 4, snake_case_name, **open", "<p>2 * 3 * 4, snake_case_name, **open</p>"),
        ("`a*b*` ``c`d`` \\*e\\*", "<p><code>a*b*</code> <code>c`d</code> *e*</p>"),
        ("```py\nif a < b:\n\n    c\n```\nafter", "[py]<code>if a &lt; b:\n\n    c</code><p>after</p>"),
        ("```\nstill open", "[text]<code>still open</code>"),
        ("- a\n- b\n  - c\n\n  more\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul><p>more</p></li><li>d</li></ul>"),
        ("3. a\n4. b\n   ```\n   c\n   ```", '<ol start="3"><li>a</li><li>b[text]<code>c</code></li></ol>'),
        ("> a\n> - b\n\nc", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote><p>c</p>"),
        ("| a | b |\n|:--|--:|\n| 1 | x \\| y |",
         '<table><thead><tr><th class="">a</th><th class="to-right">b</th></tr></thead><tbody><tr><td class="">1</td>'
         '<td class="to-right">x | y</td></tr></tbody></table>'),
        ("---\n***", "<hr><hr>"),
        ("[t](https://a.b/c_(d))", f'<p><a href="https://a.b/c_(d)" {_LINK}>t</a></p>'),
        ("See https://a.b/c?d=1.", f'<p>See <a href="https://a.b/c?d=1" {_LINK}>https://a.b/c?d=1</a>.</p>'),
        ("![alt](https://a.b/c.png)", f'<p><a href="https://a.b/c.png" {_LINK}>alt</a></p>'),
        ("[t](javascript:alert) [u](data:text/html,x) [v](/here)", "<p>t u v</p>"),
        ("<b onclick=x>&amp;</b><br><script>x</script>",
         "<p>&lt;b onclick=x&gt;&amp;amp;&lt;/b&gt;<br>&lt;script&gt;x&lt;/script&gt;</p>"),
    ],
)  # fmt: skip
def test_what_a_text_becomes(page: "Page", text: str, html: str) -> None:
    assert render(page, text).replace(' class=""', "") == html.replace(' class=""', "")


_pieces = st.lists(
    st.sampled_from(
        [
            *(
                "*",
                "**",
                "_",
                "`",
                "```",
                "~~",
                "[",
                "](",
                ")",
                "!",
                "#",
                "# ",
                "> ",
                "- ",
                "1. ",
                "|",
                "|-|",
                "\n",
                "\n\n",
            ),
            *("  ", "\\", "<script>", "<img src=x onerror=y>", "javascript:z", "https://a.b", '"', "'", "&lt;", "word"),
        ]
    )
    | st.text(max_size=5),
    max_size=25,
).map("".join)
_TAGS = {
    *("p", "br", "h2", "h3", "h4", "h5", "h6", "strong", "em", "del", "code", "pre", "a", "ul", "ol", "li", "hr"),
    *("blockquote", "table", "thead", "tbody", "tr", "th", "td", "div", "figure", "figcaption", "span", "button"),
}
_PARTS = """async (text) => {
  const {MarkdownView} = await import(new URL("playground/markdown.js", document.baseURI).href);
  const [grown, whole] = [1, 2].map(() => new MarkdownView(document.createElement("div")));
  for (let i = 0; i <= text.length; i += 3) grown.show(text.slice(0, i));
  grown.show(text);
  whole.show(text);
  const all = [...whole.element.querySelectorAll("*")];
  return {same: grown.element.innerHTML === whole.element.innerHTML, tags: all.map((e) => e.localName),
    links: all.filter((e) => e.href).map((e) => e.href), text: whole.element.textContent,
    attributes: all.flatMap((e) => e.getAttributeNames())};
}"""


@settings(max_examples=150, derandomize=True)
@given(text=_pieces)
def test_any_text_is_only_what_markdown_has(page: "Page", text: str) -> None:
    made = page.evaluate(_PARTS, text)
    assert made["same"], "a text that grew is shown as the whole text is"
    assert set(made["tags"]) <= _TAGS
    assert set(made["attributes"]) <= {
        "class",
        "href",
        "target",
        "rel",
        "start",
        "tabindex",
        "type",
        "role",
        "aria-label",
    }
    assert all(link.startswith(("http:", "https:", "mailto:")) for link in made["links"])
    words = re.findall(r"[a-z]{4,}", re.sub(r"\]\(.*?\)|```\S*", "", text))
    missing = [word for word in words if word not in made["text"]]
    assert not missing or "](" in text or "```" in text


def test_a_hostile_text_is_shown_in_no_time(page: "Page") -> None:
    """Such texts provoke backtracking, which would take hours. The deadline is far above linear time."""
    for text in (
        "*a " * 6000,
        "[" * 20000,
        "`" * 19999,
        "> " * 5000,
        "# " * 10000,
        "|-" * 9000,
        "- " * 9000,
        "**" * 9000,
    ):
        started_s = time.monotonic()
        assert render(page, text)
        assert time.monotonic() - started_s < 60.0, text[:3]
