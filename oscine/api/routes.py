"""Every endpoint, one line each. The router, the check of keys and /openapi.json are made from this table."""

from functools import partial

from oscine.api.common.errors import Error, ErrorText
from oscine.api.health import Health
from oscine.api.http.sse import SSE
from oscine.api.openai import answers
from oscine.api.openai.chat_completions import ChatCompletions
from oscine.api.openai.completions import Completions
from oscine.api.openai.models import Models
from oscine.api.openai.tokenization import Tokenize
from oscine.api.openapi import ANTHROPIC, DELETE, GET, OLLAMA, OLLAMA_GET, POST, PROBE, Description, Operation
from oscine.api.serving.schemas import DetokenizeRequest, TokenizeRequest
from oscine.extensions.apis.anthropic.answer import AnthropicAnswer
from oscine.extensions.apis.anthropic.endpoint import AnthropicMessages, CountTokens
from oscine.extensions.apis.batches.endpoint import Batches, Files
from oscine.extensions.apis.batches.schemas import (
    BatchesQuery,
    BatchList,
    BatchObject,
    BatchRequest,
    DeletedFile,
    FileList,
    FileObject,
    FilesQuery,
    FileUpload,
)
from oscine.extensions.apis.batches.service import BatchService
from oscine.extensions.apis.conventions.generate import Generate
from oscine.extensions.apis.conventions.kserve import KServe
from oscine.extensions.apis.conventions.nim import Nim
from oscine.extensions.apis.conventions.sagemaker import Invocations
from oscine.extensions.apis.conventions.schemas import (
    GenerateAnswer,
    ModelConfig,
    ModelMetadata,
    ModelQuery,
    ModelReadiness,
    NimLicense,
    NimManifest,
    NimMetadata,
    NimVersion,
    ServerInfo,
    ServerLoad,
    ServerMetadata,
    TokenizerInfo,
)
from oscine.extensions.apis.conventions.vllm import Vllm
from oscine.extensions.apis.ollama.endpoint import OllamaChat, OllamaGenerate
from oscine.extensions.apis.ollama.models import OllamaModelList, change, embed
from oscine.extensions.apis.ollama.schemas import (
    OllamaChatAnswer,
    OllamaGenerateAnswer,
    OllamaLoadedModels,
    OllamaModelInfo,
    OllamaModelRequest,
    OllamaModels,
    OllamaPullRequest,
    OllamaStatus,
)
from oscine.extensions.apis.responses.context import Compact, InputTokens
from oscine.extensions.apis.responses.endpoint import Responses, StoredResponses
from oscine.extensions.apis.responses.schemas import (
    CompactedResponse,
    DeletedResponse,
    InputItems,
    ItemsQuery,
    NoQuery,
    ResponseAnswer,
    ResponseInputTokens,
    RetrieveQuery,
)
from oscine.extensions.apis.responses.service import ResponseService


def endpoints(service: ResponseService) -> list[Operation]:
    """The first that matches serves: a path with a parameter comes after the paths that it would cover."""
    health, models, tokenize = Health(service), Models(service), Tokenize(service)
    chat, text = ChatCompletions(service), Completions(service)
    claude, count = AnthropicMessages(service), CountTokens(service)
    counted, compact = InputTokens(service), Compact(service)
    responses, stored, one = Responses(service), StoredResponses(service), "/v1/responses/{id}"
    dead, unready, unwell = ({"503": kind} for kind in (answers.Status, answers.Readiness, answers.HealthReport))
    table = [
        POST("/v1/chat/completions", chat, "Answer a conversation", answer=answers.ChatCompletion),
        POST("/v1/completions", text, "Continue a text", answer=answers.Completion),
        POST("/v1/responses", responses, "Create a response", answer=ResponseAnswer),
        POST("/v1/responses/input_tokens", counted, "Count tokens", answer=ResponseInputTokens),
        POST("/v1/responses/compact", compact, "Compact a conversation", answer=CompactedResponse),
        GET(one, stored.retrieve, "A stored response, or its events", query=RetrieveQuery, answer=ResponseAnswer),
        DELETE(one, stored.delete, "Delete a response", answer=DeletedResponse),
        POST(f"{one}/cancel", stored.cancel, "End a response in the background", query=NoQuery, answer=ResponseAnswer),
        GET(
            f"{one}/input_items",
            stored.input_items,
            "The input items of a response",
            query=ItemsQuery,
            answer=InputItems,
        ),
        ANTHROPIC("/v1/messages", claude, "Answer messages", answer=AnthropicAnswer),
        ANTHROPIC("/v1/messages/count_tokens", count, "Count tokens", answer=answers.InputTokens),
        *(_batches(service) if isinstance(service, BatchService) else ()),
        *_ollama(service),
        *_nim(service, health),
        *_inference_protocol(service, health),
        *_sagemaker_and_vllm(service, health, Invocations(service, chat, text, responses)),
        GET("/v1/models", models.list, "List models", answer=answers.ModelList),
        GET("/v1/models/{name:path}", models.retrieve, "One model", answer=answers.ModelCard),
        POST(
            "/tokenize",
            tokenize.tokenize,
            "The tokens of a text or messages",
            body=TokenizeRequest,
            answer=answers.Tokens,
        ),
        POST("/detokenize", tokenize.detokenize, "The text of tokens", body=DetokenizeRequest, answer=answers.Text),
        PROBE("/health", health.health, "State of server and engines", answer=answers.HealthReport, other=unwell),
        PROBE("/v1/health/live", health.live, "Whether the server is alive", answer=answers.Status, other=dead),
        PROBE(
            "/v1/health/ready", health.ready, "Whether all models are ready", answer=answers.Readiness, other=unready
        ),
        PROBE("/version", health.version, "Version of Oscine", answer=answers.Version),
        PROBE("/metrics", health.metrics, "Metrics for Prometheus", answer="text/plain"),
    ]
    description = Description(table, keys=bool(service.keys))
    table.append(PROBE("/openapi.json", description.document, "This description"))
    table.append(PROBE("/docs", description.page, "This description as a page", answer="text/html"))
    return table


