"""The records that cross a seam: requests into the engine, plans into the executor, and what comes back.

Plain records without behaviour. This module imports no third-party package, and of Oscine only how a statistic is
declared.
"""

from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Literal, NamedTuple, Protocol

from oscine.statistic import Statistic, by_position, counter, declared, gauge, histogram, seconds

FinishReason = Literal["stop", "length", "cancelled", "error"]
Role = Literal["aggregated", "prefill", "decode"]  # whole requests, prompts for other engines, or generation


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence is sampled. Validated by the API; the engine and executor only read it.

    Logits are changed in this order: logit_bias, repetition, frequency and presence penalties, min_tokens mask, grammar
    mask, temperature, then top_k, top_p and min_p. Temperature 0 is greedy.
    """

    max_tokens: int  # tokens to generate at most, >= 1 (0 only together with prompt_logprobs)
    min_tokens: int = 0  # stop_token_ids cannot be sampled before this many generated tokens
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # (0, 1]; smallest set of tokens with at least this probability
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # [0, 1]; relative to the most probable token
    presence_penalty: float = 0.0  # subtracted once from every generated token's logit
    frequency_penalty: float = 0.0  # subtracted per occurrence among the generated tokens
    repetition_penalty: float = 1.0  # > 0; divides positive, multiplies negative logits of prompt and generated tokens
    logit_bias: dict[int, float] = field(default_factory=dict)  # token id -> added to the logit
    seed: int = 0  # the sample at a position depends on (seed, position, logits) alone; the API draws one if none given
    stop_token_ids: tuple[
        int, ...
    ] = ()  # every id that ends the sequence, the model's own included; kept in the output
    logprobs: int | None = None  # None: none; k >= 0: the sampled token's and those of the k most probable tokens
    prompt_logprobs: int | None = (
        None  # the same for prompt tokens 1..n-1; such a request does not use the prefix cache
    )
    # A grammar in llguidance's syntax, over all generated tokens, stop tokens included. It overrides min_tokens where
    # it allows only stop tokens. Tokens after its end (ignore_eos) are free.
    grammar: str | None = None
    # A grammar in llguidance's syntax, over every header from its first marker (<|end|>, <|start|> or <|channel|>) up
    # to <|message|>, inclusive. Text between headers is free, as is the token after a marker in text. Ignored beside
    # `grammar`.
    headers: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, natural log, of the unmodified model distribution (before temperature)."""

    token_id: int  # the sampled token, or the prompt's own
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most probable first


# ---- scheduler -> executor -------------------------------------------------------------------------------------


class AdapterPlace(NamedTuple):
    """Where the low-rank adapter of a sequence is on the device."""

    slot: int  # of the adapters on the device, from 0
    number: int  # AdapterChange.number of the one that must be there; -1: whatever is there


class AdapterChange(NamedTuple):
    """An adapter comes into host memory, or goes."""

    number: int  # each that comes has a number of its own
    path: str | None  # its folder; None: it goes, and no sequence has it


@dataclass(slots=True)
class NewSequence:
    """A sequence that takes a slot of the executor with this step; it replaces whatever the slot held."""

    slot: int  # row of the executor's persistent state, 0 <= slot < max_num_seqs
    token_ids: list[int]  # every token known so far: the prompt, and what was generated before a preemption
    num_prompt_tokens: int  # leading token_ids that are the prompt
    num_cached_tokens: int  # leading tokens whose KV the given pages already hold; a multiple of the page size
    # Per page group: page of cached tokens [i * page_size, (i + 1) * page_size); -1 where it is out of the window.
    pages: list[list[int]]
    sampling: SamplingParams
    # Of the request, with the identity of its adapter; with one, its tokens are no drafts of others, nor theirs of it
    cache_salt: str = ""
    adapter: AdapterPlace | None = None


