"""What a device keeps of the running sequences between steps: page tables, and the token that each sampled last.

So a step can be launched before the tokens of the step before it are known on the host. Everything here is queued on
the device in the order of the calls.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from oscine.executor.slots import PageEntries
from oscine.executor.transfer import upload
from oscine.ops.interface import Batch, Ops
from oscine.ops.packed import BatchState, PackedSizes, PackedStep

_ALIGNED = 16  # columns: kernels are compiled anew for strides that 16 does not divide


class DeviceState:
    """Rows of num_slots sequences, and one more, the padding slot, for padding rows: their pages and sampled tokens."""

    def __init__(
        self, num_slots: int, max_model_len: int, page_size: int, num_groups: int, device: torch.device, ops: Ops
    ) -> None:
        self.device = device
        self.padding_slot = num_slots
        columns = -(-max_model_len // page_size)
        shape = (num_groups, num_slots + 1, -(-columns // _ALIGNED) * _ALIGNED)
        # Zeros: what a warm-up reads and writes is page 0.
        tables, last_ids = (torch.zeros(size, dtype=torch.int32, device=device) for size in (shape, num_slots + 1))
        self._ops = ops
        self._state = BatchState(tables, last_ids, page_size)

    def point_padding_at(self, pages: Sequence[int]) -> None:
        """The page of each group that padding reads and writes."""
        self._state.tables[:, self.padding_slot] = torch.tensor(pages, dtype=torch.int32, device=self.device)[:, None]

    def update_pages(self, entries: PageEntries) -> None:
        """No entry may be given twice."""
        if entries[0]:
            tables = self._state.tables
            written = upload(np.array(entries, np.int32), self.device)
            tables.flatten(1).index_copy_(1, written[0].long() * tables.shape[2] + written[1], written[2:])

    def batch(self, packed: PackedStep[Tensor], num_decodes: int, *, all_rows: bool = False) -> Batch:
        """`num_decodes` as in Batch. `all_rows`: logits_rows_N is known to name all tokens in their order."""
        prepared = self._ops.prepare_step(packed, self._state)
        if all_rows:
            prepared = prepared._replace(logits_rows_N=None)
        return Batch(
            **prepared._asdict(),
            query_starts_S1=packed.query_starts_S1,
            context_lens_S=packed.context_lens_S,
            num_decodes=num_decodes,
        )

    def write_back(self, sampled_slots_M: Tensor, ids_M: Tensor) -> None:
        """Keeps the sampled tokens; only the padding slot may occur more than once."""
        self._ops.write_back(self._state, sampled_slots_M, ids_M)

    @torch.inference_mode()
    def touch(self) -> None:
        """Uses every kernel of this class once, on a step of nothing."""
        sizes = PackedSizes(1, 1, 1, 1)
        packed = PackedStep.of(torch.zeros(sizes.total, dtype=torch.int32, device=self.device), sizes)
        packed.sampled_slots_M.fill_(self.padding_slot)
        self.write_back(packed.sampled_slots_M, self.batch(packed, num_decodes=1).token_ids_T)
