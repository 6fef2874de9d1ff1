"""Triton's own interpreter, without its repeated work."""

from types import SimpleNamespace

import triton
from triton.runtime import interpreter


def do_less() -> None:
    """The interpreter patches the language at each launch and at each call of a function within."""
    everything = SimpleNamespace(__globals__={"tl": triton.language, "core": triton.language.core})
    interpreter._patch_lang(everything)
    done = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda fn: done
    triton.language.core._type_for_tuple_values = lambda values, fields=None: None  # only the compiler asks for it
