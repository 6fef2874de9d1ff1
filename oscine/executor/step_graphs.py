"""How a step runs without calling its ops from Python: as a CUDA graph, or on a CPU as one recorded call."""

import torch

from oscine.executor.batch.device_state import DeviceState
from oscine.executor.cuda_graphs import Choose, DecodeGraphs, PromptGraphs
from oscine.executor.forward import Forward
from oscine.executor.recorded_steps import MAX_BYTES, RecordedSteps
from oscine.timing.kinds import GraphSizes


class StepGraphs:
    """Where a head drafts, steps without drafts have graphs of their own, which do no work for it.

    Steps with adapters have graphs of their own too. A step without any does no work for them.
    """

    def __init__(self, forward: Forward, choose: Choose, state: DeviceState, *, has_head: bool) -> None:
        self._forward, self._choose, self._state, self.has_head = forward, choose, state, has_head
        self.adapted = DecodeGraphs(forward.decode_adapted, choose, state.device)  # as the next, with adapters
        self.adapted_prompts = PromptGraphs(forward.prompts_adapted, state.padding_slot, state.device)
        plain = DecodeGraphs(forward.decode, choose, state.device)
        self.prompts = PromptGraphs(forward.prompts, state.padding_slot, state.device)
        followed = DecodeGraphs(forward.decode_followed, choose, state.device) if has_head else plain
        self._plain_graphs, self._followed_graphs = plain, followed
        self.plain: DecodeGraphs | RecordedSteps = plain
        self.followed: DecodeGraphs | RecordedSteps = followed

    @property
    def sizes(self) -> GraphSizes:
        """Of the CUDA graphs."""
        return GraphSizes(tuple(self._followed_graphs.sizes), tuple(self.prompts.sizes), self.prompts.room)

    @torch.inference_mode()
    def run_eagerly(self, sizes: GraphSizes, *, adapted: bool = False) -> None:
        """What `capture` would capture: compiles kernels and takes memory. Writes page 0."""
        if adapted:
            self.adapted_prompts.run_eagerly(sizes.prompts, sizes.room)
            self.adapted.run_eagerly(sizes.decode)
        self.prompts.run_eagerly(sizes.prompts, sizes.room)
        self._followed_graphs.run_eagerly(sizes.decode)

    def capture(self, sizes: GraphSizes, *, adapted: bool = False) -> None:
        """CUDA graphs of decode steps and of steps with prompts, the larger ones first. `adapted`: also of those with
        adapters."""
        most = self._state.padding_slot
        pool = torch.cuda.graph_pool_handle()
        if adapted:
            self.adapted_prompts.capture(sizes.prompts, sizes.room, pool)
            self.adapted.capture(sizes.decode, pool)
        self.prompts.capture(sizes.prompts, sizes.room, pool)
        self._followed_graphs.capture(sizes.decode, pool)
        if self.has_head:
            plain = [size for size, below in zip(sizes.decode, (0, *sizes.decode), strict=False) if below < most]
            self._plain_graphs.capture(plain, pool)

    def record(self, most_bytes: int = MAX_BYTES) -> None:
        """From now on decode steps are recorded C calls: on a CPU, with native ops. Writes page 0. Raises
        NotRecordable."""
        plain = followed = RecordedSteps(self._forward.decode, self._choose, most_bytes)
        if self.has_head:
            followed = RecordedSteps(self._forward.decode_followed, self._choose, most_bytes)
        followed.try_one(self._state.padding_slot)
        self.plain, self.followed = plain, followed
