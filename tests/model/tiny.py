"""Tiny gpt-oss models of several shapes, and steps over them on pages dealt in disorder."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from oscine.executor.kv.allocate import allocate_group, dtype_name
from oscine.model.config import ModelConfig
from oscine.model.gpt_oss import GptOss
from oscine.model.random_weights import RandomTensors
from oscine.model.tensors import size_of, tensor_specs
from oscine.model.weights import load_weights
from oscine.ops.interface import Batch, KVCache, PageGroup
from tests.ops.bound import reference_ops
from tests.ops.cases import to_device

CPU = torch.device("cpu")
PAGE = 64


def tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """As random_weights makes them, but with norm weights that are not all one, and router and sinks that matter."""
    source = RandomTensors(config, seed, CPU)
    made = {name: source.get(name) for name in tensor_specs(config)}
    for name, tensor in made.items():
        if "norm" in name or "router.weight" in name or name.endswith("sinks"):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))))
    return made


class DictSource:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def get(self, name: str) -> Tensor:
        return self._tensors[name]


def model(config: ModelConfig, made: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> GptOss:
    return GptOss(config, load_weights(config, DictSource(made), CPU, dtype), reference_ops())


@dataclass
class Sequence:
    tokens: Tensor
    offset: int  # position of the first token
    pages: list[int] = field(default_factory=list)
    computed: int = 0


def logits_of(model: GptOss, batch: Batch, kv: KVCache) -> Tensor:
    return model.head(model.hidden(batch, kv))


class Stepper:
    """Runs chunks of several sequences through a model. Most full pages have numbers that no sliding page can have."""

    def __init__(self, model: GptOss, num_pages: int = 64) -> None:
        config, weights = model.config, model.weights
        self.model, self.device = model, weights.device
        self.groups = config.kv_groups(PAGE, dtype_name(weights.norm_H.dtype))
        counts = [2 * num_pages, *[num_pages] * (len(self.groups) - 1)]
        self.kv = tuple(
            allocate_group(group, count, self.device).fill_(torch.nan)
            for group, count in zip(self.groups, counts, strict=True)
        )
        self.free = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).tolist()
        self.num_pages = num_pages

    def step(self, *work: tuple[Sequence, int]) -> list[Tensor]:
        """Computes the next n tokens of each sequence, single tokens first; returns their logits [n, V]."""
        for sequence, count in work:
            while len(sequence.pages) * PAGE < sequence.computed + count:
                sequence.pages.append(self.free.pop())
        logits = logits_of(self.model, to_device(self.batch(work), self.device), self.kv)
        for sequence, count in work:
            sequence.computed += count
        return list(logits.split([count for _, count in work]))

    def batch(self, work: tuple[tuple[Sequence, int], ...]) -> Batch:
        index = [torch.arange(s.computed, s.computed + count) for s, count in work]
        contexts = [s.computed + count for s, count in work]
        most = max(len(s.pages) for s, _ in work)
        tables = torch.full((len(self.groups), len(work), most), -1, dtype=torch.int32)
        for row, (sequence, _) in enumerate(work):
            pages = torch.tensor(sequence.pages, dtype=torch.int32)
            tables[0, row, : len(pages)] = 2 * pages + 1
            for place, group in enumerate(self.groups[1:], 1):
                assert group.window is not None
                first = max(0, sequence.computed - group.window + 1) // PAGE
                tables[place, row, first : len(pages)] = (-place - pages[first:]) % self.num_pages
        groups = [
            PageGroup(
                table,
                torch.cat([table[r].long()[i // PAGE] * PAGE + i % PAGE for r, i in enumerate(index)]),
            )
            for table in tables
        ]
        counts = [count for _, count in work]
        starts = torch.tensor([0, *counts]).cumsum(0)
        return Batch(
            token_ids_T=torch.cat([s.tokens[i] for (s, _), i in zip(work, index, strict=True)]),
            positions_T=torch.cat([i + s.offset for (s, _), i in zip(work, index, strict=True)]),
            query_starts_S1=starts.int(),
            context_lens_S=torch.tensor(contexts, dtype=torch.int32),
            groups=tuple(groups),
            logits_rows_N=torch.arange(int(starts[-1])),
            num_decodes=next((i for i, n in enumerate(counts) if n > 1), len(counts)),
        )


def random_tokens(config: ModelConfig, count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def whole(model: GptOss, tokens: Tensor, offset: int = 0) -> Tensor:
    """Logits [tokens, V] of one sequence computed in one step."""
    return Stepper(model, len(tokens) // PAGE + 1).step((Sequence(tokens, offset), len(tokens)))[0]


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest value."""
    return float((got - expected).abs().max() / expected.abs().max())


def checkpoint_bytes(config: ModelConfig) -> int:
    """Bytes of all published tensors."""
    return size_of(config).checkpoint_bytes
