"""The embedded model with tools and schemas, through the HTTP API and the OpenAI client: `make eval-tools`.

    python -m benchmarks.serving.eval_tools [--cases 200] [--verbose]

Questions, functions and schemas are generated, with names and values that were not in training. A case of tools is
right if the loop of question, calls, results and answer ends in the expected answer, word by word. Like most clients,
this one sends no reasoning back. A case of JSON is right if the answer validates; half of them are sampled at
temperature 1. Exit status 1 if less than 95 % of tools or 100 % of JSON are right.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema
import openai
from openai.types.chat import ChatCompletion

from benchmarks.serving.server import Server
from oscine.chat.messages import Conversation, FunctionTool, Message
from training.calls import call
from training.conversations import single
from training.extraction import extraction
from training.split import Draw

MODEL = "oscine-nano"
DATE = "2025-11-03"
LEAST_TOOLS, LEAST_JSON = 0.95, 1.0
CONCURRENCY = 64
_SEED = 81_000
_MAX_TOKENS = 512
_MAX_TURNS = 5
_MAX_JSON_TOKENS, _MAX_THOUGHT_TOKENS = 1536, 256  # about a very unusual schema it may think without end

Body = dict[str, Any]


@dataclass(frozen=True)
class ToolCase:
    """A conversation that ends in a question, and the calls, results and answer that it needs."""

    start: Conversation
    expected: tuple[Message, ...]

    @classmethod
    def make(cls, seed: int) -> "ToolCase":
        draw = Draw(seed, held_out=True)
        episode = call(draw, "medium")
        question = max(i for i, message in enumerate(episode.messages) if message.role == "user")
        start = single(draw, episode, "medium", DATE, question + 1).conversation
        return cls(start, episode.messages[question + 1 :])

    def result(self, name: str, arguments: str) -> str:
        """The result of the function, only for a correct call."""
        for asked, given in zip(self.expected[:-1:2], self.expected[1::2], strict=True):
            (made,) = asked.tool_calls
            if name == made.name and _parsed(arguments) == json.loads(made.arguments):
                return given.content
        return '{"error":"there is nothing for these arguments"}'

    def is_right(self, answer: str) -> bool:
        return answer == self.expected[-1].content


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _function(tool: FunctionTool) -> Body:
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


def _chat_message(message: Message) -> Body:
    """As a client sends it back: without the reasoning."""
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.tool_call_id, "content": message.content}
    calls = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in message.tool_calls
    ]
    return {"role": message.role, "content": message.content, **({"tool_calls": calls} if calls else {})}


async def chat_loop(client: openai.AsyncOpenAI, case: ToolCase) -> str:
    """The final answer."""
    messages: list[Any] = [_chat_message(message) for message in case.start.messages]
    tools: Any = [{"type": "function", "function": _function(tool)} for tool in case.start.tools]
    for _ in range(_MAX_TURNS):
        answer: ChatCompletion = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=tools, temperature=0, max_tokens=_MAX_TOKENS
        )
        said = answer.choices[0].message
        if not said.tool_calls:
            return said.content or ""
        messages.append({"role": "assistant", "content": said.content, "tool_calls": said.tool_calls})
        for made in said.tool_calls:
            assert made.type == "function"
            result = case.result(made.function.name, made.function.arguments)
            messages.append({"role": "tool", "tool_call_id": made.id, "content": result})
    return "no end of calls"


def _response_items(messages: tuple[Message, ...]) -> Iterator[Body]:
    for message in messages:
        if message.role == "tool":
            yield {"type": "function_call_output", "call_id": message.tool_call_id, "output": message.content}
            continue
        for made in message.tool_calls:
            item = {"type": "function_call", "call_id": made.id, "name": made.name, "arguments": made.arguments}
            yield item
        if message.content:
            yield {"role": message.role, "content": message.content}


async def responses_loop(client: openai.AsyncOpenAI, case: ToolCase) -> str:
    """The same over a chain of responses; no part of the conversation is sent twice."""
    items: Any = [*_response_items(case.start.messages)]
    tools: Any = [{"type": "function", "strict": False, **_function(tool)} for tool in case.start.tools]
    previous: str | None = None
    for _ in range(_MAX_TURNS):
        response = await client.responses.create(
            model=MODEL,
            input=items,
            tools=tools,
            temperature=0,
            max_output_tokens=_MAX_TOKENS,
            previous_response_id=previous,
        )
        made = [item for item in response.output if item.type == "function_call"]
        if not made:
            return response.output_text
        previous = response.id
        items = [
            {"type": "function_call_output", "call_id": c.call_id, "output": case.result(c.name, c.arguments)}
            for c in made
        ]
    return "no end of calls"


@dataclass(frozen=True)
class JsonCase:
    """A text and the schema for its facts, or an arbitrary schema."""

    messages: list[Body]
    schema: Body
    temperature: float

    @classmethod
    def make(cls, seed: int) -> "JsonCase":
        draw = Draw(seed, held_out=True)
        episode = extraction(draw, "medium")
        assert episode.response_schema is not None
        talk = single(draw, episode, "medium", DATE, 1).conversation
        schema = episode.response_schema.schema if seed % 4 else _strange_schema(draw)
        return cls([_chat_message(message) for message in talk.messages], schema, float(seed // 4 % 2))

    def is_right(self, answer: str) -> bool:
        try:
            jsonschema.validate(json.loads(answer), self.schema)
        except (json.JSONDecodeError, jsonschema.ValidationError):
            return False
        return True


def _strange_schema(draw: Draw) -> Body:
    """A schema unlike those of training: the model follows it only because of the constraint."""
    closed = {"type": "object", "additionalProperties": False}
    kinds: list[Body] = [
        {"type": "integer", "minimum": 3, "maximum": 40},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        {"type": "array", "items": {"$ref": "#/$defs/level"}, "minItems": 2, "maxItems": 4},
        {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        {"const": "fixed \u2713"},
        {**closed, "properties": {"on": {"type": "string", "format": "date"}}, "required": ["on"]},
        {"enum": ["a", 2, None]},
        {"type": "string", "minLength": 4, "maxLength": 9},
    ]
    chosen = draw.several(kinds, 2, 5)
    properties = {f"p{i}": {**kind} for i, kind in enumerate(chosen)}
    levels = {"level": {"type": "string", "enum": ["low", "high"]}}
    return {**closed, "properties": properties, "required": [*properties], "$defs": levels}


async def chat_json(client: openai.AsyncOpenAI, case: JsonCase) -> str:
    form: Any = {"type": "json_schema", "json_schema": {"name": "facts", "schema": case.schema, "strict": True}}
    messages: Any = case.messages
    answer: ChatCompletion = await client.chat.completions.create(
        model=MODEL,
        messages=messages,
        response_format=form,
        temperature=case.temperature,
        seed=1,
        max_tokens=_MAX_JSON_TOKENS,
        extra_body={"final_headroom": _MAX_JSON_TOKENS - _MAX_THOUGHT_TOKENS},
    )
    return answer.choices[0].message.content or ""


Case = ToolCase | JsonCase
Ask = Callable[[openai.AsyncOpenAI, Any], Awaitable[str]]


@dataclass(frozen=True)
class Part:
    name: str
    make: Callable[[int], Case]
    ask: Ask
    least: float


PARTS = (
    Part("tools, chat completions", ToolCase.make, chat_loop, LEAST_TOOLS),
    Part("tools, responses", ToolCase.make, responses_loop, LEAST_TOOLS),
    Part("JSON for a schema", JsonCase.make, chat_json, LEAST_JSON),
)


async def run(part: Part, url: str, cases: int, verbose: bool) -> float:
    """The share of right answers."""
    made = [part.make(_SEED + i) for i in range(cases)]
    places = asyncio.Semaphore(CONCURRENCY)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:

        async def one(case: Case) -> str:
            async with places:
                return await part.ask(client, case)

        answers = await asyncio.gather(*map(one, made))
    wrong = [(case, answer) for case, answer in zip(made, answers, strict=True) if not case.is_right(answer)]
    for case, answer in wrong if verbose else ():
        print(f"    {case}\n    got {answer!r}")
    return 1 - len(wrong) / cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200, help="cases per part (default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="print the wrong answers")
    args = parser.parse_args()
    failed = False
    print(f"{'part':26}{'cases':>7}{'right':>9}{'least':>8}{'seconds':>9}")
    with Server("--date", DATE, "--log-level", "warning", "--max-num-seqs", str(CONCURRENCY)) as server:
        for part in PARTS:
            started_s = time.perf_counter()
            share = asyncio.run(run(part, server.url, args.cases, args.verbose))
            elapsed_s = time.perf_counter() - started_s
            failed |= share < part.least
            print(f"{part.name:26}{args.cases:7}{share:9.1%}{part.least:8.0%}{elapsed_s:9.0f}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
