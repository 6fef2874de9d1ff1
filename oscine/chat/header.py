"""The header of a harmony message as the model wrote it, well-formed or not: from its start to <|message|>."""

import re
from collections.abc import Collection
from typing import Literal, cast

from oscine.chat.tools import NAMESPACE

Channel = Literal["analysis", "commentary", "final"]
Opening = Literal["prompt", "start", "nothing"]

_CHANNELS: tuple[Channel, ...] = ("analysis", "commentary", "final")
_FORMATS = ("json", "code")
_OTHER_ROLES = ("user", "system", "developer", "tool")
_AUDIENCES = ("assistant", "user", "all")  # recipients that are not tools
_LONGEST = 256  # characters; a longer text is not a header

_NAME = r"(?i:analysis|commentary|final)"
_TO = rf"to=(?:{NAMESPACE}\.\s+)?\S*"  # a model may put a space after the namespace
_RECIPIENT = re.compile(rf"(?:^|\s)to=({NAMESPACE}\.\s+\S+|\S+)")
_ROLE = re.compile(rf"\s*(?:assistant(?=\s|$|{_NAME})\s*)?(?:{_NAME}\s+(?=to=))?(?:{_TO}\s*)?")
_CALL = re.compile(rf"\s*(?:{_NAME}\s+)?to={NAMESPACE}\.\s*\S*\s*")
_CHANNEL = re.compile(rf"\s*(?:{_TO}\s*)?(?P<name>{_NAME})?\s*(?:{_TO}\s*)?")
_FORMAT_ONLY = re.compile(rf"\s*[\w./+-]*\s*(?:to?|{_TO}\s*)?")
_FORMAT = re.compile(rf"\s*(?:json|code)?\s*(?:{_TO}\s*)?")
_SPLIT_NAME = re.compile(rf"(?<=to={NAMESPACE}\.)\s+")


class Header:
    """The text of a header by section: role, then <|channel|> and the channel, then <|constrain|> and the format.

    `opening` says what came before: the prompt (which ends in the role), <|start|>, or nothing where <|start|> was due.
    `namespaces` are those of built-in tools.
    """

    __slots__ = ("_earlier", "_namespaces", "_pieces", "_role", "_section", "_text", "opening")

    def __init__(self, opening: Opening, namespaces: Collection[str] = ()) -> None:
        self.opening = opening
        self._namespaces = namespaces
        self._section: Literal["role", "channel", "format"] = "role"
        self._role = ""
        self._earlier = ""  # text of the sections before this one, after the role
        self._text = ""  # of this section
        self._pieces: list[tuple[int, str]] = []  # of this section: token index, text

    def add(self, token_index: int, text: str) -> None:
        self._text += text
        self._pieces.append((token_index, text))

    def complete(self, text: str) -> None:
        """Text that the last token of this section began."""
        if text:
            index, begun = self._pieces.pop()
            self._text += text
            self._pieces.append((index, begun + text))

    def enter(self, section: Literal["channel", "format"]) -> None:
        if self._section == "role":
            self._role = self._text
        self._earlier += f" {self._text}"
        self._section, self._text, self._pieces = section, "", []

    @property
    def is_marked(self) -> bool:
        """Whether a marker has shown that this is a header."""
        return self.opening == "start" or self._section != "role"

    @property
    def of_other_role(self) -> bool:
        """Whether the role is not the assistant's: the model continued past its turn."""
        role = self._text if self._section == "role" else self._role
        first = role.split(maxsplit=1)[0] if role.strip() else ""
        return first in _OTHER_ROLES or first.startswith(f"{NAMESPACE}.") or self._is_builtin(first)

    @property
    def channel(self) -> Channel | None:
        """The last channel named, in any case; None for one that harmony does not have."""
        if self._section == "role":
            words = self._explained.lower().split()
            return next((c for word in words[::-1] for c in _CHANNELS if word.removeprefix("assistant") == c), None)
        for text in (self._text, self._earlier):
            if (match := _CHANNEL.match(text)) and match["name"]:
                return cast(Channel, match["name"].lower())
        return None

    @property
    def builtin(self) -> str | None:
        """The recipient, if it is a built-in tool; with its namespace."""
        name = self._recipient()
        return name if self._is_builtin(name) else None

    @property
    def function(self) -> str | None:
        """The name of the function that the message calls, without the namespace of functions."""
        name = self._recipient()
        if self._is_builtin(name) or name in _AUDIENCES:
            return None
        while name.startswith(f"{NAMESPACE}."):
            name = name.removeprefix(f"{NAMESPACE}.")
        return name or None

    @property
    def is_broken(self) -> bool:
        """Whether this can no longer become a header, so that its text is a message."""
        if len(self._text) > _LONGEST:
            return True
        if self._section == "role":
            return not self._may_be_role()
        if self._section == "format":
            return _FORMAT_ONLY.fullmatch(self._text) is None
        words = [word for word in self._unexplained().split() if not word.startswith("to=")]
        return len(words) > (2 if self.channel is None else 1)

    def body(self) -> list[tuple[int, str]]:
        """The part of this section that is not the text of any header: token index, text."""
        left = len(self._unexplained())
        pieces: list[tuple[int, str]] = []
        for index, text in reversed(self._pieces):
            if left <= 0 and text:
                break
            pieces.append((index, text[-left:]))
            left -= len(text)
        return pieces[::-1]

    def _recipient(self) -> str:
        match = _RECIPIENT.search(self._explained) or _RECIPIENT.search(self._earlier)
        return "".join(match[1].split()) if match else ""

    def _is_builtin(self, name: str) -> bool:
        return name.partition(".")[0] in self._namespaces

    def _may_be_role(self) -> bool:
        words = _SPLIT_NAME.sub("", self._text).split()
        grows = not self._text[-1:].isspace()  # the last word
        builtin = (pattern for name in self._namespaces for pattern in (name, f"{name}.*"))
        roles = () if self.opening == "prompt" else (*_OTHER_ROLES, f"{NAMESPACE}.*", *builtin)
        assistant = ("assistant", *(f"assistant{channel}" for channel in _CHANNELS))
        for patterns in ((*assistant, *roles), _CHANNELS, ("to=*",), _CHANNELS, _FORMATS):
            if words and any(_fits(words[0], pattern, grows and len(words) == 1) for pattern in patterns):
                words.pop(0)
        return not words

    @property
    def _explained(self) -> str:
        return self._text.removesuffix(self._unexplained()) if self.is_broken else self._text

    def _unexplained(self) -> str:
        """The end of this section's text, from the first word that no header has."""
        text = self._text
        if self._section == "format":
            return text[_end(_FORMAT, text) :] if self.is_broken else ""
        if self._section == "channel":
            rest = text[_end(_CHANNEL, text) :]
            return "" if rest.strip() in _FORMATS and _RECIPIENT.search(self._earlier + text) else rest
        pattern = _CALL if self.opening != "start" and self.is_broken else _ROLE
        return text[_end(pattern, text) :]


def _fits(word: str, pattern: str, grows: bool) -> bool:
    """Whether a word matches the pattern (any case; a star is any suffix), or may match once more text has come."""
    word, fixed = word.lower(), pattern.removesuffix("*").lower()
    return word == fixed or (pattern != fixed and word.startswith(fixed)) or (grows and fixed.startswith(word))


def _end(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.match(text)
    return match.end() if match else 0
