"""Pages of requests, in both groups: what a request takes at its start, as it grows, and what it leaves behind.

Puts PagePool (who holds a page) and PrefixIndex (what a page contains) together. Knows nothing of slots, budgets or
priorities, and nothing of the memory behind a page.

Pages are registered and freed only when a step is committed, never when it is scheduled: what the index knows is
computed and certain, and a page freed while a later step is in flight is not read by that step. Plans run in order, so
a later plan may give such a page away at once.
"""

from functools import partial

from oscine.engine.core.page_holds import PageHolds
from oscine.engine.core.page_pool import PagePool
from oscine.engine.core.prefix_index import PrefixHit, PrefixIndex, root_of
from oscine.engine.core.request import NEVER, Request


class KVCacheManager:
    """The pages of both groups. Every page index of a sequence has an entry in both of its tables."""

    def __init__(
        self,
        *,
        num_full_pages: int,
        num_sliding_pages: int,
        page_size: int,
        sliding_window: int,
        prefix_caching: bool,
        prefix_seed: str,
    ) -> None:
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.index = PrefixIndex(page_size, sliding_window, root_of(prefix_seed))
        self.full = PagePool(num_full_pages, partial(self.index.forget, "full"))
        self.sliding = PagePool(num_sliding_pages, partial(self.index.forget, "sliding"))
        self.holds = PageHolds(self.index, self.full, self.sliding)
        # A sequence holds the pages that a window can touch, the one being written included.
        self.max_sliding_held = (sliding_window - 1 + page_size - 1) // page_size + 1
        if num_sliding_pages < self.max_sliding_held:
            raise ValueError(f"{num_sliding_pages} sliding pages cannot hold a window; {self.max_sliding_held} can")

    def num_pages(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def looks_up(self, request: Request) -> bool:
        """Whether the request may use the prefix index; logprobs of a prompt exist only where it is computed."""
        return self.prefix_caching and request.sampling.prompt_logprobs is None

    def find(self, request: Request) -> PrefixHit:
        """What the prefix index has of this request. Its last token is always left to compute."""
        num_pages = (len(request.token_ids) - 1) // self.page_size if self.looks_up(request) else 0
        self.index.extend_digests(request.digests, request.token_ids, num_pages, request.cache_salt)
        return self.index.find(request.digests[:num_pages])

    def fits(self, request: Request, hit: PrefixHit, reserve: int) -> bool:
        """Whether all known tokens of a waiting request find pages, `reserve` pages of each group left alone."""
        new = self.num_pages(len(request.token_ids)) - hit.num_pages
        held = hit.num_pages - hit.first_sliding
        full = new + self.full.num_unheld(hit.full_pages)
        sliding = min(new, self.max_sliding_held - held)
        sliding += self.sliding.num_unheld(hit.sliding_pages[hit.first_sliding :])
        return full + reserve <= self.full.num_available and sliding + reserve <= self.sliding.num_available

    def start(self, request: Request, hit: PrefixHit) -> None:
        """Gives a request that starts, or starts again, the pages that the index has of it."""
        for page in hit.full_pages:
            self.full.retain(page)
        for page in hit.sliding_pages[hit.first_sliding :]:
            self.sliding.retain(page)
        request.full_pages = list(hit.full_pages)
        request.sliding_pages = list(hit.sliding_pages)
        request.first_sliding = hit.first_sliding
        request.num_hit_pages = request.num_registered = hit.num_pages
        request.branch_page = hit.branch_page
        request.num_computed = hit.num_pages * self.page_size
        request.page_event = request.num_computed + self.page_size
        self.holds.release_of(request)

    def num_free_pages(self) -> int:
        """Pages that a sequence can append to both of its tables."""
        return min(self.full.num_available, self.sliding.num_available)

    def extend(self, request: Request, num_tokens: int) -> tuple[list[int], list[int]]:
        """Appends pages until the first `num_tokens` tokens have their place. Returns the pages of both groups."""
        count = self.num_pages(num_tokens) - len(request.full_pages)
        if count <= 0:
            return [], []
        full, sliding = self.full.allocate(count), self.sliding.allocate(count)
        request.full_pages += full
        request.sliding_pages += sliding
        if request.samples:
            request.fast_end = min(len(request.full_pages) * self.page_size, request.num_to_compute)
        return full, sliding

    def commit(self, request: Request, num_computed: int) -> None:
        """The first num_computed tokens are computed: registers pages now full, frees sliding pages out of reach.

        Pages are freed at page boundaries, which is one token later than the window allows (127 keys back, pages of
        64). So a sequence that ends anywhere still has the window of its last full page, and its next turn a hit.
        """
        num_pages = num_computed // self.page_size
        if self.prefix_caching:
            self._register(request, num_pages)
        first = self.index.first_needed(num_pages)
        for i in range(request.first_sliding, first):
            self.sliding.release(request.sliding_pages[i], cold=not self._worth_keeping(request, i))
        request.first_sliding = first
        request.page_event = (num_pages + 1) * self.page_size

    def release(self, request: Request) -> None:
        """Takes all pages back. Those in the index stay cached; of a prefix, the end is evicted before the start."""
        for page in reversed(request.full_pages):
            self.full.release(page)
        for page in reversed(request.sliding_pages[request.first_sliding :]):
            self.sliding.release(page)
        request.full_pages, request.sliding_pages, request.first_sliding = [], [], 0
        request.page_event, request.fast_end = NEVER, 0

    def _register(self, request: Request, num_pages: int) -> None:
        self.index.extend_digests(request.digests, request.token_ids, num_pages, request.cache_salt)
        learnt = []
        for i in range(request.num_registered, num_pages):
            digest = request.digests[i]
            if self.index.insert("full", digest, request.full_pages[i]):
                self.full.mark_indexed(request.full_pages[i])
                learnt.append(i)
            if self.index.insert("sliding", digest, request.sliding_pages[i]):
                self.sliding.mark_indexed(request.sliding_pages[i])
        self.index.announce(request.digests, request.token_ids, learnt)
        request.num_registered = num_pages

    def _worth_keeping(self, request: Request, page: int) -> bool:
        """Whether a window passed by is likely to be asked for: it was a hit, or would have been one at a branch."""
        branch = request.branch_page
        return page < request.num_hit_pages or self.index.first_needed(branch) <= page < branch
