"""Random weights in an engine process, which imports less of torch than this one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from oscine.engine.build import build_engine
from oscine.engine.core.offline import generate
from oscine.settings.config import ModelOptions
from tests.tiny import BYTES

from .harness import options, read, request, run, serving, tokens


@pytest.fixture(scope="module")
def config_file(folder: Path) -> Path:
    file = folder / "shapes.json"
    file.write_text(json.dumps(BYTES.to_dict()))
    return file


@pytest.mark.parametrize(
    ("num_ranks", "kind"),
    [
        (1, ""),
        pytest.param(2, "", marks=pytest.mark.needs("parallel")),
        pytest.param(2, ":skewed", marks=pytest.mark.needs("parallel")),
    ],
)
def test_an_engine_on_a_cpu_makes_the_same_random_weights_as_this_process(
    config_file: Path, num_ranks: int, kind: str
) -> None:
    model = ModelOptions(random_weights=f"{config_file}{kind}", tokenizer=str(config_file.parent), device="cpu")
    here = replace(options(config_file, executor="torch"), model=model)
    there = replace(here, model=replace(model, tensor_parallel_size=num_ranks))
    asked = request("a", prompt=list(range(1, 40)), max_tokens=12, temperature=0.0)
    expected = generate(build_engine(here).loop, [asked])

    async def test() -> None:
        async with serving(there) as client:
            assert client.info is not None
            assert client.info.model == f"{config_file}{kind}"
            assert tokens(await read(client.submit(asked))) == tokens(expected["a"])

    run(test)
