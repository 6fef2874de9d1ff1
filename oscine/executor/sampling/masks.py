"""Grammars of running sequences: which tokens may come next, by llguidance.

GrammarCache holds compiled grammars for one vocabulary. Constraints holds one matcher per slot, and advances it by the
sampled tokens. A sequence that cannot follow its grammar gets an error and continues without it; the engine ends it.
llguidance is loaded only if there is a vocabulary.

Shape suffixes: K constrained rows, W words of 32 tokens. Bit t % 32 of word t // 32 says whether token t may come.
"""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from oscine.executor.batch.slots import ColumnArray, IntArray, Rows
from oscine.executor.sampling.vocabulary import Markers, read_vocabulary
from oscine.ops.packed import REJECTED
from oscine.system.grammar_sandbox.check import GrammarCheck, Problem, limits
from oscine.system.grammar_sandbox.pool import GrammarSandbox, TooManyGrammarsError, UndecidedError
from oscine.system.grammar_sandbox.pool import sandbox as shared_sandbox
from oscine.types import NewSequence

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

ANYTHING = "start: /(?s:.*)/"  # the grammar of any text

TOKENIZER = "tokenizer.json"
_MAX_COMPILED = 512  # cached grammars, some 20 to 200 KB each
_COMPILERS = 2  # threads: a slow grammar does not delay a fast one
_MAX_THREADS = 16  # that make masks
_T = TypeVar("_T")
_UNTRIED = (UndecidedError, TooManyGrammarsError, OSError)  # raised for a grammar without a result
# All sequences wait for the slowest mask. An ordinary token takes well under a millisecond of CPU time.
_STEP_S = 0.02  # CPU time allowed per token of a sequence
_MAX_DEBT_S = 0.3  # CPU time beyond that which a sequence may accumulate


