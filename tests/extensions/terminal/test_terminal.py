import io

import pytest

from oscine.extensions.terminal.output import Terminal


@pytest.mark.parametrize(
    ("color", "expected"),
    [
        (False, "so I think\n\nthe answer\nin lines\n"),
        (True, "\x1b[2mso I think\n\n\x1b[0mthe answer\nin lines\n"),
    ],
)
def test_reasoning_is_dimmed_and_apart(color: bool, expected: str) -> None:
    out = io.StringIO()
    terminal = Terminal(out, color=color)
    for text in ("so ", "I think"):
        terminal.reasoning(text)
    for text in ("the answer\n", "", "in lines"):
        terminal.answer(text)
    terminal.end()
    assert out.getvalue() == expected


def test_an_answer_cut_in_its_reasoning_leaves_the_terminal_as_it_was() -> None:
    out = io.StringIO()
    terminal = Terminal(out, color=True)
    terminal.reasoning("hm")
    terminal.end()
    terminal.answer("next")
    assert out.getvalue() == "\x1b[2mhm\x1b[0m\nnext"
