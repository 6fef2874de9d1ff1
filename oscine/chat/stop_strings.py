"""Stop strings in a stream of visible text."""

from collections.abc import Sequence


class StopStrings:
    """Passes text on until a stop string is complete. That string and all text after it are never shown.

    Holds back only text that may still grow into a stop string. Of several, the one that is complete first counts, in
    whichever pieces the text comes. `matched` is that one. Raises ValueError for an empty stop string.
    """

    __slots__ = ("_held", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that can be shown now. Nothing after a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if ends:
            end, _, self.matched = min(ends)
            self._held = ""
            return text[: end - len(self.matched)]
        self._held = self._possible_start(text)
        return text[: len(text) - len(self._held)]

    def finish(self) -> str:
        """The text that was held back: the stream has ended, so it is not a stop string."""
        text, self._held = self._held, ""
        return text

    def _possible_start(self, text: str) -> str:
        """The longest end of the text with which a stop string starts."""
        for start in range(max(0, len(text) - self._longest), len(text)):
            end = text[start:]
            if any(stop.startswith(end) for stop in self._stops):
                return end
        return ""
