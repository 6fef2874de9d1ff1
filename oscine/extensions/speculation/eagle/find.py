"""The EAGLE-3 head that the options name: where it is, what it takes, and where its keys and values are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from oscine.checkpoint.folder import fingerprint
from oscine.checkpoint.hub import CONFIG, NANO_FOLDER, find_head
from oscine.checkpoint.opened import OpenedModel, config_of
from oscine.extensions.speculation.eagle.checkpoint import OpenedHead, open_head
from oscine.extensions.speculation.eagle.config import HeadConfig
from oscine.extensions.speculation.eagle.head import EagleHead
from oscine.extensions.speculation.eagle.weights import MAX_DRAFTED, head_specs
from oscine.extensions.speculation.ops.interface import DraftOps
from oscine.kv_group import KVGroup
from oscine.model.gpt_oss import GptOss
from oscine.ops.interface import KVCache
from oscine.settings.config import EngineOptions

OF_NANO = NANO_FOLDER / "eagle3"


@dataclass(frozen=True, slots=True)
class DraftHead:
    """A checked head; nothing of it is on the device yet."""

    opened: OpenedHead
    layer: int  # its index, after the layers of the target

    def beside(self, groups: Sequence[KVGroup]) -> tuple[KVGroup, ...]:
        """The page groups of the target, one of them with the head's layer. Raises ValueError if none suits it."""
        found = [*groups]
        i = self.group(groups)
        found[i] = replace(groups[i], layers=(*groups[i].layers, self.layer))
        return tuple(found)

    def group(self, groups: Sequence[KVGroup]) -> int:
        """The index of the page group with the head's window and heads."""
        config = self.opened.config
        wanted = config.window, config.num_key_value_heads, config.head_dim
        for i, group in enumerate(groups):
            if (group.window, group.num_kv_heads, group.head_dim) == wanted:
                return i
        raise ValueError(
            f"the EAGLE-3 head has {config.num_key_value_heads} KV heads of {config.head_dim}, window {config.window}; "
            f"the model has only: {', '.join(f'{g.num_kv_heads} of {g.head_dim}, {g.name}' for g in groups)}"
        )

    def num_bytes(self, dtype: torch.dtype) -> int:
        """On the device, at most."""
        config = self.opened.config
        shapes = [spec.shape for spec in head_specs(config, self.opened.names).values()]
        keys_and_values = 2 * config.num_key_value_heads * config.head_dim * 2 * config.hidden_size  # held once more
        slice_of_head = min(MAX_DRAFTED, config.vocab_size) * config.hidden_size
        return (sum(map(prod, shapes)) + keys_and_values + slice_of_head) * dtype.itemsize

    def step_bytes(self, num_tokens: int, graph_sizes: Sequence[int], dtype: torch.dtype) -> int:
        """Of tapped streams and features of the largest step, and of features that CUDA graphs of such sizes keep."""
        config = self.opened.config
        rows = (len(config.aux_layers) + 1) * num_tokens + sum(graph_sizes)
        return rows * config.hidden_size * dtype.itemsize

    def pages(self, groups: Sequence[KVGroup], kv: KVCache) -> tuple[int, Tensor]:
        """The index of the page group, and the head's layer of it, [pages, 2, G, P, D]."""
        group = self.group(groups)
        return group, kv[group][:, groups[group].layers.index(self.layer)]

    def load(self, opened: OpenedModel, model: GptOss, draft: DraftOps) -> EagleHead:
        """Onto the device of `model`, which is `opened`."""
        config, names, dtype = self.opened.config, self.opened.names, opened.dtype
        return EagleHead.load(
            config, self.opened, names, model, lambda: opened.source.get("lm_head.weight"), draft, dtype
        )


def find_draft_head(options: EngineOptions, opened: OpenedModel, *, alone: bool) -> DraftHead | None:
    """`alone`: the model is on one device. Raises ValueError for a head that is missing, or does not fit the model."""
    if options.speculation.method != "eagle3":
        return None
    if not alone:
        raise ValueError("--speculative-config: an EAGLE-3 head needs a model on one GPU; ngram does not")
    folder = head_folder(options, opened.path)
    return DraftHead(open_head(folder, opened.config), opened.config.num_hidden_layers)


def identity_of_head(options: EngineOptions, path: Path | None) -> str:
    """What decides the keys and values of its layer. `path`: of the model."""
    folder = head_folder(options, path)
    return f"{fingerprint(folder)} {HeadConfig.from_file(folder / CONFIG, config_of(options.model))}"


def head_folder(options: EngineOptions, path: Path | None) -> Path:
    """`path`: of the model. Raises ValueError if no head is named, or it is not there."""
    name = options.speculation.model
    if name is not None:
        return find_head(name, options.model)
    if path is not None and path.resolve() == NANO_FOLDER.resolve():
        return OF_NANO
    raise ValueError("--speculative-config: eagle3 needs `model`, the folder of a head or its Hugging Face name")
