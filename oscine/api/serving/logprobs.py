"""Log-probabilities as the chat API and as the older text API word them, with each token's exact bytes."""

from collections.abc import Sequence

from msgspec import Struct

from oscine.chat.events import ContentDelta
from oscine.chat.tokenizer import Tokenizer
from oscine.types import TokenLogprobs

_LEAST = -9999.0  # stands for minus infinity, which JSON does not have


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def _named(tokenizer: Tokenizer, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
    data = tokenizer.token_bytes(token_id)
    return data.decode(errors="replace"), _finite(logprob), list(data)


class ContentLogprobs:
    """Log-probabilities of a turn's content as the chat API words them."""

    def __init__(self, tokenizer: Tokenizer, top: int | None, positions: Sequence[TokenLogprobs]) -> None:
        """`top` is how many alternatives a token gets; None: no log-probabilities were asked for.

        `positions`: log-probabilities of each token of the turn, by its index. The sequence grows with the turn.
        """
        self._tokenizer, self.top, self._positions = tokenizer, top, positions

    def of(self, delta: ContentDelta) -> list[TokenLogprob]:
        """Log-probabilities of the tokens of a delta; none if they were not asked for."""
        if self.top is None:
            return []
        tokenizer, found = self._tokenizer, []
        for position in (self._positions[i] for i in delta.token_indices):
            alternatives = [TopLogprob(*_named(tokenizer, *alternative)) for alternative in position.top[: self.top]]
            found.append(TokenLogprob(*_named(tokenizer, position.token_id, position.logprob), alternatives))
        return found


class TextLogprobs:
    """The lists of a text completion: tokens, token_logprobs, top_logprobs, text_offset."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0  # characters before the next token
        self._lists = CompletionLogprobs([], [], [], [])

    def take(self) -> CompletionLogprobs:
        """The lists of the tokens since the last call. Offsets go on."""
        lists, self._lists = self._lists, CompletionLogprobs([], [], [], [])
        return lists

    def add(self, token_id: int, position: TokenLogprobs | None) -> None:
        """`position` is None for the first token of a prompt, which nothing predicts."""
        text = self._text(token_id)
        top = None
        if position is not None:
            top = {self._text(other): _finite(logprob) for other, logprob in position.top[: self._top]}
            top.setdefault(text, _finite(position.logprob))
        self._lists.tokens.append(text)
        self._lists.token_logprobs.append(None if position is None else _finite(position.logprob))
        self._lists.top_logprobs.append(top)
        self._lists.text_offset.append(self._offset)
        self._offset += len(text)

    def _text(self, token_id: int) -> str:
        """A token that is no whole text is spelled as `bytes:\\xNN`, as OpenAI does, so that keys stay distinct."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
