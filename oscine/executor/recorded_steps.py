"""Decode steps on a CPU as recorded C calls: a later step with the same number of sequences is one call.

RecordedSteps has the interface of DecodeGraphs, for any number of sequences. The first step with a number of sequences
is recorded while it runs. Results are valid until the next step of the same size.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oscine.executor.batch.device_state import Computed
from oscine.executor.batch.slots import ColumnArray, IntArray
from oscine.executor.batch.step_arrays import StepArrays
from oscine.executor.cuda_graphs import Choose, Forward
from oscine.executor.kv.memory import LOGITS_AT_ONCE
from oscine.ops.native.recording import Recording
from oscine.ops.packed import PackedSizes, PackedStep

MAX_BYTES = 64 << 20


@dataclass(slots=True)
class _Recorded:
    flat: ColumnArray  # the input, at a fixed address
    forward: Recording
    computed: Computed
    choice: tuple[Recording, IntArray] | None = None  # recorded when it is first asked for


class RecordedSteps:
    def __init__(self, forward: Forward, choose: Choose, most_bytes: int) -> None:
        """`most_bytes`: limit for the tensors of all recorded steps. The least recently used step is evicted first."""
        self._forward, self._choose, self._most_bytes = forward, choose, most_bytes
        self._recorded: dict[int, _Recorded] = {}  # by sequences, the last used at the end
        self._bytes_per_sequence = 0

    def fits(self, step: StepArrays) -> bool:
        """Whether the step has one sampled token per sequence, and its recording is within the limit.

        More rows than LOGITS_AT_ONCE are chosen in parts, which torch joins outside a recording.
        """
        count = len(step.slots_S)
        return (
            step.num_tokens == count <= LOGITS_AT_ONCE
            and count * self._bytes_per_sequence <= self._most_bytes
            and bool(step.samples_S.all())
        )

    @property
    def fits_padding(self) -> bool:
        return False

    def size_of(self, num_sequences: int) -> int:
        return num_sequences

    def replay(self, packed: tuple[ColumnArray, PackedSizes]) -> Computed:
        """Runs a step. Raises NotRecordable."""
        flat, sizes = packed
        step = self._recorded.pop(sizes.sequences, None)
        if step is None:
            step = self._record(flat, sizes)
        else:
            step.flat[:] = flat
            step.forward.run()
        self._recorded[sizes.sequences] = step
        return step.computed

    def replay_choice(self, size: int) -> Tensor:
        """Chooses tokens after a step of this size. Returns their ids."""
        step = self._recorded[size]
        if step.choice is None:
            with (recording := Recording()):
                step.choice = recording, self._choose(step.computed).numpy()
        else:
            step.choice[0].run()
        return torch.from_numpy(step.choice[1].copy())

    def _record(self, flat: ColumnArray, sizes: PackedSizes) -> _Recorded:
        flat = flat.copy()
        packed = PackedStep.of(torch.from_numpy(flat), sizes)
        with (recording := Recording()):
            computed = self._forward(packed)
        self._bytes_per_sequence = recording.nbytes // sizes.sequences
        room = self._most_bytes - recording.nbytes
        while self._recorded and sum(step.forward.nbytes for step in self._recorded.values()) > room:
            del self._recorded[next(iter(self._recorded))]
        return _Recorded(flat, recording, computed)

    @torch.inference_mode()
    def try_one(self, slot: int) -> None:
        """A step of one token at the first position of a slot, whose pages it writes. Raises NotRecordable."""
        sizes = PackedSizes(1, 1, 1, 1)
        flat = np.zeros(sizes.total, np.int32)
        packed = PackedStep.of(flat, sizes)
        for column, value in ((packed.slots_S, slot), (packed.token_slots_T, slot), (packed.sampled_slots_M, slot)):
            column[:] = value
        packed.query_starts_S1[:] = 0, 1
        self.replay((flat, sizes))
        self.replay_choice(1)
