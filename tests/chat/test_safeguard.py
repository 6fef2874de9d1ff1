"""The recipe of gpt-oss-safeguard in the documents: the policy becomes the developer's instructions."""

import re
from pathlib import Path

import msgspec
import openai_harmony as oh

from oscine.api.serving.schemas import ChatCompletionRequest
from oscine.api.turns.conversation import conversation
from oscine.chat.harmony import HarmonyRenderer

DOCUMENT = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def test_a_policy_is_rendered_as_the_model_was_trained(renderer: HarmonyRenderer, oracle: oh.HarmonyEncoding) -> None:
    found = re.search(r"```json\n(.+?)```", DOCUMENT.read_text(), re.DOTALL)
    assert found is not None
    given = msgspec.json.decode(found[1])
    policy, content = (message["content"] for message in given["messages"])
    system = oh.SystemContent.new().with_reasoning_effort(oh.ReasoningEffort.HIGH)
    system = system.with_conversation_start_date("2026-01-02")
    judgement = given["response_format"]["json_schema"]
    schema = msgspec.json.encode(judgement["schema"]).decode()
    sections = f"# Instructions\n\n{policy}\n\n# Response Formats\n\n## {judgement['name']}\n\n{schema}"
    expected = [
        oh.Message.from_role_and_content(oh.Role.SYSTEM, system),
        oh.Message.from_role_and_content(oh.Role.DEVELOPER, sections),
        oh.Message.from_role_and_content(oh.Role.USER, content),
    ]
    request = msgspec.json.decode(found[1], type=ChatCompletionRequest)
    prompt = renderer.render(conversation(request, "2026-01-02"))
    theirs = oracle.render_conversation_for_completion(oh.Conversation.from_messages(expected), oh.Role.ASSISTANT)
    assert oracle.decode(prompt) == oracle.decode(theirs)
    assert prompt == theirs