class GrammarCache:
    """Compiled grammars by their text. Any thread may call.

    A thread that compiles cannot be stopped, so a grammar is tried in another process first.
    """

    def __init__(
        self,
        tokenizer_file: Path | None,
        vocab_size: int,
        sandbox: GrammarSandbox | None = None,
        *,
        at_once: bool = True,
    ) -> None:
        """Reads the vocabulary in the background: now if `at_once`, else when it is first needed.

        `vocab_size` is that of the logits. Without a file there is no vocabulary.
        """
        self.vocab_size = vocab_size
        self._sandbox = sandbox or shared_sandbox()
        self._threads = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="grammar")
        self._markers = Markers(-1, -1, -1, -1)  # before they are read in another thread
        self._vocabulary: Future[LLTokenizer] = Future()
        self._unread: list[Path] = []  # the file, until reading begins
        if tokenizer_file is None or not tokenizer_file.is_file():
            self._vocabulary.set_exception(ValueError(f"the model has no {TOKENIZER}"))
        else:
            self._unread.append(tokenizer_file)
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()
        if at_once:
            self._begin_to_read()

    @property
    def num_words(self) -> int:
        """Words of a mask."""
        return -(-int(self._awaited().vocab_size) // 32)

    @property
    def markers(self) -> Markers:
        self._awaited()
        return self._markers

    def ready(self, grammar: str) -> bool:
        """Whether `matcher` would return at once. If not, the grammar is compiled, or will be when others are done."""
        try:
            return self._future(grammar).done()
        except TooManyGrammarsError:
            return False

    def matcher(self, grammar: str) -> "LLMatcher":
        """At the start of the grammar. Raises ValueError for one that cannot be compiled, or without a vocabulary."""
        try:
            matcher = self._future(grammar).result()
        except _UNTRIED as error:  # a later attempt may have a result
            with self._lock:
                self._compiled.pop(grammar, None)
            raise ValueError(str(error) or "too many grammars wait to be compiled") from error
        if matcher.is_error():
            raise ValueError(_first_line(matcher))
        return matcher.deep_copy()

    def _future(self, grammar: str) -> Future["LLMatcher"]:
        with self._lock:
            if grammar not in self._compiled:
                self._make_room()
                self._compiled[grammar] = self._begin(grammar)
            self._compiled.move_to_end(grammar)
            return self._compiled[grammar]

    def _begin_to_read(self) -> None:
        """Once, whichever thread is the first."""
        if self._unread:
            with suppress(IndexError):
                file = self._unread.pop()
                self._threads.submit(_settle, self._vocabulary, lambda: self._read(file))

    def _awaited(self) -> "LLTokenizer":
        self._begin_to_read()
        return self._vocabulary.result()

    def _begin(self, grammar: str) -> Future["LLMatcher"]:
        """Tries it, then compiles it. No thread of the compilers waits for the check. Raises TooManyGrammarsError."""
        self._begin_to_read()
        compiled: Future[LLMatcher] = Future()
        if self._vocabulary.done() and (error := self._vocabulary.exception()):
            compiled.set_exception(error)  # nothing to try
            return compiled

        def compile_if_sound(judged: "Future[Problem | None]") -> None:
            self._threads.submit(_settle, compiled, lambda: self._compile(grammar, judged.result()))

        self._sandbox.check([GrammarCheck(grammar)], "engine").add_done_callback(compile_if_sound)
        return compiled

    def _make_room(self) -> None:
        """Forgets the least recently used grammars, except those that are still awaited."""
        while len(self._compiled) >= _MAX_COMPILED:
            oldest = next((grammar for grammar, compiled in self._compiled.items() if compiled.done()), None)
            if oldest is None:
                return
            del self._compiled[oldest]

    def _compile(self, grammar: str, problem: Problem | None) -> "LLMatcher":
        vocabulary = self._vocabulary.result()
        if problem is not None:
            raise ValueError(problem.message.partition("\n")[0])
        from llguidance import LLMatcher

        return LLMatcher(vocabulary, grammar, log_level=0, limits=limits())

    def _read(self, file: Path) -> "LLTokenizer":
        vocabulary, self._markers = read_vocabulary(file, self.vocab_size)
        self._sandbox.start()
        return vocabulary


def _settle(future: "Future[_T]", work: Callable[[], _T]) -> None:
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)


@dataclass(slots=True)
class _Live:
    """The grammar of one sequence, at the last token known here."""

    matcher: "LLMatcher"
    stop_token_ids: tuple[int, ...]  # not sampled before min_end, unless no other token is allowed
    min_end: int  # position
    debt_s: float = 0.0  # CPU time of its tokens beyond _STEP_S per token
    forced: list[int] = field(default_factory=list)  # tokens that come next, found by an earlier call
    sampled: Callable[[], list[int]] | None = None  # the tokens that were sampled since, once they are known


