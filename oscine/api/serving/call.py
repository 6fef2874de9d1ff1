"""A decoded request with its client, its model and its API key: what an endpoint answers."""

import uuid
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from oscine.api.common.keys import Caller
from oscine.api.serving.parameters import SamplingFields
from oscine.api.serving.sampling import INT64
from oscine.api.serving.served_model import ReadyModel
from oscine.types import GenerationRequest, SamplingParams


class NamesModel(Protocol):
    """The record that a body is decoded into."""

    @property
    def model(self) -> str | None: ...


_BATCH_PRIORITY = 1 << 29  # added for a line of a batch, so that requests of waiting clients come first
_MOST = (1 << 31) - 1
T = TypeVar("T", bound=NamesModel)
U = TypeVar("U", bound=NamesModel)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    body: T
    name: str  # of the model, as the client calls it
    model: ReadyModel
    caller: Caller
    size: int  # of the body, in bytes
    arrived_s: float  # on the clock of time.perf_counter

    def with_body(self, body: U) -> "Call[U]":
        """The same call, for what its body stands for."""
        return Call(body, self.name, self.model, self.caller, self.size, self.arrived_s)

    def engine_request(self, prompt: list[int], params: SamplingParams, choice: int = 0) -> GenerationRequest:
        """One sequence, with the priority, tenant and salt of the API key. `choice`: its number of `n`."""
        body, key = self.body, self.caller.key
        assert isinstance(body, SamplingFields)
        priority, salt, tenant = body.priority or 0, body.cache_salt or "", ""
        if key is not None:
            tenant, priority = key.name, key.bounded_priority(priority)
            if self.model.served.cache_salt_by_key:
                salt = f"{len(tenant)} {tenant} {salt}"  # the length keeps the salts of two keys apart
        if self.caller.in_batch:
            priority = min(priority + _BATCH_PRIORITY, _MOST)
        if choice:
            params = replace(params, seed=(params.seed + choice) % INT64)
        request_id, adapter = uuid.uuid4().hex, self.model.adapter
        return GenerationRequest(request_id, prompt, params, priority, tenant=tenant, cache_salt=salt, adapter=adapter)
