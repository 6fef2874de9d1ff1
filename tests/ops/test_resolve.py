"""The table of backends: its choices and its refusals."""

import pytest
import torch

from oscine.ops import table
from oscine.ops.moe.reference import moe
from oscine.ops.table import choose, describe, resolve


def test_every_op_of_every_platform_resolves() -> None:
    for name in table.DEFAULTS:
        assert resolve(name).moe is moe or name != "cpu"
    assert table.platform(torch.device("cpu")) == "cpu"
    assert table.platform(torch.device("cuda"), torch.float32) == "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_of_another_kind_is_not_taken_for_a_cpu(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="'mps' is not supported"):
        choose(table.platform(torch.device("mps"), dtype))


def test_overrides_are_kept_and_described() -> None:
    choice = choose("cpu", {"moe": "reference"})
    assert set(choice) == set(table.TABLE)
    assert "moe=reference" in describe(choice)


@pytest.mark.parametrize(
    ("device", "overrides", "named"),
    [
        ("cpu", {"moe": "warp-drive"}, "'warp-drive'"),
        ("cpu", {"fly": "reference"}, "'fly'"),
        ("mps", {}, "'mps'"),
    ],
)
def test_what_the_table_lacks_is_named(device: str, overrides: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        resolve(device, overrides)


def test_a_backend_that_cannot_be_imported_does_not_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.TABLE["moe"], "broken", "oscine.ops.moe.absent:moe")
    with pytest.raises(ValueError, match="'broken' of op 'moe' cannot be loaded"):
        resolve("cpu", {"moe": "broken"})