class ScheduledSequence(NamedTuple):
    """Tokens of one slot computed in this step: positions start .. start + num_tokens - 1.

    The executor holds each slot's tokens, also those that it sampled in a step that the scheduler has not seen yet,
    so a plan carries no token ids and can be made while the step before it still runs. While that verifies drafts of
    this sequence, `start` is a lower bound: the executor knows how many were accepted.
    """

    slot: int
    start: int  # position of the first token computed
    num_tokens: int  # >= 1
    sample: bool  # whether the token after the last one is sampled (false inside a chunked prompt)
    pages: list[list[int]]  # per page group: pages appended to the slot's page table before this step; []: none
    num_drafts: int = 0  # tokens after the last that the executor may draft, compute and verify; their pages are there


@dataclass(slots=True)
class StepPlan:
    """One step of the model: what the scheduler decided and the executor runs."""

    step: int  # counts up from 0
    new: list[NewSequence]
    sequences: list[ScheduledSequence]  # at most one per slot
    adapters: list[AdapterChange] = field(default_factory=list)  # what other ranks are told of, before the step

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.sequences)


NON_FINITE = "the model produced non-finite logits"


@dataclass(slots=True)
class StepResult:
    """The sampled tokens of one step. Lists are aligned with plan.sequences."""

    step: int
    token_ids: list[list[int]]  # per sequence: sampled ids in order ([] where sample was false; several after drafts)
    logprobs: list[list[TokenLogprobs] | None] | None = None  # per sequence, per sampled id; None where not asked for
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None  # slot -> those of this step's prompt tokens
    errors: dict[int, str] | None = None  # slot -> why this one sequence cannot continue; safe to show
    num_drafted: list[int] | None = None  # per sequence: drafts that were verified; None: no drafts
    seconds: float | None = None  # the executor's own time of the step; None: the engine takes the time between commits


class RankLostError(RuntimeError):
    """A process that computes together with this one has ended, or did not come in time."""


TIMED_CONTEXT = 8  # tokens of each sequence before the steps of DecodeTimes


class DecodeTimes(NamedTuple):
    """Seconds of a step in which some number of sequences decode, as measured at the start."""

    plain: float  # without drafts or a drafter
    drafting: tuple[float, ...]  # by drafts per sequence (0, 1, ...), including the drafter


class Executor(Protocol):
    """Runs plans in order while the caller goes on. Raises when a step failed; the engine then fails all requests."""

    def launch(self, plan: StepPlan) -> None:
        """Does not wait for the device."""
        ...

    def collect(self) -> StepResult:
        """Waits for the oldest launched step."""
        ...

    def prepare(self, sampling: SamplingParams) -> bool:
        """Whether a sequence that is sampled so can be placed at once. Never waits.

        If not, the executor gets ready for it, and is asked again.
        """
        ...


# ---- engine <-> engine -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Region:
    """The pages of one group on one rank. Groups may share memory: then pages of others lie between them."""

    address: int  # of page 0
    num_pages: int
    stride: int  # bytes from a page to the next


