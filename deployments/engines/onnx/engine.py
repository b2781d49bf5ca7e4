"""The engine ONNX Runtime: encoders and decoders on any provider, encoder-decoders on the CPU."""

from __future__ import annotations

from functools import partial

from deployments.config import EncoderSettings, HardwareSettings
from deployments.engines.base import EncoderEngine, EngineKind, EngineTarget, GraphSpec
from deployments.engines.decoder import DecoderEngine, DecoderSpec
from deployments.engines.single_thread_decoder import SingleThreadDecoder


def _missing_requirement(target: EngineTarget, hardware: HardwareSettings) -> str | None:
    from deployments.engines.onnx.sessions import missing_provider, select_providers
    from deployments.engines.tensorrt import TENSORRT, missing_tensorrt

    providers = select_providers(target.options, hardware)
    if missing := missing_provider(providers):
        return f"onnxruntime has no `{missing}` here"
    return missing_tensorrt() if TENSORRT in providers else None


def _open_encoder(spec: GraphSpec, settings: EncoderSettings) -> EncoderEngine:
    if spec.options.buckets:
        from deployments.engines.onnx.io_binding import IoBindingEngine

        return IoBindingEngine(spec, settings)
    from deployments.engines.onnx.encoder import OnnxEngine

    return OnnxEngine(spec, settings)


def _open_decoder(
    spec: DecoderSpec, hardware: HardwareSettings, *, slots: int, context: int
) -> DecoderEngine:
    from deployments.engines.onnx.decoder import OnnxDecoder
    from deployments.engines.onnx.encoder_decoder import OnnxEncoderDecoder
    from deployments.engines.onnx.sessions import CUDA, select_providers

    has_encoder = spec.generation_config.encoder_decoder is not None
    engine = OnnxEncoderDecoder if has_encoder else OnnxDecoder
    open_ = partial(engine, spec, hardware, slots=slots, context=context)
    captures = CUDA in select_providers(spec.options, hardware)
    return SingleThreadDecoder(open_) if captures else open_()


ONNXRUNTIME = EngineKind(
    packages=("onnxruntime",),
    distributions=("onnxruntime", "onnxruntime-gpu"),
    missing_requirement=_missing_requirement,
    open_encoder=_open_encoder,
    open_decoder=_open_decoder,
)
