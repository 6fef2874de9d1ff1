"""The page in a real browser, in front of a real server with the embedded model."""

import json
import subprocess
import sys
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.web.playground import Playground

pytestmark = pytest.mark.needs("apis")

WEATHER = '{"sky": "clear", "temperature": 18}'


def test_an_answer_streams_with_its_thinking_and_its_figures(playground: Playground) -> None:
    playground.set(Temperature=0)
    fold = playground.answer.locator("details")
    with playground.held_answers():
        playground.ask("What is 27 + 58?")
        expect(fold.locator("summary")).to_have_text("Thinking")  # while it streams
        expect(playground.button("Stop")).to_be_visible()
    playground.wait_answered()
    expect(playground.answer.locator(".markdown")).to_have_text("27 + 58 = 85.")
    expect(fold).to_contain_text("Ones: 7 + 8 = 15")
    expect(fold.locator("summary")).to_contain_text("Thought")
    assert playground.number(r"(\d+) (?:ms|s) to first token") > 0
    assert playground.number(r"(\d+) in") > 20
    assert playground.number(r"(\d+) out") > playground.number(r"\((\d+) thinking\)") > 10
    fold.locator("summary").click()
    expect(fold.locator(".thought")).to_be_hidden()


def test_a_call_is_shown_answered_by_hand_and_continued(playground: Playground) -> None:
    playground.set(Temperature=0)
    playground.button("Add a function").click()
    playground.ask("What is the weather in Paris?")
    playground.wait_answered()
    call = playground.answer.get_by_role("region", name="Call of get_weather")
    expect(call.locator("pre")).to_have_text('{"city": "Paris"}')
    playground.ask("And now?")
    expect(playground.page.get_by_role("alert")).to_contain_text("answer them first")
    call.get_by_label("Result of get_weather").fill(WEATHER)
    playground.button("Continue").click()
    expect(playground.answer.locator(".markdown")).to_contain_text("temperature is 18")
    playground.wait_answered()
    sent = json.loads(playground.request_as("JSON"))
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "tool"]
    assert sent["messages"][1]["reasoning"] == "I call get_weather. city: Paris."
    assert sent["messages"][2]["content"] == WEATHER
    playground.button("Change the results").click()
    box = playground.page.get_by_label("Result of get_weather")
    expect(box).to_have_value(WEATHER)
    box.fill('{"temperature": 25}')
    box.press("Control+Enter")
    expect(playground.answer.locator(".markdown")).to_contain_text("25")
    playground.wait_answered()


def test_json_by_schema(playground: Playground) -> None:
    playground.page.get_by_role("button", name="Answer as JSON").click()
    playground.wait_answered()
    answer = json.loads(playground.answer.locator("pre").inner_text())
    assert answer.keys() == {"name", "age", "city"}
    assert isinstance(answer["age"], int)
    schema = playground.page.get_by_label("JSON schema of the answer")
    schema.fill('{"type": ')
    expect(schema).to_have_attribute("aria-invalid", "true")
    playground.ask("Again")
    expect(playground.page.get_by_role("alert")).to_contain_text("The schema cannot be read")
    expect(playground.questions).to_have_count(1)  # nothing was sent


def test_stop_keeps_what_was_said_and_the_next_question_follows_it(playground: Playground) -> None:
    with playground.endless_answers():
        playground.ask("What is 27 + 58?")
        expect(playground.answer.locator(".thought")).not_to_be_empty()
        playground.page.keyboard.press("Escape")
        playground.wait_answered()
    assert "stopped by you" in playground.figures()
    expect(playground.answer.locator(".thought")).not_to_be_empty()
    playground.set(Temperature=0)
    playground.ask("What is 20 + 30?")
    playground.wait_answered()
    expect(playground.answer.locator(".markdown")).to_contain_text("50")


