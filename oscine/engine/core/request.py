"""One request inside the engine: its tokens, how far they are computed, and which pages hold them.

There is no prefill and no decode: a request has computed and wanted tokens, and a step computes some of the difference.

    token_ids   p p p p p p p p g g g            known here: the prompt, then what was generated, also elsewhere
                              ^num_computed      computed, or being computed by a launched step
                                      ^num_wanted    known, or being sampled by a launched step

A launched step may verify drafts as well. Until it is committed, both numbers count none of them as accepted, and
num_uncertain says how many may be.
"""

from dataclasses import InitVar, dataclass, field, replace

from oscine.types import (
    AdapterPlace,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    RemotePrefill,
    SamplingParams,
    TokenLogprobs,
)

NEVER = 1 << 62

Order = tuple[int, bool, int]  # priority, whether it is new (else it comes from another engine), arrival


@dataclass(slots=True, eq=False)
class Request:
    """State of one live request. The scheduler moves it, the cache gives it pages, the loop feeds it tokens."""

    given: GenerationRequest
    arrival: InitVar[int]
    arrival_s: float
    max_model_len: InitVar[int]
    stream_interval: int

    request_id: str = field(init=False)
    sampling: SamplingParams = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    order: Order = field(init=False)  # smaller is more urgent; kept through preemptions
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_given: int = field(init=False)  # leading tokens that came with the request
    end: int = field(init=False)  # tokens when it ends by length
    num_to_compute: int = field(init=False)
    num_computed: int = 0
    num_wanted: int = field(init=False)
    num_uncertain: int = 0  # drafts of the launched step, of which some may turn out to be accepted
    drafts_from: int = NEVER  # position; tokens before it came with the sequence when it took its slot
    finish_reason: FinishReason | None = None
    queue_s: float | None = None  # set when first scheduled
    first_token_s: float | None = None  # when the first token was sampled here

    slot: int = -1  # of the executor; -1 while waiting
    fast_end: int = 0  # positions below this are decoded without a new page or any other work
    page_event: int = NEVER  # computed tokens at which pages are to be registered or freed

    pages: list[list[int]] = field(default_factory=list)  # while it runs, per page group: the page table
    first_held: list[int] = field(default_factory=list)  # per page group: entries of `pages` below this are freed
    digests: list[bytes] = field(default_factory=list)  # of leading full pages of token_ids, as far as needed so far
    num_registered: int = 0  # leading pages already offered to the prefix index
    num_hit_pages: int = 0  # leading pages taken from the prefix index at the last admission
    kept_pages: list[frozenset[int]] = field(default_factory=list)  # per page group: worth keeping once they are freed

    num_cached_tokens: int = 0  # prompt tokens found in the prefix index at the first admission
    num_emitted: int = field(init=False)  # leading tokens that need no output any more
    emit_at: int = field(init=False)  # tokens at which the next output is due
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the tokens not yet emitted
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # until the first output
    remote_prefill: RemotePrefill | None = None  # what became of asking another engine

    adapter: AdapterPlace | None = None  # on the device; an extension gives it before the request is scheduled

    num_drafts: int = 0  # that the next step may verify at most
    draft_steps: float = 0.0  # steps that might verify drafts; older ones weigh less, as in the next two
    drafts_accepted: float = 0.0
    drafts_expected: float = 0.0  # accepted drafts by the acceptance over all sequences

    def __post_init__(self, arrival: int, max_model_len: int) -> None:
        given, sampling = self.given, self.given.sampling
        is_new = not given.generated_token_ids  # else it has waited elsewhere, and its reader waits for the rest
        if not is_new and sampling.prompt_logprobs is not None:
            sampling = replace(sampling, prompt_logprobs=None)  # they went out with the first generated token
        self.request_id, self.sampling = given.request_id, sampling
        self.stop_token_ids = frozenset(sampling.stop_token_ids)
        self.order = (given.priority, is_new, arrival)
        self.token_ids = given.prompt_token_ids + given.generated_token_ids
        self.num_prompt_tokens = len(given.prompt_token_ids)
        self.num_given = self.num_wanted = self.num_emitted = len(self.token_ids)
        self.emit_at = self.num_given + 1
        self.end = min(self.num_prompt_tokens + sampling.max_tokens, max_model_len)
        # The last token of all is never computed; without any to generate, the whole prompt still is.
        self.num_to_compute = max(self.end - 1, self.num_prompt_tokens)

    @property
    def num_pages(self) -> int:
        """Of a request that runs: the length of its page tables, the same in all groups."""
        return len(self.pages[0])

    @property
    def samples(self) -> bool:
        """Whether anything is generated at all."""
        return self.end > self.num_prompt_tokens

    @property
    def num_missing(self) -> int:
        """Tokens that could be computed now."""
        return min(self.num_wanted, self.num_to_compute) - self.num_computed

    @property
    def given_end(self) -> FinishReason | None:
        """Why the sequence has ended with the tokens that came with it, if so."""
        if self.num_given == self.num_prompt_tokens:
            return None
        if self.token_ids[-1] in self.stop_token_ids:
            return "stop"
        return "length" if self.num_given >= self.end else None

    def accept(self, sampled: list[int], logprobs: list[TokenLogprobs] | None) -> FinishReason | None:
        """Appends what a step sampled, up to the token that ends the sequence. Returns why it ends there, if so."""
        self.num_wanted += len(sampled) - 1  # the scheduler counted on one
        self.num_computed += len(sampled) - 1
        reason: FinishReason | None = None
        num_taken = 0
        while reason is None and num_taken < len(sampled):
            token = sampled[num_taken]
            num_taken += 1
            self.token_ids.append(token)
            if token in self.stop_token_ids:
                reason = "stop"
            elif len(self.token_ids) == self.end:
                reason = "length"
        if logprobs is not None:
            self.logprobs += logprobs[:num_taken]
        return reason

    def add_prompt_logprobs(self, start: int, logprobs: list[TokenLogprobs]) -> None:
        """Those of the prompt tokens after position `start`, in this order; a preemption brings some again."""
        self.prompt_logprobs[start:] = logprobs

    def take_output(self) -> GenerationOutput:
        """The news since the last output."""
        tokens = self.token_ids
        output = GenerationOutput(self.request_id, tokens[self.num_emitted :])
        output.finish_reason = self.finish_reason
        if self.sampling.logprobs is not None:
            output.logprobs, self.logprobs = self.logprobs, []
        if self.emit_at == self.num_given + 1:
            output.num_cached_tokens = self.num_cached_tokens
            output.queue_s = self.queue_s or 0.0
            output.prefill = self.remote_prefill
            if self.sampling.prompt_logprobs is not None:
                output.prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, []
        self.num_emitted = len(tokens)
        self.emit_at = len(tokens) + self.stream_interval
        return output
