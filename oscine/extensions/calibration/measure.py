"""Prompts through the model: exact keys and values, from which scales are chosen, and what FP8 changes.

The model computes prompts as an engine does, one after the other, in chunks. Exact keys and values are read from the
pages of its cache. Log-probabilities are those of the token that is best with an exact cache, at each position.

Shape suffixes as in ops/interface.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor
from tqdm import tqdm

from oscine.checkpoint.opened import OpenedModel
from oscine.executor.kv.allocate import allocate_group, dtype_name
from oscine.extensions.calibration.choice import Seen, num_clamped, squared_error
from oscine.kv_dtype import KVDtype
from oscine.model.gpt_oss import GptOss
from oscine.ops.interface import Batch, KVCache, PageGroup
from oscine.ops.platforms import reference
from oscine.ops.platforms.interface import Platform
from oscine.ops.platforms.table import choose, platform_of, resolve
from oscine.ops.target import Target

PAGE = 64  # tokens
CHUNK = 2048  # tokens of a step
ROWS = 256  # of logits at once
Prompts = Sequence[Sequence[int]]


@dataclass(slots=True)
class Change:
    """Of the next tokens of all positions, against an exact cache."""

    positions: int = 0
    equal: int = 0  # greedy tokens
    total: float = 0.0  # of changes of log-probabilities
    largest: float = 0.0

    def add(self, exact_NV: Tensor, other_NV: Tensor) -> None:
        """Logits."""
        best_N = exact_NV.argmax(-1, keepdim=True)
        of_exact, of_other = (logits.log_softmax(-1).gather(-1, best_N) for logits in (exact_NV, other_NV))
        change_N = (of_exact - of_other).abs()
        self.positions += len(best_N)
        self.equal += int((other_NV.argmax(-1, keepdim=True) == best_N).sum())
        self.total += float(change_N.double().sum())
        self.largest = max(self.largest, float(change_N.max()))


@dataclass(slots=True)
class Errors:
    """Of all keys and values, [L, 2, G] float64: sums of squares, and elements."""

    squares: Tensor
    dynamic: Tensor  # squared errors with a scale per token
    calibrated: Tensor
    clamped: Tensor
    tokens: int = 0


class Calibrated:
    """A model, and caches of three kinds for one prompt at a time."""

    def __init__(self, opened: OpenedModel, *, progress: bool) -> None:
        """Loads the weights. Raises ValueError for a GPU that has no FP8."""
        self._progress = progress
        self.config, self.device, self._dtype = opened.config, opened.device, dtype_name(opened.dtype)
        target = Target.of(opened.device)
        self.platform = _platform(target, opened.dtype)
        ops = resolve(target, choose(self.platform.name))
        self._model = GptOss(opened.config, opened.load(ops=ops, progress=progress), ops)

    def look(self, prompts: Prompts) -> Seen:
        """Keys and values of all prompts. Raises ValueError for values that are not finite."""
        seen = Seen.nothing(self.config.num_hidden_layers, self.config.num_key_value_heads, self.device)
        for prompt in self._shown("Measuring keys and values", prompts):
            for layer, rows_2GTD in self._keys_and_values(prompt, self._exact(prompt)):
                if not rows_2GTD.isfinite().all():
                    raise ValueError(f"layer {layer} has keys or values that are not finite")
                seen.add(layer, rows_2GTD)
        return seen

    def compare(self, prompts: Prompts, exponents_L2G: Tensor) -> tuple[Errors, Change, Change]:
        """Errors of keys and values; changes by a scale per token, and by calibrated scales."""
        nothing = torch.zeros(exponents_L2G.shape, dtype=torch.float64, device=self.device)
        errors = Errors(nothing, nothing.clone(), nothing.clone(), nothing.clone())
        dynamic, calibrated = Change(), Change()
        fixed = GptOss(self.config, self._model.weights, self._model.ops, [*exponents_L2G])
        for prompt in self._shown("Comparing next tokens", prompts):
            exact_kv, *others = self._exact(prompt), *(self._cache(prompt, KVDtype.FP8) for _ in range(2))
            caches = zip((self._model, self._model, fixed), (exact_kv, *others), strict=True)
            passes = [self._hidden(model, prompt, kv) for model, kv in caches]
            for x_exact, x_dynamic, x_fixed in zip(*passes, strict=True):
                for rows in zip(*(x.split(ROWS) for x in (x_exact, x_dynamic, x_fixed)), strict=True):
                    exact_NV, *logits = map(self._model.head, rows)
                    for change, other_NV in zip((dynamic, calibrated), logits, strict=True):
                        change.add(exact_NV, other_NV)
            self._add_errors(errors, prompt, exact_kv, exponents_L2G)
        return errors, dynamic, calibrated

    def _add_errors(self, errors: Errors, prompt: Sequence[int], kv: KVCache, exponents_L2G: Tensor) -> None:
        errors.tokens += len(prompt)
        for layer, rows_2GTD in self._read(prompt, kv):
            fixed_2G = exponents_L2G[layer]
            errors.squares[layer] += rows_2GTD.double().square().sum((-1, -2))
            errors.dynamic[layer] += squared_error(rows_2GTD, None)
            errors.calibrated[layer] += squared_error(rows_2GTD, fixed_2G)
            errors.clamped[layer] += num_clamped(rows_2GTD, fixed_2G)

    def _shown(self, what: str, prompts: Prompts) -> "tqdm[Sequence[int]]":
        return tqdm(prompts, desc=what, unit="prompt", disable=not self._progress)

    # ---- one prompt ----

    def _exact(self, prompt: Sequence[int]) -> KVCache:
        return self._cache(prompt, self._dtype)

    def _cache(self, prompt: Sequence[int], dtype: str) -> KVCache:
        num_pages = ceil(len(prompt) / PAGE)
        return tuple(allocate_group(group, num_pages, self.device) for group in self.config.kv_groups(PAGE, dtype))

    def _keys_and_values(self, prompt: Sequence[int], kv: KVCache) -> Iterator[tuple[int, Tensor]]:
        for _ in self._hidden(self._model, prompt, kv):
            pass
        yield from self._read(prompt, kv)

    def _read(self, prompt: Sequence[int], kv: KVCache) -> Iterator[tuple[int, Tensor]]:
        """Layers, and their rows [2, G, T, D] in float32, of exact pages."""
        for layers, pages in zip(self.config.layers_by_window.values(), kv, strict=True):
            for place, layer in enumerate(layers):
                rows_2GTD = pages[:, place].permute(1, 2, 0, 3, 4).flatten(2, 3)
                yield layer, rows_2GTD[:, :, : len(prompt)].float()

    def _hidden(self, model: GptOss, prompt: Sequence[int], kv: KVCache) -> Iterator[Tensor]:
        """The input of the head for each position, [T, H], by chunks."""
        for start in range(0, len(prompt), CHUNK):
            yield model.hidden(self._batch(prompt, start, min(start + CHUNK, len(prompt))), kv)

    def _batch(self, prompt: Sequence[int], start: int, end: int) -> Batch:
        """The step that computes tokens start .. end - 1. The pages of the prompt are 0, 1, 2 and so on."""
        position_T = torch.arange(start, end, device=self.device)
        table_SB = torch.arange(ceil(len(prompt) / PAGE), dtype=torch.int32, device=self.device)[None]
        return Batch(
            token_ids_T=torch.tensor(prompt[start:end], device=self.device),
            positions_T=position_T,
            query_starts_S1=torch.tensor([0, end - start], dtype=torch.int32, device=self.device),
            context_lens_S=torch.tensor([end], dtype=torch.int32, device=self.device),
            groups=(PageGroup(table_SB, position_T),) * len(self.config.layers_by_window),
            logits_rows_N=None,
        )


def _platform(target: Target, dtype: torch.dtype) -> Platform:
    """The one that serves FP8 keys on this device. Raises ValueError."""
    found = platform_of(target, dtype)
    lacking = found.lacking_for_keys(target, KVDtype.FP8)
    if lacking is None:
        return found
    if target.device.type == "cpu":  # the C kernels have no FP8
        return reference.PLATFORM
    raise ValueError(f"calibration of FP8 keys and values needs {lacking}")
