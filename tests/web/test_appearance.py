"""The appearance and reach of the page: light, dark, on a phone, without a mouse; and the picture in the README."""

import json
import os
import struct
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.web.accessibility import check_structure, low_contrasts, nameless_controls, tab_order
from tests.web.playground import Playground

pytestmark = pytest.mark.needs("apis")

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
PICTURE_BYTES = 200_000


def fill_conversation(playground: Playground) -> None:
    """A call, its result, an answer; and then something that the server refuses."""
    playground.set(Temperature=0)
    playground.button("Add a function").click()
    playground.ask("What is the weather in Paris?")
    playground.wait_answered()
    playground.page.get_by_label("Result of get_weather").fill('{"temperature": 18}')
    playground.button("Continue").click()
    playground.wait_answered()
    playground.set(Temperature="-1")
    playground.ask("And in Oslo?")
    playground.wait_answered()
    playground.expect_refusal(400)


@pytest.mark.parametrize("context_options", [{"color_scheme": "light"}, {"color_scheme": "dark"}], indirect=True)
def test_everything_has_a_name_and_can_be_read(playground: Playground) -> None:
    page = playground.page
    check_structure(page)
    assert nameless_controls(page) == []
    assert low_contrasts(page) == []
    fill_conversation(playground)
    check_structure(page)
    assert nameless_controls(page) == []
    assert low_contrasts(page) == []
    for keys in ("Control+.", "Control+/"):
        page.keyboard.press(keys)
        expect(page.get_by_role("dialog")).to_be_visible()
        assert low_contrasts(page) == []
        page.keyboard.press("Escape")


def test_the_tabulator_goes_through_all_of_it_in_order(playground: Playground) -> None:
    playground.page.get_by_role("link", name="To the message box").focus()
    order = tab_order(playground.page, 40)
    landmarks = [
        "new",
        "toggle-sidebar",
        "show-request",
        "prompt",
        "send",
        "close-settings",
        "model",
        "add-tool",
        "key",
    ]
    assert [name for name in order if name in landmarks][: len(landmarks)] == landmarks


@pytest.mark.parametrize("context_options", [{"color_scheme": "dark"}], indirect=True)
def test_the_theme_follows_the_machine_until_it_is_chosen(playground: Playground) -> None:
    page = playground.page

    def is_dark() -> bool:
        red = page.evaluate("getComputedStyle(document.body).backgroundColor").split("(")[1].split(",")[0]
        return int(red) < 64

    assert is_dark()
    playground.button("Theme: system").click()
    assert not is_dark()
    page.reload()
    assert not is_dark()
    playground.button("Theme: light").click()
    assert is_dark()
    playground.button("Theme: dark").click()
    expect(playground.button("Theme: system")).to_be_visible()


@pytest.mark.parametrize("context_options", [PHONE], indirect=True)
def test_on_a_phone_the_panels_lie_over_the_conversation(playground: Playground) -> None:
    page = playground.page
    expect(page.get_by_role("complementary", name="Settings")).to_be_hidden()
    page.get_by_role("button", name="Call a function").tap()
    playground.wait_answered()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    for name, panel in (("Settings", "Settings"), ("Conversations", "Conversations")):
        playground.button(name).tap()
        expect(page.get_by_role("complementary", name=panel)).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        check_structure(page)
        assert low_contrasts(page) == []
        page.keyboard.press("Escape")
        expect(page.get_by_role("complementary", name=panel)).to_be_hidden()
    assert page.locator("#page").evaluate("(e) => e.inert") is False


@pytest.mark.parametrize("context_options", [PHONE], indirect=True)
def test_on_a_phone_the_button_to_the_end_covers_no_text(playground: Playground) -> None:
    page = playground.page
    rows = "".join(f"| {i} | a long cell of a table | another |\n" for i in range(60))
    delta = {"content": f"| number | the head of it | third |\n|---|---|---|\n{rows}"}
    body = f"data: {json.dumps({'choices': [{'delta': delta, 'finish_reason': 'stop'}]})}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    playground.ask("A table, please")
    playground.wait_answered()
    to_end = playground.button("To the newest text")
    expect(to_end).to_be_hidden()
    page.locator("#scroll").evaluate("(area) => area.scrollTo(0, 0)")
    expect(to_end).to_be_visible()
    button, text = to_end.bounding_box(), page.locator("#scroll").bounding_box()
    assert button is not None
    assert text is not None
    assert button["y"] >= text["y"] + text["height"]
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    to_end.tap()
    expect(to_end).to_be_hidden()


@pytest.mark.parametrize("context_options", [{"viewport": {"width": 1360, "height": 880}}], indirect=True)
def test_the_picture_of_the_readme(playground: Playground, tmp_path: Path) -> None:
    """`make screenshot` writes it to docs/img."""
    playground.set(Temperature=0)
    playground.ask("What is 27 + 58?")
    playground.wait_answered()
    playground.button("Add a function").click()
    playground.ask("What is the weather in Paris?")
    playground.wait_answered()
    playground.page.get_by_label("Result of get_weather").fill('{"sky": "clear", "temperature": 18}')
    playground.page.mouse.move(0, 0)
    picture = Path(os.environ.get("OSCINE_SCREENSHOT", tmp_path / "playground.png"))
    playground.page.screenshot(path=picture, animations="disabled", caret="hide")
    data = picture.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (1360, 880)
    assert 20_000 < len(data) < PICTURE_BYTES
