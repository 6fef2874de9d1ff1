"""`oscine chat`: what is typed and pasted, the commands, and where lines of an answer break."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from oscine.chat.effort import EFFORTS
from oscine.cli.error import CommandError
from oscine.extensions.terminal import messages
from oscine.extensions.terminal.conversation import Conversation
from oscine.extensions.terminal.messages import _history, editor, is_open, read_lines, unquoted
from oscine.extensions.terminal.output import Terminal
from oscine.extensions.terminal.slash import SLASHES, Bye, obey
from oscine.extensions.terminal.wrap import Wrapper


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[PipeInput]:
    monkeypatch.setattr(messages.sys.stdout, "isatty", lambda: True)
    with create_pipe_input() as keyboard, create_app_session(input=keyboard, output=DummyOutput()):
        yield keyboard


def test_a_paste_of_several_lines_is_one_message(keyboard: PipeInput, tmp_path: Path) -> None:
    keyboard.send_text("\x1b[200~one\r\ntwo\n\nthree\n\x1b[201~ and more\rnext\r")
    with editor(tmp_path / "history") as read:
        assert read() == "one\ntwo\n\nthree\n and more"
        assert read() == "next"


def test_quotes_and_alt_enter_go_on_in_the_next_line(keyboard: PipeInput, tmp_path: Path) -> None:
    keyboard.send_text('"""one\rtwo"""\r' + "three\x1b\rfour\r" + '/system """a\rb"""\r\x04')
    with editor(tmp_path / "history") as read:
        assert [read(), read(), read()] == ['"""one\ntwo"""', "three\nfour", '/system """a\nb"""']
        with pytest.raises(EOFError):
            read()


def test_pastes_are_told_apart_from_typing_as_long_as_the_conversation_lasts(
    keyboard: PipeInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(DummyOutput, "enable_bracketed_paste", lambda output: said.append("on"))
    monkeypatch.setattr(DummyOutput, "disable_bracketed_paste", lambda output: said.append("off"))
    keyboard.send_text("one\r")
    with editor(tmp_path / "history") as read:
        assert said == ["on"], "before the first prompt"
        read()
        assert said[-1] == "on", "after a prompt"
    assert said[-1] == "off"


def test_messages_are_kept_for_their_owner_alone(keyboard: PipeInput, tmp_path: Path) -> None:
    path = tmp_path / "state" / "chat_history"
    keyboard.send_text("first\r\x1b[200~second\nmessage\x1b[201~\r")
    for _ in range(2):
        with editor(path) as read:
            read()
            path.chmod(0o644)
    assert list(_history(path).load_history_strings()) == ["second\nmessage", "first"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_history_that_cannot_be_kept_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for path in (tmp_path / "file" / "history", tmp_path / "link", tmp_path, Path("/dev/null")):
        assert isinstance(_history(path), InMemoryHistory), path
    kept = _history(tmp_path / "history")
    (tmp_path / "history").unlink()
    (tmp_path / "history").mkdir()
    kept.store_string("lost")


@pytest.mark.parametrize(
    ("text", "goes_on", "message"),
    [
        ('"""', True, ""),
        ('"""a', True, "a"),
        ('"""\na\nb\n"""', False, "a\nb"),
        ('"""a""" ', False, "a"),
        ('/system """a\nb"""', False, "/system a\nb"),
        ('/system """a', True, "/system a"),
        ('"""Docs."""\nx = """y"""', False, '"""Docs."""\nx = """y"""'),
        ('print("""a', False, 'print("""a'),
        ("plain", False, "plain"),
    ],
)
def test_quotes_hold_lines_together(text: str, goes_on: bool, message: str) -> None:
    assert (is_open(text), unquoted(text)) == (goes_on, message)


def test_lines_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('one\n"""two\n\nthree"""\n"""four\n'))
    assert [read_lines(), read_lines(), read_lines()] == ["one", '"""two\n\nthree"""', '"""four']
    with pytest.raises(EOFError):
        read_lines()


