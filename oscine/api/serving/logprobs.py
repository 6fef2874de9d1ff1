"""Log-probabilities as the chat API and as the older text API word them, with each token's exact bytes."""

from typing import Any

from oscine.chat.events import ContentDelta
from oscine.chat.tokenizer import Tokenizer
from oscine.types import TokenLogprobs

_LEAST = -9999.0  # stands for minus infinity, which JSON does not have


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


def chat_logprob(tokenizer: Tokenizer, position: TokenLogprobs, top: int) -> dict[str, Any]:
    """One entry of `logprobs.content`; `top` is how many alternatives were asked for."""
    alternatives = [_token(tokenizer, token_id, logprob) for token_id, logprob in position.top[:top]]
    return {**_token(tokenizer, position.token_id, position.logprob), "top_logprobs": alternatives}


class ContentLogprobs:
    """Those of every token of a choice by its index, and of its content as the chat API words them."""

    def __init__(self, tokenizer: Tokenizer, top: int | None) -> None:
        """`top` is how many alternatives a token gets; None: no log-probabilities were asked for."""
        self._tokenizer = tokenizer
        self.top = top
        self._positions: list[TokenLogprobs] = []

    def take(self, positions: list[TokenLogprobs]) -> None:
        """Of the tokens that come next."""
        self._positions += positions

    def forget(self, index: int) -> None:
        """The tokens from `index` on."""
        del self._positions[index:]

    def of(self, delta: ContentDelta) -> list[dict[str, Any]] | None:
        """Of the tokens that a delta consists of; None when they were not asked for."""
        if self.top is None:
            return None
        return [chat_logprob(self._tokenizer, self._positions[i], self.top) for i in delta.token_indices]


class TextLogprobs:
    """The lists of a text completion: tokens, token_logprobs, top_logprobs, text_offset."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0  # characters before the next token
        self.clear()

    def clear(self) -> None:
        """Starts the lists of a new event; offsets go on."""
        self.lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(self, token_id: int, position: TokenLogprobs | None) -> None:
        """`position` is None for the first token of a prompt, which nothing predicts."""
        text = self._text(token_id)
        top = None
        if position is not None:
            top = {self._text(other): _finite(logprob) for other, logprob in position.top[: self._top]}
            top.setdefault(text, _finite(position.logprob))
        lists = self.lists
        lists["tokens"].append(text)
        lists["token_logprobs"].append(None if position is None else _finite(position.logprob))
        lists["top_logprobs"].append(top)
        lists["text_offset"].append(self._offset)
        self._offset += len(text)

    def _text(self, token_id: int) -> str:
        """A token that is no whole text is spelled as `bytes:\\xNN`, as OpenAI does, so that keys stay distinct."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
