"""Prompts of a file, as token ids: chat requests in JSON lines, or lines of plain text."""

import codecs
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from oscine.api.common.errors import APIError
from oscine.api.serving.schemas import ChatCompletionRequest
from oscine.api.turns.conversation import conversation
from oscine.chat.harmony import HarmonyRenderer, PromptTooLong
from oscine.chat.messages import Conversation, ConversationError, Message
from oscine.chat.tokenizer import Tokenizer
from oscine.system.json_text import decode_json
from oscine.system.model_files import open_file, shown

JSON_LINES = ".jsonl"  # ends the names of files of chat requests


def read_prompts(file: Path, tokenizer: Tokenizer, context: int) -> list[list[int]]:
    """`context`: the most tokens of a prompt. Raises ValueError that names the file and the line."""
    renderer, prompts = HarmonyRenderer(tokenizer), []
    for number, line in _lines(file):
        try:
            talk = _request(line) if file.suffix == JSON_LINES else _question(line)
            ids = renderer.render(talk, context)
            if len(ids) > context:
                raise PromptTooLong
        except PromptTooLong:
            raise ValueError(f"{file}:{number}: longer than the context of {context:,} tokens") from None
        except (APIError, ConversationError, ValueError, RecursionError) as error:
            raise ValueError(f"{file}:{number}: {shown(error)}") from None
        prompts.append(ids)
    if not prompts:
        raise ValueError(f"{file}: has no prompts")
    return prompts


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers, without UTF-8's byte order mark."""
    with open_file(file) as opened:
        for number, line in enumerate(opened, 1):
            if text := (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip():
                yield number, text


def _question(line: bytes) -> Conversation:
    try:
        text = line.decode()
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    return Conversation((Message("user", text),), current_date=_today())


def _request(line: bytes) -> Conversation:
    """Of a chat completion's request, a line of a batch with one, or a list of messages."""
    try:
        found: Any = decode_json(line, Any)
    except msgspec.DecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if isinstance(found, list):
        found = {"messages": found}
    if isinstance(found, dict) and "body" in found:
        found = found["body"]
    return conversation(msgspec.json.decode(msgspec.json.encode(found), type=ChatCompletionRequest), _today())


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()
