"""Step times between measured points.

    decode    at each number of rows, a curve over the mean context of a row
    verify    the same for each number of drafts per sequence
    prompts   at each number of tokens, a curve over their depth
    mixed     at each number of rows and of all tokens, over the mean context and the depth

The depth of a prompt's chunk is where it starts. Chunks that are shorter than one of all tokens have a negative depth,
down to -1 for prompts of one token.

Times are exact at the points. Between sizes decodes and prompts of few tokens are linear in logarithms, longer prompts
in their tokens; between contexts all are linear. What contexts take beyond the first one of a size grows with their
sum, so between numbers of rows it is linear. Mixed steps are measured at fewer sizes and depths than prompts. Between
and outside these sizes, and beyond these depths, they grow as prompts do; beyond their contexts they grow as decodes
do. They have no points with drafts: these are rows, and beyond the most rows they add tokens and what these read. Steps
that run as CUDA graphs are never mixed with eager ones. A padding row of a graph counts as a part of a row: it is
computed, but reads no expert of its own. The part grows with the rows, since many rows read all experts anyway. Steps
of decodes or of prompts alone that are below the smallest size take its time.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, get_args

from oscine.timing.answer import NO_END, Cell, Class, NotMeasuredError, blend, worst
from oscine.timing.curve import Between, Curve, Segment, between
from oscine.timing.features import StepFeatures
from oscine.timing.kinds import EAGER, NO_GRAPHS, GraphSizes
from oscine.timing.table import Kind, StepPoint

_MS = 1e-3
# Beside n rows, a padding row counts as MOST * n^2 / (n^2 + HALF^2) of a row: fitted, see docs/log.md.
_FILLER_MOST, _FILLER_HALF = 0.85, 32

# Tokens of a step up to which more of them read more experts: so many times are linear in logarithms.
_FEW = 48, 64, 96, 128, 192, 256, 384, 512


class MeasuredSurface:
    """Of one table. Points that are held out are not used."""

    def __init__(self, points: Iterable[StepPoint], graphs: GraphSizes = NO_GRAPHS) -> None:
        used = [one for one in points if not one.held_out]
        self._graphs = graphs
        of_kind = {kind: [one for one in used if one.kind == kind] for kind in get_args(Kind)}
        self._decodes = {0: _Rows(of_kind["decode"])}
        for drafts in sorted({_drafts_of(one) for one in of_kind["verify"]}):
            own = [one for one in of_kind["verify"] if _drafts_of(one) == drafts]
            self._decodes[drafts] = _Rows([*self._with_contexts(own)])
        self._prompts = {eager: _Prompts(_of(of_kind["prompts"], eager)) for eager in (False, True)}
        self._mixed = {
            eager: _Mixed(_of(of_kind["mixed"], eager), self._parts, self._prompts[eager]) for eager in (False, True)
        }

    def cell(self, step: StepFeatures, *, scaled: bool = False) -> Cell:
        size = self._graphs.size_of(step)
        count = _count(step.tokens, size)
        if not step.prompt_sequences:
            cell = self._decode(step, count)
        else:
            surface = self._mixed if step.decode_rows else self._prompts
            cell = surface[size == EAGER].cell(step, count)
        if cell.factor > 1.0:
            if not scaled:
                raise NotMeasuredError(f"a step of this kind is {cell.factor:.2f} times what was measured: {step}")
            cell = cell._replace(figures=worst("scaled", cell.figures))
        return cell

    def _decode(self, step: StepFeatures, count: float) -> Cell:
        """Between the numbers of drafts per sequence that were measured, of as many sequences."""
        sequences = step.decode_rows - step.drafts
        each = step.drafts / sequences
        known = sorted(self._decodes)
        high = next((drafts for drafts in known if drafts >= each), None)
        if high is None:
            cell = self._decodes[known[-1]].cell(step, count)
            return cell._replace(factor=max(cell.factor, (1 + each) / (1 + known[-1])))
        if high == each:
            return self._decodes[high].cell(step, count)
        low = max(drafts for drafts in known if drafts < each)
        first, second = (self._decodes[drafts].cell(step, self._rows(sequences, drafts)) for drafts in (low, high))
        return blend(first, second, (each - low) / (high - low))

    def _rows(self, sequences: int, drafts: int) -> float:
        """Of a step of so many sequences and drafts of each, with what fills up its graph."""
        rows = sequences * (1 + drafts)
        return _count(rows, self._graphs.size_of(StepFeatures(rows, sampled=sequences, drafts=rows - sequences)))

    def _with_contexts(self, points: Sequence[StepPoint]) -> Iterator[StepPoint]:
        """Where only one context was measured: points at those of decode steps too, as rows read what those read."""
        yield from points
        contexts: dict[int, set[int]] = {}
        for one in points:
            contexts.setdefault(one.rows, set()).add(one.context)
        for one in points:
            if len(contexts[one.rows]) == 1 and self._decodes[0]:
                for context, more_ms in self._decodes[0].growth(one.rows, one.context):
                    yield replace(one, context=context, ms=one.ms + more_ms)

    def _parts(self, point: StepPoint) -> "_Parts":
        prompts = self._prompts[point.size == EAGER] or self._prompts[True]
        decodes = self._decodes[0]
        if not decodes:
            return _Parts(prompts)
        return _Parts(prompts, decodes.slope(point.rows), decodes.last(point.rows))


class _Parts(NamedTuple):
    """What steps of decodes alone, and of prompts alone, tell of a mixed step."""

    prompts: "_Prompts"
    per_context: float = 0.0  # milliseconds per token of mean context
    context: float = 0.0  # largest mean context of the decode points


def _count(tokens: int, size: int) -> float:
    """Tokens of a step, with what fills up its graph."""
    if size == EAGER:
        return tokens
    return tokens + _FILLER_MOST * tokens**2 / (tokens**2 + _FILLER_HALF**2) * (size - tokens)


def _of(points: Iterable[StepPoint], eager: bool) -> list[StepPoint]:
    return [one for one in points if (one.size == EAGER) == eager]


def _drafts_of(point: StepPoint) -> int:
    return point.drafts // (point.rows - point.drafts)


class _Sizes:
    """Curves at sizes in ascending order."""

    def __init__(self, curves: dict[float, Curve]) -> None:
        self.sizes = sorted(curves)
        self.curves = [curves[size] for size in self.sizes]
        # Slope per row (or token) and per x, where a curve has one point only: that of the largest size.
        known = [(size, curve.last_slope) for size, curve in curves.items() if curve.last_slope is not None]
        size, slope = max(known, default=(1, 0.0))
        self._per_size = (slope or 0.0) / size

    def __bool__(self) -> bool:
        return bool(self.sizes)

    def at(self, value: float, x: float) -> tuple[Segment, float, bool]:
        """Over x, the factor beyond the last size, and whether it is exact. Raises NotMeasuredError without curves."""
        if not self.sizes:
            raise NotMeasuredError("no steps of this kind were measured")
        place = between(self.sizes, value)
        curves = [self.curves[i] for i in (place.low, place.high)]
        sizes = [self.sizes[i] for i in (place.low, place.high)]
        low, high = (curve.at(x, self._per_size * size) for curve, size in zip(curves, sizes, strict=True))
        is_exact = low.is_point and high.is_point and self.sizes[place.high] == value
        weight, share = self._weight(place, value), _share(sizes[0], sizes[1], value)
        found = _grown((low, curves[0].ys[0]), (high, curves[1].ys[0]), weight, share)
        return found, place.factor, is_exact

    def _weight(self, place: Between, value: float) -> float:
        """Of the second of two sizes."""
        first, second = (self.curves[i].ys[0] for i in (place.low, place.high))
        return _log_weight(first, second, place.share)

    def last(self, value: float) -> float:
        """The last x that was measured around this size."""
        place = between(self.sizes, value)
        return min(self.curves[place.low].xs[-1], self.curves[place.high].xs[-1])

    def slope(self, value: float) -> float:
        place = between(self.sizes, value)
        found = self.curves[place.high].last_slope
        return self._per_size * value if found is None else found


def _blend(low: Segment, high: Segment, weight: float) -> Segment:
    base, slope = (a + (b - a) * weight for a, b in zip(low[:2], high[:2], strict=True))
    return Segment(base, slope, min(low.end, high.end), beyond=low.beyond or high.beyond)


def _grown(low: tuple[Segment, float], high: tuple[Segment, float], weight: float, share: float) -> Segment:
    """Between two sizes, each with its milliseconds at the first context.

    `weight`: of the larger size, at the first context. What longer contexts take more grows with their sum: `share` is
    its weight there, linear in the sizes.
    """
    starts = low[1], high[1]
    less, more = (one._replace(base=one.base - start) for one, start in (low, high))
    found = _blend(less, more, share)
    return found._replace(base=starts[0] + (starts[1] - starts[0]) * weight + found.base)


def _share(low: float, high: float, value: float) -> float:
    return (value - low) / (high - low) if low < value < high else 0.0


def _log_weight(first: float, second: float, share: float) -> float:
    """The weight of the second value in a sum that is linear in logarithms: first^(1 - share) * second^share."""
    if share in (0.0, 1.0) or first == second:
        return share
    ratio = second / first
    return float((ratio**share - 1) / (ratio - 1))


class _Rows(_Sizes):
    """Decode steps: rows, then mean context."""

    def __init__(self, points: Sequence[StepPoint]) -> None:
        of_size = _by_count(points)
        super().__init__({size: Curve((p.context, p.ms) for p in own) for size, own in of_size.items()})

    def growth(self, rows: int, context: int) -> Iterator[tuple[int, float]]:
        """Larger contexts of the next larger size, and the milliseconds that they take more than this one."""
        curve = self.curves[between(self.sizes, rows).high]
        start = curve.at(context)
        for x, y in zip(curve.xs, curve.ys, strict=True):
            if x > context:
                yield int(x), y - start.base - start.slope * context

    def last(self, value: float) -> float:
        """Few rows have longer contexts than many: between them it is linear in logarithms."""
        place = between(self.sizes, value)
        low, high = (self.curves[i].xs[-1] for i in (place.low, place.high))
        return float(low * (high / low) ** place.share)

    def cell(self, step: StepFeatures, count: float) -> Cell:
        """`count`: of rows, with what fills up a graph."""
        mean = step.decode_context / step.decode_rows
        segment, factor, is_exact = self.at(count, mean)
        further = max(1.0, mean / self.last(count)) if segment.beyond else 1.0
        return _cell(segment, step.decode_rows, factor, further, is_exact)


class _Prompts(_Sizes):
    """Steps of prompts: tokens, then depth."""

    def __init__(self, points: Sequence[StepPoint]) -> None:
        of_size = _by_count(points)
        super().__init__({n: Curve((_depth(p.pairs, p.tokens), p.ms) for p in own) for n, own in of_size.items()})
        few = (n for n in _FEW if self.sizes and self.sizes[0] < n < self.sizes[-1])
        self._growth = Curve((n, self.at(n, 0.0)[0].base) for n in (*self.sizes, *few))

    def _weight(self, place: Between, value: float) -> float:
        if self.sizes[place.high] <= _FEW[-1]:
            return super()._weight(place, value)
        return _share(self.sizes[place.low], self.sizes[place.high], value)

    def cell(self, step: StepFeatures, tokens: float) -> Cell:
        """`tokens`: with what fills up a graph, as of mixed steps."""
        depth = _depth(step.prompt_pairs, step.prompt_tokens)
        segment, factor, is_exact = self.at(tokens, depth)
        scale = factor  # beyond the largest step, as many tokens per second as it has
        if segment.beyond:
            factor *= _deeper(depth, self.last(tokens), step.prompt_tokens)
        seconds = (segment.base + segment.slope * depth) * scale * _MS
        return Cell(seconds, figures="measured" if is_exact else "interpolated", factor=factor)

    def deep_ms(self, tokens: int, depth: float) -> float:
        """Milliseconds of so many tokens at this depth."""
        segment, factor, _ = self.at(tokens, depth)
        return (segment.base + segment.slope * depth) * factor

    def whole_ms(self, tokens: float) -> float:
        """Milliseconds of one prompt of so many tokens, without a context; never less for more tokens."""
        return self._growth.value(tokens)

    @property
    def grows(self) -> bool:
        """Whether it tells how times grow."""
        return len(self.sizes) > 1


def _by_count(points: Iterable[StepPoint]) -> dict[float, list[StepPoint]]:
    """By their tokens, with what fills up a graph."""
    found: dict[float, list[StepPoint]] = {}
    for one in points:
        found.setdefault(_count(one.rows + one.tokens, one.size), []).append(one)
    return found


def _depth(pairs: int, tokens: int) -> float:
    """The start of a chunk of so many tokens with so many pairs; negative for several short ones."""
    whole = (tokens + 1) / 2
    depth = pairs / tokens - whole
    return depth if depth >= 0 else depth / whole


def _deeper(depth: float, most: float, tokens: int) -> float:
    """The factor of pairs beyond a depth."""
    whole = (tokens + 1) / 2
    return max(1.0, (max(depth, 0.0) + whole) / (max(most, 0.0) + whole))


def _cell(segment: Segment, rows: int, scale: float, further: float, is_exact: bool) -> Cell:
    """A segment over the mean context, as seconds over the sum of contexts.

    `scale`: of the time, for sizes beyond the measured ones. `further`: context / largest measured context; it changes
    the factor, not the time.
    """
    end = NO_END if segment.end == float("inf") else int(segment.end * rows)
    figures: Class = "measured" if is_exact else "interpolated"
    return Cell(segment.base * scale * _MS, segment.slope / rows * scale * _MS, end, figures, scale * further)


class _Node:
    """Mixed steps of one number of rows and of tokens: at each depth, a curve over the mean context."""

    def __init__(self, points: Sequence[StepPoint], tokens: int, parts: _Parts) -> None:
        """`parts`: for contexts beyond those of mixed steps, and where only one context or depth was measured."""
        self._tokens, self._parts = tokens, parts
        depths = {one: _depth(one.pairs, tokens) for one in points}
        self._depths = sorted(set(depths.values()))
        self._curves = [Curve((p.context, p.ms) for p in points if depths[p] == depth) for depth in self._depths]
        self._context = max(curve.xs[-1] for curve in self._curves)  # largest one of mixed steps

        self._deepest = max(self._depths[-1], parts.prompts.last(tokens) if parts.prompts else -1.0)

    def at(self, context: float, depth: float) -> "_Found":
        deeper = _deeper(depth, self._deepest, self._tokens)
        is_composed = context > self._context or depth > self._depths[-1]
        segment = self._at_depth([curve.at(context, self._slope) for curve in self._curves], depth)
        first = self._at_depth([Segment(curve.ys[0], 0.0, float("inf")) for curve in self._curves], depth)
        most = max(self._context, self._parts.context)
        return _Found(segment, first.base, self._curves[0].ys[0], most, deeper, is_composed)

    def _at_depth(self, segments: list[Segment], depth: float) -> Segment:
        """`segments`: at each of the depths."""
        last = self._depths[-1]
        if depth > last and (self._deepest > last or len(segments) == 1):
            more_ms = self._deeper_ms(depth) - self._deeper_ms(last)
            return segments[-1]._replace(base=segments[-1].base + more_ms)
        if len(segments) == 1:
            return segments[0]
        high = max(1, min(bisect_left(self._depths, depth), len(segments) - 1))
        share = (depth - self._depths[high - 1]) / (self._depths[high] - self._depths[high - 1])
        return _blend(segments[high - 1], segments[high], max(share, 0.0))

    def _deeper_ms(self, depth: float) -> float:
        return self._parts.prompts.deep_ms(self._tokens, depth) if self._parts.prompts else 0.0

    @property
    def _slope(self) -> float:
        """Per mean context, of a curve of a single point: that of a longer curve, if there is one."""
        known = [slope for curve in self._curves if (slope := curve.last_slope) is not None]
        return known[0] if known else self._parts.per_context


class _Mixed:
    """Mixed steps: all tokens, then decode rows, then a node."""

    def __init__(self, points: Sequence[StepPoint], parts: Callable[[StepPoint], _Parts], prompts: _Prompts) -> None:
        self._prompts = prompts
        self._most = max((one.rows for one in points), default=0)
        self._columns: dict[float, dict[int, _Node]] = {}
        for size, found in _by_count(points).items():
            of_rows = {rows: [one for one in found if one.rows == rows] for rows in sorted({one.rows for one in found})}
            self._columns[size] = {rows: _Node(own, own[0].tokens, parts(own[0])) for rows, own in of_rows.items()}
        self._sizes = sorted(self._columns)
        self._prompts_ms = [prompts.whole_ms(size) for size in self._sizes] if prompts.grows else []

    def cell(self, step: StepFeatures, tokens: float) -> Cell:
        if not self._sizes:
            raise NotMeasuredError("no mixed steps of this kind were measured")
        place = between(self._sizes, tokens)
        context = step.decode_context / step.decode_rows
        depth = _depth(step.prompt_pairs, step.prompt_tokens)
        low, high = (self._column(self._sizes[i], step.decode_rows, context, depth) for i in (place.low, place.high))
        segment = _blend(low.segment, high.segment, self._weight(place, tokens, low.ms, high.ms))
        scale = beyond = place.factor
        is_composed = low.is_composed or high.is_composed
        if place.low == place.high and tokens != self._sizes[place.low] and self._prompts_ms:  # outside of all sizes
            now_ms, then_ms = self._prompts.whole_ms(tokens), self._prompts_ms[place.low]
            if now_ms < then_ms:
                segment = segment._replace(base=segment.base * now_ms / then_ms)
            else:
                segment = segment._replace(base=segment.base + now_ms - then_ms)
            scale, is_composed = 1.0, True
            beyond = max(1.0, tokens / max(self._sizes[-1], self._prompts.sizes[-1]))
        more_rows = max(1.0, (step.decode_rows - step.drafts) / self._most)
        is_composed = is_composed or step.decode_rows > self._most
        cell = _cell(segment, step.decode_rows, scale * more_rows, 1.0, is_exact=False)
        figures: Class = "composed" if is_composed else cell.figures
        further = context / min(low.most, high.most)
        return cell._replace(figures=figures, factor=max(beyond * more_rows, further, low.deeper, high.deeper))

    def _weight(self, place: Between, tokens: float, first: float, second: float) -> float:
        """Of the larger size: where the time of prompts of so many tokens lies between those of the two sizes."""
        if place.low != place.high and self._prompts_ms:
            low, high = self._prompts_ms[place.low], self._prompts_ms[place.high]
            if low < high:
                return (self._prompts.whole_ms(tokens) - low) / (high - low)
        return _log_weight(first, second, place.share)

    def _column(self, size: float, rows: int, context: float, depth: float) -> "_Found":
        nodes = self._columns[size]
        known = list(nodes)
        place = between(known, rows)
        first, second = (nodes[known[i]].at(context, depth) for i in (place.low, place.high))
        weight = _log_weight(first.ms, second.ms, place.share)
        share = _share(known[place.low], known[place.high], rows)
        segment = _grown((first.segment, first.first), (second.segment, second.first), weight, share)
        segment = segment._replace(slope=segment.slope * place.factor)  # of rows beyond those of this size
        return _Found(
            segment,
            first.first + (second.first - first.first) * weight,
            first.ms + (second.ms - first.ms) * weight,
            first.most * (second.most / first.most) ** place.share,
            max(first.deeper, second.deeper),
            first.is_composed or second.is_composed,
        )


class _Found(NamedTuple):
    """Mixed steps of one number of tokens, or of one number of rows too."""

    segment: Segment  # over the mean context
    first: float  # milliseconds at the first context
    ms: float  # to compare with others by
    most: float  # largest mean context that is known
    deeper: float  # by how much the prompt is deeper than what is known
    is_composed: bool  # with times of decodes