def _batches(service: BatchService) -> list[Operation]:
    files, batches, file, batch = Files(service), Batches(service), "/v1/files/{id}", "/v1/batches/{id}"
    off = {"501": Error}
    stored = {**off, "413": Error, "415": Error, "408": Error, "400": Error}
    return [
        POST("/v1/files", files.create, "Upload a file", form=FileUpload, answer=FileObject, other=stored),
        GET("/v1/files", files.list, "List files", query=FilesQuery, answer=FileList, other=off),
        GET(file, files.retrieve, "One file", answer=FileObject, other=off),
        GET(f"{file}/content", files.content, "The content of a file", answer="application/octet-stream", other=off),
        DELETE(file, files.delete, "Delete a file", answer=DeletedFile, other={**off, "409": Error}),
        POST(
            "/v1/batches",
            batches.create,
            "Create a batch",
            body=BatchRequest,
            answer=BatchObject,
            other={**off, "429": Error},
        ),
        GET("/v1/batches", batches.list, "List batches", query=BatchesQuery, answer=BatchList, other=off),
        GET(batch, batches.retrieve, "One batch", answer=BatchObject, other=off),
        POST(f"{batch}/cancel", batches.cancel, "End a batch", answer=BatchObject, other={**off, "409": Error}),
    ]


def _ollama(service: ResponseService) -> list[Operation]:
    chat, generate, models = OllamaChat(service), OllamaGenerate(service), OllamaModelList(service)
    refused = partial(OLLAMA, summary="Not supported", other={"400": ErrorText})
    return [
        OLLAMA("/api/chat", chat, "Answer a conversation", answer=OllamaChatAnswer),
        OLLAMA("/api/generate", generate, "Answer a prompt", answer=OllamaGenerateAnswer),
        OLLAMA_GET("/api/tags", models.tags, "List models", answer=OllamaModels),
        OLLAMA_GET("/api/ps", models.ps, "List models that are ready", answer=OllamaLoadedModels),
        OLLAMA_GET("/api/version", models.version, "Version of Ollama's API", answer=answers.Version, open=True),
        OLLAMA("/api/show", models.show, "One model", body=OllamaModelRequest, answer=OllamaModelInfo),
        OLLAMA("/api/pull", models.pull, "Whether a model is served", body=OllamaPullRequest, answer=OllamaStatus),
        *(refused(f"/api/{name}", embed) for name in ("embed", "embeddings")),
        *(refused(f"/api/{name}", change) for name in ("create", "copy", "push")),
        DELETE("/api/delete", change, "Not supported", error=ErrorText, other={"400": ErrorText}),
    ]


def _nim(service: ResponseService, health: Health) -> list[Operation]:
    nim = Nim(service)
    return [
        GET("/v1/metadata", nim.metadata, "The deployment, as NIM describes it", answer=NimMetadata),
        GET("/v1/manifest", nim.manifest, "All model profiles", answer=NimManifest),
        GET("/v1/license", nim.license, "The license", answer=NimLicense),
        PROBE("/v1/version", nim.version, "Version, as NIM has it", answer=NimVersion),
        PROBE("/v1/metrics", health.metrics, "The same as /metrics", answer="text/plain"),
    ]


def _inference_protocol(service: ResponseService, health: Health) -> list[Operation]:
    """KServe's, with Triton's extension for texts. A path with more segments comes before those that it ends."""
    kserve, one = KServe(service), "/v2/models/{name:path}"
    get, probe = partial(GET, error=ErrorText), partial(PROBE, error=ErrorText)
    generate = partial(POST, error=ErrorText, answer=GenerateAnswer, undeclared=True)
    dead, unready = {"503": answers.Status}, {"503": answers.Readiness}
    return [
        probe("/v2/health/live", health.live, "Whether the server is alive", answer=answers.Status, other=dead),
        probe(
            "/v2/health/ready", health.ready, "Whether all models are ready", answer=answers.Readiness, other=unready
        ),
        get("/v2", kserve.server, "Name and version", answer=ServerMetadata),
        generate(f"{one}/generate", Generate(service, stream=False), "Continue a text"),
        generate(f"{one}/generate_stream", Generate(service, stream=True), "Continue a text, as events", answer=SSE),
        probe(
            f"{one}/ready",
            kserve.ready,
            "Whether a model is ready",
            answer=ModelReadiness,
            other={"503": ModelReadiness},
        ),
        get(f"{one}/config", kserve.config, "The configuration of a model", answer=ModelConfig),
        get(one, kserve.model, "One model", answer=ModelMetadata),
    ]


def _sagemaker_and_vllm(service: ResponseService, health: Health, invocations: Invocations) -> list[Operation]:
    vllm = Vllm(service)
    unready, missing = {"503": answers.Readiness}, {"404": Error, "503": Error}
    return [
        PROBE("/ping", health.ready, "Whether all models are ready", answer=answers.Readiness, other=unready),
        POST("/invocations", invocations, "Answer a chat completion, completion or response"),
        GET("/load", vllm.load, "Sequences that run or wait", answer=ServerLoad),
        GET("/server_info", vllm.server_info, "Options of the engines", answer=ServerInfo),
        GET(
            "/tokenizer_info",
            vllm.tokenizer_info,
            "The tokenizer",
            query=ModelQuery,
            answer=TokenizerInfo,
            other=missing,
        ),
    ]
