"""A model that computes one prompt step and one decode step, with its own routing or an imposed one.

Shape suffixes as in oscine/ops/interface.py.
"""

from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.inputs import counted
from oscine.executor.kv.allocate import allocate_group, dtype_name
from oscine.extensions.bench.step_inputs import PAGE
from oscine.kv_dtype import KVDtype
from oscine.model.config import ModelConfig
from oscine.model.gpt_oss import GptOss
from oscine.ops.interface import Batch, Ops, PageGroup, Routing

Choices = list[Tensor]  # expert ids [T, K] of each layer, the prompt step's and then the decode step's


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts of one length, and a token after each: a step computes the prompts, a second one the last tokens."""

    tokens_SC: Tensor  # int64

    @classmethod
    def of_random_tokens(cls, config: ModelConfig, sequences: int, prompt: int) -> "Load":
        """`prompt`: tokens."""
        generator = torch.Generator().manual_seed(0)
        return cls(torch.randint(0, config.vocab_size, (sequences, prompt + 1), generator=generator))

    def batches(self, config: ModelConfig, device: torch.device) -> tuple[Batch, Batch]:
        tokens, groups = self.tokens_SC.to(device), len(config.layers_by_window)
        end = tokens.shape[1]
        return batch(tokens, groups, 0, end - 1), batch(tokens, groups, end - 1, end)

    @property
    def num_pages(self) -> int:
        sequences, length = self.tokens_SC.shape
        return sequences * ceil(length / PAGE)

    def __str__(self) -> str:
        return f"{len(self.tokens_SC)} prompts of {self.tokens_SC.shape[1] - 1} tokens"


def batch(tokens_SC: Tensor, groups: int, start: int, end: int) -> Batch:
    """The step that computes tokens start .. end - 1 of each sequence. Logits of all of them are wanted."""
    device, (sequences, length) = tokens_SC.device, tokens_SC.shape
    pages = ceil(length / PAGE)
    table_SB = torch.arange(sequences * pages, device=device).view(sequences, pages)
    position = torch.arange(start, end, device=device)
    slots_T = (table_SB[:, position // PAGE] * PAGE + position % PAGE).flatten()
    return Batch(
        token_ids_T=tokens_SC[:, start:end].flatten(),
        positions_T=position.repeat(sequences),
        query_starts_S1=torch.arange(sequences + 1, device=device).int() * (end - start),
        context_lens_S=torch.full((sequences,), end, dtype=torch.int32, device=device),
        groups=(PageGroup(table_SB.int(), slots_T),) * groups,
        logits_rows_N=None,
        num_decodes=sequences if end - start == 1 else 0,
    )


@dataclass(frozen=True, slots=True)
class Result:
    logits: tuple[Tensor, Tensor]  # of the prompt step and the decode step, [N, V] float32
    choices: Choices  # of its own router


@torch.inference_mode()
def run(model: GptOss, load: Load, *, fp8_keys: bool = False, imposed: Choices | None = None) -> Result:
    """`imposed`: the experts of each layer, in place of the router's choice. Their weights are the router's own."""
    device, config = model.weights.device, model.config
    dtype = dtype_name(model.weights.norm_H.dtype)
    groups = config.kv_groups(PAGE, KVDtype.FP8 if fp8_keys else dtype)
    kv = tuple(allocate_group(group, load.num_pages, device) for group in groups)
    choices: Choices = []
    routed = GptOss(config, model.weights, with_routing(model.ops, choices, imposed))
    prompt, decode = (routed.head(routed.hidden(step, kv)) for step in load.batches(config, device))
    return Result((prompt, decode), choices)


def with_routing(ops: Ops, choices: Choices, imposed: Choices | None) -> Ops:
    """Appends the router's choices to `choices`. `imposed`: as for run."""

    def norm_route(
        x: Tensor,
        weight_H: Tensor,
        eps: float,
        residual_TH: Tensor,
        router_weight_EH: Tensor,
        router_bias_E: Tensor,
        experts_per_token: int,
    ) -> tuple[Tensor, Tensor, Routing]:
        router = router_weight_EH, router_bias_E
        y_TH, sum_TH, routing = ops.norm_route(x, weight_H, eps, residual_TH, *router, experts_per_token)
        choices.append(routing.expert_ids_TK.long())
        if imposed is not None:
            ids_TK = imposed[len(choices) - 1]
            logits_TE = functional.linear(y_TH.float(), router_weight_EH.float(), router_bias_E.float())
            other = counted(ids_TK, logits_TE.gather(1, ids_TK).softmax(-1), len(router_bias_E))
            routing = other._replace(prepared=routing.prepared)
        return y_TH, sum_TH, routing

    return replace(ops, norm_route=norm_route)


@dataclass(frozen=True, slots=True)
class Error:
    """Of logits, relative to those of the truth."""

    prompt: float  # all rows together
    decode: float
    median: float  # of the rows of the prompt
    other_experts: float  # share of the choices that the truth does not make

    @classmethod
    def of(cls, result: Result, truth: Result) -> "Error":
        rows = [(got - true).norm(dim=1) for got, true in zip(result.logits, truth.logits, strict=True)]
        sizes = [true.norm(dim=1) for true in truth.logits]
        prompt, decode = (float(row.norm() / size.norm()) for row, size in zip(rows, sizes, strict=True))
        pairs = zip(result.choices, truth.choices, strict=True)
        same = torch.cat([(own[:, :, None] == true[:, None]).any(-1).flatten() for own, true in pairs])
        return cls(prompt, decode, float((rows[0] / sizes[0]).median()), 1 - float(same.float().mean()))
