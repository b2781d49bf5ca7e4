"""Tiny decoders of any architecture of transformers, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.decoder_artifacts import write_byte_tokenizer
from tests.support.tiny_encoders import write_json

WINDOW = 32
# The hidden size is a square number. Gemma scales embeddings by the square root of this size. The
# model builder would round a root that is no integer to two decimals.
SIZES = {
    "hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "pad_token_id": 0,
    "eos_token_id": 7,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3}
ROUTED_EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
GRANITE = {
    "embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.25,
    "logits_scaling": 4.0,
}  # fmt: skip
GRANITE_EXPERTS = GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 3}
GRANITE_LAYERS = {
    "num_hidden_layers": 3, "sliding_window": WINDOW, "layer_rope_theta": [1e4, 0, 50],
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}  # fmt: skip
DELTA_NET = {
    "num_hidden_layers": 3, "layer_types": [
        "linear_attention", "full_attention", "linear_attention"],
    "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 16,
}  # fmt: skip
MAMBA2 = {
    "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 8,
    "mamba_d_head": 64, "mamba_d_state": 32,
}  # fmt: skip
NEMOTRON_EXPERTS = ROUTED_EXPERTS | {
    "hybrid_override_pattern": "ME*-E", "moe_shared_expert_intermediate_size": 96,
}  # fmt: skip
FALCON_40B = {
    "new_decoder_architecture": True,
    "num_kv_heads": 2,
    "num_ln_in_parallel_attn": None,
}
FALCON_RW = {
    "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True,
    "num_attention_heads": 12, "hidden_size": 192,  # slopes that bf16 does not represent
}  # fmt: skip
# Texts of the tests reach the third multiple of the original context.
MINISTRAL_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 30,
    "llama_4_scaling_beta": 0.5,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": WINDOW,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 40, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 24,
}  # fmt: skip
# Architectures whose OWN values include recurrent layers.
RECURRENT = (
    "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM",
    "Qwen3NextForCausalLM", "FalconH1ForCausalLM", "BambaForCausalLM", "NemotronHForCausalLM",
    "Lfm3ForCausalLM", "OlmoHybridForCausalLM", "Mamba2ForCausalLM",
)  # fmt: skip
# Config values of every architecture, in addition to SIZES. Most defaults turn off what the graph
# of the architecture should do, such as windows, biases and factors.
OWN: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "GraniteForCausalLM": GRANITE,
    "NemotronForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "ArceeForCausalLM": {},
    "Jais2ForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": WINDOW},
    "Qwen3ForCausalLM": {"head_dim": 32},
    "GemmaForCausalLM": {"head_dim": 16},
    "Gemma2ForCausalLM": {"head_dim": 16, "sliding_window": WINDOW},
    "Gemma3ForCausalLM": {"head_dim": 16, "sliding_window": WINDOW, "layer_types": [
        "sliding_attention", "full_attention"]},
    "Phi3ForCausalLM": {"original_max_position_embeddings": 128, "sliding_window": WINDOW},
    "PhiForCausalLM": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "Ernie4_5ForCausalLM": {"head_dim": 16},
    "OPTForCausalLM": {"ffn_dim": 96},
    # Scores without a factor grow with the size.
    "GPTNeoForCausalLM": {"hidden_size": 64, "window_size": WINDOW, "attention_types": [
        [["global", "local"], 1]]},
    "GPTJForCausalLM": {"rotary_dim": 32},
    "BloomForCausalLM": {},
    "FalconForCausalLM": {"num_ln_in_parallel_attn": 1},
    "GPTBigCodeForCausalLM": {},
    "MptForCausalLM": {"max_seq_len": 128},
    "CodeGenForCausalLM": {"rotary_dim": 32},
    "XGLMForCausalLM": {"ffn_dim": 96},
    "BioGptForCausalLM": {},
    "GPTNeoXForCausalLM": {"rotary_pct": 0.5},
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0], "use_sliding_window": True,
        "sliding_window": WINDOW},
    "SeedOssForCausalLM": {"head_dim": 32, "attention_bias": True, "attention_out_bias": True},
    "Olmo3ForCausalLM": {"sliding_window": WINDOW, "layer_types": [
        "sliding_attention", "full_attention"]},
    "Exaone4ForCausalLM": {"sliding_window": WINDOW, "layer_types": [
        "sliding_attention", "full_attention"]},
    "CohereForCausalLM": {"logit_scale": 0.25},
    "Cohere2ForCausalLM": {"logit_scale": 0.25, "sliding_window": WINDOW, "layer_types": [
        "sliding_attention", "full_attention"]},
    "StableLmForCausalLM": {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "Starcoder2ForCausalLM": {"sliding_window": WINDOW},
    "GlmForCausalLM": {"head_dim": 64, "attention_bias": True},
    "Glm4ForCausalLM": {"head_dim": 64, "attention_bias": True},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 32, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}},
    "HeliumForCausalLM": {"head_dim": 64},
    "MixtralForCausalLM": {"num_local_experts": 4, "sliding_window": WINDOW},
    "Qwen2MoeForCausalLM": EXPERTS | {
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96, "mlp_only_layers": [0],
        "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "Qwen3MoeForCausalLM": EXPERTS | {"moe_intermediate_size": 64, "norm_topk_prob": True,
        "use_sliding_window": True, "sliding_window": WINDOW},
    "OlmoeForCausalLM": EXPERTS,
    "FlexOlmoForCausalLM": EXPERTS,
    "GraniteMoeForCausalLM": GRANITE_EXPERTS,
    "GraniteMoeSharedForCausalLM": GRANITE_EXPERTS | {"shared_intermediate_size": 64},
    "GraniteMoeHybridForCausalLM": GRANITE_EXPERTS | {
        "num_local_experts": 0, "shared_intermediate_size": 96, "position_embedding_type": "rope",
        "mamba_n_heads": 8, "layer_types": ["attention"] * 2},
    "Ernie4_5_MoeForCausalLM": {
        "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 64, "moe_layer_end_index": 1},
    "Glm4MoeForCausalLM": ROUTED_EXPERTS | {"use_qk_norm": True, "partial_rotary_factor": 0.5},
    "Dots1ForCausalLM": ROUTED_EXPERTS | {
        "n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": True,
        "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "GptOssForCausalLM": {
        "num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 32, "intermediate_size": 64,
        "swiglu_limit": 1.5, "sliding_window": WINDOW, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": WINDOW}},
    "Lfm2ForCausalLM": {
        "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
        "conv_bias": True},
    "Lfm2MoeForCausalLM": EXPERTS | {
        "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1, "moe_intermediate_size": 64, "routed_scaling_factor": 1.5},
    "Qwen3_5ForCausalLM": DELTA_NET,
    "Qwen3_5MoeForCausalLM": DELTA_NET | EXPERTS | {
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96},
    "DeepseekV2ForCausalLM": LATENT | {
        "q_lora_rank": None, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
        "moe_intermediate_size": 64, "first_k_dense_replace": 1, "topk_method": "greedy",
        "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1},
    "DeepseekV3ForCausalLM": LATENT | ROUTED_EXPERTS | {
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
        "norm_topk_prob": True},
    "Glm4MoeLiteForCausalLM": LATENT | ROUTED_EXPERTS | {
        "n_group": 1, "topk_group": 1, "v_head_dim": 48, "norm_topk_prob": True,
        "mlp_layer_types": ["dense", "sparse"]},
    "MiniCPM3ForCausalLM": LATENT | {
        "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 64},
    # transformers would set the embedding of a padding token to zero.
    "YoutuForCausalLM": LATENT | {"rope_interleave": False, "pad_token_id": None},
    "Gemma4UnifiedForCausalLM": {
        "num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "head_dim": 16,
        "global_head_dim": 32, "sliding_window": WINDOW, "final_logit_softcapping": 3.0},
    "Gemma4ForCausalLM": {
        "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2, "head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW,
        "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 300,
        "use_double_wide_mlp": True, "final_logit_softcapping": 3.0},
    "Gemma3nForCausalLM": {
        "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2, "head_dim": 16, "sliding_window": WINDOW, "laurel_rank": 64,
        "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 200,
        "activation_sparsity_pattern": [0.95, 0.8] + [0.0] * 4, "final_logit_softcapping": 3.0},
    "FalconH1ForCausalLM": {
        "mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_state": 32, "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.25, "mlp_multipliers": [1.5, 0.5], "key_multiplier": 0.6,
        "attention_in_multiplier": 1.25, "attention_out_multiplier": 0.75, "ssm_in_multiplier": 0.8,
        "ssm_out_multiplier": 1.2, "ssm_multipliers": [0.9, 1.3, 0.7, 1.1, 0.6]},
    "BambaForCausalLM": {"num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_heads": 8,
        "mamba_d_state": 32},
    "NemotronHForCausalLM": {"head_dim": 32, "mamba_num_heads": 8, "mamba_head_dim": 64,
        "n_groups": 2, "ssm_state_size": 32, "hybrid_override_pattern": "M-*-M"},
    "OlmoHybridForCausalLM": DELTA_NET | {
        "linear_num_key_heads": 4, "rope_parameters": {"rope_theta": None}},
    "Lfm3ForCausalLM": {
        "num_hidden_layers": 4, "head_dim": 32, "sliding_window": WINDOW, "layer_types": [
            "conv", "full_attention", "sliding_attention", "conv"]},
    "MellumForCausalLM": EXPERTS | {"moe_intermediate_size": 64, "head_dim": 32,
        "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"]},
    "HYV3ForCausalLM": EXPERTS | {"moe_intermediate_size": 64, "head_dim": 32},
    "Mamba2ForCausalLM": {
        "num_heads": 8, "head_dim": 64, "n_groups": 2, "state_size": 32},
    "Qwen3NextForCausalLM": DELTA_NET | EXPERTS | {
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96, "mlp_only_layers": [0]},
    "MinistralForCausalLM": {"head_dim": 32, "sliding_window": WINDOW, "layer_types": [
        "sliding_attention", "full_attention"]},
    "Ministral3ForCausalLM": {
        "head_dim": 32, "rope_parameters": MINISTRAL_ROPE, "sliding_window": WINDOW},
    "OlmoForCausalLM": {"clip_qkv": 0.5},
    "VaultGemmaForCausalLM": {"head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": WINDOW,
        "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "CwmForCausalLM": {"head_dim": 32, "sliding_window": WINDOW, "layer_types": [
        "full_attention", "sliding_attention"], "rope_parameters": LLAMA3_ROPE},
    "ApertusForCausalLM": {"rope_parameters": LLAMA3_ROPE},
    "NanoChatForCausalLM": {"final_logit_softcapping": 5.0},
    "PersimmonForCausalLM": {},
    "HyperCLOVAXForCausalLM": GRANITE | {"head_dim": 32, "logits_scaling": 0.25},
    "GraniteSWAForCausalLM": GRANITE | GRANITE_LAYERS,
    "GraniteMoeSWAForCausalLM": GRANITE_EXPERTS | GRANITE_LAYERS | {"shared_intermediate_size": 64},
    "PhimoeForCausalLM": {"num_local_experts": 8, "router_jitter_noise": 0.1, "lm_head_bias": True,
        "attention_bias": True, "sliding_window": WINDOW},
    "ExaoneMoeForCausalLM": EXPERTS | {
        "head_dim": 32, "moe_intermediate_size": 64, "sliding_window": WINDOW, "layer_types": [
            "sliding_attention", "full_attention"]},
    "SolarOpenForCausalLM": ROUTED_EXPERTS | {"head_dim": 32},
    "MiniMaxM2ForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 32,
        "intermediate_size": 64, "rotary_dim": 16},
    "AfmoeForCausalLM": EXPERTS | {
        "num_hidden_layers": 3, "head_dim": 32, "moe_intermediate_size": 64, "route_scale": 1.5,
        "mup_enabled": True, "sliding_window": WINDOW, "layer_types": [
            "sliding_attention", "full_attention", "sliding_attention"]},
    "HunYuanMoEV1ForCausalLM": {"num_experts": 8, "moe_topk": [3, 2], "head_dim": 32,
        "rope_parameters": {
            "rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}},
}  # fmt: skip


def write_decoder(architecture: str, directory: Path, own: dict[str, Any]) -> Any:
    """Write a tiny model with random weights and the config values `own` to `directory`."""
    directory.mkdir()
    tokenizer = write_byte_tokenizer(directory / "tokenizer.json")
    write_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    kind = getattr(transformers, architecture)
    config = SIZES | {"vocab_size": tokenizer.get_vocab_size()} | own
    torch.manual_seed(0)
    model = kind(kind.config_class(**config)).eval()
    randomize(model)
    model.save_pretrained(directory)
    return model


def randomize(model: Any) -> None:
    """Replace weights that a new model leaves equal, such as those of norms."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):  # zero in a new model
                buffer.normal_(std=0.1)
            elif name.endswith("layer_scalar"):  # one in a new model
                buffer.uniform_(0.5, 1.5)
            elif name.endswith("act_fn.beta"):  # 0.5 in every layer of a new model
                buffer.add_(torch.rand_like(buffer), alpha=0.5)
