"""One request of each expensive shape: many values, long texts, slow grammars, floods.

Each is as large as allowed, or just too large. Random parts come from a seed.
"""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.serving.siege.requests import Attack, post

BODY_BYTES = 4 << 20  # the largest that is taken
VALUES = 1 << 18  # JSON values that are taken
LONG_TEXT = 64_000  # characters
FLOOD_BYTES = 4 << 20
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
HI: dict[str, Any] = {"role": "user", "content": "hi"}


def chat(**parameters: Any) -> dict[str, Any]:
    return {"messages": [HI], "max_tokens": 3, **parameters}


def many(count: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, path and body of requests with about `count` JSON values."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "1"}]
    function = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(40)}}
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": function}} for i in range(count // 170)
    ]
    flat = [{"type": "function", **tool["function"]} for tool in tools]
    items = [{"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"} for i in range(count // 10)]
    results = [
        {"type": "function_call_output", "call_id": f"c{i}", "output": "1"} for i in range(len(items))
    ]  # fmt: skip
    blocks = [{"type": "text", "text": "a"}] * (count // 5)
    users = [{"role": "user", "content": "a"}] * (count // 5)
    yield "messages", CHAT, chat(messages=[HI] * (count // 5))
    yield "turns with calls", CHAT, chat(messages=turns * (count // 28))
    yield "text parts", CHAT, chat(messages=[{"role": "user", "content": blocks}])
    yield "tools", CHAT, chat(tools=tools)
    yield "tools of a response", RESPONSES, {"input": "hi", "tools": flat, "max_output_tokens": 16}
    yield "items", RESPONSES, {"input": [*items[::2], *results[::2]], "max_output_tokens": 16, "store": False}
    yield "messages of a response", RESPONSES, {"input": users, "max_output_tokens": 16}
    yield "Anthropic's messages", MESSAGES, {"model": "m", "messages": users, "max_tokens": 3}
    yield "Anthropic's blocks", MESSAGES, {"model": "m", "messages": [{**HI, "content": blocks}], "max_tokens": 3}
    yield "messages counted", TOKENIZE, {"messages": users}
    yield "token ids", TEXT, {"prompt": [65] * (count - 10), "max_tokens": 3}
    yield "prompts of token ids", TEXT, {"prompt": [[65]] * (count // 3), "max_tokens": 1}
    yield "prompts", TEXT, {"prompt": ["a"] * (count // 2), "max_tokens": 1}
    yield "tokens of no text", DETOKENIZE, {"tokens": [65] * (count - 10)}
    yield "stops", CHAT, chat(stop=[f"s{i}" for i in range(count // 2)])
    yield "stop tokens", CHAT, chat(stop_token_ids=[*range(count // 2)])
    yield "biases", CHAT, chat(logit_bias={str(i): 1 for i in range(count // 4)})
    yield "metadata", RESPONSES, {"input": "hi", "metadata": {f"k{i}": "v" for i in range(count // 4)}}
    yield "include", RESPONSES, {"input": "hi", "include": ["reasoning.encrypted_content"] * (count // 2)}
    yield "unknown fields", CHAT, chat(**{f"unknown{i}": [{}] for i in range(count // 8)})
    yield "choices", CHAT, chat(guided_choice=[f"choice {i}" for i in range(count // 2)])


def counts() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The largest accepted counts, of values of some size."""
    words = [f"{i} apples and pears" for i in range(8192)]
    properties = {f"p{i}": {"type": "array", "items": {"type": "string"}} for i in range(4000)}
    parameters = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(60)}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters}} for i in range(1024)]
    yield "1,024 tools", CHAT, chat(tools=tools)
    yield "1,024 strict tools", CHAT, chat(
        tools=[{"type": "function", "function": {"name": f"f{i}", "strict": True, "parameters": {"type": "object"}}}
               for i in range(1024)], tool_choice="required",
    )  # fmt: skip
    yield "8,192 choices", CHAT, chat(guided_choice=words)
    yield "1,024 biases", CHAT, chat(logit_bias={str(i): -100 for i in range(1024)})
    yield "128 answers", CHAT, chat(n=128)
    yield "128 answers to each of 32", TEXT, {"prompt": ["a"] * 32, "n": 128, "max_tokens": 1}
    yield "wide schema", CHAT, chat(guided_json={"type": "object", "properties": properties})
    yield "wide enum", CHAT, chat(guided_json={"enum": words})
    yield "any of many", CHAT, chat(guided_json={"anyOf": [{"const": word} for word in words[:4000]]})


def nested(depth: int) -> Any:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def slow_grammars() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Small requests that take long to compile, or that make masks slow."""
    quartic = {f"^(a|b)*x{{{i}}}$": {"type": "integer"} for i in range(1, 401)}
    lark = 'start: a\na: "x" a a | "x" a | "x"\n'
    rules = "start: r0\n" + "".join(f'r{i}: "a" r{i + 1} | "b"\n' for i in range(6000)) + 'r6000: "c"\n'
    yield "quartic schema", CHAT, chat(guided_json={"type": "object", "patternProperties": quartic})
    yield "nested schema", CHAT, chat(guided_json=nested(200))
    yield "long array", CHAT, chat(guided_json={"type": "array", "items": {}, "minItems": 10**6, "maxItems": 10**7})
    yield "long string", CHAT, chat(guided_json={"type": "string", "minLength": 10**6, "maxLength": 10**7})
    yield "repeated pattern", CHAT, chat(guided_regex="((a{1,100}){1,100}){1,100}")
    yield "alternatives", CHAT, chat(guided_regex="(" + "|".join(f"a{i}b*c" for i in range(20_000)) + ")*")
    yield "backtracking", CHAT, chat(guided_regex="(a|aa|aaa|b*)*" * 200 + "c")
    yield "counted alternatives", CHAT, chat(guided_regex="(.*a.{400}|.*b.{399})")
    yield "large classes", CHAT, chat(guided_regex=r"[\p{L}\p{N}--aeiou]{500}" * 20)
    yield "ambiguous grammar", CHAT, chat(guided_grammar=lark, max_tokens=200, ignore_eos=True)
    yield "many rules", CHAT, chat(guided_grammar=rules)
    yield (
        "names of functions",
        CHAT,
        chat(tools=[{"type": "function", "function": {"name": f"a{i}" * 12}} for i in range(1024)], tool_choice="auto"),
    )


def texts(rng: random.Random, size: int) -> Iterator[tuple[str, str]]:
    """Texts that tokenizers find hard."""
    yield "spaces", " " * size
    yield "line breaks", "\n" * size
    yield "one letter", "a" * size
    yield "letters", "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=size))
    yield "digits", "".join(rng.choices("0123456789", k=size))
    yield "CJK", "".join(map(chr, rng.choices(range(0x4E00, 0x9FFF), k=size)))
    yield "emoji", "".join(map(chr, rng.choices(range(0x1F300, 0x1F9FF), k=size)))
    yield "joined emoji", "\U0001f469\u200d" * (size // 2)
    yield "combining marks", "a" + "\u0301" * size
    yield "punctuation", "".join(rng.choices("!?.,;:'\"-_()[]{}<>|/\\", k=size))
    yield "spaces and letters", " a" * (size // 2)
    yield "tabs and spaces", "\t " * (size // 2)
    yield "special tokens", "<|start|>" * (size // 9)
    yield "zeros", "\u0000" * size


def json_texts() -> Iterator[tuple[str, bytes]]:
    """Bodies that are hard to parse."""
    yield "one large number", b'{"messages": [], "seed": ' + b"9" * BODY_BYTES + b"}"
    yield "many digits after a point", b'{"messages": [], "temperature": 0.' + b"1" * (BODY_BYTES - 64) + b"}"
    yield "equal keys", b'{"model": "' + b'a", "model": "' * 100_000 + b'"}'
    yield "escapes", b'{"prompt": "' + b"\\u00e9" * (BODY_BYTES // 6 - 16) + b'"}'
    yield "half surrogates", b'{"prompt": "' + b"\\ud83d" * (BODY_BYTES // 6 - 16) + b'"}'
    yield "spaces around nothing", b" " * (BODY_BYTES - 2) + b"{}"
    yield "open brackets", b'{"messages": ' + b"[" * (BODY_BYTES - 64)
    yield "open objects", b'{"messages": ' + b'{"a":' * (BODY_BYTES // 5 - 64)
    yield "commas", b'{"messages": [' + b"," * (BODY_BYTES - 64) + b"]}"
    yield "empty lists", b'{"messages": [' + b"[]," * (VALUES // 2 - 64) + b"[]]}"
    yield "a long name", b'{"' + b"a" * (BODY_BYTES - 64) + b'": 1, "messages": []}'
    yield "a long model", b'{"messages": [{"role": "user", "content": "a"}], "model": "' + b"a" * 4_000_000 + b'"}'
    yield "a long role", b'{"messages": [{"role": "' + b"a" * 4_000_000 + b'", "content": "a"}]}'
    yield "a long id", b'{"input": "hi", "previous_response_id": "' + b"a" * 4_000_000 + b'"}'
    yield "not UTF-8", b'{"prompt": "' + b"\xff" * (BODY_BYTES - 64) + b'"}'


def floods() -> Iterator[Attack]:
    """Floods from one connection without a key."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    chunked = head + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    get, answer = (
        b"GET /v1/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n",
    )
    then: dict[str, Any] = {"half_closes": True}
    yield Attack("trailers", (chunked + b"0\r\n", *[b"X-Trailer: y\r\n" * 5000] * 60), **then)
    yield Attack("chunk extensions", (chunked + b"1;", *[b"y" * 65_536] * 60), **then)
    yield Attack("chunks of one byte", (chunked, *[b"1\r\na\r\n" * 10_000] * 60), **then)
    yield Attack("many headers", (head + b"a:\r\n" * 16_000 + b"\r\n",), **then)
    yield Attack("endless header", (head + b"X: ", *[b"y" * 65_536] * 60), **then)
    yield Attack("empty lines", tuple([b"\r\n" * 32_768] * 60), **then)
    yield Attack("pipelined probes", (get * (FLOOD_BYTES // len(get)),), leaves=True, pause_s=1.0)
    yield Attack("pipelined metrics", (answer * 2000,), leaves=True, pause_s=1.0)
    posts = post(CHAT, b"{}").replace(b"Connection: close\r\n", b"") * 20_000
    yield Attack("pipelined posts", (posts,), leaves=True, pause_s=1.0)
    yield Attack("long path", (b"GET /" + b"%2e/" * 16_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",), **then)
    yield Attack("long query", (b"GET /v1/health/live?" + b"a=b&" * 16_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",), **then)
    for header in (b"Host: evil.example", b"Origin: https://evil.example", b"Content-Type: text/plain"):
        yield Attack(header.decode(), (post(CHAT, json.dumps(chat()).encode(), header),))


def shapes(seed: int, *headers: bytes) -> Iterator[Attack]:
    """`headers`: sent with every complete request, such as a key."""
    rng = random.Random(seed)

    def attack(name: str, path: str, body: bytes) -> Attack:
        return Attack(f"{name} {path}", (post(path, body, *headers),))

    kinds: list[Callable[[], Iterator[tuple[str, str, dict[str, Any]]]]] = [
        lambda: many(VALUES - 1000),
        lambda: many(2 * VALUES),
        counts,
        slow_grammars,
    ]
    for i, kind in enumerate(kinds):
        for name, path, body in kind():
            yield attack(name + " (too many)" * (i == 1), path, json.dumps(body).encode())
    for name, text in texts(rng, LONG_TEXT):
        yield attack(name, TEXT, json.dumps({"prompt": text, "max_tokens": 3}).encode())
        yield attack(name, CHAT, json.dumps(chat(messages=[HI | {"content": text}])).encode())
    for name, text in texts(rng, BODY_BYTES // 4 - 16):
        data = json.dumps({"prompt": text}, ensure_ascii=False).encode()
        yield attack(f"{len(data) >> 10} KiB of {name}", TOKENIZE, data)
    for name, data in json_texts():
        for path in (CHAT, RESPONSES):
            yield attack(name, path, data)
    yield from floods()
