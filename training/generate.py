"""Greedy generation in batches with the training model, on any device."""

import torch
from torch import Tensor

from training.attention import CachedAttention
from training.model import GptOss

_CHUNK = 512  # prompt positions computed at once


class Generator:
    """Calling it with prompts continues each of them up to and with the first stop id."""

    def __init__(self, model: GptOss, stop_ids: tuple[int, ...], cache_tokens: int = 1 << 17) -> None:
        """`cache_tokens`: positions of all rows of a batch together."""
        self.model, self.stop_ids, self.cache_tokens = model, stop_ids, cache_tokens

    @torch.inference_mode()
    def __call__(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        outputs: list[list[int]] = [[] for _ in prompts]
        while order:
            longest = len(prompts[order[-1]]) + max_tokens
            rows = max(1, self.cache_tokens // longest)
            batch, order = order[-rows:], order[:-rows]
            for i, output in zip(batch, self._generate([prompts[i] for i in batch], max_tokens), strict=True):
                outputs[i] = output
        return outputs

    def _generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        device = self.model.lm_head.weight.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        longest = int(lengths.max())
        ids_BT = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=device)
        attend = CachedAttention(self.model.size, len(prompts), longest + max_tokens, device, torch.float32)
        token_B = self._prefill(ids_BT, lengths, attend)
        stops = torch.tensor(self.stop_ids, device=device)
        tokens, running = [token_B], ~torch.isin(token_B, stops)
        while len(tokens) < max_tokens and bool(running.any()):
            positions_BT = (lengths + len(tokens) - 1)[:, None]
            attend.advance(positions_BT)
            logits, _ = self.model(token_B[:, None], positions_BT, attend)
            token_B = logits[:, -1].argmax(-1)
            tokens.append(token_B)
            running &= ~torch.isin(token_B, stops)
        return [self._until_stop(row) for row in torch.stack(tokens, 1).tolist()]

    def _prefill(self, ids_BT: Tensor, lengths: Tensor, attend: CachedAttention) -> Tensor:
        """The first generated token of each row. Rows are padded on the right: nothing ever attends to padding."""
        token_B = torch.zeros_like(lengths)
        for start in range(0, ids_BT.shape[1], _CHUNK):
            chunk = ids_BT[:, start : start + _CHUNK]
            positions_BT = torch.arange(start, start + chunk.shape[1], device=chunk.device).expand_as(chunk)
            attend.advance(positions_BT)
            logits, _ = self.model(chunk, positions_BT, attend)
            last = lengths - 1 - start
            here = (last >= 0) & (last < chunk.shape[1])
            index = last.clamp(0, chunk.shape[1] - 1)[:, None, None].expand(-1, 1, logits.shape[-1])
            token_B = torch.where(here, logits.gather(1, index)[:, 0].argmax(-1), token_B)
        return token_B

    def _until_stop(self, row: list[int]) -> list[int]:
        end = next((i for i, token in enumerate(row) if token in self.stop_ids), len(row) - 1)
        return row[: end + 1]
