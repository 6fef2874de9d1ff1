"""The page's own Markdown in a real browser: the elements that it makes, and that no text becomes any other element."""

import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

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
    html = re.sub(r'<span class="code-\w+">(.*?)</span>', r"\1", html)
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


_FORMULAS = """async (text) => {
  const load = (name) => import(new URL(`playground/${name}.js`, document.baseURI).href);
  const {MarkdownView} = await load("markdown");
  await load("vendor/katex.min");
  const view = new MarkdownView(document.createElement("div"));
  view.show("$x$");
  while (!view.element.querySelector(".katex")) await new Promise(requestAnimationFrame);
  view.show(text);
  const made = [...view.element.querySelectorAll(".formula")];
  return [made.map((e) => e.querySelector("annotation")?.textContent ?? null),
    made.map((e) => e.classList.contains("display")), view.element.textContent];
}"""


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        (r"so \(x^2\) is", ["x^2"]),
        (r"so $x$, $a_1 + b$ and $2x+1$.", ["x", "a_1 + b", "2x+1"]),
        ("\\[\na\\\\b\n\n\\frac{1}{2}\n\\]\nafter", ["a\\\\b\n\n\\frac{1}{2}"]),
        ("text:\n$$\nx_i\n$$", ["x_i"]),
        (r"- item \[ y \] and $$z$$", ["y", "z"]),
        ("1. point\n   \\[ y \\]", ["y"]),
        (r"**bold $x*y$ and $z*w$**", ["x*y", "z*w"]),
        ("| a | b |\n|--|--|\n| $x$ | \\(y\\) |", ["x", "y"]),
        ("$AB$ is a side", ["AB"]),
    ],
)
def test_formulas_are_set(page: "Page", text: str, sources: list[str]) -> None:
    found, displayed, shown = page.evaluate(_FORMULAS, text)
    assert [source.strip() for source in found] == sources
    assert displayed == [source in ("z", "x_i") or "frac" in source or "[ y" in text for source in sources]
    assert "\\(" not in shown


_MAKE_VIEW = """async () => {
  const {MarkdownView} = await import(new URL("playground/markdown.js", document.baseURI).href);
  window.view = new MarkdownView(document.createElement("div"));
  window.count = 0;
}"""
_SHOW_ANOTHER = """() => {
  window.view.show(`$x_{${window.count++}}$`);
  const styles = [...document.styleSheets].filter((sheet) => sheet.href?.includes("katex"));
  return window.view.element.querySelector(".katex") !== null && styles.length === 1;
}"""


@pytest.mark.parametrize("file", ["katex.min.js", "katex.min.css"])
def test_formulas_are_set_after_a_fetch_of_katex_has_failed(
    browser: "Browser", fake_server: "ServerProcess", file: str
) -> None:
    page, asked = browser.new_page(), list[str]()

    def answer(route: "Route") -> None:
        asked.append(route.request.url)
        route.abort() if len(asked) <= 2 else route.continue_()

    page.route(re.compile(re.escape(file)), answer)
    page.goto(fake_server.url)
    page.evaluate(_MAKE_VIEW)
    page.wait_for_function(_SHOW_ANOTHER, timeout=20_000)
    assert len(asked) == 3
    page.close()


@pytest.mark.parametrize(
    "text",
    [
        "It costs $5, or $10 for two.",
        "$20 for A and 30$ for B",
        "from US$5 to US$6, $5-$10",
        "echo $HOME and $PATH, $HOME:$PATH",
        r"an escaped \$x\$",
        "open $x and no end",
        r"open \(x and no end",
        "`$x$` and ``\\(y\\)``",
        "```\n$x$\n\\[ y \\]\n```",
        "a $ b $ c",
        "$$ $$",
    ],
)
def test_prices_code_and_open_formulas_are_text(page: "Page", text: str) -> None:
    found, _, shown = page.evaluate(_FORMULAS, text)
    assert found == []
    assert "$" in shown or "\\" in shown or "(" in shown


def test_what_cannot_be_set_stays_as_it_was_written(page: "Page") -> None:
    for source in (r"\(\frac{1}\)", r"\(\unknown x\)", "\\(" + "{" * 300 + "\\)"):
        found, _, shown = page.evaluate(_FORMULAS, source)
        assert (found, shown) == ([None], source)


def test_a_formula_makes_no_link_image_or_style(page: "Page") -> None:
    page.evaluate(_FORMULAS, "$x$")
    for source in (
        r"\href{javascript:alert(1)}{x}",
        r"\includegraphics{https://a.b/c.png}",
        r"\htmlStyle{color:red}{x}",
    ):
        html = render(page, f"\\({source}\\)")
        assert "<a " not in html
        assert "<img " not in html
        assert 'style="color:red' not in html


_COLOURS = """async ([text, language]) => {
  const {coloured} = await import(new URL("playground/code_colors.js", document.baseURI).href);
  const nodes = coloured(text, language);
  const kinds = nodes.filter((node) => node.className).map((node) => [node.className.slice(5), node.textContent]);
  return [kinds, nodes.map((node) => node.textContent ?? node).join("")];
}"""


@pytest.mark.parametrize(
    ("language", "text", "kinds"),
    [
        ("python", 'if x: # no\n  f("a#b", 1.5)', ["keyword if", "comment # no", 'string "a#b"', "number 1.5"]),
        ("py", '"""a\n\'b\'"""\ndefine = it', ['string """a\n\'b\'"""']),
        (
            "js",
            "const a = `x${1}` // b\n/* c\n*/",
            ["keyword const", "string `x${1}`", "comment // b", "comment /* c\n*/"],
        ),
        ("rust", "fn f<'a>(x: &'a str)", ["keyword fn"]),
        ("bash", "echo $#  # it's", ["comment # it's"]),
        ("SQL", "SELECT 'x' -- y", ["keyword SELECT", "string 'x'", "comment -- y"]),
        ("json", '{"a": [1e3, true]}', ['string "a"', "number 1e3", "keyword true"]),
        ("text", "if 1: # no", []),
        ("", "if 1: # no", []),
    ],
)
def test_code_has_colours(page: "Page", language: str, text: str, kinds: list[str]) -> None:
    found, whole = page.evaluate(_COLOURS, [text, language])
    assert [" ".join(kind) for kind in found] == kinds
    assert whole == text


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
  const all = [...whole.element.querySelectorAll("*")].filter((e) => !e.parentElement.closest(".formula"));
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
        "$" * 19999,
        "$a" * 9000,
        "$$ " * 6000,
        "$$\n" * 6000,
        "\\(" * 9000,
        "\\[\n" * 6000,
        "```js\n" + "`/*'\"" * 5000,
    ):
        started_s = time.monotonic()
        assert render(page, text)
        assert time.monotonic() - started_s < 60.0, text[:3]
