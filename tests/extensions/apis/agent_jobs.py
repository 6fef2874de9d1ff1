"""Jobs of three agents as their requests are on the wire: what each sends first, and how its history grows.

The shapes are those of Codex 0.171, Claude Code 2.1 and opencode 1.18; the texts are our own.
"""

import uuid
from typing import Any

from tests.api.scripted_server import ScriptedServer

Json = dict[str, Any]

_SECTION = " - Say what you found, and change nothing that was not asked for.\n" * 12
_COMMAND = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "What the shell is given."}},
    "required": ["command"],
    "additionalProperties": False,
}
_NAMES = ("run", *(f"tool_{i}" for i in range(8)))
_ABOUT = "Does one thing, and says how it went. " * 8


class ClaudeCode:
    """Messages: its first block and its folder differ, thinking comes back without text, and the cache marks move."""

    path = "/v1/messages"

    def __init__(self, folder: str) -> None:
        memory = (
            f"# Memory\n\nYou have notes at `/home/a/.claude/projects/{folder.replace('/', '-')}/memory/`.\n{_SECTION}"
        )
        place = (
            f"# Environment\nYou are in this environment:\n - Primary working directory: {folder}\n - Platform: linux"
        )
        rules = f"\nYou help with software.\n\n# Harness\n{_SECTION}\n# Style\n{_SECTION}"
        billing = f"x-anthropic-billing-header: cc_version=2.1.332.{uuid.uuid4().hex[:3]}; cc_entrypoint=cli;"
        mark = {"cache_control": {"type": "ephemeral"}}
        self._head: Json = {
            "system": [
                {"type": "text", "text": billing},
                {"type": "text", "text": "You are a coding agent.", **mark},
                {"type": "text", "text": f"{rules}\n{memory}\n{place}\n\n# Context\n{_SECTION}", **mark},
            ],
            "tools": [{"name": name, "description": _ABOUT, "input_schema": _COMMAND} for name in _NAMES],
            "metadata": {"user_id": uuid.uuid4().hex},
            "max_tokens": 32_000,
            "thinking": {"type": "adaptive", "display": "omitted"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
        }
        reminder = {"type": "text", "text": "<system-reminder>\nToday's date is 2026-11-28.\n</system-reminder>\n"}
        self._messages: list[Json] = [
            {"role": "user", "content": [reminder, {"type": "text", "text": f"Mend the tests of {folder}."}]},
            {"role": "system", "content": f"These agents can be used:\n{_SECTION}"},
        ]

    @property
    def body(self) -> Json:
        last = self._messages[-1]
        content = last["content"]
        if isinstance(content, list):
            content = [*content[:-1], {**content[-1], "cache_control": {"type": "ephemeral"}}]
        return {**self._head, "messages": [*self._messages[:-1], {**last, "content": content}]}

    def take(self, answer: Json, result: str) -> int:
        """Adds the answer and the result of its call to the history. Returns the cached tokens."""
        (call,) = (block for block in answer["content"] if block["type"] == "tool_use")
        back = {"type": "tool_result", "tool_use_id": call["id"], "content": result, "is_error": False}
        self._messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [back]}]
        return int(answer["usage"]["cache_read_input_tokens"])


class Codex:
    """Responses without a store: items come back with their ids, reasoning sealed."""

    path = "/v1/responses"

    def __init__(self, folder: str) -> None:
        def said(role: str, text: str) -> Json:
            return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

        space = {"type": "namespace", "name": "agents", "description": "Others.", "tools": self._functions(_NAMES[1:4])}
        self._input = [
            said("developer", f"You are a coding agent.\n\n# Rules\n{_SECTION}"),
            said("developer", f"<skills_instructions>\n{_SECTION}</skills_instructions>"),
            said("user", f"<environment_context>\n  <cwd>{folder}</cwd>\n</environment_context>"),
            said("user", f"Mend the tests of {folder}."),
        ]
        self._head: Json = {
            "tools": [*self._functions(_NAMES), space],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": str(uuid.uuid4()),
            "client_metadata": {"session": str(uuid.uuid4())},
        }

    def _functions(self, names: tuple[str, ...]) -> list[Json]:
        return [
            {"type": "function", "name": name, "description": _ABOUT, "strict": False, "parameters": _COMMAND}
            for name in names
        ]

    @property
    def body(self) -> Json:
        return {**self._head, "input": self._input}

    def take(self, answer: Json, result: str) -> int:
        (call,) = (item for item in answer["output"] if item["type"] == "function_call")
        back = [{k: v for k, v in item.items() if k not in ("content", "status")} for item in answer["output"]]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": result}
        self._input = [*self._input, *back, output]
        return int(answer["usage"]["input_tokens_details"]["cached_tokens"])


class OpenCode:
    """Chat completions: its folder differs, and reasoning does not come back."""

    path = "/v1/chat/completions"

    def __init__(self, folder: str) -> None:
        env = (
            f"Here is some information about the environment:\n<env>\n  Working directory: {folder}\n</env>\nSkills:\n"
        )
        system = f"You are a coding agent.\n\n# Tone\n{_SECTION}\n# Tasks\n{_SECTION}\n\n{env}{_SECTION}"
        functions = ({"name": name, "description": _ABOUT, "parameters": _COMMAND} for name in _NAMES)
        self._head: Json = {
            "max_tokens": 16_384,
            "tools": [{"type": "function", "function": function} for function in functions],
            "tool_choice": "auto",
        }
        self._messages: list[Json] = [
            {"role": "system", "content": system},
            {"role": "user", "content": f"Mend the tests of {folder}."},
        ]

    @property
    def body(self) -> Json:
        return {**self._head, "messages": self._messages}

    def take(self, answer: Json, result: str) -> int:
        (choice,) = answer["choices"]
        calls = choice["message"]["tool_calls"]
        back = {"role": "tool", "tool_call_id": calls[0]["id"], "content": result}
        self._messages = [*self._messages, {"role": "assistant", "content": "", "tool_calls": calls}, back]
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


Agent = ClaudeCode | Codex | OpenCode


def reply(server: ScriptedServer, turn: int) -> list[int]:
    """What the model writes in a turn: it thinks, and calls."""
    t = server.tokenizer
    thought = [t.channel, *t.encode("analysis"), t.message, *t.encode(f"Step {turn}: the tests come first."), t.end]
    header = [t.start, *t.encode("assistant"), t.channel, *t.encode("commentary to=functions.run "), t.constrain]
    return [*thought, *header, *t.encode("json"), t.message, *t.encode(f'{{"command":"pytest -k {turn}"}}'), t.call]
