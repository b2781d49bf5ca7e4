"""Decoders with mixtures of experts: forms of the weights, quantization, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
from safetensors.numpy import load_file, save_file

from build_artifacts.checkpoints.architectures import has_experts, load_config
from build_artifacts.errors import UnsupportedModel
from build_artifacts.presets import DECODER_FP16, DECODER_INT4, DECODER_INT8_BLOCKS
from build_artifacts.recipes import DECODER_FP32
from deployments.engines.decoder import DecoderSpec
from tests.integration.compiler.decoders.test_families import (
    check_export,
    check_logits,
    compute_logits,
    export_graph,
    mean_cosine,
    quantize,
    run_graph,
)
from tests.support.decoder_families import NEMOTRON_EXPERTS, OWN, write_decoder
from tests.support.tiny_encoders import write_json

# The context is limited to the original one, for which the first of both tables is made.
PHI_ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "short_mscale": 1.3,
    "long_mscale": 1.5, "original_max_position_embeddings": 100,
    "short_factor": [1 + channel / 9 for channel in range(32)], "long_factor": [2.0] * 32,
}  # fmt: skip

MELLUM_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "default", "rope_theta": 50.0},
}


def count_operators(spec: DecoderSpec) -> Counter[str]:
    nodes = onnx.load(spec.path, load_external_data=False).graph.node
    return Counter(node.op_type for node in nodes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["Mixtral", "Qwen3Moe", "GraniteMoeShared", "Ernie4_5_Moe", "HunYuanMoEV1", "GptOss", "Phimoe",
     "ExaoneMoe", "SolarOpen", "MiniMaxM2", "Afmoe", "Qwen3Next", "NemotronH",
     "Mellum", "HYV3"],
)  # fmt: skip
def test_checkpoint_may_have_the_names_of_transformers(family: str, tmp_path: Path) -> None:
    """transformers can save all experts in two tensors, instead of those of the first release."""
    model = write_decoder(f"{family}ForCausalLM", tmp_path / "checkpoint", own(family))
    model.save_pretrained(tmp_path / "checkpoint", save_original_format=False)
    names = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert sum(name.endswith("experts.down_proj") for name in names) in (1, 2)
    ids, expected = compute_logits(model)
    check_logits(run_graph(export_graph(tmp_path, DECODER_FP32), ids), expected, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Ernie4_5_Moe", {"use_bias": True, "tie_word_embeddings": False}),
        ("HunYuanMoEV1", {"n_group": False}),  # no field of this architecture
        ("Phimoe", {"attention_bias": False, "lm_head_bias": False, "router_jitter_noise": 0.01}),
        ("Phimoe", {"rope_parameters": PHI_ROPE}),
        ("Afmoe", {"mup_enabled": False, "attention_bias": True}),
        ("ExaoneMoe", {"first_k_dense_replace": 0}),
        ("Mellum", {"norm_topk_prob": False, "mlp_layer_types": ["sparse", "sparse"]}),
        ("Mellum", {"rope_parameters": MELLUM_ROPE}),
        ("HYV3", {"num_shared_experts": 2, "attention_bias": True, "mlp_bias": True}),
    ],
)
def test_other_configs_match_transformers(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    check_export(tmp_path, f"{family}ForCausalLM", own(family) | changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["Mixtral", "Qwen2Moe", "Qwen3Moe", "GraniteMoeShared", "Dots1", "Afmoe", "MiniMaxM2",
     "NemotronH", "HYV3"],
)  # fmt: skip
def test_experts_are_quantized_and_routers_stay_float(family: str, tmp_path: Path) -> None:
    model = write_decoder(f"{family}ForCausalLM", tmp_path / "checkpoint", own(family))
    ids, expected = compute_logits(model)
    graph = export_graph(tmp_path, DECODER_FP32)
    float_experts = count_operators(graph)["MoE"]
    assert float_experts == (1 if family in ("Qwen2Moe", "Dots1", "HYV3") else 2)
    int8 = quantize(graph, tmp_path)
    check_quantized(int8, float_experts)
    assert mean_cosine(run_graph(int8, ids), expected) > 0.97


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [DECODER_INT8_BLOCKS, DECODER_INT4])
def test_experts_are_quantized_in_blocks(recipe: Any, tmp_path: Path) -> None:
    model = write_decoder("Qwen3MoeForCausalLM", tmp_path / "checkpoint", own("Qwen3Moe"))
    ids, expected = compute_logits(model)
    spec = export_graph(tmp_path, recipe)
    check_quantized(spec, 2)
    least, most = (0.99, 1) if recipe is DECODER_INT8_BLOCKS else (0.8, 0.99)
    assert least < mean_cosine(run_graph(spec, ids), expected) < most


def check_quantized(spec: DecoderSpec, experts: int) -> None:
    kinds = count_operators(spec)
    assert kinds["QMoE"] == kinds["Gemm"] == experts
    assert kinds["MoE"] == 0


@pytest.mark.slow
def test_experts_of_partial_blocks_stay_float(tmp_path: Path) -> None:
    changed = own("Qwen3Moe") | {"moe_intermediate_size": 48}
    model = write_decoder("Qwen3MoeForCausalLM", tmp_path / "checkpoint", changed)
    ids, expected = compute_logits(model)
    graph = export_graph(tmp_path, DECODER_FP32)
    for spec in (quantize(graph, tmp_path), export_again(tmp_path)):
        kinds = count_operators(spec)
        assert (kinds["MoE"], kinds["QMoE"], kinds["MatMul"]) == (2, 0, 0)
        assert mean_cosine(run_graph(spec, ids), expected) > 0.98


def export_again(directory: Path) -> DecoderSpec:
    (directory / "graph").rename(directory / "float graph")
    return export_graph(directory, DECODER_INT8_BLOCKS)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen2Moe", "Qwen3Moe", "Olmoe"])
def test_probabilities_of_experts_are_scaled_or_not(family: str, tmp_path: Path) -> None:
    other = not own(family).get("norm_topk_prob", False)
    check_export(tmp_path, f"{family}ForCausalLM", own(family) | {"norm_topk_prob": other})


@pytest.mark.slow
def test_glm_may_have_no_query_norm(tmp_path: Path) -> None:
    check_export(tmp_path, "Glm4MoeForCausalLM", own("Glm4Moe") | {"use_qk_norm": False})


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("Qwen3Moe", {"hidden_act": "gelu"}, "the activation `gelu`"),
        ("Olmoe", {"clip_qkv": 8.0}, "`clip_qkv` of the architecture `olmoe`"),
        ("Glm4Moe", {"n_group": 2, "topk_group": 1}, "`n_group` .* is 2"),
        ("Glm4Moe", {"norm_topk_prob": False}, "`norm_topk_prob` .* is false"),
        ("ExaoneMoe", {"n_group": 2, "topk_group": 1}, "`n_group` .* is 2"),
        ("SolarOpen", {"norm_topk_prob": False}, "`norm_topk_prob` .* is false"),
        ("Phimoe", {"hidden_act": "gelu"}, "the activation `gelu`"),
        ("NemotronH", {"mlp_hidden_act": "silu"}, "the activation `silu`"),
        ("NemotronH", {"n_group": 2, "topk_group": 1}, "`n_group` .* is 2"),
        ("NemotronH", {"moe_latent_size": 64}, "`moe_latent_size` .* is 64"),
    ],
)
def test_unsupported_experts_are_rejected_by_name(
    family: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    write_decoder(f"{family}ForCausalLM", tmp_path / "checkpoint", own(family) | changes)
    with pytest.raises(UnsupportedModel, match=reason):
        export_graph(tmp_path, DECODER_FP32)


def test_experts_have_no_gpu_graph(tmp_path: Path) -> None:
    write_decoder("Qwen3MoeForCausalLM", tmp_path / "checkpoint", own("Qwen3Moe"))
    with pytest.raises(UnsupportedModel, match="compute in fp32"):
        export_graph(tmp_path, DECODER_FP16)


def test_missing_expert_is_named(tmp_path: Path) -> None:
    write_decoder("Qwen3MoeForCausalLM", tmp_path / "checkpoint", own("Qwen3Moe"))
    path, missing = tmp_path / "checkpoint" / "model.safetensors", "layers.1.mlp.experts.5.up_proj"
    weights = load_file(path)
    save_file({n: w for n, w in weights.items() if missing not in n}, path)
    with pytest.raises(UnsupportedModel, match=f"no tensor `{missing}"):
        export_graph(tmp_path, DECODER_FP32)


def test_config_without_a_head_size_is_rejected(tmp_path: Path) -> None:
    """The default of this architecture is none, which transformers cannot compute with."""
    checkpoint = tmp_path / "checkpoint"
    write_decoder("HunYuanMoEV1ForCausalLM", checkpoint, own("HunYuanMoEV1"))
    config = json.loads((checkpoint / "config.json").read_bytes())
    write_json(checkpoint / "config.json", config | {"head_dim": None})
    with pytest.raises(UnsupportedModel, match=r"transformers does not support `config\.json`"):
        export_graph(tmp_path, DECODER_FP32)


@pytest.mark.parametrize("pattern", ["M*-", "ME*"])
def test_nemotron_has_experts_in_listed_layers_only(pattern: str, tmp_path: Path) -> None:
    """Its config has a number of experts in any case."""
    changed = own("NemotronH") | {"hybrid_override_pattern": pattern}
    write_decoder("NemotronHForCausalLM", tmp_path / "checkpoint", changed)
    assert has_experts(load_config(tmp_path / "checkpoint")) == ("E" in pattern)


def test_one_expert_is_none(tmp_path: Path) -> None:
    dense = tmp_path / "checkpoint"
    write_decoder("HunYuanDenseV1ForCausalLM", dense, own("HunYuanDenseV1") | {"num_experts": 1})
    assert not has_experts(load_config(dense))


def own(family: str) -> dict[str, Any]:
    changes = NEMOTRON_EXPERTS if family == "NemotronH" else {}
    return OWN[f"{family}ForCausalLM"] | changes
