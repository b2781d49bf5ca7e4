from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from build_artifacts.checkpoints.adapter import read_adapter
from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.facts import EMBEDDING_TASKS, ModelFacts, read_facts, tasks_of
from build_artifacts.errors import BuildError, SourceNotFound, UnsafeSource, UnsupportedModel
from deployments.manifest import Head, Source, TaskName
from deployments.tasks import served_tasks
from tests.builders import tiny_tokenizer, write_json, write_pooling
from tests.sealed import tiny_manifest

CLASSIFY = (TaskName.TEXT_CLASSIFICATION,)
TAG = (TaskName.TOKEN_CLASSIFICATION,)
ANSWER = (TaskName.QUESTION_ANSWERING,)
FILL = (TaskName.FILL_MASK,)
BERT = {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 32}


def checkpoint_at(directory: Path, config: dict[str, object]) -> Checkpoint:
    """A checkpoint of which only the JSON files are read."""
    write_json(directory / "config.json", config)
    return Checkpoint(directory, Source(ref="here", revision="1"), "local/model")


def facts_of(
    directory: Path, config: dict[str, object], tasks: tuple[TaskName, ...] = EMBEDDING_TASKS
) -> ModelFacts:
    return read_facts(checkpoint_at(directory, config), tasks)


@pytest.mark.parametrize(
    ("config", "tokenizer", "sentence", "limit"),
    [
        (BERT, {}, {}, 512),
        (BERT, {"model_max_length": 128}, {}, 128),
        (BERT, {"model_max_length": 10**30}, {"max_seq_length": 256}, 256),
        (BERT, {"model_max_length": 1e30}, {"max_seq_length": None}, 512),
        (BERT | {"max_position_embeddings": 64}, {"model_max_length": 512}, {}, 64),
        (BERT | {"model_type": "roberta", "max_position_embeddings": 514}, {}, {}, 512),
        (BERT | {"model_type": "xlm-roberta", "max_position_embeddings": 514}, {}, {}, 512),
        (BERT | {"model_type": "mpnet", "max_position_embeddings": 514}, {}, {}, 512),
    ],
    ids=str,
)
def test_the_tightest_limit_on_length_wins(
    tmp_path: Path,
    config: dict[str, object],
    tokenizer: dict[str, object],
    sentence: dict[str, object],
    limit: int,
) -> None:
    write_json(tmp_path / "tokenizer_config.json", tokenizer)
    write_json(tmp_path / "sentence_bert_config.json", sentence)
    assert facts_of(tmp_path, config).max_tokens == limit


def test_the_limit_of_sentence_embeddings_does_not_bind_a_classifier(tmp_path: Path) -> None:
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 256})
    assert facts_of(tmp_path, BERT).max_tokens == 256
    assert facts_of(tmp_path, BERT, CLASSIFY).max_tokens == 512


@pytest.mark.parametrize(
    ("said", "pooling"), [("mean", "mean"), ("cls", "cls"), ("lasttoken", "last")]
)
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_and_normalising_are_read_from_the_modules(
    tmp_path: Path, said: str, pooling: str, normalize: bool
) -> None:
    write_pooling(tmp_path, pooling=said, normalize=normalize)
    facts = facts_of(tmp_path, BERT)
    assert (facts.pooling, facts.normalize) == (pooling, normalize)


def test_a_bare_encoder_is_pooled_by_mean_and_not_normalised(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, BERT)
    assert (facts.pooling, facts.normalize, facts.width) == ("mean", False, 32)


@pytest.mark.parametrize(("said", "pooling"), [("cls", "cls"), ("lasttoken", "last")])
def test_newer_files_name_the_pooling_in_one_word(tmp_path: Path, said: str, pooling: str) -> None:
    write_pooling(tmp_path)
    write_json(tmp_path / "1_Pooling" / "config.json", {"pooling_mode": said})
    assert facts_of(tmp_path, BERT).pooling == pooling


def max_pooling(directory: Path) -> None:
    write_pooling(directory, pooling="max")


def two_poolings(directory: Path) -> None:
    flags = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}
    write_pooling(directory)
    write_json(directory / "1_Pooling" / "config.json", flags)


def weighted_mean(directory: Path) -> None:
    write_pooling(directory)
    write_json(directory / "1_Pooling" / "config.json", {"pooling_mode": "weightedmean"})


def dense_layer(directory: Path) -> None:
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense"}
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for kind, path in paths.items()
    ]
    write_json(directory / "modules.json", modules)