def conversation(asked: list[dict[str, object]]) -> Conversation:
    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        event = {"choices": [{"delta": {"content": "well"}, "finish_reason": "stop"}]}
        return httpx.Response(200, text=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")

    client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://server")
    settings = {"model": "m", "reasoning_effort": "medium"}
    terminal = Terminal(io.StringIO(), color=False)
    return Conversation(client, settings, 9, terminal, terminal)


def test_commands_and_messages() -> None:
    asked: list[dict[str, object]] = []
    talk = conversation(asked)
    assert obey("/system", talk) == "instructions: none"
    assert obey("/system Be brief.\nBe kind.", talk) == "instructions: Be brief.\nBe kind."
    assert obey("/effort xhigh", talk) == "effort: xhigh"
    assert obey("/etc/hosts is what?", talk) is None
    system = {"role": "system", "content": "Be brief.\nBe kind."}
    assert asked[0]["messages"] == [system, {"role": "user", "content": "/etc/hosts is what?"}]
    assert asked[0]["reasoning_effort"] == "xhigh"
    obey("/reset", talk)
    obey("/system none", talk)
    obey("again", talk)
    assert asked[1]["messages"] == [{"role": "user", "content": "again"}]
    assert obey("", talk) is None
    assert len(asked) == 2
    with pytest.raises(Bye):
        obey("/bye", talk)


@pytest.mark.parametrize("leave", ["/bye", "/exit", "/quit"])
def test_the_commands_of_ollama_are_known(leave: str) -> None:
    asked: list[dict[str, object]] = []
    talk = conversation(asked)
    assert obey("/?", talk) == obey("/help", talk)
    obey("first", talk)
    obey("/clear", talk)
    obey("second", talk)
    assert asked[1]["messages"] == [{"role": "user", "content": "second"}]
    with pytest.raises(Bye):
        obey(leave, talk)


def test_help_and_errors_list_all() -> None:
    talk = conversation([])
    text = obey("/help", talk) or ""
    assert all(slash.usage in text and slash.what in text for slash in SLASHES.values())
    listed = ", ".join(EFFORTS)
    assert listed in text
    with pytest.raises(CommandError, match=f"^/effort takes one of {listed}; did you mean high[?]$"):
        obey("/effort hihg", talk)
    with pytest.raises(CommandError, match=r"^/efort is no command; did you mean /effort\? \(/help lists them\)$"):
        obey("/efort high", talk)


def in_pieces(text: str, size: int) -> Callable[[Wrapper], str]:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    return lambda wrapper: "".join(map(wrapper.add, pieces)) + wrapper.end()


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one two three", "one two\nthree"),
        ("one two  three ", "one two\nthree"),
        ("one\n\n  two three", "one\n\n  two\nthree"),
        ("internationalisation it is", "internationalisation\nit is"),
        ("12345678 9", "12345678\n9"),
        ("1234567 9", "1234567\n9"),
        ("123456 8", "123456 8"),
        ("e\u0301e\u0301 e\u0301e\u0301 ab", "e\u0301e\u0301 e\u0301e\u0301 ab"),
        ("日本語の文章", "日本語の\n文章"),
        ("a b c d e\n```\nx = 1  # long line\n```\na b c d e", "a b c d\ne\n```\nx = 1  # long line\n```\na b c d\ne"),
        ("  ```py\na long line of code", "  ```py\na long line of code"),
        ("~~~\n``` is not its end\n~~~\none two three", "~~~\n``` is not its end\n~~~\none two\nthree"),
    ],
)
def test_lines_break_at_spaces_and_code_stays(text: str, expected: str, size: int) -> None:
    assert in_pieces(text, size)(Wrapper(lambda: 8)) == expected
    assert in_pieces(text, size)(Wrapper(lambda: 0)) == text.rstrip(" ")


def test_the_next_answer_begins_outside_of_code() -> None:
    wrapper = Wrapper(lambda: 8)
    in_pieces("```\nhalf", 1000)(wrapper)
    assert in_pieces("one two three", 1000)(wrapper) == "one two\nthree"
