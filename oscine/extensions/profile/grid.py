"""Which steps are measured: a grid of sizes and contexts, as dense as the time permits."""

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from oscine.timing.features import StepFeatures, pairs_of
from oscine.timing.kinds import EAGER, GraphSizes

CONTEXTS = 128, 1024, 4096, 16384, 65536, 131072  # the last one, or what is possible
_STARTS = 0, 4096, 16384, 65536, 131072  # the last one, or what is possible
_FEW_STARTS = 0, 16384, 131072  # at the coarser levels
_EAGER_TOKENS = 64, 256, 1024, 2048, 4096, 8192, 16384
_EAGER_MIDDLE = 4096  # measured at each level: mixed steps of some thousand tokens grow as prompts do
_FEW_TOKENS = 128  # the same: up to some hundred tokens, each one more reads fewer new experts
_MIXED_ROWS = 1, 8, 32, 64, 128, 256, 512
_MIXED_TOKENS = 32, 96, 160, 320, 640, 1024, 2048, 2304, 4096, 8192, 16384
_MIXED_CONTEXTS, _MIXED_START = (1024, 65536), 16384
_SHORT, _LONG = 1024, (16384, 131072)  # contexts of steps that are held out: at least, and between which
_LEAST_CHUNK = 16  # tokens of a prompt in a mixed step
_MOST_CHUNKS = 64
_APART = 1.5  # least ratio of neighbouring contexts: nearer points say nothing about growth
LEVELS = 4
HELD_OUT, HELD_OUT_UNLIKE = 20, 8
_SEVERAL = 0.75  # of the latter: share with more than one long context


class Levels(NamedTuple):
    """How dense the grid of each kind of step is: 0 is the coarsest, LEVELS - 1 the full grid."""

    decode: int = 0
    prompts: int = 0
    mixed: int = 0


class Limits(NamedTuple):
    """Of an engine, from its memory plan."""

    max_num_seqs: int
    step_tokens: int
    max_model_len: int
    page_size: int
    pages: tuple[int, ...]  # by group
    windows: tuple[int | None, ...]  # by group: tokens
    graphs: GraphSizes


class Shape(NamedTuple):
    """A step: `rows` sequences that decode after `context` tokens, and `chunks` prompts of `tokens` together."""

    rows: int = 0
    context: int = 0  # tokens, a multiple of the page size
    tokens: int = 0
    start: int = 0  # of each chunk: a multiple of the page size
    chunks: int = 0
    longest: int = 0  # context of some rows among shorter ones; 0: all are alike
    many: int = 1  # of these

    @property
    def kind(self) -> str:
        return ("mixed" if self.rows else "prompts") if self.chunks else "decode"

    def features(self, more: int = 0) -> StepFeatures:
        """After `more` steps, in each of which the rows read a token more."""
        contexts = [one + 1 + more for one in self.contexts()]
        pairs = sum(pairs_of(self.start, length) for length in self.lengths())
        return StepFeatures(self.rows, sum(contexts), self.tokens, pairs, self.chunks, self.rows + self.chunks)

    def contexts(self) -> list[int]:
        """Cached tokens of each row."""
        long = min(self.many, self.rows) if self.longest else 0
        return [self.longest] * long + [self.context] * (self.rows - long)

    def lengths(self) -> list[int]:
        """Tokens of each chunk."""
        if not self.chunks:
            return []
        each, more = divmod(self.tokens, self.chunks)
        return [each + (i < more) for i in range(self.chunks)]

    def fits(self, limits: Limits, steps: int) -> bool:
        """Whether the engine can run it so many times, with pages of its own for each sequence."""
        contexts, lengths = self.contexts(), self.lengths()
        ends = [context + steps for context in contexts] + [self.start + length for length in lengths]
        if max(ends) >= limits.max_model_len or not 0 < self.rows + self.chunks <= limits.max_num_seqs:
            return False
        if self.rows + self.tokens > limits.step_tokens or min(lengths, default=2) < 2:
            return False
        begins = contexts + [self.start] * self.chunks
        for available, window in zip(limits.pages, limits.windows, strict=True):
            spans = (page_span(begin, end, window, limits.page_size) for begin, end in zip(begins, ends, strict=True))
            if sum(len(span) for span in spans) > available:
                return False
        return True


