"""The embedded model as it ships: the engine's greedy tokens are those that transformers generates from the folder."""

from pathlib import Path

import pytest
import torch

from oscine.chat.harmony import HarmonyRenderer
from oscine.chat.messages import Conversation, FunctionTool, Message
from oscine.chat.tokenizer import Tokenizer
from oscine.engine.build import build_engine
from oscine.engine.core import offline
from oscine.settings.config import EngineOptions
from oscine.types import GenerationRequest, SamplingParams
from tests.model.test_gpt_oss import transformers_model

NANO = Path(__file__).parents[2] / "oscine" / "model" / "nano"
MAX_TOKENS = 200
WEATHER = FunctionTool(
    "get_weather", "Gets the weather.", {"type": "object", "properties": {"city": {"type": "string"}}}
)
BOXES = " ".join(f"The code of box {i} is {i * 7919 % 10007}." for i in range(60))  # far longer than the window
CONVERSATIONS = {
    "sum": Conversation((Message("user", "What is 27 + 58?"),), current_date="2025-08-05"),
    "call": Conversation((Message("user", "What is the weather in Osaka?"),), (WEATHER,), current_date="2025-08-05"),
    "recall": Conversation((Message("user", f"{BOXES} What is the code of box 17?"),), current_date="2025-08-05"),
}


@pytest.fixture(scope="module")
def generated() -> dict[str, list[int]]:
    """By Oscine's engine on two threads, all conversations at once; prompt and answer."""
    token = Tokenizer(NANO)
    renderer = HarmonyRenderer(token)
    sampling = SamplingParams(MAX_TOKENS, temperature=0.0, stop_token_ids=(token.return_, token.call))
    prompts = {name: renderer.render(conversation) for name, conversation in CONVERSATIONS.items()}
    loop = build_engine(EngineOptions(quiet=True)).loop
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    outputs = offline.generate(loop, [GenerationRequest(name, ids, sampling) for name, ids in prompts.items()])
    torch.set_num_threads(threads)
    return {name: ids + [i for output in outputs[name] for i in output.token_ids] for name, ids in prompts.items()}


@pytest.mark.long
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_greedy_tokens_are_those_of_transformers(name: str, generated: dict[str, list[int]]) -> None:
    oracle = transformers_model(NANO)
    prompt = HarmonyRenderer(Tokenizer(NANO)).render(CONVERSATIONS[name])
    with torch.inference_mode():
        expected = oracle.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=MAX_TOKENS)[0].tolist()
    assert generated[name] == expected


@pytest.mark.long
def test_the_answers_mean_something(generated: dict[str, list[int]]) -> None:
    text = {name: Tokenizer(NANO).decode(ids) for name, ids in generated.items()}
    assert text["sum"].endswith("85.<|return|>")
    assert text["call"].endswith('{"city":"Osaka"}<|call|>')