def prompt_left_out(directory: Path) -> None:
    write_pooling(directory)
    pooling = {"pooling_mode_mean_tokens": True, "include_prompt": False}
    write_json(directory / "1_Pooling" / "config.json", pooling)
    spoken = {"prompts": {"query": "find: "}, "default_prompt_name": None}
    write_json(directory / "config_sentence_transformers.json", spoken)


def lowercased_outside(directory: Path) -> None:
    from tokenizers import Tokenizer, normalizers

    tiny_tokenizer(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "sentence_bert_config.json", {"do_lower_case": True})


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (max_pooling, "pooling by max_tokens"),
        (weighted_mean, "pooling by weightedmean"),
        (two_poolings, "pooling by cls_token and mean_tokens"),
        (dense_layer, "a module `Dense`"),
        (prompt_left_out, "include_prompt"),
        (lowercased_outside, "lowercases"),
    ],
)
def test_what_would_give_other_embeddings_is_refused(
    tmp_path: Path, spoil: object, sentence: str
) -> None:
    assert callable(spoil)
    spoil(tmp_path)
    with pytest.raises(UnsupportedModel, match=sentence):
        facts_of(tmp_path, BERT)


def test_a_pooling_directory_outside_the_checkpoint_is_refused(tmp_path: Path) -> None:
    module = {"path": "../1_Pooling", "type": "sentence_transformers.models.Pooling"}
    transformer = {"path": "", "type": "sentence_transformers.models.Transformer"}
    write_json(tmp_path / "model" / "modules.json", [transformer, module])
    with pytest.raises(UnsafeSource, match="points outside"):
        facts_of(tmp_path / "model", BERT)


def test_prompts_are_kept(tmp_path: Path) -> None:
    spoken = {"prompts": {"query": "find: ", "passage": ""}, "default_prompt_name": "query"}
    write_json(tmp_path / "config_sentence_transformers.json", spoken)
    facts = facts_of(tmp_path, BERT)
    assert facts.prompts == (("query", "find: "), ("passage", ""))
    assert facts.default_prompt == "query"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, "single_label"),
        (
            {
                "id2label": {"0": "a", "1": "b"},
                "problem_type": "multi_label_classification",
            },
            "multi_label",
        ),
        ({"id2label": {"0": "a"}}, "single_label"),
        (
            {"id2label": {"0": "a"}, "problem_type": "multi_label_classification"},
            "multi_label",
        ),
        ({"id2label": {"0": "a"}, "problem_type": "regression"}, "regression"),
        ({"id2label": {"0": "a", "1": "b"}, "problem_type": "regression"}, "regression"),
    ],
    ids=str,
)
def test_the_kind_of_classifier_is_read_from_the_config(
    tmp_path: Path, config: dict[str, object], problem: str
) -> None:
    assert facts_of(tmp_path, BERT | config, CLASSIFY).problem == problem


def test_labels_are_in_the_order_of_their_ids(tmp_path: Path) -> None:
    labels = {str(i): f"label {i}" for i in (10, 2, 0, 1, 3, 4, 5, 6, 7, 8, 9)}
    facts = facts_of(tmp_path, BERT | {"id2label": labels}, CLASSIFY)
    assert facts.labels == tuple(f"label {i}" for i in range(11))
    assert facts.width == 11


def test_a_decoder_is_built_where_its_vectors_are_pooled(tmp_path: Path) -> None:
    qwen = {"model_type": "qwen3", "architectures": ["Qwen3Model"], "hidden_size": 32}
    with pytest.raises(UnsupportedModel, match="`qwen3` is not an encoder"):
        facts_of(tmp_path, qwen)
    write_pooling(tmp_path, pooling="lasttoken")
    assert facts_of(tmp_path, qwen).pooling == "last"
    with pytest.raises(UnsupportedModel, match="`qwen3` is not an encoder"):
        facts_of(tmp_path, qwen, CLASSIFY)


def test_spans_have_two_ends_and_no_labels(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, BERT | {"id2label": {"0": "a", "1": "b"}}, ANSWER)
    assert (facts.head, facts.width, facts.labels, facts.problem) == (Head.SPAN, 2, (), None)


