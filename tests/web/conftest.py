"""A real browser on the page of a real server.

The browser's packages are imported when it is requested. The browser ends with its module, since an event loop runs as
long as it does.
"""

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.web.playground import Playground

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.server import ServerProcess

_ARGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_PATIENCE_MS = 20_000  # for a machine with other things to do


def _executable() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no browser here: `make browser` installs Debian's chromium (as root)")
    return found


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    executable = _executable()
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=_PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(_ARGS))
        yield browser
        browser.close()


@pytest.fixture
def context_options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A test may parametrize it: viewport, colour scheme and so on."""
    return {"viewport": {"width": 1440, "height": 900}, **getattr(request, "param", {})}


@pytest.fixture
def playground(
    browser: "Browser", nano_server: "ServerProcess", context_options: dict[str, Any]
) -> Iterator[Playground]:
    """The page of the embedded model. Nothing may be logged as an error or be asked of another origin."""
    context = browser.new_context(reduced_motion="reduce", **context_options)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    context.set_default_timeout(_PATIENCE_MS)
    playground = Playground(context.new_page(), nano_server.url)
    playground.open()
    yield playground
    playground.check_quiet()
    context.close()
