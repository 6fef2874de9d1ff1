"""Every request gets exactly its own tokens: any arrivals, cancellations, shared prefixes, preemptions and chunks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from .harness import PAGE, Run, Setting

# Prompts are cut from few texts, so prefixes are shared often and diverge within pages and at their ends.
TEXTS = [[(i * i + t) % 50 for i in range(120)] for t in range(2)]

prompts = st.builds(
    lambda text, length, tail: TEXTS[text][:length] + tail,
    st.integers(0, 1),
    st.one_of(st.integers(0, 110), st.sampled_from([PAGE, 3 * PAGE, 5 * PAGE])),
    st.lists(st.integers(0, 49), min_size=1, max_size=6),
)
samplings = st.fixed_dictionaries(
    {"seed": st.integers(0, 1), "stop_token_ids": st.sampled_from([(), (), (7,), (3, 11, 30)])},
    optional={"logprobs": st.just(0)},
)


@st.composite
def setting(draw: st.DrawFn) -> Setting:
    max_num_seqs = draw(st.integers(1, 8))
    windows = draw(st.sampled_from([(PAGE,), (18,), (33,), (34,), (2 * PAGE,), (), (33, 18), (34, 17, PAGE)]))
    return Setting(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from([0, 1, 5, 30, 200])),
        stream_interval=draw(st.sampled_from([1, 1, 3, 20])),
        overlap=draw(st.booleans()),
        lazy=draw(st.booleans()),
        prefix_caching=draw(st.sampled_from([True, True, True, False])),
        windows=windows,
        num_full_pages=draw(st.integers(10, 16)),
        num_sliding_pages=draw(st.integers(4, 12)),
        num_slots=draw(st.sampled_from([0, *range(4 * (1 + len(windows)), 30)])),
        per_slot=(*draw(st.tuples(*[st.integers(1, 3)] * len(windows))), 1)[:: draw(st.sampled_from([1, -1]))],
        max_attended=draw(st.sampled_from([None, None, 50, 1000])),
        most_drafts=draw(st.sampled_from([0, 0, 1, 3, 8])),
    )


class EngineMachine(RuleBasedStateMachine):
    @initialize(setting=setting())
    def start(self, setting: Setting) -> None:
        self.run_ = Run(setting)
        self.count = 0

    @rule(
        prompt=prompts,
        max_tokens=st.one_of(st.integers(1, 4), st.integers(1, 100)),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        sampling=samplings,
    )
    def add(self, prompt: list[int], max_tokens: int, priority: int, sampling: dict[str, object]) -> None:
        self.run_.add(f"r{self.count}", prompt, max_tokens, priority, **sampling)
        self.count += 1

    @rule(prompt=prompts, max_tokens=st.integers(0, 3))
    def add_with_prompt_logprobs(self, prompt: list[int], max_tokens: int) -> None:
        self.run_.add(f"r{self.count}", prompt, max_tokens, prompt_logprobs=0)
        self.count += 1

    @rule(prompt=prompts, cut=st.integers(1, 60), max_tokens=st.integers(1, 60), sampling=samplings)
    def add_cut(self, prompt: list[int], cut: int, max_tokens: int, sampling: dict[str, object]) -> None:
        self.run_.add_cut(f"r{self.count}", prompt, cut, max_tokens, **sampling)
        self.count += 1

    @precondition(lambda self: any(not self.run_.is_done(r) for r in self.run_.outputs))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        live = [r for r in self.run_.outputs if not self.run_.is_done(r)]
        self.run_.loop.cancel(data.draw(st.sampled_from(live)))

    @precondition(lambda self: self.run_.loop.has_work)
    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.run_.loop.has_work:
                self.run_.step()

    @precondition(lambda self: self.run_.loop.has_work)
    @rule()
    def finish(self) -> None:
        self.run_.finish()

    def teardown(self) -> None:
        if hasattr(self, "run_"):
            self.run_.finish()


TestEngine = pytest.mark.long(EngineMachine.TestCase)
TestEngine.settings = settings(max_examples=60, stateful_step_count=30)


@pytest.mark.long
@settings(max_examples=60)
@given(
    setting=setting(),
    arrivals=st.lists(
        st.tuples(st.integers(0, 40), prompts, st.integers(1, 100), st.integers(0, 2), samplings),
        min_size=2,
        max_size=10,
    ),
)
def test_every_mixture_of_chunks_hits_and_preemptions_gives_the_naive_tokens(
    setting: Setting, arrivals: list[tuple[int, list[int], int, int, dict[str, object]]]
) -> None:
    run = Run(setting)
    arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
    for i, (at, prompt, max_tokens, priority, sampling) in enumerate(arrivals):
        while run.now < at:
            run.step()
        run.add(f"r{i}", prompt, max_tokens, priority, **sampling)
    run.finish()
