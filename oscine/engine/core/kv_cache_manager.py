"""Pages of requests, in all groups: what a request takes at its start, as it grows, and what it leaves behind.

PagePool counts the holders of a page; PrefixIndex has its content. Pages are registered and freed only when a step is
committed, never when it is scheduled. So the index only has what is computed, and a page that is freed is not read by
a step in flight. Plans run in order, so a later plan may give such a page away at once.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter, sub

from oscine.engine.core.page_holds import PageHolds
from oscine.engine.core.page_pool import Pools
from oscine.engine.core.prefix_index import PrefixHit, PrefixIndex, root_of
from oscine.engine.core.request import NEVER, Request
from oscine.kv_group import KVGroup, Slots, most_pages, slots_of

_NO_PAGES: frozenset[int] = frozenset()
_first = itemgetter(0)
_MANY = 1024  # sequences over which the rest of a slot is shared out


class KVCacheManager:
    """The pages of all groups. Every page index of a sequence has an entry in each of its tables, one per group."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        memory: Sequence[Slots],
        *,
        prefix_caching: bool,
        prefix_seed: str,
        drafts: bool,
        index: type[PrefixIndex] = PrefixIndex,
    ) -> None:
        """`drafts`: sequences may have some. Raises ValueError if a group's memory cannot hold a window."""
        self.page_size = groups[0].page_size
        self.prefix_caching = prefix_caching
        self.on_evict: Callable[[int, int], None] | None = None  # called with group and page, while it is still known
        self.pools = Pools(memory, self._forget)
        self._pools = [*self.pools]  # a list: loops over it are hot
        self.index = index(groups, root_of(prefix_seed), [pool.num_pages for pool in self._pools])
        self.holds = PageHolds(groups, self.pools, self.index)
        # Of each group with a window: its place, how many tokens a query sees before its own, and the pool.
        self._windows = [
            (place, group.window - 1, pool)
            for place, (group, pool) in enumerate(zip(groups, self.pools, strict=True))
            if group.window is not None
        ]
        self.groups, self._memory, self._drafts = groups, memory, drafts
        self.most_pages = most_pages(groups, memory)  # of full attention that one sequence can have
        # Pages per group that a sequence in decode holds at most; -1: full attention, which always grows.
        self._steady = [-1 if group.window is None else group.decode_pages(drafts) for group in groups]
        for group, pool in zip(groups, self.pools, strict=True):
            if group.window is not None and pool.num_pages < group.window_pages:
                raise ValueError(f"{pool.num_pages} {group.name} pages cannot hold a window; {group.window_pages} can")

    def num_pages(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def num_held(self, num_pages: int) -> int:
        """How many sequences of so many pages fit at once."""
        return min(
            slots.count * _MANY // slots_of(self.groups, slots, _MANY, num_pages, drafts=self._drafts)
            for slots in self._memory
        )

    def looks_up(self, request: Request) -> bool:
        """Whether the request may use the prefix index; logprobs of a prompt exist only where it is computed."""
        return self.prefix_caching and request.sampling.prompt_logprobs is None

    def find(self, request: Request) -> PrefixHit:
        """What the prefix index has of this request. Its last token is always left to compute."""
        num_pages = (len(request.token_ids) - 1) // self.page_size if self.looks_up(request) else 0
        self._extend_digests(request, num_pages)
        return self.index.find(request.digests[:num_pages])

    def fits(self, request: Request, hit: PrefixHit, lower: Sequence[Request] = (), *, preempted: bool = False) -> bool:
        """Whether all known tokens of a waiting request find pages.

        One page is left for each running sequence that may need one more, except for those of `lower` priority.
        `preempted`: count the latter as preempted.
        """
        num_pages = self.num_pages(len(request.token_ids))
        held = zip(self.groups, hit.first_held, strict=True)
        wanted = [group.most_held(num_pages) - (hit.num_pages - first) for group, first in held]
        retained = [pages[first:] for pages, first in zip(hit.pages, hit.first_held, strict=True)]
        spared = [sum(self._grows(other, place) for other in lower) for place in range(len(self.groups))]
        released = [
            [page for other in lower for page in other.pages[place][other.first_held[place] :]] if preempted else []
            for place in range(len(self.groups))
        ]
        return self.pools.have_room([*map(sub, wanted, spared)], retained, released)

    def start(self, request: Request, hit: PrefixHit) -> None:
        """Gives a request that starts, or starts again, the pages that the index has of it."""
        for pool, pages, first in zip(self._pools, hit.pages, hit.first_held, strict=True):
            pool.retain_some(pages[first:])
        request.pages = [list(pages) for pages in hit.pages]
        request.first_held = list(hit.first_held)
        request.num_hit_pages = request.num_registered = hit.num_pages
        self._count_growing(request, 1)
        request.kept_pages = [self._kept_pages(group, request, hit.branch_page) for group in self.groups]
        request.num_computed = hit.num_pages * self.page_size
        request.page_event = request.num_computed + self.page_size - 1
        self.holds.release_of(request)

    def appendable(self, most: int) -> int:
        """How many pages, up to `most`, a sequence can append to each of its tables.

        One page stays for each running sequence that may need one, if the sequence can append one nevertheless.
        """

        if self.pools.have_room([most] * len(self.groups)):
            return most
        if not self.pools.can_allocate([1] * len(self.groups)):
            return 0

        def lacks_room(count: int) -> bool:
            return not self.pools.have_room([count] * len(self.groups))

        return max(1, bisect_left(range(1, most), True, key=lacks_room))

    def extend(self, request: Request, num_tokens: int) -> list[list[int]]:
        """Appends pages until the first `num_tokens` tokens have their place. Returns the pages per group, if any."""
        count = self.num_pages(num_tokens) - request.num_pages
        if count <= 0:
            return []
        added = self.pools.allocate([count] * len(self._pools))
        for place, pages in enumerate(request.pages):
            if self._steady[place] < 0:  # it always grows
                pages += added[place]
                continue
            grew = self._grows(request, place)
            pages += added[place]
            self._pools[place].num_growing += self._grows(request, place) - grew
        if request.samples:
            request.fast_end = min(request.num_pages * self.page_size, request.num_to_compute)
        return added

    def extend_each(self, requests: Sequence[Request]) -> None:
        """Appends a page to each table of each of these sequences, which decode, in their order. There must be room."""
        if not requests:
            return
        page_size = self.page_size
        for place, added in enumerate(self.pools.allocate_each(len(requests))):
            pool, steady = self._pools[place], self._steady[place]
            for i, request in enumerate(requests):
                pages, first = request.pages[place], request.first_held[place]
                pages.append(added[i])
                if steady >= 0 and first >= request.num_hit_pages:  # see _grows
                    held = len(pages) - first
                    pool.num_growing += (held != steady) - (held != steady + 1)
        for request in requests:
            request.fast_end = min(request.num_pages * page_size, request.num_to_compute)

    def commit(self, request: Request, num_computed: int, *, ends: bool = False) -> None:
        """The first num_computed tokens are computed: registers pages now full, frees those that no window reaches.

        A sequence that ends keeps the window of its last full page, so its next turn has a hit. A sequence that goes on
        frees a page one token before each page boundary, if no later token reads it (window 128, pages of 64). The step
        in flight computes that last token, and the next step can take the freed page.
        """
        num_pages = num_computed // self.page_size
        if self.prefix_caching and num_pages > request.num_registered:
            self._register([(request, self._new_pages(request, num_pages))])
        is_early = not ends and (num_computed + 1) % self.page_size == 0
        end = num_computed if is_early else num_pages * self.page_size
        for place, reach, pool in self._windows:
            held, first = request.first_held[place], (end - reach) // self.page_size
            if first > held:
                for cold, pages in self._pass_pages(request, place, held, first):
                    pool.release_some(pages, cold=cold)
        # An early page is still to be registered.
        request.page_event = num_computed + 1 if is_early else (num_pages + 1) * self.page_size - 1

    def commit_each(self, requests: Sequence[Request], nums_computed: Sequence[int]) -> None:
        """As commit() of each of these sequences, in their order; none of them ends."""
        if len(self._windows) > 1:  # their pages are freed in turn
            for request, num_computed in zip(requests, nums_computed, strict=True):
                self.commit(request, num_computed)
            return
        page_size = self.page_size
        if self.prefix_caching:
            full = zip(requests, [num // page_size for num in nums_computed], strict=True)
            self._register([(one, self._new_pages(one, num)) for one, num in full if num > one.num_registered])
        ends = [num - (num % page_size if (num + 1) % page_size else 0) for num in nums_computed]
        for place, reach, pool in self._windows:
            steady, freed = self._steady[place], list[tuple[bool, int]]()
            for request, end in zip(requests, ends, strict=True):
                held, first = request.first_held[place], (end - reach) // page_size
                if first <= held:
                    continue
                if first > held + 1:
                    runs = self._pass_pages(request, place, held, first)
                    freed += [(cold, page) for cold, pages in runs for page in pages]
                    continue
                pages, num_hit = request.pages[place], request.num_hit_pages
                request.first_held[place] = first
                if held >= num_hit:  # see _grows
                    count = len(pages) - first
                    pool.num_growing += (count != steady) - (count + 1 != steady)
                    freed.append((held not in request.kept_pages[place], pages[held]))
                else:
                    if first >= num_hit:
                        pool.num_growing -= len(pages) - first == steady
                    freed.append((False, pages[held]))
            for cold, run in groupby(freed, _first):
                pool.release_some([page for _, page in run], cold=cold)
        for request, num in zip(requests, nums_computed, strict=True):
            is_early = not (num + 1) % page_size
            request.page_event = num + 1 if is_early else (num // page_size + 1) * page_size - 1

    def release(self, request: Request) -> None:
        """Takes all pages back. Those in the index stay cached; of a prefix, the end is evicted before the start."""
        self._count_growing(request, -1)
        for pool, pages, first in zip(self._pools, request.pages, request.first_held, strict=True):
            pool.release_some(reversed(pages[first:]))
        request.pages, request.first_held = [], []
        request.page_event, request.fast_end = NEVER, 0

    def clear(self) -> None:
        """Forgets all that is cached. No page may be held."""
        self.pools.clear()

    def _count_growing(self, request: Request, by: int) -> None:
        """Adds `by` to num_growing of each group in which the running request grows."""
        for place, pool in enumerate(self._pools):
            if self._grows(request, place):
                pool.num_growing += by

    def _grows(self, request: Request, place: int) -> bool:
        """Whether a running request may need one more page of a group.

        With exactly the pages that decode needs, all of them its own, it frees a page before it takes the next. Most
        requests that compute a prompt have another number of pages.
        """
        first = request.first_held[place]
        return len(request.pages[place]) - first != self._steady[place] or first < request.num_hit_pages

    def _pass_pages(self, request: Request, place: int, held: int, first: int) -> list[tuple[bool, list[int]]]:
        """No later token of the request reads its pages from `held` to `first` of a group. Returns them in runs that
        are cold, or are not."""
        pages, kept, num_hit = request.pages[place], request.kept_pages[place], request.num_hit_pages
        num_left, steady = len(pages) - first, self._steady[place]
        request.first_held[place] = first
        grew, grows = num_left + first - held != steady or held < num_hit, num_left != steady or first < num_hit
        self._pools[place].num_growing += grows - grew  # see _grows
        if first == held + 1:
            return [(held >= num_hit and held not in kept, pages[held : held + 1])]
        runs: list[tuple[bool, list[int]]] = []
        next_page = min(max(held, num_hit), first)
        if next_page > held:
            runs.append((False, pages[held:next_page]))
        for page in sorted(page for page in kept if next_page <= page < first):
            if page > next_page:
                runs.append((True, pages[next_page:page]))
            runs.append((False, pages[page : page + 1]))
            next_page = page + 1
        if first > next_page:
            runs.append((True, pages[next_page:first]))
        return runs

    def _forget(self, group: int, pages: Sequence[int]) -> None:
        if self.on_evict is not None:
            for page in pages:
                self.on_evict(group, page)
        self.index.forget(group, pages)

    def _new_pages(self, request: Request, num_pages: int) -> range:
        """So many pages of a request are full. Returns the places of those that count as registered from now on."""
        self._extend_digests(request, num_pages)
        new = range(request.num_registered, num_pages)
        request.num_registered = num_pages
        return new

    def _register(self, full: Sequence[tuple[Request, range]]) -> None:
        """`full`: requests, and the places of their pages that have become full."""
        if not full:
            return
        for place, pool in enumerate(self._pools):
            offers = [(one.digests, one.token_ids, one.pages[place][new.start : new.stop], new) for one, new in full]
            pool.mark_indexed(self.index.register_each(place, offers))

    def _extend_digests(self, request: Request, num_pages: int) -> None:
        given = request.given
        self.index.extend_digests(request.digests, request.token_ids, num_pages, given.cache_salt, given.adapter)

    def _kept_pages(self, group: KVGroup, request: Request, branch_page: int) -> frozenset[int]:
        """Pages, by their places in the prefix, that are worth keeping when no later token reads them.

        They belong to a window that may become a prefix hit: it would have been one at a branch, or it ends 0, 1, 8,
        64, ... pages before the end of the prompt. The next turn often branches off near the end of the prompt, as it
        drops the reasoning after it. A prompt that branches off n pages before the end finds a window less than 8 n
        pages before it.
        """
        if group.window is None:
            return _NO_PAGES
        end, distance = request.num_prompt_tokens // self.page_size, 1
        ends = [branch_page, end]
        while distance < end:
            ends.append(end - distance)
            distance *= 8
        return frozenset(page for last in ends for page in range(group.first_needed(last), last))
