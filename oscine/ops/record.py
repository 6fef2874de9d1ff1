"""Records of the values of a Gluon kernel."""

from typing import Any, dataclass_transform

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate


@dataclass_transform()
def record(cls: Any) -> Any:
    """An aggregate of the annotated fields of a class, constructed from their values in that order."""
    fields = gl.constexpr(tuple(cls.__annotations__))  # a constexpr is part of the key of Triton's cache
    kinds = tuple(cls.__annotations__.values())

    @gluon.constexpr_function  # it unwraps constants
    def construct(self, *values):
        for name, kind, value in zip(fields, kinds, values, strict=True):
            setattr(self, name, gl.constexpr(value) if kind is gl.constexpr else value)

    cls.__init__ = construct
    return _aggregate(cls)