@dataclass(frozen=True, slots=True)
class Transport:
    """What decides how pages travel from one process to another."""

    host: str = ""  # equal for processes that can reach each other's memory
    segments: str = ""  # sizes of TCP messages, as UCX is set
    has_rdma: bool = False


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of one rank that other engines may read."""

    agent: bytes  # NIXL's metadata: how to reach it, and what it has registered
    kind: Literal["DRAM", "VRAM"]
    device: int  # 0 for DRAM
    regions: list[Region]  # per page group


TransferState = Literal["running", "done", "failed"]  # of pages on their way


class PageMoves(NamedTuple):
    """Pages of one group: the i-th of the source becomes the i-th of the target."""

    group: int
    source_pages: list[int]
    target_pages: list[int]


# ---- API <-> engine --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefillSource:
    """Another engine that may compute a prompt, whose pages are then fetched from it."""

    replica: str  # its name in the cluster
    address: str  # ZeroMQ endpoint where it takes requests
    min_tokens: int  # a prompt that lacks fewer tokens than this is computed where it is
    timeout_s: float  # from asking to having the pages; then the prompt is computed where it is


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. `n` choices are n requests with the same prompt and different seeds."""

    request_id: str  # unique among live requests
    prompt_token_ids: list[int]  # 1 .. max_model_len - 1 tokens, each below the vocabulary size
    sampling: SamplingParams
    priority: int = 0  # lower runs sooner; within a priority, requests from a lost engine first, then by arrival
    # Tokens that another engine generated before it was lost. They count as generated (max_tokens, min_tokens,
    # penalties, grammars, positions of the seed). They are not sent again, nor are logprobs of the prompt.
    generated_token_ids: list[int] = field(default_factory=list)
    prefill: PrefillSource | None = None  # another engine that may compute the prompt
    tenant: str = ""  # the API key's name; a cluster's router shares fairly among tenants
    cache_salt: str = ""  # only requests with the same salt share cached prefixes
    adapter: str = ""  # AdapterInfo.identity of the low-rank adapter that is added to the model; empty: none


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """How a prompt came from another engine."""

    replica: str  # PrefillSource.replica
    prefill_s: float = 0.0  # from asking to its pages being ready there
    transfer_s: float = 0.0  # from there to having them here
    num_full_pages: int = 0  # moved
    num_sliding_pages: int = 0  # moved, of all groups with a window
    num_bytes: int = 0
    transport: str = ""  # memory, rdma or tcp
    failure: str | None = None  # why the prompt was computed here after all, in one line


