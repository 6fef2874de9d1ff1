"""The held-out skills as a task file for `oscine eval`: `python -m training.tasks skills.jsonl [--cases 10]`.

A server answers them through its API, with its own chat template and grammars. So a skill differs from the one of
training.evaluate in two ways: a schema of the answer always has its grammar, and the skill with tools of the server is
left out. The date of the prompts is the server's: start it with `--date 2025-11-03`.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oscine.chat.messages import FunctionTool, Message
from oscine.extensions.eval import task
from training.conversations import Sample
from training.evaluate import MAX_TOKENS, SEED, SKILLS, Skill, answers, ends, equal_json, named, required, valid_json
from training.json_mode import JSON_OBJECT
from training.split import Draw

Line = dict[str, Any]


def lines(cases: int) -> Iterator[Line]:
    """`cases` task lines of each skill."""
    for skill in SKILLS:
        made = (skill.make(Draw(SEED + index, held_out=True)) for index in range(cases))
        yield from (_line(skill, sample, index) for index, sample in enumerate(made) if not _is_built_in(sample))


def _is_built_in(made: Sample) -> bool:
    return bool(made.conversation.namespaces)


def _line(skill: Skill, made: Sample, index: int) -> Line:
    talk = made.conversation
    line: Line = {"id": f"{skill.name}/{index}", "group": skill.name, "messages": [*map(_message, talk.messages)]}
    if talk.tools:
        line["tools"] = [{"type": "function", "function": _function(tool)} for tool in talk.tools]
    parameters: Line = {"reasoning_effort": talk.reasoning_effort, "max_tokens": MAX_TOKENS, "temperature": 0}
    if talk.response_schema == JSON_OBJECT:
        parameters["response_format"] = {"type": "json_object"}
    elif talk.response_schema is not None:
        line["response_schema"] = talk.response_schema.schema
    if skill.grammar is required:
        parameters["tool_choice"] = "required"
    elif skill.grammar is named:
        (call,) = made.completion.tool_calls
        parameters |= {"tool_choice": {"type": "function", "function": {"name": call.name}}}
    return line | {"parameters": parameters, "answer": _answer(skill, made)}


def _answer(skill: Skill, made: Sample) -> Line:
    if skill.right in (answers, ends):
        return {"ends": "text" if skill.right is answers else "any"}
    if skill.right is valid_json:
        assert made.conversation.response_schema is not None
        return {"schema": made.conversation.response_schema.schema}
    if made.completion.tool_calls:
        call = made.completion.tool_calls[-1]
        return {"call": {"name": call.name, "arguments": json.loads(call.arguments)}}
    if skill.right is equal_json:
        return {"json": json.loads(made.completion.content)}
    return {"text": made.completion.content}


def _function(tool: FunctionTool) -> Line:
    parameters = {} if tool.parameters is None else {"parameters": tool.parameters}
    return {"name": tool.name, "description": tool.description, **parameters}


def _message(message: Message) -> Line:
    """As a client sends it back, without the reasoning."""
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.tool_call_id, "content": message.content}
    made = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    return {"role": message.role, "content": message.content, **({"tool_calls": made} if made else {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="file to write")
    parser.add_argument("--cases", type=int, default=10, help="tasks per skill (default: %(default)s)")
    args = parser.parse_args()
    print(f"{task.write(args.output, lines(args.cases)):,} tasks in {args.output}")


if __name__ == "__main__":
    main()
