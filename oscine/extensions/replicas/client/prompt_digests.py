"""The digests of the pages of a prompt, by which the router finds replicas that have them."""

from oscine.engine.core.prefix_index import extend_digests, root_of, salted
from oscine.types import GenerationRequest

_Roots = tuple[str, str]  # of a request: its salt and its adapter
_Known = tuple[list[int], int, _Roots, list[bytes]]  # a prompt, its length, its roots and its digests
_NONE: _Known = ([], 0, ("", ""), [])


class PromptDigests:
    """There are none without a seed. Those of the last prompt are kept: its choices share them."""

    def __init__(self, prefix_seed: str) -> None:
        """`prefix_seed`: as the engines have it."""
        self._root = root_of(prefix_seed) if prefix_seed else None
        self._page_size: int | None = None
        self._last = _NONE

    def reset(self, page_size: int) -> None:
        self._page_size, self._last = page_size, _NONE

    def of(self, request: GenerationRequest) -> list[bytes]:
        prompt, roots = request.prompt_token_ids, (request.cache_salt, request.adapter)
        known, length, known_roots, _ = self._last
        if prompt is not known or (len(prompt), roots) != (length, known_roots):
            self._last = (prompt, len(prompt), roots, self.extended([], prompt, *roots))
        return self._last[3]

    def extended(self, digests: list[bytes], tokens: list[int], salt: str, adapter: str = "") -> list[bytes]:
        """The digests of all whole pages of `tokens`, of which `digests` has some."""
        longer = digests.copy()
        if self._root is not None:
            assert self._page_size is not None
            size, root = self._page_size, salted(self._root, salt, adapter)
            extend_digests(longer, tokens, len(tokens) // size, page_size=size, root=root)
        return longer
