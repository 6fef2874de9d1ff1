"""Each parameter that clients and other servers know is honoured, ignored or refused by name, and described."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.types.beta import message_create_params as beta_messages
from anthropic.types.message_create_params import MessageCreateParamsBase
from ollama._types import ChatRequest, GenerateRequest, Options
from openai.types import completion_create_params as text
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

from oscine.api.common.errors import APIError
from oscine.api.common.memory import Bodies, Held
from oscine.api.serving.schemas import ChatCompletionRequest, CompletionRequest, decode
from oscine.extensions.apis.anthropic.schemas import MessagesRequest
from oscine.extensions.apis.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions
from oscine.extensions.apis.responses.schemas import ResponseRequest
from tests.api.scripted_server import ScriptedServer, events_of

QUESTION = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": QUESTION},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}
FORMS: list[tuple[str, Any, str, Any]] = [
    ("json_schema", {"type": "integer"}, "guided_json", {"type": "integer"}),
    ("json_schema", '{"type": "integer"}', "guided_json", {"type": "integer"}),
    ("regex", "[a-z]+", "guided_regex", "[a-z]+"),
    ("grammar", 'start: "yes" | "no"', "guided_grammar", 'start: "yes" | "no"'),
    ("ebnf", 'start: "yes" | "no"', "guided_grammar", 'start: "yes" | "no"'),
]
GBNF = 'root ::= answer "!"\nanswer ::= "yes" | "no"\n'
# Parameters of vLLM and SGLang that OpenAI does not have.
OTHER_SERVERS = """
    top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos
    min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
    prompt_logprobs logprob_token_ids allowed_token_ids bad_words use_beam_search watermarking
    add_special_tokens structured_outputs guided_json guided_regex guided_choice guided_grammar
    guided_decoding_backend guided_whitespace_pattern priority structural_tag request_id session_id
    return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params ec_transfer_params vllm_xargs
    repetition_detection stream_interval logits_processors best_of media_io_kwargs mm_processor_kwargs
    return_prompt_text regex ebnf json_schema stop_regex no_stop_trim lora_path session_params
    custom_logit_processor custom_params return_hidden_states return_routed_experts rid extra_key
    data_parallel_rank routed_dp_rank bootstrap_host bootstrap_port bootstrap_room stream_reasoning typical_p
    grammar
"""
OF_CHAT = """
    thinking_token_budget include_reasoning echo add_generation_prompt continue_final_message documents
    chat_template chat_template_kwargs reasoning think thinking enable_thinking separate_reasoning input_ids
