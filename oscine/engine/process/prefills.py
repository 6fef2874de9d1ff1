"""Prompts that an engine computes for other engines, as the engine's process sees them."""

from oscine.engine.wire.messages import FromPeer, Meet, Met, Prefill, PrefillRefused, ToPeer
from oscine.types import GenerationOutput

GIVES_NONE = "the engine gives no pages to others"


class Prefills:
    """Those of an engine that gives no pages to others. It says so to who asks."""

    def __init__(self) -> None:
        self.news: list[tuple[bytes, ToPeer]] = []  # to be sent to the peers named in it

    @property
    def patience_ms(self) -> int | None:
        """How long an idle engine may wait before it calls expire()."""
        return None

    def handle(self, peer: bytes, message: FromPeer) -> None:
        match message:
            case Meet():
                self.news.append((peer, Met(None)))
            case Prefill(request_id):
                self.news.append((peer, PrefillRefused(request_id, GIVES_NONE)))

    def take(self, outputs: list[GenerationOutput]) -> list[GenerationOutput]:
        """Takes in what became of the prompts; call it right after each step. Returns all other outputs."""
        return outputs

    def lose(self, peer: bytes) -> None:
        """A peer is gone."""

    def expire(self) -> None:
        """Ends leases whose time is over."""
