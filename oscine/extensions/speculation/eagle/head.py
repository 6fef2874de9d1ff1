"""The network of an EAGLE-3 head (Li et al., arXiv:2503.01840): one llama layer that drafts one token at a time.

For the token at position p + 1 and a feature of position p:

    x       = [norm(embedding of the token), norm(feature)]
    h       = feature + attention(x)            keys and values are kept at position p
    h       = h + MLP(norm(h))
    draft   = best token of norm(h)             for position p + 2; h is the feature of position p + 1 in the next draft

The feature of the first draft is a product of the target's residual streams at p. Shape suffixes as in
ops/interface.py.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import NamedTuple

import torch
from torch import Tensor

from oscine.extensions.speculation.eagle.config import HeadConfig
from oscine.extensions.speculation.eagle.weights import HeadWeights, WholeHead, load_weights_of_head
from oscine.extensions.speculation.ops.interface import DraftOps
from oscine.model.gpt_oss import GptOss
from oscine.model.weights import TensorSource
from oscine.ops.interface import Batch, Ops, PageGroup, SamplingBatch
from oscine.ops.rope.yarn import yarn_cos_sin


class Drafted(NamedTuple):
    """The result of one draft step."""

    feature_TH: Tensor  # of the next draft
    normed_TH: Tensor  # for `choose`


class EagleHead:
    """Weights and ops of one device; holds no state between steps."""

    def __init__(
        self, config: HeadConfig, weights: HeadWeights, ops: Ops, draft: DraftOps, cos_sin: Tensor, final_norm_H: Tensor
    ) -> None:
        """`cos_sin`: as in QkvProjection. `final_norm_H`: the target's."""
        self.config, self.weights, self.draft_ops = config, weights, draft
        self._ops, self._cos_sin, self._final_norm_H = ops, cos_sin, final_norm_H

    @classmethod
    def load(
        cls,
        config: HeadConfig,
        source: TensorSource,
        held: Collection[str],
        target: GptOss,
        target_output: Callable[[], Tensor],
        draft: DraftOps,
        dtype: torch.dtype,
    ) -> "EagleHead":
        """A head on the target's device. Arguments as of load_weights_of_head."""
        ops, of_target = target.ops, target.weights
        weights = load_weights_of_head(config, source, held, of_target, target_output, ops, draft, dtype)
        return cls(config, weights, ops, draft, _cos_sin(config, target), of_target.norm_H)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The streams that `features` needs, as GptOss.hidden_and_aux counts them."""
        return self.config.aux_layers

    @property
    def dtype(self) -> torch.dtype:
        """Of features."""
        return self.weights.norm_H.dtype

    @torch.inference_mode()
    def features(self, streams: Mapping[int, Tensor]) -> Tensor:
        """The target's streams [T, H] -> features of the first draft [T, H]."""
        weights, draft = self.weights, self.draft_ops
        tapped = [streams[tap] for tap in self.aux_layers]
        if self.config.taps_normed:
            tapped = [self._norm(tapped[0], self._final_norm_H)]
        if self.config.fc_norm:
            tapped = [self._norm(tap, norm_H) for tap, norm_H in zip(tapped, weights.tap_norms, strict=True)]
        joined = draft.join(tapped)
        if self.config.norm_before_fc:
            joined = self._norm(joined, weights.tap_norms[0])
        return joined if weights.combine is None else draft.linear(joined, weights.combine)

    @torch.inference_mode()
    def fill(
        self, features_TH: Tensor, next_ids_T: Tensor, positions_T: Tensor, slots_T: Tensor, kv_pages: Tensor
    ) -> None:
        """Writes keys and values only: for tokens from which nothing is drafted.

        next_ids_T: the token after each position. kv_pages: the head's layer, [pages, 2, G, P, D].
        """
        x, _ = self._input(features_TH, next_ids_T)
        kv = self.draft_ops.linear(x, self.weights.kv)
        self.draft_ops.rope_and_write(kv, self._cos_sin, positions_T, kv_pages, slots_T)

    @torch.inference_mode()
    def step(
        self, features_TH: Tensor, next_ids_T: Tensor, batch: Batch, group: PageGroup, kv_pages: Tensor
    ) -> Drafted:
        """Hidden states of all tokens of the batch; writes their keys and values. Arguments as in `fill`."""
        weights, draft = self.weights, self.draft_ops
        x, residual_TH = self._input(features_TH, next_ids_T)
        qkv = draft.linear(x, weights.qkv)
        q_TQD = draft.rope_and_write(qkv, self._cos_sin, batch.positions_T, kv_pages, group.slots_T)
        heads = self._ops.attention(q_TQD, kv_pages, batch, group, weights.sinks_Q, self.config.window)
        eps, rms_norm = self.config.rms_norm_eps, self._ops.rms_norm
        normed_TH, residual_TH = rms_norm(draft.sums(heads, weights.out), weights.mlp_norm_H, eps, residual_TH)
        mixed = draft.sums(draft.gated(normed_TH, weights.gate_up), weights.down)
        normed_TH, hidden_TH = rms_norm(mixed, weights.norm_H, eps, residual_TH)
        return Drafted(normed_TH if self.config.norm_output else hidden_TH, normed_TH)

    @torch.inference_mode()
    def choose(self, normed_NH: Tensor, sampling: SamplingBatch) -> Tensor:
        """Drafted token ids [N] of the target's vocabulary: the most probable, with the noise that the target will
        have."""
        output = self.weights.output
        if isinstance(output, WholeHead):
            return self._ops.chooser.choose(normed_NH, output.weight_VH, output.prepared, sampling)
        return self.draft_ops.choose(normed_NH, output, sampling)

    def _input(self, features_TH: Tensor, next_ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the layer [T, 2H], and the residual."""
        weights, eps = self.weights, self.config.rms_norm_eps
        embedding, features = (weights.embed_VH, weights.embed_norm_H), (features_TH, weights.feature_norm_H)
        x, normed_TH = self.draft_ops.input(next_ids_T, *embedding, *features, eps)
        return x, normed_TH if self.config.norm_before_residual else features_TH

    def _norm(self, x_TH: Tensor, weight_H: Tensor) -> Tensor:
        return self._ops.rms_norm(x_TH, weight_H, self.config.rms_norm_eps, None)[0]


def _cos_sin(config: HeadConfig, target: GptOss) -> Tensor:
    """The target's table, where the rules are the same."""
    if (config.yarn, config.head_dim, config.rounded_ramp) == (target.config.yarn, target.config.head_dim, False):
        return target.cos_sin
    positions, device = target.config.max_position_embeddings, target.weights.device
    return yarn_cos_sin(positions, config.head_dim, device, **asdict(config.yarn), rounded=config.rounded_ramp)
