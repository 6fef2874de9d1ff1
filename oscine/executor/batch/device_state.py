"""What a device keeps of the running sequences between steps: page tables, lengths, and the token sampled last.

So a step can be launched before the host knows the tokens of the step before it, or how many they are. Everything here
is queued on the device in the order of the calls.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from oscine.executor.batch.copies import upload
from oscine.executor.batch.slots import PageEntries
from oscine.ops.interface import Batch, Ops
from oscine.ops.packed import BatchState, PackedSizes, PackedStep

_ALIGNED = 16  # columns: kernels are compiled anew for strides that 16 does not divide


class Computed(NamedTuple):
    """A step up to the choice of the next tokens."""

    packed: PackedStep[Tensor]  # on the device
    batch: Batch
    x_NH: Tensor  # what the head takes
    features_TH: Tensor | None = None  # what a draft head reads


class DeviceState:
    """Rows of num_slots sequences, and one more, the padding slot, for padding rows: their pages and sampled tokens."""

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        page_size: int,
        num_groups: int,
        device: torch.device,
        ops: Ops,
        max_drafts: int,
    ) -> None:
        self.device = device
        self.padding_slot = num_slots
        num_columns = -(-max_model_len // page_size)
        shape = (num_groups, num_slots + 1, -(-num_columns // _ALIGNED) * _ALIGNED)
        # Zeros: what a warm-up reads and writes is page 0.
        sizes = shape, (num_slots + 1,), (num_slots + 1,), (num_slots + 1, max(1, max_drafts))
        tables, last_ids, lens, drafts = (torch.zeros(s, dtype=torch.int32, device=device) for s in sizes)
        self._ops = ops
        self._state = BatchState(tables, last_ids, lens, drafts, page_size)
        self._drafts_on_host = drafts.numpy() if device.type == "cpu" else None
        lens.fill_(1)  # the padding slot always stands at position 0

    def point_padding_at(self, pages: Sequence[int]) -> None:
        """The page of each group that padding reads and writes."""
        self._state.tables[:, self.padding_slot] = torch.tensor(pages, dtype=torch.int32, device=self.device)[:, None]

    def update_pages(self, entries: PageEntries) -> None:
        """No entry may be given twice."""
        if entries[0]:
            tables = self._state.tables
            written = upload(np.array(entries, np.int32), self.device)
            tables.flatten(1).index_copy_(1, written[0].long() * tables.shape[2] + written[1], written[2:])

    @property
    def drafts(self) -> Tensor:
        """As in BatchState."""
        return self._state.drafts

    def batch(
        self,
        packed: PackedStep[Tensor],
        num_decodes: int,
        *,
        counted: bool = False,
        all_rows: bool = False,
        lens: Tensor | None = None,
    ) -> Batch:
        """`num_decodes` as in Batch; `counted`: it is a bound. `all_rows`: logits_rows_N is known to name all tokens in
        their order. `lens`: in the place of those of the sequences."""
        state = self._state if lens is None else replace(self._state, lens=lens)
        prepared = self._ops.prepare_step(packed, state)
        if all_rows:
            prepared = prepared._replace(logits_rows_N=None)
        return Batch(
            **prepared._asdict(),
            query_starts_S1=packed.query_starts_S1,
            num_decodes=num_decodes,
            counts_2=packed.counts_2 if counted else None,
        )

    def put_drafts(self, drafts: Sequence[tuple[int, list[int]]]) -> None:
        """Slots, and what may follow the token that each sampled last: 1 to max_drafts tokens."""
        table = self._drafts_on_host
        if table is not None:
            for slot, ids in drafts:  # an index array would take longer, and give other threads Python's lock
                table[slot, : len(ids)] = ids
            return
        width = max(len(ids) for _, ids in drafts)
        both = upload(
            np.array([(slot, *ids, *[0] * (width - len(ids))) for slot, ids in drafts], np.int32), self.device
        )
        self._state.drafts[both[:, 0].long(), :width] = both[:, 1:]

    def accept(self, packed: PackedStep[Tensor], batch: Batch, ids_M: Tensor) -> Tensor:
        """Keeps what was sampled, up to the first draft that is not accepted: see Ops.accept."""
        return self._ops.accept(packed, batch, self._state, ids_M)

    @torch.inference_mode()
    def touch(self) -> None:
        """Uses every kernel of this class once, on a step of nothing."""
        sizes = PackedSizes(1, 1, 1, 1)
        packed = PackedStep.of(torch.zeros(sizes.total, dtype=torch.int32, device=self.device), sizes)
        packed.sampled_slots_M.fill_(self.padding_slot)
        batch = self.batch(packed, num_decodes=1)
        self.accept(packed, batch, batch.token_ids_T)
