"""The instructions of agents, so that conversations in different folders share the prefix of their prompts.

Claude Code, opencode and Codex name a folder of the user's in the middle of their instructions, and the declarations
of tools come after all instructions. What follows the first mention of the folder comes after the tools instead. No
text changes, and the order of the instructions stays.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from oscine.chat.messages import Message

_FOLDER = re.compile(r"[Ww]orking directory: |/\.claude/projects/|/\.codex/skills")
_FENCE = "```"


def folders_last(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages of a conversation, with the leading instructions in two parts if they name a folder."""
    leading = [*takewhile(lambda message: message.role in ("system", "developer"), messages)]
    for i, message in enumerate(leading):
        if (at := _varying(message.content)) is not None:
            head = replace(message, content=message.content[:at].rstrip("\n"))
            rest = Message(message.role, message.content[at:].lstrip("\n"), after_tools=True)
            return (*messages[:i], head, rest, *messages[i + 1 :])
    return tuple(messages)


def _varying(text: str) -> int | None:
    """Where the section, or else the paragraph, begins that names a folder."""
    found = _FOLDER.search(text)
    if found is None:
        return None
    before = text[: found.start()]
    at = before.rfind("\n# ") + 1 or before.rfind("\n\n") + 1
    return None if before.count(_FENCE, 0, at) % 2 else at  # not within an example
