"""Catalog of the rivals (measured servers of other projects): command, API, environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.rivals.apis import (
    Api,
    completion_api,
    inputs_api,
    open_inference_api,
    openai_api,
)
from benchmarks.rivals.materials import MLSERVER_MODEL

FP32, SEALED = "fp32", "the sealed graph"
MODEL_NAME = "model"  # model name in requests to servers with one model


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Server software of another project. `command` and `variables` have placeholders in braces.

    Placeholders are `{python}` (interpreter of the environment), `{bin}` (its directory), `{port}`,
    `{port_2}`, `{port_3}` and the attributes of Materials.
    """

    name: str
    title: str
    environment: str | None  # name of a requirement list; None: environment of this process
    package: str  # package whose version the results state
    computes_with: str
    command: tuple[str, ...]
    api: Api
    ready_path: str
    variables: Mapping[str, str] = field(default_factory=dict)


# Environment variables that keep rivals from sending statistics and downloading models.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "INFINITY_ANONYMOUS_USAGE_STATS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_GRAPH = ("--engine", "onnxruntime", "--model", "{graph}", "--tokenizer", "{tokenizer}")


def _script(script: str, *options: str) -> tuple[str, ...]:
    return ("{python}", f"{{programs}}/{script}.py", *options, "--port", "{port}")


def _around_graph(name: str, title: str, environment: str | None, package: str) -> Rival:
    """Return a rival in `programs/` that runs the graph of the artifact on ONNX Runtime."""
    script = f"{name.partition('-')[0]}_server"
    is_ray = name == "ray-serve"
    return Rival(
        name=name,
        title=title,
        environment=environment,
        package=package,
        computes_with=SEALED,
        command=_script(script, *_GRAPH),
        api=inputs_api("/" if is_ray else "/embed"),
        ready_path="/" if is_ray else "/health",
    )


def _in_fastapi(name: str, environment: str, title: str, package: str, *options: str) -> Rival:
    """Return a rival that runs a library in fp32 behind FastAPI."""
    return Rival(
        name=name,
        title=f"{title} in FastAPI",
        environment=environment,
        package=package,
        computes_with=FP32,
        command=_script("fastapi_server", "--engine", name, *options),
        api=inputs_api(),
        ready_path="/health",
    )


_CHECKPOINT = ("--model", "{checkpoint}")
_FLOAT_GRAPH = ("--model", "{float_graph}", "--tokenizer", "{tokenizer}")
_RIVALS = (
    _in_fastapi(
        "pipeline-padded", "torch", "transformers pipeline, padded to 512", "transformers",
        *_CHECKPOINT,
    ),
    _in_fastapi("pipeline", "torch", "transformers pipeline", "transformers", *_CHECKPOINT),
    _in_fastapi(
        "sentence-transformers", "torch", "sentence-transformers", "sentence-transformers",
        *_CHECKPOINT,
    ),
    _around_graph("fastapi-onnxruntime", "ONNX Runtime in FastAPI", "onnxruntime", "onnxruntime"),
    _around_graph("ray-serve", "Ray Serve, defaults", None, "ray"),
    _around_graph("litserve", "LitServe, batches of up to 32", "litserve", "litserve"),
    Rival(
        name="infinity",
        title="infinity, torch",
        environment="infinity",
        package="infinity-emb",
        computes_with=FP32,
        command=(
            "{bin}/infinity_emb", "v2", "--model-id", "{checkpoint}",
            "--served-model-name", MODEL_NAME, "--device", "cpu",
            "--host", "127.0.0.1", "--port", "{port}",
        ),
        api=openai_api("/embeddings", MODEL_NAME),
        ready_path="/health",
    ),
    Rival(
        name="mlserver",
        title="MLServer, custom runtime",
        environment="mlserver",
        package="mlserver",
        computes_with=SEALED,
        command=("{bin}/mlserver", "start", "{mlserver}"),
        api=open_inference_api(MLSERVER_MODEL),
        ready_path=f"/v2/models/{MLSERVER_MODEL}/ready",
        variables={
            "PYTHONPATH": "{programs}",
            "MLSERVER_HOST": "127.0.0.1",
            "MLSERVER_HTTP_PORT": "{port}",
            "MLSERVER_GRPC_PORT": "{port_2}",
            "MLSERVER_METRICS_PORT": "{port_3}",
        },
    ),
    _in_fastapi("fastembed", "fastembed", "fastembed", "fastembed", "--model", "{fastembed}"),
    _in_fastapi("openvino", "openvino", "OpenVINO", "openvino", *_FLOAT_GRAPH),
    Rival(
        name="llama.cpp",
        title="llama.cpp's server, published Q4_1 weights",
        environment="llama",
        package="llama-cpp-python",
        computes_with="Q4_1",
        command=(
            "{python}", "-m", "llama_cpp.server", "--model", "{gguf}",
            "--host", "127.0.0.1", "--port", "{port}",
        ),
        api=completion_api(MODEL_NAME),
        ready_path="/v1/models",
    ),
    Rival(
        name="onnxruntime-genai",
        title="onnxruntime-genai in FastAPI",
        environment="genai",
        package="onnxruntime-genai",
        computes_with="int4",
        command=_script("genai_server", "--model", "{genai}"),
        api=completion_api(MODEL_NAME),
        ready_path="/health",
    ),
)  # fmt: skip

RIVALS: Mapping[str, Rival] = {rival.name: rival for rival in _RIVALS}

# Servers that are not measured, with the reason. Every result file lists them.
NOT_INSTALLABLE: Mapping[str, str] = {
    "OpenVINO Model Server": "published as a container image and binary archives, not on PyPI; "
    "OpenVINO's Python package is measured instead",
    "text-embeddings-inference": "published as container images and Rust source, not on PyPI",
    "Triton Inference Server": "published as container images, not on PyPI",
}