def test_a_question_is_rewritten_and_an_answer_made_again(playground: Playground) -> None:
    playground.set(Temperature=0)
    playground.ask("What is 27 + 58?")
    playground.wait_answered()
    playground.questions.hover()
    playground.button("Edit and send again").click()
    playground.page.get_by_label("Your message").fill("What is 30 + 12?")
    playground.questions.get_by_role("button", name="Send").click()
    playground.wait_answered()
    expect(playground.questions).to_have_text(["What is 30 + 12?"])
    expect(playground.answer.locator(".markdown")).to_contain_text("42")
    playground.page.get_by_role("radio", name="Low").check()
    playground.button("Answer again").click()
    playground.wait_answered()
    expect(playground.page.get_by_role("article", name="Answer")).to_have_count(1)
    assert json.loads(playground.request_as("JSON"))["reasoning_effort"] == "low"


def test_all_settings_are_sent_and_a_bad_one_is_named(playground: Playground) -> None:
    playground.set(Instructions="Be brief.", Temperature="0.5", Top_p="0.9", Most_tokens="9", Seed="7")
    playground.page.get_by_label("Stop texts").fill("one\ntwo words")
    playground.page.get_by_label("Role of the instructions").select_option("system")
    playground.ask("Hello!")
    playground.wait_answered()
    assert "cut off by the token limit" in playground.figures()
    sent = json.loads(playground.request_as("JSON"))
    assert sent == {
        "model": "oscine-nano",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning_effort": "medium",
        "temperature": 0.5,
        "top_p": 0.9,
        "max_completion_tokens": 9,
        "seed": 7,
        "stop": ["one", "two words"],
    }
    playground.set(Temperature="warm")
    playground.ask("Hello!")
    expect(playground.page.get_by_label("Temperature")).to_be_focused()
    expect(playground.page.get_by_label("Temperature")).to_have_attribute("aria-invalid", "true")
    playground.set(Temperature="5")
    playground.button("Send").click()
    expect(playground.answer.get_by_role("alert")).to_contain_text("temperature")
    expect(playground.answer.get_by_role("alert")).to_contain_text("status 400")
    playground.wait_answered()
    playground.expect_refusal(400)


def test_the_button_of_the_head_shows_what_was_sent_and_what_would_be(playground: Playground) -> None:
    playground.set(Temperature=0)
    playground.ask("What is 27 + 58?")
    playground.wait_answered()
    sent = json.loads(playground.request_as("JSON"))
    assert json.loads(playground.request_of_the_head_as("JSON")) == sent
    assert [message["role"] for message in sent["messages"]] == ["user"]
    playground.prompt.fill("And 1 more?")
    following = json.loads(playground.request_of_the_head_as("JSON"))
    assert [message["role"] for message in following["messages"]] == ["user", "assistant", "user"]


def test_a_copied_request_runs_and_says_the_same(playground: Playground) -> None:
    playground.set(Temperature=0, Instructions='Don\'t say "no" to $HOME or `ls` \\ ümlauts.')
    playground.button("Add a function").click()
    playground.ask("What is the weather in Paris?")
    playground.wait_answered()
    done = _run(["sh", "-c", playground.request_as("curl")])
    events = [json.loads(line[6:]) for line in done.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    pieces = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(pieces) == '{"city":"Paris"}'
    assert _run([sys.executable, "-c", playground.request_as("Python")]).endswith('get_weather{"city":"Paris"}\n')


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_conversations_are_kept_deleted_and_restored(playground: Playground) -> None:
    page = playground.page
    playground.set(Temperature=0, Instructions="Be kind.")
    playground.ask("What is 27 + 58?")
    playground.wait_answered()
    page.reload()
    expect(playground.answer.locator(".markdown")).to_have_text("27 + 58 = 85.")
    expect(page.get_by_label("Instructions", exact=True)).to_have_value("Be kind.")
    page.keyboard.press("Control+k")
    expect(page.get_by_role("heading", name="What would you like to ask?")).to_be_visible()
    expect(page.get_by_label("Instructions", exact=True)).to_have_value("Be kind.")
    kept = page.get_by_role("navigation").get_by_role("button", name="What is 27 + 58?", exact=True)
    kept.click()
    expect(playground.answer.locator(".markdown")).to_have_text("27 + 58 = 85.")
    kept.hover()
    page.get_by_role("button", name='Delete "What is 27 + 58?"').click()
    expect(kept).to_have_count(0)
    playground.button("Undo").click()
    expect(playground.answer.locator(".markdown")).to_have_text("27 + 58 = 85.")
    page.reload()
    expect(kept).to_have_count(1)


def test_the_keyboard_alone_is_enough(playground: Playground) -> None:
    page = playground.page
    expect(playground.prompt).to_be_focused()
    page.keyboard.type("What is 27 + 58?")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Please.")
    page.keyboard.press("Control+Enter")
    expect(playground.questions).to_have_text("What is 27 + 58?\nPlease.")
    playground.wait_answered()
    page.keyboard.press("ArrowUp")
    expect(page.get_by_label("Your message")).to_be_focused()
    page.keyboard.press("Control+a")
    page.keyboard.type("Hello!")
    page.keyboard.press("Control+Enter")
    playground.wait_answered()
    expect(playground.questions).to_have_text("Hello!")
    page.keyboard.press("Control+Shift+Enter")
    playground.wait_answered()
    page.keyboard.press("Control+.")
    expect(page.get_by_role("dialog", name="Request")).to_be_visible()
    expect(playground.button("Copy").last).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+/")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+,")
    expect(page.get_by_role("complementary", name="Settings")).to_be_hidden()
    page.keyboard.press("Control+,")
    expect(page.get_by_label("Model", exact=True)).to_be_focused()


