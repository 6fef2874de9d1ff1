"""Items of tools with types of their own, OpenAI's hosted ones too, so that a conversation with their calls goes on.

The model reads a call as that of a function with the name of the tool. The result is in the same item, or in a second
one.
"""

from typing import Any, ClassVar

import msgspec
from msgspec import Struct

from oscine.api.turns.attachments import described
from oscine.extensions.apis.responses.typed.tools import Object


class HostedItem(Struct, kw_only=True, tag_field="type"):
    tool: ClassVar[str]
    id: str
    call_id: str | None = None
    status: str = "completed"

    def text(self) -> str | None:
        """The result, as the model reads it; None if another item has it."""
        return None


class HostedCall(HostedItem):
    def input(self) -> Any:
        """The arguments, a JSON value."""
        raise NotImplementedError


class _ShellCall(HostedCall, tag="shell_call"):
    tool = "shell"
    action: Object

    def input(self) -> Any:
        return {name: value for name, value in self.action.items() if value is not None}


class _ShellOutput(HostedItem, tag="shell_call_output"):
    tool = "shell"
    output: list[Object]

    def text(self) -> str:
        return msgspec.json.encode(self.output).decode()


class _LocalShellCall(_ShellCall, tag="local_shell_call"):
    tool = "local_shell"


class _LocalShellOutput(HostedItem, tag="local_shell_call_output"):
    """Its id is that of the call, if it has no call_id."""

    tool = "local_shell"
    output: str

    def __post_init__(self) -> None:
        self.call_id = self.call_id or self.id

    def text(self) -> str:
        return self.output


class _PatchCall(HostedCall, tag="apply_patch_call"):
    tool = "apply_patch"
    operation: Object

    def input(self) -> Any:
        return self.operation


class _PatchOutput(HostedItem, tag="apply_patch_call_output"):
    tool = "apply_patch"
    output: str | None = None

    def text(self) -> str:
        return "\n".join(filter(None, (self.status, self.output)))


class _ComputerCall(HostedCall, tag="computer_call"):
    tool = "computer"
    action: Object | None = None
    actions: list[Object] | None = None

    def __post_init__(self) -> None:
        if self.action is None and self.actions is None:
            raise ValueError("it needs 'action' or 'actions'")

    def input(self) -> Any:
        return {"actions": self.actions} if self.action is None else self.action


class _ComputerOutput(HostedItem, tag="computer_call_output"):
    tool = "computer"
    output: Object

    def text(self) -> str:
        return described(self.output)


class _Program(HostedCall, tag="program"):
    tool = "program"
    code: str

    def input(self) -> Any:
        return {"code": self.code}


class _ProgramOutput(HostedItem, tag="program_output"):
    tool = "program"
    result: str

    def text(self) -> str:
        return self.result


class _ToolSearch(HostedCall, tag="tool_search_call"):
    tool = "tool_search"
    arguments: Any

    def input(self) -> Any:
        return self.arguments


class _FoundTools(HostedItem, tag="tool_search_output"):
    """The names only: the model reads the tools themselves with all others."""

    tool = "tool_search"
    tools: list[Object]

    def text(self) -> str:
        names = [tool.get("name") or tool.get("server_label") or tool.get("type") for tool in self.tools]
        return msgspec.json.encode(names).decode()


class _File(Struct):
    filename: str | None = None
    text: str | None = None


class _FileSearch(HostedCall, tag="file_search_call"):
    tool = "file_search"
    queries: list[str]
    results: list[_File] | None = None

    def input(self) -> Any:
        return {"queries": self.queries}

    def text(self) -> str:
        if self.results is None:
            return f"{self.status}; the results are not shown"
        return "\n\n".join("\n".join(filter(None, (file.filename, file.text))) for file in self.results)


class _Error(Struct):
    message: str = ""


class _Image(HostedCall, tag="image_generation_call"):
    tool = "image_generation"
    revised_prompt: str | None = None
    result: str | None = None
    output_format: str | None = None
    error: _Error | None = None

    def input(self) -> Any:
        return {} if self.revised_prompt is None else {"revised_prompt": self.revised_prompt}

    def text(self) -> str:
        if self.result is None:
            return f"{self.status}: {self.error.message}" if self.error else self.status
        media_type = f"image/{self.output_format or 'png'}"
        return described({"type": "image", "media_type": media_type, "data": self.result})


HOSTED: dict[str, type[HostedItem]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (
        *(_LocalShellCall, _LocalShellOutput, _ShellCall, _ShellOutput, _PatchCall, _PatchOutput),
        *(_ComputerCall, _ComputerOutput, _Program, _ProgramOutput, _ToolSearch, _FoundTools, _FileSearch, _Image),
    )
}
