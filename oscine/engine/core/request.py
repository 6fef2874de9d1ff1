"""One request inside the engine: its tokens, how far they are computed, and which pages hold them.

Knows nothing of other requests, of pools or of time. There is no prefill and no decode: a request has tokens that are
computed and tokens that are wanted, and a step computes some of the difference.

    token_ids   p p p p p p p p g g g            known here: the prompt, then what was generated, also elsewhere
                              ^num_computed      computed, or being computed by a launched step
                                      ^num_wanted    known, or being sampled by a launched step
"""

from dataclasses import replace

from oscine.types import FinishReason, GenerationOutput, GenerationRequest, RemotePrefill, TokenLogprobs

NEVER = 1 << 62

Order = tuple[int, bool, int]  # priority, whether it is new (else it comes from another engine), arrival


class Request:
    """State of one live request. The scheduler moves it, the cache gives it pages, the loop feeds it tokens."""

    __slots__ = (
        "arrival_s",
        "branch_page",
        "cache_salt",
        "digests",
        "emit_at",
        "end",
        "fast_end",
        "finish_reason",
        "first_held",
        "first_token_s",
        "logprobs",
        "num_cached_tokens",
        "num_computed",
        "num_emitted",
        "num_given",
        "num_hit_pages",
        "num_prompt_tokens",
        "num_registered",
        "num_to_compute",
        "num_wanted",
        "order",
        "page_event",
        "pages",
        "priority",
        "prompt_logprobs",
        "queue_s",
        "remote_prefill",
        "request_id",
        "sampling",
        "slot",
        "stop_token_ids",
        "stream_interval",
        "token_ids",
    )

    def __init__(
        self, request: GenerationRequest, *, arrival: int, arrival_s: float, max_model_len: int, stream_interval: int
    ) -> None:
        sampling = request.sampling
        if request.generated_token_ids and sampling.prompt_logprobs is not None:
            sampling = replace(sampling, prompt_logprobs=None)  # they went out with the first generated token
        self.request_id = request.request_id
        self.sampling = sampling
        self.priority = request.priority
        self.cache_salt = request.cache_salt
        is_new = not request.generated_token_ids  # else it has waited elsewhere, and its reader waits for the rest
        self.order = (request.priority, is_new, arrival)  # smaller is more urgent; kept through preemptions
        self.arrival_s = arrival_s
        self.queue_s: float | None = None  # set when first scheduled
        self.first_token_s: float | None = None  # when the first token was sampled here
        self.stop_token_ids = frozenset(sampling.stop_token_ids)
        self.stream_interval = stream_interval

        self.token_ids = request.prompt_token_ids + request.generated_token_ids
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_given = len(self.token_ids)  # leading tokens that came with the request
        self.end = min(self.num_prompt_tokens + sampling.max_tokens, max_model_len)  # tokens when it ends by length
        # The last token of all is never computed; without any to generate, the whole prompt still is.
        self.num_to_compute = max(self.end - 1, self.num_prompt_tokens)
        self.num_computed = 0
        self.num_wanted = self.num_given
        self.finish_reason: FinishReason | None = None

        self.slot = -1  # of the executor; -1 while waiting
        self.fast_end = 0  # positions below this need no new page and no other thought to be decoded
        self.page_event = NEVER  # computed tokens at which pages are to be registered or freed

        self.pages: list[list[int]] = []  # while it runs, per page group: page of tokens [i * page_size, ...)
        self.first_held: list[int] = []  # per page group: entries of `pages` below this are not held any more
        self.digests: list[bytes] = []  # of the leading full pages of token_ids, as far as they were needed
        self.num_registered = 0  # leading pages already offered to the prefix index
        self.num_hit_pages = 0  # leading pages taken from the prefix index at the last admission
        self.branch_page = 0  # pages of the longest prefix that the index knew then, if only in the first group

        self.num_cached_tokens = 0  # prompt tokens found in the prefix index at the first admission
        self.num_emitted = self.num_given  # leading tokens that need no output any more
        self.emit_at = self.num_given + 1  # tokens at which the next output is due
        self.logprobs: list[TokenLogprobs] = []  # of the tokens not yet emitted
        self.prompt_logprobs: list[TokenLogprobs] = []  # until the first output
        self.remote_prefill: RemotePrefill | None = None  # what another engine that was asked did

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
            self._add_first_news(output)
        self.num_emitted = len(tokens)
        self.emit_at = len(tokens) + self.stream_interval
        return output

    def _add_first_news(self, output: GenerationOutput) -> None:
        output.num_cached_tokens = self.num_cached_tokens
        output.queue_s = self.queue_s or 0.0
        output.prefill = self.remote_prefill
        if self.sampling.prompt_logprobs is not None:
            output.prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, []
