"""Step times of a model on the GPUs of one machine, for groups of any size.

A table is for one chip, one link and one or two GPUs. Other times are calculated from it:

    another chip     times of the most similar one: decode steps scaled by bandwidth, prompts by arithmetic
    another link     two messages per layer, which take latency + bytes / bandwidth of this link
    more GPUs        T(n) = f + w / n without messages, with f and w from one GPU and from the measured number
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from typing import Literal, NamedTuple

from oscine.extensions.timing.surface import Surface
from oscine.extensions.timing.table import Table
from oscine.timing.table import Header

Sharing = Literal["tensor", "experts"]  # what a group divides among its GPUs: all tensors, or only the experts
_ELEMENT_BYTES = 2  # bfloat16


class NotMeasuredError(LookupError):
    """No table covers this model, or this kind of group."""


@dataclass(frozen=True, slots=True)
class Chip:
    name: str  # as its driver calls it
    bytes_per_s: float  # of its memory, as in Header
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Link:
    """The link between any two GPUs of a machine, in one direction."""

    name: str
    latency_s: float  # of a message
    bytes_per_s: float


class Group(NamedTuple):
    """GPUs that run each step together: ranks of an engine, or engines that share experts."""

    sharing: Sharing = "tensor"
    num_gpus: int = 1


@dataclass(frozen=True, slots=True)
class _Surfaces:
    header: Header
    surface: Surface


@dataclass(frozen=True, slots=True)
class StepTimes:
    chip: Chip
    link: Link | None  # None: a single GPU, or no peer access
    measured: Chip  # the one whose times are scaled
    _groups: dict[Group, _Surfaces] = field(repr=False)

    @classmethod
    def of(cls, tables: Sequence[Table], model: str, chip: Chip, link: Link | None) -> "StepTimes":
        """From the tables of the most similar chip. Raises NotMeasuredError for a model without a table of one GPU."""
        own = [one for one in tables if one.header.model == model]
        single = [one.header for one in own if one.header.num_gpus == 1]
        if not single:
            raise NotMeasuredError(f"no step times of {model} were measured")
        nearest = min(single, key=lambda header: _distance(header, chip))
        groups = {_group_of(one.header): one for one in own if one.header.gpu == nearest.gpu}
        measured = Chip(nearest.gpu, nearest.bytes_per_s, nearest.flops_per_s)
        surfaces = {group: _Surfaces(one.header, Surface(one.points)) for group, one in groups.items()}
        return cls(chip, link, measured, surfaces)

    def decode_s(self, group: Group, rows: int, context: float) -> float:
        """Seconds of a decode step in which each engine of the group has `rows` sequences with this mean context."""
        found = {known: one.surface.decode_ms(rows, context) / 1e3 for known, one in self._groups.items()}
        return self._of_group(found, group, rows, self.measured.bytes_per_s / self.chip.bytes_per_s)

    def prompts_s(self, group: Group, tokens: int, prompt: int) -> float:
        """Seconds of a step in which each engine of the group computes `tokens` of prompts of this length."""
        pairs = tokens * (prompt + 1) / 2
        found = {known: one.surface.prompts_ms(tokens, pairs) / 1e3 for known, one in self._groups.items()}
        return self._of_group(found, group, tokens, self.measured.flops_per_s / self.chip.flops_per_s)

    def origin(self, group: Group) -> str:
        """Where the times of a group come from, in words."""
        figures = {self._groups[one].header.figures for one in (Group(), self._nearest(group))}
        known = self._nearest(group) == group
        how = "measured" if figures == {"measured"} and known else "calculated"
        source = f"step times {how}" + ("" if known else f" from those of {self._nearest(group).num_gpus} GPUs")
        return f"{source} {'on' if self.chip.name == self.measured.name else 'and scaled from'} {self.measured.name}"

    def _nearest(self, group: Group) -> Group:
        """The largest measured group of this kind, up to this size if there is one. Raises NotMeasuredError."""
        if group.num_gpus == 1:
            return Group()
        kind = [one for one in self._groups if one.sharing == group.sharing and one.num_gpus > 1]
        if not kind:
            raise NotMeasuredError(f"no step times of GPUs that share {group.sharing} were measured")
        return max(kind, key=lambda one: (one.num_gpus <= group.num_gpus, one.num_gpus))

    def _of_group(self, found: dict[Group, float], group: Group, rows: int, scale: float) -> float:
        alone, known = found[Group()], self._nearest(group)
        if group.num_gpus == 1:
            return alone * scale
        header = self._groups[known].header
        theirs = Link("", header.link_latency_s, header.link_bytes_per_s)
        of_known = max(found[known] - _messages_s(header, theirs, known, rows), 0.0)
        divided = (alone - of_known) / (1 - 1 / known.num_gpus)
        time = max(alone - divided + divided / group.num_gpus, of_known * known.num_gpus / group.num_gpus)
        return time * scale + _messages_s(header, self.link or theirs, group, rows)


def _group_of(header: Header) -> Group:
    if header.num_gpus == 1:
        return Group()
    return Group("tensor" if header.tensor_parallel_size > 1 else "experts", header.num_gpus)


def _distance(header: Header, chip: Chip) -> float:
    own = log(header.bytes_per_s / chip.bytes_per_s), log(header.flops_per_s / chip.flops_per_s)
    return 0.0 if header.gpu == chip.name else sum(map(abs, own))


def _messages_s(header: Header, link: Link, group: Group, rows: int) -> float:
    """Seconds of the messages of a step.

    Ranks all-reduce all rows twice per layer, in two shots. Engines that share experts send their rows to all others,
    and receive sums.
    """
    row = header.hidden * _ELEMENT_BYTES
    others = group.num_gpus - 1
    sent = 2 * rows * row * others / group.num_gpus if group.sharing == "tensor" else rows * row * others
    return 2 * header.layers * (link.latency_s + sent / link.bytes_per_s)
