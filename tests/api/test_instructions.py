"""Instructions that name the user's folder stand behind the tools, with all their text and in their order."""

import pytest

from oscine.api.turns.instructions import folders_last
from oscine.chat.messages import Message
from tests.api.scripted_server import ScriptedServer

RULES = "You write code.\n\n# Style\nBe brief."
PLACE = "# Environment\n - Working directory: /home/a\n\n# Context\nLong talks are cut."
TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "hi"}


def prompt_of(server: ScriptedServer, system: str, **more: object) -> str:
    server.chat(messages=[{"role": "system", "content": system}, USER], **more)
    return server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)


def test_the_section_with_the_folder_and_all_after_it_follow_the_tools(scripted: ScriptedServer) -> None:
    prompt = prompt_of(scripted, f"{RULES}\n\n{PLACE}", tools=[TOOL])
    first, second = prompt.split("<|start|>developer<|message|>")[1:]
    assert first.startswith(f"# Instructions\n\n{RULES}\n\n# Tools\n\n## functions")
    assert second.startswith(f"# Instructions\n\n{PLACE}<|end|><|start|>user")


def test_without_tools_instructions_stay_together(scripted: ScriptedServer) -> None:
    assert f"# Instructions\n\n{RULES}\n\n{PLACE}<|end|>" in prompt_of(scripted, f"{RULES}\n\n{PLACE}")


def parts(*texts: str) -> list[tuple[str, bool]]:
    said = [Message("system", text) for text in texts]
    return [(message.content, message.after_tools) for message in folders_last([*said, Message("user", "hi")])]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([RULES], [(RULES, False)]),
        ([RULES, PLACE, RULES], [(RULES, False), ("", False), (PLACE, True), (RULES, False)]),
        (["A.\n\nB:\nWorking directory: /a\nC."], [("A.", False), ("B:\nWorking directory: /a\nC.", True)]),
        (["Working directory: /a"], [("", False), ("Working directory: /a", True)]),
        (
            [RULES, "<skills>\n## Skills\n- `r0` = `/home/a/.codex/skills`\n</skills>"],
            [(RULES, False), ("", False), ("<skills>\n## Skills\n- `r0` = `/home/a/.codex/skills`\n</skills>", True)],
        ),
        (["A.\n```\n# Working directory: /a\n```"], [("A.\n```\n# Working directory: /a\n```", False)]),
        (
            ["A.\n# Memory\nIn /home/a/.claude/projects/-a/memory/."],
            [("A.", False), ("# Memory\nIn /home/a/.claude/projects/-a/memory/.", True)],
        ),
    ],
)
def test_where_instructions_are_parted(texts: list[str], expected: list[tuple[str, bool]]) -> None:
    *said, user = parts(*texts)
    assert said == expected
    assert user == ("hi", False)
