"""Serving of the page: headers, caches and keys, and that it works behind a prefix and with a key."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from oscine.api.playground import FOLDER
from tests.api.scripted_server import ScriptedServer
from tests.server import ServerProcess
from tests.web.playground import Playground

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

OWN_FILES = sorted(path.name for path in FOLDER.iterdir() if path.is_file())
VENDOR = FOLDER / "vendor"
SERVED = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".woff2": "font/woff2"}
THIRD_PARTY = sorted(f"vendor/{path.name}" for path in VENDOR.iterdir() if path.suffix in SERVED)
VENDOR_BYTES = 400_000

PAGE = {"Accept": "text/html,*/*;q=0.8"}


@pytest.fixture
def scripted(model_folder: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(model_folder, api_keys=("secret",)) as server:
        yield server


def test_the_page_and_its_files_need_no_key_and_carry_a_strict_policy(scripted: ScriptedServer) -> None:
    for path in ("/", *(f"/playground/{name}" for name in (*OWN_FILES, *THIRD_PARTY) if name != "index.html")):
        response = scripted.get(path, PAGE)
        assert response.status_code == 200, path
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-cache"
        kind = "text/html" if path == "/" else SERVED[Path(path).suffix]
        assert response.headers["content-type"].startswith(kind)
    assert scripted.get("/v1/models").status_code == 401


def test_what_a_browser_has_is_not_sent_again(scripted: ScriptedServer) -> None:
    first = scripted.get("/playground/app.js")
    etag = first.headers["etag"]
    for given in (etag, f'"other", W/{etag}', "*"):
        again = scripted.get("/playground/app.js", {"If-None-Match": given})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert scripted.get("/playground/app.js", {"If-None-Match": '"other"'}).content == first.content


@pytest.mark.needs("apis")
def test_tools_that_look_for_ollama_find_it_in_place_of_the_page(scripted: ScriptedServer) -> None:
    for method, body in (("GET", "Ollama is running"), ("HEAD", "")):
        response = scripted.request(method, "/", None, {"Accept": "*/*"})
        assert (response.status_code, response.headers["vary"]) == (200, "Accept")
        assert response.headers["content-type"].startswith("text/plain")
        assert not body or response.text == body
    assert scripted.get("/", PAGE).headers["vary"] == "Accept"


def test_only_its_own_files_are_served(scripted: ScriptedServer) -> None:
    for path in (
        "/playground/",
        "/playground/../config.py",
        "/playground/%2e%2e/config.py",
        "/playground/none.js",
        "/playground/vendor/README.md",
    ):
        assert scripted.get(path).status_code in (401, 404)


@pytest.mark.needs("apis")
def test_it_can_be_switched_off(model_folder: Path) -> None:
    with ScriptedServer(model_folder, playground=False) as server:
        assert server.get("/", PAGE).text == "Ollama is running"
        assert server.get("/playground/app.js").status_code == 404


def test_the_page_asks_for_nothing_elsewhere() -> None:
    for name in OWN_FILES:
        text = (FOLDER / name).read_text()
        addresses = set(re.findall(r"(?:https?:)?//[a-z][\w.-]+", text)) - {"http://www.w3.org"}  # the name of SVG
        assert not addresses, name
        assert "innerHTML" not in text
        assert "eval(" not in text
        assert len(text.splitlines()) < 400


def test_what_others_made_is_small_licensed_and_asks_for_nothing_elsewhere() -> None:
    assert sum(path.stat().st_size for path in VENDOR.iterdir()) < VENDOR_BYTES
    assert "MIT License" in (VENDOR / "katex.LICENSE").read_text()
    listed = (VENDOR / "README.md").read_text()
    assert all(path.name in listed or path.suffix == ".woff2" for path in VENDOR.iterdir() if path.name != "README.md")
    script, style = ((VENDOR / f"katex.min.{suffix}").read_text() for suffix in ("js", "css"))
    assert set(re.findall(r"https?://[\w.-]+", script + style)) == {"http://www.w3.org"}
    assert not re.search(r"innerHTML|\beval\(|new Function|XMLHttpRequest|import\(", script)
    assert set(re.findall(r"url\(([^)]*)\)", style)) == {path.name for path in VENDOR.glob("*.woff2")}


def test_behind_a_prefix_and_with_a_key(browser: "Browser", model_folder: Path) -> None:
    with ServerProcess(
        str(model_folder), "--executor", "fake", "--api-key", "secret", "--log-level", "error"
    ) as server:
        page = browser.new_page(extra_http_headers={})

        def strip(route: "Route") -> None:
            """What a proxy in front does."""
            route.continue_(url=route.request.url.replace("/models/oscine/", "/", 1))

        page.route("**/models/oscine/**", strip)
        page.goto(f"{server.url}/models/oscine/")
        playground = Playground(page, server.url)
        expect(page.locator("#model-problem")).to_contain_text("API key")
        playground.ask("Hello!")
        expect(playground.answer.get_by_role("alert")).to_contain_text("status 401")
        playground.button("Enter the key").click()
        expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.type("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#model option")).to_have_count(1)
        playground.button("Answer again").click()
        playground.wait_answered()
        assert playground.answer.locator(".markdown").inner_text()
        playground.answer.get_by_role("button", name="Request of this answer as code").click()
        snippet = page.locator("#snippet").inner_text()
        assert "$OPENAI_API_KEY" in snippet
        assert "secret" not in snippet
        assert f"{server.url}/models/oscine/v1/chat/completions" in snippet
        page.close()
