"""The page as a user operates it: typing, clicking and reading."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Route


# An answer's events come as they were sent, up to the first one that thinks; the others after `letAnswersGo()`.
_HOLD_ANSWERS = """() => {
  const ask = window.fetch;
  const released = new Promise((resolve) => { window.letAnswersGo = resolve; });
  window.fetch = async (...request) => {
    const response = await ask(...request);
    if (!response.url.endsWith("/v1/chat/completions")) return response;
    let text = "", thinks = false;
    const events = new TransformStream({
      async transform(part, controller) {
        text += part;
        for (let end = text.indexOf("\\n\\n"); end >= 0; end = text.indexOf("\\n\\n")) {
          if (thinks) await released;
          const event = text.slice(0, end + 2);
          text = text.slice(end + 2);
          controller.enqueue(event);
          thinks ||= event.includes('"reasoning":"') || event.includes('"reasoning": "');
        }
      },
    });
    const body = response.body.pipeThrough(new TextDecoderStream());
    const held = body.pipeThrough(events).pipeThrough(new TextEncoderStream());
    return new Response(held, { status: response.status, headers: response.headers });
  };
}"""


class Playground:
    def __init__(self, page: "Page", url: str) -> None:
        self.page, self.url = page, url
        self.errors: list[str] = []  # what the console has logged; a test takes out those that it provokes
        self.requests: list[str] = []
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self) -> None:
        self.page.goto(self.url + "/")
        self.page.locator("#model option").first.wait_for(state="attached")

    def check_quiet(self) -> None:
        assert self.errors == []
        elsewhere = [url for url in self.requests if not url.startswith(self.url + "/")]
        assert elsewhere == []

    def expect_refusal(self, status: int) -> None:
        """The browser itself logs a refused request."""
        (error,) = self.errors
        assert f"status of {status}" in error
        self.errors.clear()

    def button(self, name: str) -> "Locator":
        return self.page.get_by_role("button", name=name, exact=True)

    @property
    def prompt(self) -> "Locator":
        return self.page.get_by_label("Message", exact=True)

    @property
    def answer(self) -> "Locator":
        """The newest one."""
        return self.page.get_by_role("article", name="Answer").last

    @property
    def questions(self) -> "Locator":
        return self.page.get_by_role("article", name="You")

    def ask(self, text: str) -> None:
        self.prompt.fill(text)
        self.button("Send").click()

    @contextmanager
    def endless_answers(self) -> Iterator[None]:
        """Requests ask for an answer that does not end, so that it can be interrupted on any machine."""

        def lengthen(route: "Route") -> None:
            route.continue_(post_data=json.dumps(route.request.post_data_json | {"min_tokens": 100_000}))

        self.page.route("**/v1/chat/completions", lengthen)
        yield
        self.page.unroute("**/v1/chat/completions")

    @contextmanager
    def held_answers(self) -> Iterator[None]:
        """Answers stop at their first thought until the end of the block, however fast the server is."""
        self.page.evaluate(_HOLD_ANSWERS)
        yield
        self.page.evaluate("letAnswersGo()")

    def wait_answered(self) -> None:
        from playwright.sync_api import expect

        expect(self.page.get_by_role("log")).to_have_attribute("aria-busy", "false")
        self.answer.get_by_role("button", name="Answer again").wait_for()

    def set(self, **settings: Any) -> None:
        """By the labels of the panel, with underscores for spaces."""
        for label, value in settings.items():
            self.page.get_by_label(label.replace("_", " "), exact=True).fill(str(value))

    def figures(self) -> str:
        return self.answer.locator(".figures").inner_text()

    def number(self, pattern: str) -> float:
        """The first group of a pattern in the figures of the newest answer."""
        match = re.search(pattern, self.figures())
        assert match, self.figures()
        return float(match[1])

    def request_as(self, language: str) -> str:
        """The newest answer's request, through the clipboard."""
        self.answer.get_by_role("button", name="Request of this answer as code").click()
        return self._copied(language)

    def request_of_the_head_as(self, language: str) -> str:
        self.page.locator("#show-request").click()
        return self._copied(language)

    def _copied(self, language: str) -> str:
        self.page.get_by_role("dialog").get_by_role("radio", name=language).check()
        self.button("Copy").last.click()
        self.page.keyboard.press("Escape")
        return str(self.page.evaluate("navigator.clipboard.readText()"))
