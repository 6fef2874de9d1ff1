"""CUDA graphs without a GPU: operators are recorded during capture, and replayed on the same memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RecordedGraph(TorchDispatchMode):
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._calls.append((function, args, kwargs or {}, outputs))
        return result

    def replay(self) -> None:
        for function, args, kwargs, outputs in self._calls:
            again = [leaf for leaf in tree_leaves(function(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for output, new in zip(outputs, again, strict=True):
                if output.data_ptr() != new.data_ptr():
                    output.copy_(new)


@contextmanager
def _capture(graph: RecordedGraph, pool: object) -> Iterator[None]:
    with graph:
        yield


def record_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", _capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