def test_tokens_have_labels_and_no_problem(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, BERT | {"id2label": {"0": "O", "1": "B-X", "2": "I-X"}}, TAG)
    assert (facts.head, facts.width, facts.problem) == (Head.TOKENS, 3, None)
    assert facts.labels == ("O", "B-X", "I-X")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tokenizer_config.json", "[MASK]"),
        ("tokenizer_config.json", {"content": "[MASK]", "lstrip": True}),
        ("special_tokens_map.json", "[MASK]"),
    ],
)
def test_the_mask_token_is_the_one_the_tokenizer_names(
    name: str, said: object, tmp_path: Path
) -> None:
    tiny_tokenizer(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {})
    write_json(tmp_path / name, {"mask_token": said})
    facts = facts_of(tmp_path, BERT | {"vocab_size": 99}, FILL)
    assert (facts.head, facts.width, facts.mask_token) == (Head.MASKS, 99, 4)


@pytest.mark.parametrize("said", [None, "<mask>"])
def test_a_tokenizer_without_a_mask_token_cannot_fill_masks(
    said: str | None, tmp_path: Path
) -> None:
    tiny_tokenizer(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {"mask_token": said})
    with pytest.raises(UnsupportedModel, match="no mask token") as caught:
        facts_of(tmp_path, BERT, FILL)
    assert "`mask_token`" in caught.value.hint


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2"},
        {"model_type": "t5"},
        BERT | {"is_decoder": True},
        {"model_type": "made-up-by-somebody"},
    ],
    ids=str,
)
def test_what_is_no_encoder_is_refused(tmp_path: Path, config: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModel):
        facts_of(tmp_path, config)


def architecture(name: str) -> dict[str, object]:
    return {"model_type": "bert", "architectures": [name]}


@pytest.mark.parametrize(
    ("config", "asked", "tasks"),
    [
        (architecture("BertModel"), None, EMBEDDING_TASKS),
        (architecture("BertForSequenceClassification"), None, CLASSIFY),
        (architecture("BertForTokenClassification"), None, TAG),
        (architecture("BertForQuestionAnswering"), None, ANSWER),
        (architecture("BertForMaskedLM"), None, FILL),
        (architecture("BertForMaskedLM"), TaskName.SENTENCE_SIMILARITY, EMBEDDING_TASKS),
        (architecture("BertForMaskedLM"), TaskName.TOKEN_EMBEDDINGS, EMBEDDING_TASKS),
        (architecture("BertForMaskedLM"), TaskName.FEATURE_EXTRACTION, EMBEDDING_TASKS),
    ],
)
def test_tasks_come_from_the_files_unless_asked_for(
    tmp_path: Path,
    config: dict[str, object],
    asked: TaskName | None,
    tasks: tuple[TaskName, ...],
) -> None:
    assert tasks_of(checkpoint_at(tmp_path, config), None, asked) == tasks


def test_an_architecture_that_says_nothing_of_a_task_needs_one(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="cannot tell a task") as caught:
        tasks_of(checkpoint_at(tmp_path, architecture("BertForPreTraining")), None, None)
    assert "--task" in caught.value.hint


ONE_SCORE = architecture("BertForSequenceClassification") | {"id2label": {"0": "LABEL_0"}}
THREE_LABELS = ONE_SCORE | {"id2label": {"0": "a", "1": "b", "2": "c"}}
CROSS_ENCODER = {"sentence_transformers": {"activation_fn": "torch.nn.Sigmoid", "version": "5"}}
OLD_CROSS_ENCODER = {"sbert_ce_default_activation_function": "torch.nn.Identity"}


@pytest.mark.parametrize(
    ("config", "asked", "tasks"),
    [
        (ONE_SCORE, None, (*CLASSIFY, TaskName.TEXT_RANKING)),
        (ONE_SCORE, TaskName.TEXT_RANKING, (TaskName.TEXT_RANKING, *CLASSIFY)),
        (ONE_SCORE | CROSS_ENCODER, None, (TaskName.TEXT_RANKING, *CLASSIFY)),
        (ONE_SCORE | OLD_CROSS_ENCODER, None, (TaskName.TEXT_RANKING, *CLASSIFY)),
        (ONE_SCORE | CROSS_ENCODER, CLASSIFY[0], (*CLASSIFY, TaskName.TEXT_RANKING)),
        (THREE_LABELS | CROSS_ENCODER, None, CLASSIFY),
        (THREE_LABELS, None, CLASSIFY),
    ],
)
def test_one_score_ranks_and_a_cross_encoder_ranks_first(
    tmp_path: Path,
    config: dict[str, object],
    asked: TaskName | None,
    tasks: tuple[TaskName, ...],
) -> None:
    assert tasks_of(checkpoint_at(tmp_path, config), None, asked) == tasks


def test_several_labels_cannot_rank(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="this one has 3 labels"):
        tasks_of(checkpoint_at(tmp_path, THREE_LABELS), None, TaskName.TEXT_RANKING)


