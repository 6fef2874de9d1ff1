"""Headers follow their grammar and texts are free: the tokens equal a full recomputation in plain Python."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from oscine.engine.core.loop import EngineLoop
from oscine.executor.batch.slots import Rows
from oscine.executor.sampling.headers import Headers
from oscine.executor.sampling.masks import GrammarCache
from oscine.ops.sample.noise import gumbel
from oscine.types import GenerationRequest, NewSequence, SamplingParams
from tests.tiny import TINY

from .grammars import END as END_OF_TEXT
from .grammars import TOKENS, tokenizer_file
from .tiny import executor, loop, model, next_logits, options, prompt, recompute, request, run

START, END, CHANNEL, MESSAGE = range(END_OF_TEXT - 4, END_OF_TEXT)
SPECIALS = {"<|start|>": START, "<|end|>": END, "<|channel|>": CHANNEL, "<|message|>": MESSAGE}
RULE = """%llguidance {"no_forcing": true}
start: (<|end|>? <|start|> "ab" | <|channel|>) ("ca" | "bb") <|message|>"""
ROLE = [START, TOKENS.index("ab")]
TEXTS = {START: ("abca", "abbb"), CHANNEL: ("ca", "bb")}
WORDS = [(i, token) for i, token in enumerate(TOKENS) if i not in SPECIALS.values()]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> GrammarCache:
    return GrammarCache(tokenizer_file(tmp_path_factory.mktemp("tokenizer"), SPECIALS), TINY.vocab_size)


def follows(header: list[int]) -> set[int]:
    """The tokens that are allowed next in a header."""
    if header == [END]:
        return {START}
    begin, said = (header[1:] if header[0] == END else header), ""
    said = "".join(TOKENS[i] for i in begin[1:])
    texts = TEXTS[begin[0]]
    found = {i for i, token in WORDS if any(text.startswith(said + token) for text in texts)}
    return found | ({MESSAGE} if said in texts else set())


class Reader:
    """One sequence, read token by token."""

    def __init__(self, tokens: list[int]) -> None:
        self.header: list[int] | None = None
        self.ruled_from = self.position = 0
        last = [*reversed(tokens)].index(START) if START in tokens else -1
        for i, token in enumerate(tokens):
            self.position = i
            if i >= len(tokens) - 1 - last and last >= 0:
                self.read(token)
        self.position = len(tokens)

    def read(self, token: int) -> None:
        if token == MESSAGE:
            self.header = None
        elif self.header is not None and token in follows(self.header):
            self.header.append(token)
        elif token in (START, END, CHANNEL):
            if self.header is None:
                self.ruled_from = self.position + 2
            self.header = [token]
        self.position += 1

    def allowed(self) -> set[int] | None:
        return None if self.header is None or self.position < self.ruled_from else follows(self.header)


def expected(one: GenerationRequest) -> list[int]:
    tokens, count = [*one.prompt_token_ids], len(one.prompt_token_ids)
    reader = Reader(tokens)
    while len(tokens) < count + one.sampling.max_tokens:
        logits = next_logits(tuple(tokens)).clone()
        for token, bias in one.sampling.logit_bias.items():
            logits[token] += bias
        if one.sampling.temperature:
            logits += gumbel(torch.tensor([one.sampling.seed]), torch.tensor([len(tokens)]), len(logits))[0]
        allowed = reader.allowed()
        ids = range(len(logits)) if allowed is None else allowed
        tokens.append(max(ids, key=lambda token: float(logits[token])))
        reader.read(tokens[-1])
    return tokens[count:]


def engine(grammars: GrammarCache, pages: int, overlap: bool, chunk: int) -> EngineLoop:
    asked = options(overlap=overlap, max_num_batched_tokens=chunk)
    runner = executor(model(), asked, pages, pages, grammars)
    return loop(runner, asked, runner.memory)


def workload() -> list[GenerationRequest]:
    """Cases: greedy and with noise, many and few headers, starting in a header, in a text, and without a rule."""
    often = {START: 3.0, END: 5.0, CHANNEL: 4.0}
    kinds: list[tuple[list[int], dict[str, object]]] = [
        (ROLE, {}),
        (ROLE, {"temperature": 1.0, "seed": 1}),
        (ROLE, {"temperature": 1.0, "seed": 2, "logit_bias": often}),
        ([*ROLE, CHANNEL], {"temperature": 1.0, "seed": 3, "logit_bias": often, "logprobs": 1}),
        ([*ROLE, TOKENS.index("ca"), MESSAGE, 5, 7], {"temperature": 1.0, "seed": 4, "logit_bias": often}),
        ([5], {"temperature": 1.0, "seed": 5}),
        (ROLE, {"temperature": 1.0, "seed": 6, "headers": None, "logit_bias": often}),
    ]
    return [
        request(str(i), [*prompt(12, start=i), *end], max_tokens=48, **{"headers": RULE, **extra})
        for i, (end, extra) in enumerate(kinds)
    ]


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("pages", "chunk"), [(64, 64), (10, 16)])
def test_headers_are_held_to_their_grammar_and_texts_are_free(
    grammars: GrammarCache, overlap: bool, pages: int, chunk: int
) -> None:
    running = engine(grammars, pages, overlap, chunk)
    requests = workload()
    found = run(running, *requests)
    assert (running.stats().preemptions > 0) == (pages < 64)
    for one in requests:
        if one.sampling.headers is not None:
            recompute(one.prompt_token_ids, found[one.request_id].token_ids)
            assert found[one.request_id].token_ids == expected(one), one.request_id
    assert sum(found["2"].token_ids.count(marker) for marker in TEXTS) > 3, "the case shows nothing"


class Steps:
    """Plays steps of one sequence with known tokens; counts the waits for the last token."""

    def __init__(self, grammars: GrammarCache) -> None:
        self.headers = Headers(grammars, 4)
        self.waits = 0

    def assign(self, slot: int, prompt: list[int], generated: list[int] | None = None) -> None:
        sampling = SamplingParams(max_tokens=99, headers=RULE)
        tokens = [*prompt, *(generated or [])]
        self.headers.assign(NewSequence(slot, tokens, len(prompt), 0, [], sampling))

    def step(self, slot: int, position: int, token: int) -> set[int] | None:
        """Returns the tokens that may come; the given one is sampled."""
        positions, zero, last = np.array([position]), np.zeros(1, np.int64), self.waits
        rows = Rows(np.array([slot]), zero, lambda: positions, lambda: zero)
        found = self.headers.advance(rows)
        self.headers.sampled(rows, self._ids(token))
        assert self.waits - last <= 2
        return {*found[0].tolist()} if found else None

    def _ids(self, token: int) -> Callable[[], NDArray[np.int64]]:
        def ids() -> NDArray[np.int64]:
            self.waits += 1
            return np.array([token])

        return ids


def test_in_text_the_last_token_is_not_waited_for(grammars: GrammarCache) -> None:
    steps = Steps(grammars)
    steps.assign(1, [*ROLE, TOKENS.index("ca"), MESSAGE])
    for position in range(4, 10):
        assert steps.step(1, position, 3) is None
        assert steps.waits == max(0, position - 5), "all but the last one"


def test_a_slot_that_changes_hands_hears_nothing_of_its_last_sequence(grammars: GrammarCache) -> None:
    steps = Steps(grammars)
    steps.assign(1, ROLE)
    assert steps.step(1, 2, TOKENS.index("ca")) == follows(ROLE)
    steps.assign(1, ROLE)
    assert steps.step(1, 2, TOKENS.index("bb")) == follows(ROLE)
    assert steps.step(1, 3, MESSAGE) == {MESSAGE}


def test_a_rule_that_cannot_be_compiled_ends_its_request_alone(grammars: GrammarCache) -> None:
    running = engine(grammars, 64, True, 64)
    broken = request("broken", prompt(9), headers="start: (")
    found = run(running, broken, request("whole", prompt(9), headers=RULE), request("none", prompt(9)))
    assert "headers cannot be compiled" in (found["broken"].error or "")
    assert [found[name].finish_reason for name in ("whole", "none")] == ["length", "length"]


def test_a_grammar_of_the_whole_turn_goes_before(grammars: GrammarCache) -> None:
    one = request("a", [*prompt(9), *ROLE], grammar='start: "cb" "cb" "cb" <|return|>', headers=RULE, max_tokens=3)
    assert "".join(TOKENS[i] for i in run(engine(grammars, 64, True, 64), one)["a"].token_ids).startswith("cb")


@pytest.mark.long
@pytest.mark.parametrize("few", [True, False])
def test_plain_rows_need_no_logits(grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch, few: bool) -> None:
    if few:
        monkeypatch.setattr(type(model()), "head", lambda self, x_NH: pytest.fail("all logits were made"))
    else:
        monkeypatch.setattr("oscine.executor.sampling.headers._MAX_CHOSEN", 0)
    plain = [one for one in workload() if not one.sampling.logit_bias]
    found = run(engine(grammars, 64, True, 64), *plain)
    monkeypatch.undo()
    for one in plain:
        assert found[one.request_id].token_ids == expected(one), one.request_id
