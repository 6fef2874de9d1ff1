"""Endpoints of NIM, KServe, Triton Inference Server, SageMaker and vLLM as a part of the server."""

from functools import partial

from oscine.api.common.errors import Error, ErrorText
from oscine.api.health import Health
from oscine.api.http.sse import SSE
from oscine.api.interface import Api
from oscine.api.openai import answers
from oscine.api.openai.chat_completions import ChatCompletions
from oscine.api.openai.completions import Completions
from oscine.api.openapi import GET, POST, PROBE, QUESTION, Operation
from oscine.api.serving.service import Service
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
from oscine.extensions.apis.responses.api import responses_of

_CHAT = {"messages": QUESTION, "max_completion_tokens": 200}
_TEXT = {"text_input": "Once upon a time", "parameters": {"max_tokens": 16}}


class ConventionsApi(Api):
    @property
    def operations(self) -> list[Operation]:
        service, health = self.service, Health(self.service)
        endpoints = ChatCompletions(service), Completions(service), responses_of(service).responses
        invocations = Invocations(service, *endpoints)
        return [
            *_nim(service, health),
            *_inference_protocol(service, health),
            *_sagemaker_and_vllm(service, health, invocations),
        ]


def _nim(service: Service, health: Health) -> list[Operation]:
    nim = Nim(service)
    return [
        GET("/v1/metadata", nim.metadata, "The deployment, as NIM describes it", answer=NimMetadata),
        GET("/v1/manifest", nim.manifest, "All model profiles", answer=NimManifest),
        GET("/v1/license", nim.license, "The license", answer=NimLicense),
        PROBE("/v1/version", nim.version, "Version, as NIM has it", answer=NimVersion),
        PROBE("/v1/metrics", health.metrics, "The same as /metrics", answer="text/plain"),
    ]


def _inference_protocol(service: Service, health: Health) -> list[Operation]:
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
        generate(f"{one}/generate", Generate(service, stream=False), "Continue a text", example=_TEXT),
        generate(
            f"{one}/generate_stream",
            Generate(service, stream=True),
            "Continue a text, as events",
            answer=SSE,
            example=_TEXT,
        ),
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


def _sagemaker_and_vllm(service: Service, health: Health, invocations: Invocations) -> list[Operation]:
    vllm = Vllm(service)
    unready, missing = {"503": answers.Readiness}, {"404": Error, "503": Error}
    return [
        PROBE("/ping", health.ready, "Whether all models are ready", answer=answers.Readiness, other=unready),
        POST("/invocations", invocations, "Answer a chat completion, completion or response", example=_CHAT),
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