@dataclass(slots=True)
class GenerationOutput:
    """News of one request. Outputs of a request arrive in order; the last one has a finish_reason."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)  # generated since the last output
    logprobs: list[TokenLogprobs] | None = None  # aligned with token_ids
    prompt_logprobs: list[TokenLogprobs] | None = None  # of prompt tokens 1..n-1, once, with the first output
    finish_reason: FinishReason | None = None
    error: str | None = None  # set when finish_reason is "error"; safe to show to the client
    num_cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    queue_s: float = 0.0  # seconds between arrival at the reporting engine and the first scheduled step
    prefill: RemotePrefill | None = None  # with the first output of a request that asked another engine


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where other processes of a cluster reach an engine: ZeroMQ endpoints with host and port."""

    requests: str  # clients and other engines
    kv_events: str | None = None  # publishes what the prefix cache stores and forgets
    kv_replay: str | None = None  # gives events again that a subscriber has missed


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The size of a model, and whether it is on a GPU."""

    num_parameters: int = 0
    checkpoint_bytes: int = 0  # of the published weights
    on_gpu: bool = False


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A low-rank adapter that an engine has."""

    name: str  # as requests have it
    path: str  # folder
    identity: str  # of its contents: adapters with equal values are equal in all engines
    rank: int  # the highest of its matrices
    targets: tuple[str, ...]  # parts of a layer that it changes, of settings.adapters.TARGETS
    num_bytes: int  # in host memory, of one rank


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The facts about an engine, from its executor to the API."""

    model: str  # as loaded
    max_model_len: int  # tokens, prompt and generated together
    vocab_size: int  # ids at or above are refused
    page_size: int  # tokens
    max_num_seqs: int  # sequences that run at once, for which there is room
    max_num_batched_tokens: int = 0  # tokens of a step; 0: not said
    size: ModelSize = ModelSize()
    gpus: tuple[str, ...] = ()  # UUIDs of those that compute it
    ready_s: float = 0.0  # seconds from the start of its process to ready; 0: it has none of its own
    endpoints: Endpoints | None = None  # of an engine that others may reach
    adapters: tuple[AdapterInfo, ...] | None = None  # loaded at its start; None: it takes none


@dataclass(slots=True)
class EngineStats:
    """A snapshot of the engine."""

    num_running: int = gauge("Sequences that run", "num_requests_running", "engine", "replica", "load")
    num_waiting: int = gauge("Sequences that wait", "num_requests_waiting", "engine", "replica", "load")
    # Only pages that a request holds are used. Sliding pages are those of all groups with a window. Groups may share
    # memory: each slot has pages of one of them. Where they do not, slots are those of the fullest group.
    kv_slots_used: int = gauge("KV memory slots with pages held by live requests", "kv_slots_used", "engine")
    kv_slots_cached: int = gauge(
        "KV memory slots whose pages are cached for reuse and held by no request",
        "kv_slots_cached",
        "engine",
    )
    kv_slots_total: int = gauge("KV memory slots", "kv_slots", "engine")
    full_pages_used: int = gauge("Full-attention pages held by live requests", "full_pages_used", "engine")
    full_pages_total: int = gauge("Full-attention pages at most", "full_pages", "engine")
    sliding_pages_used: int = gauge("Sliding-window pages held by live requests", "sliding_pages_used", "engine")
    sliding_pages_total: int = gauge("Sliding-window pages at most", "sliding_pages", "engine")
    adapters_loaded: int = gauge("LoRA adapters in host memory", "lora_adapters", "engine")
    adapters_running: int = gauge("LoRA adapters on the device that a request uses", "lora_adapters_used", "engine")
    adapters_waiting: int = gauge("Requests that wait for a place of their LoRA adapter", "lora_waiting", "engine")
    # Prompt tokens over waiting and running requests; a sequence in decode counts 0. What the prefix index has of a
    # waiting request is not known yet, and included.
    queued_tokens: int = gauge("Tokens not yet computed of live requests", "queued_tokens", "replica", "load")
    active_tokens: int = gauge("Tokens known of the requests that run", "active_tokens", "replica", "load")
    requests: int = counter("Requests taken, whatever became of them")  # so a router knows which it has yet to add
    kv_event_messages: int = counter("Messages of KV events sent")  # so a reader knows that it has missed the last ones
    steps: int = counter("Steps of the model", "engine_steps", "engine")
    step_tokens: int = counter("Tokens computed in steps")
    steps_by_tokens: list[int] = field(
        default_factory=list, metadata=histogram("Tokens computed in a step", "iteration_tokens", count="steps")
    )
    prompt_tokens: int = counter("Prompt tokens of admitted requests", "prompt_tokens", "engine", "replica", "load")
    generated_tokens: int = counter("Generated tokens", "generation_tokens", "engine", "replica", "load")
    prefix_queries: int = counter(
        "Prompt tokens looked up in the prefix cache", "prefix_cache_queries", "engine", "replica", "load"
    )
    prefix_hits: int = counter(
        "Prompt tokens found in the prefix cache", "prefix_cache_hits", "engine", "replica", "load"
    )
    # Of the prompt tokens. The others are computed here.
    local_hits: int = counter("Prompt tokens that the prefix cache had before")
    external_hits: int = counter("Prompt tokens whose pages came from other engines")
    preemptions: int = counter("Sequences that were put back to make room", "num_preemptions", "engine", "replica")
    non_finite: int = counter(
        "Sequences that ended because their logits were not finite", "non_finite_logits", "engine"
    )
    first_tokens: int = counter("Requests whose first token was sampled here", "", "load")
    first_token_s: float = seconds(
        "Arrival there to first token", "time_to_first_token_seconds", "replica", "load", count="first_tokens"
    )
    inter_tokens: int = counter("Tokens after the first", "", "load")
    # The wait for a token that is late is in it already.
    inter_token_s: float = seconds(
        "Between tokens of a sequence", "inter_token_latency_seconds", "replica", "load", count="inter_tokens"
    )
    remote_prefills: int = counter(
        "Prompts whose pages came from another engine", "remote_prefills", "transfers", "replica"
    )
    remote_prefill_failures: int = counter(
        "Prompts that another engine was asked for and that were computed here",
        "remote_prefill_failures",
        "transfers",
        "replica",
    )
    fetched_pages: int = counter("KV pages that came from other engines", "fetched_pages", "transfers", "replica")
    fetched_bytes: int = counter("Bytes of these", "fetched_bytes", "transfers", "replica")
    fetch_s: float = seconds("Seconds that fetching them took, added up", "fetch_seconds", "transfers", "replica")
    fetches_over_tcp: int = counter(
        "Prompts whose pages came over TCP, without RDMA", "remote_prefills_over_tcp", "transfers", "replica"
    )
    fetches_declined: int = counter(
        "Prompts computed here because their pages would have taken longer over the network",
        "remote_prefills_declined",
        "transfers",
        "replica",
    )
    fetch_bytes_per_s: int = gauge(
        "Bytes per second of recent fetches, of the link used last", "fetch_bytes_per_second", "transfers"
    )
    computed_prompt_tokens_per_s: int = gauge(
        "Tokens per second of recent prompts computed here", "computed_prompt_tokens_per_second", "transfers"
    )
    drafts: int = counter("Steps of a sequence that verified drafts", "spec_decode_num_drafts", "speculation")
    draft_tokens: int = counter("Drafts that were verified", "spec_decode_num_draft_tokens", "speculation")
    accepted_tokens: int = counter("Drafts that were accepted", "spec_decode_num_accepted_tokens", "speculation")
    accepted_by_position: list[int] = field(
        default_factory=list,
        metadata=by_position("Drafts that were accepted, by position", "spec_decode_num_accepted_tokens_per_pos"),
    )
    # Pages that were evicted, or soon will be, in host memory and on disk. A copy may be in the cache as well.
    offload_host_pages: int = gauge("KV pages in host memory", "kv_offload_host_pages", "offload")
    offload_host_bytes: int = gauge("Bytes of these", "kv_offload_host_bytes", "offload")
    offload_disk_pages: int = gauge("KV pages in files", "kv_offload_disk_pages", "offload")
    offload_disk_bytes: int = gauge("Bytes of these files", "kv_offload_disk_bytes", "offload")
    offload_saved_pages: int = counter("KV pages copied to host memory", "kv_offload_saved_pages", "offload")
    offload_lost_pages: int = counter(
        "Full-attention pages that were evicted before they were copied", "kv_offload_lost_pages", "offload"
    )
    offload_declined: int = counter(
        "Requests computed because that was quicker than copying pages", "kv_offload_declined", "offload"
    )
    offload_disk_failures: int = counter(
        "Files that could not be written, or read", "kv_offload_disk_failures", "offload"
    )
    offload_host_hits: int = counter("KV pages that came back from host memory", "kv_offload_host_hits", "offload")
    offload_disk_hits: int = counter("KV pages that came back from files", "kv_offload_disk_hits", "offload")
    offload_save_s: float = seconds(
        "Copying a page to host memory", "kv_offload_save_seconds", "offload", count="offload_saved_pages"
    )
    offload_host_s: float = seconds(
        "Copying a page back from host memory", "kv_offload_host_load_seconds", "offload", count="offload_host_hits"
    )
    offload_disk_s: float = seconds(
        "Reading a page back from a file", "kv_offload_disk_load_seconds", "offload", count="offload_disk_hits"
    )

    def copy(self) -> "EngineStats":
        copied = EngineStats(*_values(self))
        copied.steps_by_tokens = self.steps_by_tokens.copy()
        copied.accepted_by_position = self.accepted_by_position.copy()
        return copied

    @property
    def kv_usage(self) -> float:
        """Used share of the KV memory, 0 to 1; 0 where there is none."""
        return self.kv_slots_used / max(self.kv_slots_total, 1)

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens of a sequence in a step that verified its drafts; None if none did."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None


_values = attrgetter(*(field.name for field in fields(EngineStats)))

STATISTICS = (
    *declared(EngineStats),
    Statistic(
        "kv_usage",
        "gauge",
        "Used share of the KV memory, 0 to 1",
        "kv_cache_usage_perc",
        ("engine", "replica", "load"),
    ),
)


@dataclass(frozen=True, slots=True)
class RankHandle:
    """One rank's place in a group of ranks or engines, as descriptors of its process."""

    rank: int
    memory: int  # shared by all ranks
    wakes: list[int]  # by rank: an event that the rank sleeps on

    @property
    def num_ranks(self) -> int:
        return len(self.wakes)

    @property
    def descriptors(self) -> tuple[int, ...]:
        return self.memory, *self.wakes