class Constraints:
    """The grammars of the sequences that run. One thread calls everything."""

    def __init__(self, grammars: GrammarCache) -> None:
        self.grammars = grammars
        self._live: dict[int, _Live] = {}  # by slot; until the grammar has come to its end
        self._errors: dict[int, str] = {}  # by slot
        self._some_are_slow = False  # whether the last step had a slow sequence

    def assign(self, new: NewSequence) -> None:
        """A sequence takes a slot, with or without a grammar, and perhaps with tokens that it has generated."""
        slot, sampling = new.slot, new.sampling
        self._live.pop(slot, None)
        self._errors.pop(slot, None)
        if sampling.grammar is None:
            return
        try:
            matcher = self.grammars.matcher(sampling.grammar)
        except ValueError as error:
            self._errors[slot] = f"the grammar cannot be compiled: {error}"
            return
        min_end = new.num_prompt_tokens + sampling.min_tokens
        self._live[slot] = _Live(matcher, sampling.stop_token_ids, min_end)
        self._consume(slot, new.token_ids[new.num_prompt_tokens :])

    def errors(self, slots: Iterable[int]) -> dict[int, str]:
        """Why sequences of these slots cannot go on."""
        return {slot: self._errors[slot] for slot in slots if slot in self._errors} if self._errors else {}

    def any(self, slots_N: IntArray) -> bool:
        """Whether any of these slots may be constrained."""
        return bool(self._live) and not self._live.keys().isdisjoint(slots_N.tolist())

    def sampled(self, slots_N: IntArray, token_ids: Callable[[], IntArray]) -> None:
        """A step samples a token in each of these rows; `token_ids` waits for them, and is called when it must be.

        Rows of a sequence follow one another. The id of a row that is not accepted is REJECTED.
        """
        if not self._live:
            return
        slots = slots_N.tolist()
        for start, slot in enumerate(slots):
            live = self._live.get(slot)
            if live is None or (start and slots[start - 1] == slot):
                continue
            end = next((row for row in range(start + 1, len(slots)) if slots[row] != slot), len(slots))
            live.sampled = lambda start=start, end=end: token_ids()[start:end].tolist()

    def advance(self, slots_N: IntArray) -> list[int]:
        """Waits for what these slots sampled last. Returns the rows whose next token is constrained."""
        if not self._live:
            return []
        slots = slots_N.tolist()
        self._catch_up(slots)
        return [row for row, slot in enumerate(slots) if slot in self._live]

    def forced(self, slots: Sequence[int], most: Sequence[int]) -> list[list[int]]:
        """The forced next tokens of each slot: those without an alternative, up to `most` per slot.

        Waits for what these slots sampled last.
        """
        if not self._live:
            return [[] for _ in slots]
        self._catch_up(slots)
        return [self._forced(slot)[:count] for slot, count in zip(slots, most, strict=True)]

    def _catch_up(self, slots: Iterable[int]) -> None:
        """Takes in what these slots sampled last."""
        for slot in slots:
            live = self._live.get(slot)
            if live is not None and live.sampled is not None:
                token_ids, live.sampled = [id for id in live.sampled() if id != REJECTED], None
                if token_ids[-1] < 0:  # no token could be sampled; the sequence ends
                    del self._live[slot]
                else:
                    self._consume(slot, token_ids)

    def _forced(self, slot: int) -> list[int]:
        """The forced next tokens of a slot. They are kept, so a long run is computed once and not per token.

        A vocabulary may have tokens that the model lacks.
        """
        live = self._live.get(slot)
        if live is None:
            return []
        if not live.forced:
            began_s = time.thread_time()
            forced, vocab_size = live.matcher.compute_ff_tokens(), self.grammars.vocab_size
            live.forced = [*takewhile(vocab_size.__gt__, forced)]
            live.debt_s += time.thread_time() - began_s
        return live.forced

    def fill(self, rows: Rows, rows_K: list[int], masks_KW: ColumnArray) -> None:
        """Fills the masks of the rows that `advance` returned."""
        firsts = [k for k, row in enumerate(rows_K) if rows.places_N[row] == 0]
        ends = [*firsts[1:], len(rows_K)]
        alone = [k for k, end in zip(firsts, ends, strict=True) if end == k + 1]
        self._fill_alone([int(rows.slots_N[rows_K[k]]) for k in alone], alone, masks_KW)
        for k, end in zip(firsts, ends, strict=True):
            if end > k + 1:
                self._fill_drafts(int(rows.slots_N[rows_K[k]]), rows.drafts()[rows_K[k + 1 : end]], masks_KW[k:end])
        positions = rows.positions()[rows_K].tolist()
        for k, row in enumerate(rows_K):
            slot = int(rows.slots_N[row])
            if rows.places_N[row] == 0:
                live = self._live[slot]
                self._worker(slot)
            if slot in self._errors:
                masks_KW[k] = -1
            elif positions[k] < live.min_end:
                _forbid(masks_KW[k], live.stop_token_ids)

    def _fill_alone(self, slots: list[int], masks: list[int], masks_KW: ColumnArray) -> None:
        """The masks of sequences without drafts."""
        from llguidance.numpy import fill_next_token_bitmask_par

        if len(slots) <= 1 or self._some_are_slow:
            self._fill_measured(slots, masks, masks_KW)
            return
        began_s = time.perf_counter()
        matchers = [self._live[slot].matcher for slot in slots]
        fill_next_token_bitmask_par(self._executor, [*zip(matchers, masks, strict=True)], masks_KW)
        self._some_are_slow = time.perf_counter() - began_s > _STEP_S

    def _fill_measured(self, slots: list[int], masks: list[int], masks_KW: ColumnArray) -> None:
        """Makes each mask by itself, to measure which sequences take long."""
        from llguidance.numpy import fill_next_token_bitmask

        def fill(slot: int, mask: int) -> float:
            began_s = time.thread_time()
            fill_next_token_bitmask(self._live[slot].matcher, masks_KW, mask)
            return time.thread_time() - began_s

        if len(slots) <= 1:
            times_s = [*map(fill, slots, masks)]
        else:
            with ThreadPoolExecutor(min(_most_threads(), len(slots))) as threads:
                times_s = [*threads.map(fill, slots, masks)]
        for slot, time_s in zip(slots, times_s, strict=True):
            self._live[slot].debt_s += time_s
        self._some_are_slow = max(times_s, default=0.0) > _STEP_S

    def _fill_drafts(self, slot: int, drafts: IntArray, masks_KW: ColumnArray) -> None:
        """The masks before and after each draft; anything is allowed after one that is not, or after the end."""
        from llguidance.numpy import fill_next_token_bitmask

        live, began_s, num_consumed = self._live[slot], time.thread_time(), 0
        masks_KW[:] = -1
        for row, draft in enumerate([*drafts.tolist(), None]):
            fill_next_token_bitmask(live.matcher, masks_KW, row)
            if draft is None or not live.matcher.try_consume_tokens([draft]):
                break
            num_consumed += 1
            if live.matcher.is_stopped():
                break
        live.matcher.rollback(num_consumed)
        live.debt_s += time.thread_time() - began_s

    def _consume(self, slot: int, token_ids: list[int]) -> None:
        live = self._live[slot]
        began_s = time.thread_time()
        del live.forced[: len(token_ids)]
        num_consumed = live.matcher.try_consume_tokens(token_ids)
        if not live.matcher.is_stopped():
            live.matcher.consume_tokens(token_ids[num_consumed:])  # says what is wrong with the rest
        time_s = time.thread_time() - began_s
        live.debt_s = max(0.0, live.debt_s + time_s - len(token_ids) * _STEP_S)
        self._worker(slot)

    def _worker(self, slot: int) -> None:
        """Drops a matcher that has ended, has failed, or takes so long that it delays all others."""
        live = self._live[slot]
        if live.matcher.is_error():
            self._errors[slot] = f"the grammar cannot be followed: {_first_line(live.matcher)}"
        elif live.debt_s > _MAX_DEBT_S:
            self._errors[slot] = "the grammar cannot be followed: its tokens take too long to check"
        if slot in self._errors or live.matcher.is_stopped():
            del self._live[slot]

    @cached_property
    def _executor(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor(_most_threads())


def mask_of(token_ids: IntArray, num_words: int) -> NDArray[np.int32]:
    """The mask that allows these tokens, with all of its words."""
    bits = np.zeros(32 * num_words, np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _most_threads() -> int:
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def _forbid(mask_W: ColumnArray, token_ids: Iterable[int]) -> None:
    """Removes tokens from a mask, unless it has no others."""
    left_W = mask_W.view(np.uint32).copy()
    for token in token_ids:
        if token < 32 * len(left_W):
            left_W[token // 32] &= ~np.uint32(1 << token % 32)
    if left_W.any():
        mask_W[:] = left_W.view(np.int32)


def _first_line(matcher: "LLMatcher") -> str:
    return matcher.get_error().partition("\n")[0]
