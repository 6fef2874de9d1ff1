"""The token of rows with no sampling parameter but temperature: all logits, then the choice among them."""

from typing import Any

from torch import Tensor

from oscine.ops.interface import Chooser, LmHead, Sample, SamplingBatch


def chooser(lm_head: LmHead, sample: Sample) -> Chooser:
    """The chooser made from the given backends: this rank's logits, and the choice among those of all ranks."""

    def choose(x_NH: Tensor, weight_VH: Tensor, _: Any, sampling: SamplingBatch) -> Tensor:
        return sample(lm_head(x_NH, weight_VH), sampling).token_ids_N

    return Chooser(prepare=lambda weight_VH: None, prepared_bytes=lambda vocab, hidden: 0, choose=choose)
