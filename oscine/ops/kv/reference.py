"""How keys and values are stored in pages, and loaded from them.

The definition. Shape suffixes as in ops/interface.py; W pages that are read, R rows of a head in a page.
"""

from torch import Tensor

from oscine.ops.kv.fp8 import dequantise, elements_and_exponents, is_fp8, page_size_of, quantise


def store(
    keys_TGD: Tensor, values_TGD: Tensor, kv_pages: Tensor, slots_T: Tensor, exponents_2G: Tensor | None = None
) -> None:
    """Writes keys and values, in any float dtype, to slots_T of kv_pages [pages, 2, G, R, D], as kv_pages has them.

    `exponents_2G`: as in QkvProjection.
    """
    page_size = page_size_of(kv_pages)
    page_T, offset_T = slots_T // page_size, slots_T % page_size
    if is_fp8(kv_pages):
        elements, exponents = elements_and_exponents(kv_pages)
        for kind, heads_TGD in enumerate((keys_TGD, values_TGD)):
            fixed_G = None if exponents_2G is None else exponents_2G[kind]
            elements[page_T, kind, :, offset_T], exponents[page_T, kind, :, offset_T] = quantise(heads_TGD, fixed_G)
        return
    for kind, heads_TGD in enumerate((keys_TGD, values_TGD)):
        kv_pages[page_T, kind, :, offset_T] = heads_TGD.to(kv_pages.dtype)


def load(stored: Tensor, pages_W: Tensor) -> Tensor:
    """These pages of stored [pages, ..., R, D], in float32: [W, ..., P, D]."""
    pages = stored.index_select(0, pages_W)
    return dequantise(*elements_and_exponents(pages)) if is_fp8(stored) else pages.float()
