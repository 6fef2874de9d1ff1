"""Raw text: tokens in, content out, up to a stop string. Knows nothing of harmony."""

from collections.abc import Iterable, Sequence

from oscine.chat.detokenizer import Detokenizer
from oscine.chat.events import ContentDelta, Event
from oscine.chat.stop_strings import StopStrings
from oscine.chat.tokenizer import Tokenizer


class TextParser:
    """A Parser of oscine.api.serving.turn. All text is one message of content."""

    separator = ""
    num_reasoning_tokens = num_tool_calls = 0
    thinking = False

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, skip_special: bool = True) -> None:
        """`skip_special`: whether special tokens are left out; else their names are text."""
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stop)
        self._show = self._stops.feed if stop else str
        self.num_tokens = 0

    @property
    def stop_string(self) -> str | None:
        return self._stops.matched

    @property
    def done(self) -> bool:
        return self._stops.matched is not None

    def feed(self, token_ids: Iterable[int]) -> list[Event]:
        texts = []
        for token_id in token_ids:
            if self._stops.matched is not None:
                break
            self.num_tokens += 1
            texts.append(self._show(self._text(token_id)))
        return _content("".join(texts))

    def finish(self) -> list[Event]:
        """What was held back."""
        if self.done:
            return []
        return _content(self._show(self._detokenizer.finish()) + self._stops.finish())

    def resume(self, prompt: Sequence[int]) -> list[Event]:
        """Generation goes on behind another prompt."""
        return []

    def _text(self, token_id: int) -> str:
        name = self._tokenizer.token_bytes(token_id)
        if self._skip_special or not name or not self._tokenizer.is_special(token_id):
            return self._detokenizer.add(token_id)
        return self._detokenizer.finish() + name.decode()


def _content(text: str) -> list[Event]:
    return [ContentDelta(text, [])] if text else []