"""


def names(kind: Any) -> set[str]:
    return set(kind.__annotations__)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ChatCompletionRequest, names(chat.CompletionCreateParamsBase) | {*OTHER_SERVERS.split(), *OF_CHAT.split()}),
        (CompletionRequest, names(text.CompletionCreateParamsBase) | {*OTHER_SERVERS.split()}),
        (ResponseRequest, names(responses.ResponseCreateParamsBase) | {*OTHER_SERVERS.split()}),
        (MessagesRequest, names(MessageCreateParamsBase) | names(beta_messages.MessageCreateParamsBase)),
        (OllamaChatRequest, set(ChatRequest.model_fields)),
        (OllamaGenerateRequest, set(GenerateRequest.model_fields)),
        (OllamaOptions, set(Options.model_fields)),
    ],
    ids=["chat", "text", "responses", "messages", "ollama-chat", "ollama-generate", "ollama-options"],
)
def test_no_parameter_that_others_know_is_unknown_here(ours: Any, theirs: set[str]) -> None:
    assert theirs <= {*ours.__struct_fields__}


def described(schemas: dict[str, Any], kind: str, seen: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """All fields of a request and of its parts."""
    if kind in seen:
        return
    seen.add(kind)
    for name, field in schemas[kind].get("properties", {}).items():
        if name != schemas[kind].get("discriminator", {}).get("propertyName") and "const" not in str(field.get("enum")):
            yield f"{kind}.{name}", field
        for part in json.dumps(field).split("#/components/schemas/")[1:]:
            yield from described(schemas, part.split('"')[0], seen)


def test_every_field_of_every_request_is_described(scripted: ScriptedServer) -> None:
    document = scripted.get("/openapi.json").json()
    seen: set[str] = set()
    fields: dict[str, Any] = {}
    for operation in (o for methods in document["paths"].values() for o in methods.values() if "requestBody" in o):
        (content,) = operation["requestBody"]["content"].values()
        kind = content["schema"]["$ref"].rpartition("/")[2]
        fields |= described(document["components"]["schemas"], kind, seen)
    tags = {"NamedToolChoice.type", "NamedCustomChoice.type", "AllowedToolsChoice.type"}
    assert len(fields) > 150
    assert not {name for name, field in fields.items() if not field.get("description")} - tags


@pytest.mark.long
@pytest.mark.parametrize("path", BODIES)
def test_a_value_that_asks_for_nothing_is_taken_and_any_other_refused(scripted: ScriptedServer, path: str) -> None:
    document = scripted.get("/openapi.json").json()
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    properties = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]["properties"]
    usual = {name: field["enum"][1] for name, field in properties.items() if "anything but" in field["description"]}
    assert usual["typical_p"] == 1.0
    assert scripted.post(path, BODIES[path] | usual).status_code == 200
    for name in usual:
        refused = scripted.post(path, BODIES[path] | {name: 0.123})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")


@pytest.mark.parametrize("path", BODIES)
def test_what_is_ignored_changes_nothing(scripted: ScriptedServer, path: str) -> None:
    document = scripted.get("/openapi.json").json()
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    properties = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]["properties"]
    ignored = [name for name, field in properties.items() if "without effect" in field["description"]]
    untyped = [name for name in ignored if not {"type", "anyOf", "enum"} & properties[name].keys()]
    assert len(untyped) > 30
    body = BODIES[path] | {"seed": 1, "temperature": 0.5}
    for given in ({}, dict.fromkeys(untyped, "x"), {"no_name_that_is_known": 1}):
        assert scripted.post(path, body | given).status_code == 200
    plain, *others = ((r.prompt_token_ids, r.sampling, r.priority) for r in scripted.engine.requests)
    assert others == [plain, plain]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("name", "value", "ours", "same"), FORMS, ids=lambda v: str(v)[:20])
def test_forms_under_other_names(
    scripted: ScriptedServer, path: str, name: str, value: Any, ours: str, same: Any
) -> None:
    for given in ({name: value}, {ours: same}):
        assert scripted.post(path, BODIES[path] | given).status_code == 200
    asked, known = (request.sampling.grammar for request in scripted.engine.requests)
    assert asked is not None
    assert asked == known
    twice = scripted.post(path, BODIES[path] | {name: value, ours: same})
    assert twice.status_code == 400


@pytest.mark.parametrize("name", ["ebnf", "grammar", "guided_grammar"])
def test_gbnf_is_read_too(scripted: ScriptedServer, name: str) -> None:
    scripted.chat(**{name: GBNF})
    assert scripted.engine.requests[0].sampling.grammar is not None
    for wrong in ("root ::= (", "root ::= nothing", "root ::= " + "(" * 3000, 'root ::= "a"' + " " * 5000):
        refused = scripted.post("/v1/chat/completions", {"messages": QUESTION, name: wrong})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == name


def test_token_ids_of_a_chat_completion(scripted: ScriptedServer) -> None:
    t = scripted.tokenizer
    said = [t.channel, *b"analysis", t.message, *b"hm", t.end, t.start, *b"assistant"]
    said += [t.channel, *b"final", t.message, *b"yes", t.return_]
    scripted.says(*said, *b"never shown", size=4)
    answer = scripted.chat(return_token_ids=True, n=2)
    prompt = scripted.engine.requests[0].prompt_token_ids
    assert answer["prompt_token_ids"] == prompt
    assert [choice["token_ids"] for choice in answer["choices"]] == [said, said]
    events = scripted.chat_events(return_token_ids=True)
    assert events[0]["prompt_token_ids"] == prompt
    assert [i for event in events for choice in event["choices"] for i in choice.get("token_ids", ())] == said
    assert "token_ids" not in json.dumps([scripted.chat(), scripted.chat_events()])


@pytest.mark.parametrize("echo", [False, True])
def test_token_ids_of_a_text_completion(scripted: ScriptedServer, echo: bool) -> None:
    scripted.says("yes", scripted.tokenizer.return_, size=2)
    said = [*b"yes", scripted.tokenizer.return_]
    body = {"prompt": ["ab", "c"], "return_token_ids": True, "max_tokens": 9, "echo": echo}
    choices = scripted.post("/v1/completions", body).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[*b"ab"], [*b"c"]]
    assert [choice["token_ids"] for choice in choices] == [said, said]
    events = events_of(scripted.post("/v1/completions", body | {"stream": True}))
    found: dict[int, list[int]] = {0: [], 1: []}
    for choice in (choice for event in events for choice in event["choices"]):
        assert ("prompt_token_ids" in choice) == (found[choice["index"]] == [])
        found[choice["index"]] += choice["token_ids"]
    assert found == {0: said, 1: said}


@pytest.mark.parametrize(
    ("parameters", "begins_after"),
    [
        ({"thinking_token_budget": 5}, 5),
        ({"thinking_token_budget": 0}, 0),
        ({"reasoning": {"max_tokens": 7}}, 7),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
        ({"thinking_token_budget": 30, "final_headroom": 50}, 10),
        ({"thinking_token_budget": 30, "final_headroom": 5}, 30),
    ],
    ids=str,
)
def test_a_budget_of_thinking_ends_it(scripted: ScriptedServer, parameters: Any, begins_after: int) -> None:
    t = scripted.tokenizer
    thinks = scripted.says(t.channel, "analysis", t.message, "hm " * 40, size=1, finish="length")
    answers = scripted.says("So be it.", t.return_)
    scripted.engine.script = lambda request: (thinks if len(scripted.engine.requests) == 1 else answers)(request)
    answer = scripted.chat(max_tokens=60, **parameters)
    assert answer["choices"][0]["message"]["content"] == "So be it."
    first, second = scripted.engine.requests
    assert second.sampling.max_tokens == 60 - begins_after
    assert first.sampling.max_tokens == 60


@pytest.mark.parametrize(
    ("parameters", "effort"),
    [
        ({"think": False}, "low"),
        ({"think": True}, "medium"),
        ({"think": "high"}, "high"),
        ({"enable_thinking": False}, "low"),
        ({"reasoning": {"enabled": False}}, "low"),
        ({"thinking": {"type": "disabled"}}, "low"),
        ({"thinking": {"type": "enabled"}}, "medium"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, "high"),
    ],
    ids=str,
)
def test_thinking_is_switched_in_the_words_of_other_servers(
    scripted: ScriptedServer, parameters: Any, effort: str
) -> None:
    scripted.chat(**parameters)
    assert f"Reasoning: {effort}\n" in scripted.tokenizer.decode(scripted.engine.requests[0].prompt_token_ids)


def messages(server: ScriptedServer, **given: Any) -> Any:
    body = {"model": server.service.names[0], "messages": QUESTION, "max_tokens": 20, **given}
    return server.post("/v1/messages", body)


def param_refused(kind: type, **body: Any) -> str | None:
    sent = json.dumps({"messages": QUESTION, "max_tokens": 20, "model": "m", **body}).encode()
    scope: dict[str, Any] = {"type": "http"}
    try:
        with Held(Bodies(), scope):
            asyncio.run(decode(sent, kind, scope))
    except APIError as error:
        return error.param
    return None


@pytest.mark.parametrize("name", [*OTHER_SERVERS.split(), "logprobs"])
def test_messages_know_the_parameters_that_chat_completions_know(name: str) -> None:
    """Those that would change an answer are honoured or refused."""
    wrong = {name: "a value"}
    assert param_refused(MessagesRequest, **wrong) == param_refused(ChatCompletionRequest, **wrong)


def test_extensions_are_honoured_in_messages(scripted: ScriptedServer) -> None:
    given = {"min_p": 0.25, "seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.75, "repetition_penalty": 1.5}
    given |= {"min_tokens": 3, "stop_token_ids": [65], "logit_bias": {"66": 2.0}}
    assert messages(scripted, **given, priority=-2, n=1).status_code == 200
    (request,) = scripted.engine.requests
    sampling = request.sampling
    assert (sampling.min_p, sampling.seed, sampling.min_tokens) == (0.25, 7, 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, 0.75, 1.5)
    assert sampling.stop_token_ids[-1] == 65
    assert sampling.logit_bias == {66: 2.0}
    assert request.priority == -2
    assert messages(scripted, guided_choice=["yes", "no"]).status_code == 200
    assert scripted.engine.requests[-1].sampling.grammar is not None
    schema = {"type": "object", "properties": {}}
    both = {"output_config": {"format": {"type": "json_schema", "schema": schema}}, "guided_choice": ["a"]}
    assert "'guided_choice'" in messages(scripted, **both).json()["error"]["message"]
    assert messages(scripted, n=2).status_code == 400
