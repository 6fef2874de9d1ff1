"""norm_qkv with exact pages, with FP8 pages, and with calibrated scales: `python -m benchmarks.kernels.calibrated`.

Times in CUDA graphs over layers of random weights at published sizes, in us per call: the norm, and the product with
rotation and cache write. With a scale per token a head has one program. With calibrated scales it has as many as with
exact pages.
"""

import argparse

import torch
from torch import Tensor

from oscine.checkpoint.hub import PUBLISHED
from oscine.executor.kv.allocate import allocate_group
from oscine.extensions.bench.step_inputs import PAGE, StepLoad, make_batch, random_weights
from oscine.extensions.bench.timer import time_call
from oscine.kv_dtype import KVDtype
from oscine.model.config import ModelConfig
from oscine.model.gpt_oss import rope_table
from oscine.model.weights import Weights
from oscine.ops.interface import Ops, QkvProjection
from oscine.ops.platforms.table import choose, platform_of, resolve
from oscine.ops.target import Target

TOKENS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 1024
EXPONENT = 126  # of all scales
MODES = {  # the type of pages, and whether scales are calibrated
    "exact": (KVDtype.BFLOAT16, False),
    "FP8": (KVDtype.FP8, False),
    "FP8 calibrated": (KVDtype.FP8, True),
}


class Projections:
    """Calls of norm_qkv for one token of each of some sequences."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, num_tokens: int) -> None:
        device = weights.device
        self._config, self._weights, self._ops = config, weights, ops
        self._cos_sin = rope_table(config, device)
        self._batch = make_batch(config, StepLoad(num_tokens, 1, CONTEXT), device)
        self._x_TH = torch.randn(num_tokens, config.hidden_size, device=device).to(weights.norm_H.dtype)

    def time(self, dtype: KVDtype, is_calibrated: bool) -> float:
        """Seconds of a call."""
        config, device, place = self._config, self._weights.device, self._batch.groups[0]
        num_pages = int(place.page_table_SB.max()) + 1
        pages = allocate_group(config.kv_groups(PAGE, dtype)[0], num_pages, device)
        exponents_2G: Tensor | None = None
        if is_calibrated:
            exponents_2G = torch.full((2, config.num_key_value_heads), EXPONENT, dtype=torch.uint8, device=device)

        def norm_qkv(i: int) -> object:
            layer = self._weights.layers[i % len(self._weights.layers)]
            where = self._cos_sin, self._batch.positions_T, pages[:, i % pages.shape[1]], place.slots_T
            projection = QkvProjection(layer.qkv_weight_FH, layer.qkv_bias_F, *where, exponents_2G)
            return self._ops.norm_qkv(self._x_TH, layer.input_norm_H, config.rms_norm_eps, self._x_TH, projection)

        return time_call(norm_qkv, device).seconds


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(PUBLISHED), default="120b", help="sizes (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: %(default)s)")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="(default: 1 to 64)")
    chosen = parser.parse_args()
    target = Target.of(torch.device(chosen.device))
    dtype = torch.bfloat16
    config, ops = PUBLISHED[chosen.model](), resolve(target, choose(platform_of(target, dtype).name))
    weights = random_weights(config, ops, target.device, dtype)
    print("us per call  " + "".join(f"{name:>16}" for name in MODES))
    for num_tokens in chosen.tokens:
        calls = Projections(config, weights, ops, num_tokens)
        times = [calls.time(*mode) * 1e6 for mode in MODES.values()]
        print(f"{num_tokens:5} tokens " + "".join(f"{time:16.2f}" for time in times), flush=True)


if __name__ == "__main__":
    main()