def test_a_server_that_breaks_off_is_reported(playground: Playground) -> None:
    playground.page.route("**/v1/chat/completions", lambda route: route.abort())
    playground.ask("Hello!")
    expect(playground.answer.get_by_role("alert")).to_contain_text("cannot be reached")
    playground.errors.clear()
    chunk = {"choices": [{"index": 0, "delta": {"content": "Half of"}}]}
    failure = {"error": {"message": "The engine died.", "code": "engine_died"}}
    body = f": keep-alive\r\n\r\ndata: {json.dumps(chunk)}\r\n\r\ndata: {json.dumps(failure)}\n\ndata: [DONE]\n\n"
    playground.page.unroute("**/v1/chat/completions")
    playground.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream")
    )
    playground.button("Answer again").click()
    expect(playground.answer.get_by_role("alert")).to_contain_text("The engine died.")
    expect(playground.answer.locator(".markdown")).to_have_text("Half of")
    assert "broken off" in playground.figures()


_FIGURES = """async (chunks) => {
  const {addChunk, figures, newAnswer} = await import(new URL("playground/answer.js", document.baseURI).href);
  const answer = newAnswer({});
  for (const [ms, chunk] of chunks) addChunk(answer, chunk, ms);
  return figures(answer);
}"""


@pytest.mark.parametrize(
    ("times_ms", "rate"),
    [
        ((100, 160, 1100), "100 tokens/s"),
        ((100, 598, 600), "200 tokens/s"),
        ((100, 101, 599), None),
        ((9000, 9000, 9001), None),
    ],
)
def test_tokens_that_arrive_together_give_no_rate(
    playground: Playground, times_ms: tuple[int, int, int], rate: str | None
) -> None:
    """The times are those of the role, which comes with the first token, of the first text and of the last."""
    deltas = {"role": "assistant", "content": ""}, {"content": "a"}, {"tool_calls": [{"index": 0}]}
    chunks: list[Any] = [[ms, {"choices": [{"delta": delta}]}] for ms, delta in zip(times_ms, deltas, strict=True)]
    chunks.append([times_ms[-1], {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 101}}])
    figures = playground.page.evaluate(_FIGURES, chunks)
    assert [figure for figure in figures if "tokens/s" in figure] == ([rate] if rate else [])


def test_an_answer_that_was_cut_says_what_can_be_done(playground: Playground) -> None:
    playground.set(Temperature=0, Most_tokens=78)
    playground.ask("What is 27 + 58?")
    playground.wait_answered()
    cut = playground.answer.locator(".cut")
    expect(cut).to_contain_text("cut off at the limit of 78 tokens")
    cut.get_by_role("button", name="Change the limit").click()
    expect(playground.page.get_by_label("Most tokens")).to_be_focused()
    playground.set(Most_tokens="")
    cut.get_by_role("button", name="Go on").click()
    playground.wait_answered()
    expect(playground.questions).to_have_text(["What is 27 + 58?", "Go on where you stopped."])
    expect(playground.page.locator(".cut button").first).to_be_hidden()