@pytest.mark.parametrize(
    "labels",
    [
        ("contradiction", "neutral", "entailment"),
        ("Entailment", "not_entailment"),
        ("no", "ENTAILS"),
    ],
)
def test_what_judges_entailment_is_built_as_a_classifier_for_zero_shot_too(
    labels: tuple[str, ...], tmp_path: Path
) -> None:
    named = {str(i): label for i, label in enumerate(labels)}
    checkpoint = checkpoint_at(tmp_path, ONE_SCORE | {"id2label": named})
    asked = tasks_of(checkpoint, None, TaskName.ZERO_SHOT_CLASSIFICATION)
    assert asked == tasks_of(checkpoint, None, None) == CLASSIFY
    manifest = tiny_manifest(labels=labels)
    assert TaskName.ZERO_SHOT_CLASSIFICATION in served_tasks(manifest)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (THREE_LABELS, "has the labels `a`, `b`, `c`$"),
        (ONE_SCORE | {"id2label": {"0": "entailment"}}, "has the labels `entailment`$"),
        (ONE_SCORE | {"id2label": None, "num_labels": 4}, "`LABEL_0`, `LABEL_1`, `LABEL_2`, …$"),
        (ONE_SCORE | {"id2label": None}, "`LABEL_0`, `LABEL_1`$"),
    ],
    ids=str,
)
def test_zero_shot_without_entailment_is_refused(
    config: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=sentence) as caught:
        tasks_of(checkpoint_at(tmp_path, config), None, TaskName.ZERO_SHOT_CLASSIFICATION)
    assert "`id2label`" in caught.value.hint


def test_an_adapters_own_labels_decide_over_zero_shot(tmp_path: Path, adapter_source: Path) -> None:
    adapter = read_adapter(adapter_source)
    bare = checkpoint_at(tmp_path, architecture("BertModel"))
    with pytest.raises(UnsupportedModel, match=f"`{adapter.labels[0]}`"):
        tasks_of(bare, adapter, TaskName.ZERO_SHOT_CLASSIFICATION)
    judging = replace(adapter, labels=("no", "entailment"))
    assert tasks_of(bare, judging, TaskName.ZERO_SHOT_CLASSIFICATION) == CLASSIFY


def test_a_newer_cross_encoder_is_known_by_its_own_file(tmp_path: Path) -> None:
    write_pooling(tmp_path)  # it has a list of modules like an embedding model
    write_json(tmp_path / "config_sentence_transformers.json", {"model_type": "CrossEncoder"})
    checkpoint = checkpoint_at(tmp_path, ONE_SCORE)
    assert tasks_of(checkpoint, None, None)[0] is TaskName.TEXT_RANKING


def test_sentence_transformers_files_make_an_embedding_model(tmp_path: Path) -> None:
    write_pooling(tmp_path)
    assert tasks_of(checkpoint_at(tmp_path, architecture("X")), None, None) == EMBEDDING_TASKS


def test_an_adapter_brings_its_task(tmp_path: Path, adapter_source: Path) -> None:
    adapter = read_adapter(adapter_source)
    bare = checkpoint_at(tmp_path, architecture("BertModel"))
    assert tasks_of(bare, adapter, None) == CLASSIFY
    with pytest.raises(UnsupportedModel, match="the adapter was trained for"):
        tasks_of(bare, adapter, TaskName.FEATURE_EXTRACTION)


LORA = {"peft_type": "LORA", "task_type": "SEQ_CLS"}


@pytest.mark.parametrize(
    ("config", "files", "error", "sentence"),
    [
        ({}, (), SourceNotFound, "no `adapter_config.json`"),
        (LORA | {"peft_type": "IA3"}, (), UnsupportedModel, "of the type `IA3`"),
        (LORA | {"task_type": "SEQ_2_SEQ_LM"}, (), UnsupportedModel, "`SEQ_2_SEQ_LM`"),
        (LORA | {"task_type": None}, (), UnsupportedModel, "`None`"),
        (LORA, (), SourceNotFound, "no `adapter_model.safetensors`"),
        (LORA, ("adapter_model.bin",), UnsafeSource, "pickled weights only"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused(
    tmp_path: Path,
    config: dict[str, object],
    files: tuple[str, ...],
    error: type[BuildError],
    sentence: str,
) -> None:
    write_json(tmp_path / "adapter_config.json", config)
    for name in files:
        (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(error, match=sentence):
        read_adapter(tmp_path)