def page_span(begin: int, end: int, window: int | None, page_size: int) -> range:
    """The pages of a sequence that are read or written while tokens begin .. end - 1 are computed."""
    first = 0 if window is None else max(0, begin - window + 1)
    return range(first // page_size, -(-end // page_size))


def grid(limits: Limits, levels: Levels, steps: int) -> list[Shape]:
    """All shapes of these levels that fit, small ones first."""
    shapes = {*_decodes(limits, levels.decode), *_prompts(limits, levels.prompts), *_mixed(limits, levels.mixed)}
    fitting = (shape for shape in shapes if shape.fits(limits, steps))
    return sorted(fitting, key=lambda one: (one.kind, one.rows + one.tokens, *one))


def held_out(limits: Limits, shapes: Sequence[Shape], steps: int, seed: int = 0) -> list[Shape]:
    """Random shapes between those of a grid; the last ones are decodes with unlike contexts."""
    draw, found = random.Random(seed), list[Shape]()
    known = [one for one in shapes if one.chunks < 2]
    for _ in range(50 * HELD_OUT if known else 0):
        one, other = draw.choice(known), draw.choice(known)
        if one.kind != other.kind or _is_eager(one, limits) != _is_eager(other, limits):
            continue
        shape = Shape(
            _between(draw, one.rows, other.rows),
            _pages(_between(draw, one.context, other.context), limits),
            _between(draw, one.tokens, other.tokens),
            _pages(_between(draw, one.start, other.start), limits),
            one.chunks,
        )
        if shape.fits(limits, steps) and _is_eager(shape, limits) == _is_eager(one, limits):
            found.append(shape)
        if len(found) == HELD_OUT:
            break
    return found + _held_unlike(limits, steps, draw)


def _held_unlike(limits: Limits, steps: int, draw: random.Random) -> list[Shape]:
    """Decodes with some long contexts among shorter ones. Tables know only the sum."""
    short, long = _pages(min(_SHORT, limits.max_model_len // 4), limits), _contexts(limits, _LONG)
    found = list[Shape]()
    for _ in range(50 * HELD_OUT_UNLIKE if long and limits.max_num_seqs > 1 else 0):
        rows, longest = _between(draw, 2, limits.max_num_seqs), _between(draw, long[0], long[-1])
        context = _pages(_between(draw, short, longest // 2), limits)
        many = _between(draw, 2, rows // 2) if rows > 3 and draw.random() < _SEVERAL else 1
        shape = Shape(rows, context, longest=_pages(longest, limits), many=many)
        if shape.context * _APART < shape.longest and shape.fits(limits, steps):
            found.append(shape)
        if len(found) == HELD_OUT_UNLIKE:
            break
    return found


def _between(draw: random.Random, one: int, other: int) -> int:
    """Evenly in logarithms."""
    low, high = sorted((one, other))
    ratio: float = ((high + 1) / (low + 1)) ** draw.random()
    return round((low + 1) * ratio) - 1


def _is_eager(shape: Shape, limits: Limits) -> bool:
    return limits.graphs.size_of(shape.features()) == EAGER


def _pages(tokens: int, limits: Limits) -> int:
    """Rounded to whole pages."""
    return max(1, round(tokens / limits.page_size)) * limits.page_size if tokens else 0


def _thinned(values: Sequence[Any], level: int) -> list[Any]:
    """Every one at the last level, every second one at the level before, and so on; the ends always."""
    step = 1 << max(LEVELS - 1 - level, 0)
    return sorted({*values[::step], *values[-1:]})


def _contexts(limits: Limits, values: Iterable[int]) -> list[int]:
    longest = limits.max_model_len - 2 * limits.page_size
    found = {_pages(min(value, longest), limits) for value in values} if longest > 0 else set()
    return sorted(one for one in found if one <= longest)


def _decodes(limits: Limits, level: int) -> Iterator[Shape]:
    graphs = [size for size in limits.graphs.decode if size <= limits.max_num_seqs]  # larger ones are for drafts
    sizes = _thinned(graphs or _powers(limits.max_num_seqs), level)
    contexts = _contexts(limits, CONTEXTS)
    for rows in sizes:
        room = (limits.pages[0] // rows - 1) * limits.page_size  # of a row, less a page to grow
        wanted = [one for one in _thinned(contexts, max(level, 1)) if _APART * one < room]
        for context in {*wanted, *(min(room, one) for one in contexts[-1:])}:
            if context > limits.page_size:
                yield Shape(rows, context)


def _prompts(limits: Limits, level: int) -> Iterator[Shape]:
    most = limits.step_tokens
    graphs = limits.graphs.prompts
    eager = [size for size in (graphs[-1] + 1 if graphs else 8, *_EAGER_TOKENS, most) if size > (graphs or (0,))[-1]]
    middle = [_EAGER_MIDDLE] if graphs and graphs[-1] < _EAGER_MIDDLE < most else []
    middle += [size for size in graphs if size >= _FEW_TOKENS][:1]
    sizes = {*_thinned(graphs, level), *_thinned(sorted({min(one, most) for one in eager}), level + 1), *middle}
    for tokens in sizes:
        for start in _starts(limits, tokens, _STARTS if level == LEVELS - 1 else _FEW_STARTS):
            yield Shape(tokens=tokens, start=start, chunks=1)
        if tokens >= 4 * _LEAST_CHUNK:  # short prompts
            yield Shape(tokens=tokens, chunks=min(_MOST_CHUNKS, tokens // _LEAST_CHUNK, limits.max_num_seqs))


def _starts(limits: Limits, tokens: int, values: Iterable[int]) -> list[int]:
    """Where a chunk of so many tokens may start; the end of the context is the last place."""
    latest = max(0, limits.max_model_len - tokens - limits.page_size) // limits.page_size * limits.page_size
    return sorted({min(_pages(value, limits), latest) for value in values})


def _mixed(limits: Limits, level: int) -> Iterator[Shape]:
    largest = limits.graphs.prompts[-1:]
    totals = sorted({min(one, limits.step_tokens) for one in _MIXED_TOKENS} | {*largest})
    ends = [*largest, *[one for one in totals if largest and one > largest[0]][:1]]  # where eager steps begin
    for total in sorted({*_thinned(totals, level), *ends}):
        all_rows = _thinned(sorted({min(one, limits.max_num_seqs - 1) for one in _MIXED_ROWS}), level)
        for rows in all_rows:
            if tokens := _prompt_tokens(limits, total, rows):
                is_deep = rows == all_rows[0] and total in (*largest, totals[-1])
                yield from _mixed_of(limits, rows, tokens, is_deep=is_deep)


def _mixed_of(limits: Limits, rows: int, tokens: int, *, is_deep: bool) -> Iterator[Shape]:
    """`is_deep`: also at the end of a long prompt. Others grow as prompts do."""
    room = ((limits.pages[0] - tokens // limits.page_size) // rows - 2) * limits.page_size  # of a row
    contexts = _contexts(limits, (min(one, room) for one in _MIXED_CONTEXTS if room > 0))
    for context in contexts:
        if context == contexts[0] or context > _APART * contexts[0]:
            yield Shape(rows, context, tokens, 0, 1)
    for start in _starts(limits, tokens, (_MIXED_START, *_STARTS[-1:] * is_deep)) if contexts else ():
        yield Shape(rows, contexts[0], tokens, start, 1)


def _prompt_tokens(limits: Limits, total: int, rows: int) -> int:
    """Of a mixed step, with which it fills up its graph; 0: too few."""
    size = limits.graphs.size_of(StepFeatures(rows, rows, total - rows, 1, 1, rows + 1)) if 0 < rows < total else 0
    tokens = (size or total) - rows
    return 0 if rows < 1 or tokens < min(_LEAST_CHUNK, total // 2) else tokens


def _powers(most: int) -> list[int]:
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]
