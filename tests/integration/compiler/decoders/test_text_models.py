"""Text models of checkpoints with image inputs, compared with the whole models in transformers."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from build_artifacts.checkpoints.adapter import read_adapter
from build_artifacts.checkpoints.architectures import WITH_IMAGES
from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.models import load_model
from build_artifacts.errors import UnsupportedModel
from build_artifacts.families.base import BuildBudget
from build_artifacts.pipeline import BuildRequest, build
from build_artifacts.progress import BuildProgress
from build_artifacts.recipes import DECODER_FP32, BuildRecipe
from build_artifacts.steps.merge import merge
from build_artifacts.steps.text_model import extract_text_model
from deployments.artifacts.manifest import ModelSource
from deployments.artifacts.types import ModelHead
from tests.integration.compiler.decoders.test_families import (
    TOKENS,
    check_logits,
    export_graph,
    run_graph,
)
from tests.support.decoder_artifacts import write_byte_tokenizer
from tests.support.decoder_families import OWN, SIZES, randomize
from tests.support.tiny_encoders import write_json

VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
QWEN_VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 256,
    "num_position_embeddings": 16,
}  # fmt: skip
IMAGE_POSITIONS = {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
}  # fmt: skip
# Values of the text model and of the image encoder, by model type of the checkpoint.
KINDS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        OWN["Gemma3ForCausalLM"] | {"rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        VISION,
    ),
    "gemma4": (
        OWN["Gemma4ForCausalLM"],
        VISION | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16},
    ),
    "gemma4_unified": (
        OWN["Gemma4UnifiedForCausalLM"], {"mm_embed_dim": 256, "mm_posemb_size": 16},
    ),
    "idefics3": ({"model_type": "llama"}, VISION),
    "internvl": (
        {"model_type": "qwen3"} | OWN["Qwen3ForCausalLM"],
        VISION | {"image_size": [28, 28], "patch_size": [14, 14]},
    ),
    "lfm2_vl": ({"model_type": "lfm2"} | OWN["Lfm2ForCausalLM"], VISION),
    "llava": ({"model_type": "mistral"} | OWN["MistralForCausalLM"], VISION),
    "llava_next": ({"model_type": "llama"}, VISION),
    "llava_onevision": ({"model_type": "qwen2"}, VISION),
    "mistral3": ({"model_type": "mistral"} | OWN["MistralForCausalLM"], VISION),
    "qwen2_vl": (
        IMAGE_POSITIONS, {"depth": 1, "embed_dim": 32, "hidden_size": 256, "num_heads": 2},
    ),
    "qwen2_5_vl": (IMAGE_POSITIONS, QWEN_VISION),
    "qwen3_vl": (OWN["Qwen3ForCausalLM"], QWEN_VISION),
    "qwen3_5": (OWN["Qwen3_5ForCausalLM"], QWEN_VISION),
    "qwen3_5_moe": (OWN["Qwen3_5MoeForCausalLM"], QWEN_VISION),
    "smolvlm": ({"model_type": "llama"}, VISION),
}  # fmt: skip


MINISTRAL3 = {"model_type": "ministral3"} | OWN["Ministral3ForCausalLM"]
TEXT_MODELS = [
    # The image encoder of Gemma 3n is in another package; test_gemma3n.py has a test without it.
    *(pytest.param(kind, KINDS[kind][0], id=kind) for kind in WITH_IMAGES if kind != "gemma3n"),
    pytest.param("mistral3", MINISTRAL3, id="mistral3-ministral3"),
]


def write_model(
    kind: str, directory: Path, own: dict[str, Any] | None = None, *, hub_names: bool = True
) -> Any:
    """Write a tiny model with random weights to `directory`, with the hub's names of tensors.

    `own` are values of the text model; by default those of `KINDS`.
    """
    directory.mkdir()
    tokenizer = write_byte_tokenizer(directory / "tokenizer.json")
    write_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    default, vision = KINDS[kind]
    text = SIZES | {"vocab_size": tokenizer.get_vocab_size()} | (default if own is None else own)
    model_class = getattr(transformers, WITH_IMAGES[kind])
    torch.manual_seed(0)
    model = model_class(model_class.config_class(text_config=text, vision_config=vision)).eval()
    randomize(model)
    model.save_pretrained(directory, save_original_format=hub_names)
    return model


def extract(directory: Path) -> Path:
    """Extract the text model of `directory / "whole"` to `directory / "checkpoint"`."""
    whole = Checkpoint(directory / "whole", ModelSource(ref="here", revision="1"), "tiny/model")
    (directory / "checkpoint").mkdir(exist_ok=True)
    extract_text_model(whole, directory / "checkpoint")
    return directory / "checkpoint"


@pytest.mark.slow
@pytest.mark.parametrize("hub_names", [True, False], ids=["hub", "transformers 5"])
@pytest.mark.parametrize(("kind", "own"), TEXT_MODELS)
def test_text_model_computes_what_the_whole_model_computes(
    kind: str, own: dict[str, Any], hub_names: bool, tmp_path: Path
) -> None:
    model = write_model(kind, tmp_path / "whole", own, hub_names=hub_names)
    weights = extract(tmp_path)
    read = transformers.AutoConfig.from_pretrained(weights)
    assert read.architectures[0].endswith("ForCausalLM")
    ids = np.random.default_rng(0).integers(8, read.vocab_size, TOKENS)
    with torch.inference_mode():
        expected = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    spec = export_graph(tmp_path, DECODER_FP32)
    check_logits(run_graph(spec, ids), expected, 2e-4)


@pytest.mark.slow
def test_build_of_a_checkpoint_with_images_seals_its_text_model(tmp_path: Path) -> None:
    write_model("smolvlm", tmp_path / "whole")
    request = BuildRequest(
        ref=str(tmp_path / "whole"),
        store=tmp_path / "store",
        recipe=BuildRecipe(candidates=(), decoders=(DECODER_FP32,)),
        budget=BuildBudget(tune_seconds=0),
    )
    log = io.StringIO()
    manifest = build(request, BuildProgress(log)).manifest
    assert "the text model, without image inputs" in log.getvalue()
    assert manifest.architecture == "LlamaForCausalLM"
    assert manifest.tasks == ("text-generation",)
    assert [candidate.name for candidate in manifest.candidates] == ["cpu-fp32"]


def list_linear_modules(model: torch.nn.Module, part: str) -> list[str]:
    """Return the full names of linear modules whose names contain `part`."""
    modules = model.named_modules()
    return [name for name, each in modules if part in name and isinstance(each, torch.nn.Linear)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "smolvlm", "qwen3_vl"])
@pytest.mark.parametrize("targets", ["all-linear", "names", "pattern"])
def test_adapter_of_the_whole_model_fits_the_text_model(
    kind: str, targets: str, tmp_path: Path
) -> None:
    """It may also adapt the image encoder, which answers to texts do not need."""
    own = KINDS[kind][0] | {"num_hidden_layers": 6, "layer_types": ["full_attention"] * 6}
    model = write_model(kind, tmp_path / "whole", own)
    weights = extract(tmp_path)
    text_part = "text_model" if kind == "smolvlm" else "language_model"
    modules: str | list[str] = "all-linear"
    if targets == "names":  # peft shortens so many names
        modules = list_linear_modules(model, f"{text_part}.layers")
        assert len(modules) > 20
    elif targets == "pattern":
        modules = rf"model\.{text_part}(?=\.).*\.(q_proj|down_proj)"
    first = rf"{text_part}\.layers\.0\.self_attn\.q_proj"
    options = LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        target_modules=modules,
        alpha_pattern={first: 64},
        rank_pattern={first: 8},
    )
    adapted = get_peft_model(model, options).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    adapter = read_adapter(tmp_path / "adapter")
    source = Checkpoint(weights, ModelSource(ref="here", revision="1"), "tiny/model")
    merge(source, adapter, tmp_path / "merged")
    merged = load_model(tmp_path / "merged", head=ModelHead.NEXT_TOKEN, dtype="float32")
    ids = torch.arange(8, 60)[None]
    with torch.inference_mode():
        expected = adapted(input_ids=ids).logits
        torch.testing.assert_close(merged(ids).logits, expected, atol=1e-3, rtol=1e-3)


def merge_into_text_model(adapted: Any, directory: Path) -> Any:
    """Save an adapter of the whole model, and return the text model with the adapter merged."""
    adapted.save_pretrained(directory / "adapter")
    source = Checkpoint(extract(directory), ModelSource(ref="here", revision="1"), "tiny/model")
    merge(source, read_adapter(directory / "adapter"), directory / "merged")
    return load_model(directory / "merged", head=ModelHead.NEXT_TOKEN, dtype="float32")


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_adapter_fits_although_its_base_states_another_vocabulary(
    kind: str, tmp_path: Path
) -> None:
    """The whole config of these models has a number of tokens of its own."""
    model = write_model(kind, tmp_path / "whole")
    options = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    adapted = get_peft_model(model, options)
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "whole")
    merge_into_text_model(adapted, tmp_path)


EXPERTS = "model.language_model.layers.0.mlp.experts"


@pytest.mark.slow
# peft warns of patterns of ranks that fit no module, although it applies them to parameters.
@pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")
@pytest.mark.parametrize(
    "parameters",
    [
        ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ["down_proj"],
        [f"{EXPERTS}.gate_up_proj", "mlp.gate.weight"],
    ],
    ids=["ends", "a name", "a full name"],
)
def test_adapter_of_experts_fits_the_text_model(parameters: list[str], tmp_path: Path) -> None:
    """peft adapts the weights of all experts of a layer, which are no modules, as parameters."""
    model = write_model("qwen3_5_moe", tmp_path / "whole")
    options = LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        target_modules=["q_proj"],
        target_parameters=parameters,
        rank_pattern={rf"{EXPERTS}\.(gate_up_proj|down_proj)": 2},
        alpha_pattern={"gate_up_proj": 32, r"layers\.1\.mlp\.experts\.down_proj": 16},
    )
    adapted = get_peft_model(model, options).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    ids = torch.arange(8, 60)[None]
    merged = merge_into_text_model(adapted, tmp_path)
    with torch.inference_mode():
        expected = adapted(input_ids=ids).logits
        torch.testing.assert_close(merged(ids).logits, expected, atol=1e-3, rtol=1e-3)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_bytes())
    assert sorted(config["target_parameters"]) == sorted(parameters)


def test_adapter_of_the_image_encoder_alone_is_refused(tmp_path: Path) -> None:
    model = write_model("smolvlm", tmp_path / "whole")
    options = LoraConfig(task_type="CAUSAL_LM", target_modules=r".*vision_model.*q_proj")
    with pytest.raises(UnsupportedModel, match="changes the image encoder only"):
        merge_into_text_model(get_peft_model(model, options), tmp_path)


def test_adapter_with_weights_that_fit_no_module_is_refused(tmp_path: Path) -> None:
    model = write_model("smolvlm", tmp_path / "whole")
    weights = extract(tmp_path)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "text_model.layers.1." in name)
    save_file(tensors | {name.replace("layers.1.", "layers.7."): tensors[name].clone()}, path)
    source = Checkpoint(weights, ModelSource(ref="here", revision="1"), "tiny/model")
    with pytest.raises(UnsupportedModel, match=r"layers\.7.*fit no module"):
        merge(source, read_adapter(tmp_path / "adapter"), tmp_path / "merged")


def edit_config(directory: Path, changes: dict[str, Any]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes), encoding="utf-8")


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"eos_token_id": [9, 11]}, [9, 11]),
        ({"text_config": {"eos_token_id": 12}}, 12),
        ({"eos_token_id": None, "text_config": {"eos_token_id": 12}}, 12),
        ({}, None),  # not the default of the class, which may be any token of another vocabulary
    ],
)
def test_end_tokens_are_those_that_the_config_states(
    stated: dict[str, Any], expected: object, tmp_path: Path
) -> None:
    write_model("llava", tmp_path / "whole")
    path = tmp_path / "whole" / "config.json"
    config = json.loads(path.read_bytes())
    config.pop("eos_token_id", None)
    del config["text_config"]["eos_token_id"]
    text = config["text_config"] | stated.get("text_config", {})
    path.write_text(json.dumps(config | stated | {"text_config": text}), encoding="utf-8")
    read = json.loads((extract(tmp_path) / "config.json").read_bytes())
    assert read.get("eos_token_id") == expected


def test_quantized_checkpoint_is_rejected_before_it_is_copied(tmp_path: Path) -> None:
    write_model("qwen3_5", tmp_path / "whole")
    edit_config(tmp_path / "whole", {"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(UnsupportedModel, match="the checkpoint is quantized"):
        extract(tmp_path)
    assert not list((tmp_path / "checkpoint").iterdir())


def test_unsupported_text_model_is_rejected_by_name(tmp_path: Path) -> None:
    write_model("llava", tmp_path / "whole")
    edit_config(tmp_path / "whole", {"text_config": {"model_type": "rwkv"}})
    with pytest.raises(UnsupportedModel, match="`RwkvForCausalLM` cannot be built"):
        extract(tmp_path)
    edit_config(tmp_path / "whole", {"text_config": {"model_type": "t5"}})
    with pytest.raises(UnsupportedModel, match="no class for the text model `t5`"):
        extract(tmp_path)


def test_checkpoint_without_weights_of_the_text_model_is_rejected(tmp_path: Path) -> None:
    write_model("llava", tmp_path / "whole")
    path = tmp_path / "whole" / "model.safetensors"
    tensors = load_file(path)
    save_file({name: each for name, each in tensors.items() if "language" not in name}, path)
    with pytest.raises(UnsupportedModel, match="has no weights of a text model"):
        extract(tmp_path)
