"""How keys and values are stored in pages, and loaded from them.

The definition. Shape suffixes as in ops/interface.py; W pages that are read.
"""

from torch import Tensor


def store(keys_TGD: Tensor, values_TGD: Tensor, kv_pages: Tensor, slots_T: Tensor) -> None:
    """Writes keys and values, in any float dtype, to slots_T of kv_pages [pages, 2, G, P, D], as kv_pages has them."""
    page_size = kv_pages.shape[3]
    page_T, offset_T = slots_T // page_size, slots_T % page_size
    for kind, heads_TGD in enumerate((keys_TGD, values_TGD)):
        kv_pages[page_T, kind, :, offset_T] = heads_TGD.to(kv_pages.dtype)


def load(stored: Tensor, pages_W: Tensor) -> Tensor:
    """These pages of stored [pages, ...], in float32: [W, ...]."""
    return stored.index_select(0, pages_W).float()
