"""Answers of a whole model, by its folder or file."""

from oscine.checkpoint.hub import NANO_FOLDER
from oscine.engine.build import build_engine
from oscine.engine.core import offline
from oscine.settings.config import EngineOptions, ModelOptions
from oscine.types import GenerationRequest, SamplingParams


def greedy(model: str, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of a model that has the vocabulary of the embedded one."""
    loop = build_engine(EngineOptions(model=ModelOptions(model, tokenizer=str(NANO_FOLDER)), quiet=True)).loop
    sampling = SamplingParams(48, temperature=0.0)
    outputs = offline.generate(loop, [GenerationRequest(str(i), ids, sampling) for i, ids in enumerate(prompts)])
    return [[i for output in outputs[str(number)] for i in output.token_ids] for number in range(len(prompts))]
