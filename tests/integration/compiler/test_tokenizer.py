"""Checkpoints without tokenizer.json, or with one that their tokenizer class changes."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from build_artifacts.checkpoints.checkpoint import Checkpoint, content_digest
from build_artifacts.errors import BuildError, SourceNotFound, UnsafeSource, UnsupportedModel
from build_artifacts.sources.hub import HuggingFaceHub
from build_artifacts.sources.tokenizer import (
    correct_settings,
    ensure_fast_tokenizer,
    write_fast_tokenizer,
)
from build_artifacts.steps.resolve import resolve
from deployments.artifacts.manifest import ModelSource
from tests.support.small_tokenizers import byte_level
from tests.support.tiny_encoders import tiny_tokenizer, write_json

TEXTS = ("the lovely river", "Bad FILM!", "a train to the city, 2024", "Ünïcode & 東京")
PAIRS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "G", "o", "d", "Ġ", "f", "i", "l", "m", "oo")


def read_words(tokenizer: Path) -> list[str]:
    vocabulary = Tokenizer.from_file(str(tokenizer)).get_vocab()
    return sorted(vocabulary, key=lambda word: vocabulary[word])


@pytest.fixture
def words_only(tmp_path: Path, embedding_source: Path) -> Path:
    """The tiny embedding model with `vocab.txt` only, as in the BERT checkpoints of 2018."""
    directory = tmp_path / "model"
    shutil.copytree(embedding_source, directory)
    words = read_words(directory / "tokenizer.json")
    (directory / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    (directory / "tokenizer.json").unlink()
    write_json(directory / "tokenizer_config.json", {"model_max_length": 512})
    return directory


def vocabulary_only(directory: Path, model_type: str, **config: object) -> Path:
    write_json(directory / "config.json", {"model_type": model_type})
    write_json(directory / "tokenizer_config.json", config)
    return directory


def with_words(directory: Path, model_type: str, **config: object) -> Path:
    tiny_tokenizer(directory / "words")
    words = read_words(directory / "words" / "tokenizer.json")
    (directory / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    return vocabulary_only(directory, model_type, **config)


def with_pairs(directory: Path, model_type: str) -> Path:
    write_json(directory / "vocab.json", {token: i for i, token in enumerate(PAIRS)})
    (directory / "merges.txt").write_text("#version: 0.2\no o\n", encoding="utf-8")
    return vocabulary_only(directory, model_type)


def test_vocab_txt_converts_to_tokenizer(
    tmp_path: Path, words_only: Path, embedding_source: Path
) -> None:
    checkpoint = resolve(str(words_only), tmp_path / "scratch", HuggingFaceHub())
    made = Tokenizer.from_file(str(checkpoint.weights / "tokenizer.json"))
    original = Tokenizer.from_file(str(embedding_source / "tokenizer.json"))
    for text in TEXTS:
        assert made.encode(text).ids == original.encode(text).ids
    assert not (words_only / "tokenizer.json").exists()
    # Only the tokenizer is new: all other files and the revision are those of the source.
    assert (checkpoint.directory / "1_Pooling" / "config.json").is_file()
    assert (checkpoint.weights / "model.safetensors").samefile(words_only / "model.safetensors")
    assert checkpoint.source.revision == content_digest(words_only)
    assert checkpoint.source.ref == str(words_only)


@pytest.mark.parametrize(("lowercase", "expected"), [(True, "good"), (False, "[UNK]")])
def test_lowercasing_follows_config(tmp_path: Path, lowercase: bool, expected: str) -> None:
    directory = with_words(tmp_path / "model", "bert", do_lower_case=lowercase)
    made = write_fast_tokenizer(directory, tmp_path / "made")
    assert Tokenizer.from_file(str(made)).encode("Good").tokens == ["[CLS]", expected, "[SEP]"]


def test_vocab_json_converts_to_tokenizer(tmp_path: Path) -> None:
    made = write_fast_tokenizer(with_pairs(tmp_path / "model", "roberta"), tmp_path / "made")
    tokens = Tokenizer.from_file(str(made)).encode("Good film").tokens
    assert tokens == ["<s>", "G", "oo", "d", "Ġ", "f", "i", "l", "m", "</s>"]


def test_existing_tokenizer_is_unchanged(tmp_path: Path, embedding_source: Path) -> None:
    own = embedding_source / "tokenizer.json"
    assert write_fast_tokenizer(embedding_source, tmp_path / "made") == own
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("model_type", "sentence"),
    [
        # For these types, transformers makes a tokenizer with five special tokens and no words.
        ("albert", "the tokenizer class of this model does not read `vocab.txt`"),
        ("longformer", "the tokenizer class of this model does not read `vocab.txt`"),
        # For mpnet, transformers adds special tokens that have no embeddings in the model.
        ("mpnet", "the tokenizer class of this model does not read `vocab.txt`"),
        ("modernbert", "`vocab.txt` cannot be converted"),
    ],
)
def test_unused_vocabulary_is_rejected(tmp_path: Path, model_type: str, sentence: str) -> None:
    with pytest.raises(SourceNotFound, match=sentence) as caught:
        write_fast_tokenizer(with_words(tmp_path / "model", model_type), tmp_path / "made")
    assert "save_pretrained" in caught.value.hint
    assert "\n" not in caught.value.message
    assert not (tmp_path / "made").exists()


def sentencepiece(directory: Path) -> None:
    (directory / "vocab.txt").unlink()
    (directory / "sentencepiece.bpe.model").write_bytes(b"\x0a\x0e")


def written_in_python(directory: Path) -> None:
    config = {"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "basic"}
    write_json(directory / "tokenizer_config.json", config)


def remote(directory: Path) -> None:
    config = {"auto_map": {"AutoTokenizer": ["theirs.Tokenizer", None]}}
    write_json(directory / "tokenizer_config.json", config)


def not_text(directory: Path) -> None:
    (directory / "vocab.txt").write_bytes(b"[PAD]\n\xff\xfe\n")


@pytest.mark.parametrize(
    ("damage", "error", "sentence"),
    [
        (sentencepiece, SourceNotFound, "`sentencepiece.bpe.model` cannot be converted here"),
        (written_in_python, SourceNotFound, "BertJapaneseTokenizer has no fast implementation"),
        (remote, UnsafeSource, "remote code"),
        (not_text, BuildError, "`vocab.txt`"),
    ],
)
def test_unsupported_vocabulary_is_rejected_by_name(
    tmp_path: Path, words_only: Path, damage: object, error: type[BuildError], sentence: str
) -> None:
    assert callable(damage)
    damage(words_only)
    with pytest.raises(error, match=sentence) as caught:
        resolve(str(words_only), tmp_path / "scratch", HuggingFaceHub())
    assert caught.value.hint


def test_vocab_json_without_merges_is_rejected(tmp_path: Path) -> None:
    directory = with_pairs(tmp_path / "model", "roberta")
    (directory / "merges.txt").unlink()
    with pytest.raises(SourceNotFound, match=r"`vocab.json` cannot be converted"):
        write_fast_tokenizer(directory, tmp_path / "made")


def test_added_tokens_are_included(tmp_path: Path) -> None:
    directory = with_words(tmp_path / "model", "bert")
    number = len((directory / "vocab.txt").read_text(encoding="utf-8").splitlines())
    write_json(directory / "added_tokens.json", {"[NAME]": number})
    made = write_fast_tokenizer(directory, tmp_path / "made")
    added = json.loads(made.read_bytes())["added_tokens"]
    assert ("[NAME]", number) in [(token["content"], token["id"]) for token in added]


def with_normalizer(directory: Path, normalizer: object, **config: object) -> Path:
    """Write a BERT tokenizer with `normalizer` in tokenizer.json."""
    tiny_tokenizer(directory)
    path = directory / "tokenizer.json"
    write_json(path, json.loads(path.read_bytes()) | {"normalizer": normalizer})
    return vocabulary_only(directory, "bert", **config)


def bert_normalizer(*, lowercase: bool) -> dict[str, object]:
    return {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": lowercase,
    }


def assert_equals_transformers(tokenizer: Path, checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    ours = Tokenizer.from_file(str(tokenizer))
    theirs = AutoTokenizer.from_pretrained(checkpoint)
    for text in (*TEXTS, "café 東京"):
        assert ours.encode(text).ids == theirs(text)["input_ids"]


@pytest.mark.parametrize(
    ("lowercase", "config"),
    [
        (False, {"do_lower_case": True}),
        (False, {"do_lower_case": True, "tokenizer_class": "BertTokenizerFast"}),
        (False, {}),  # the default of the class
        (True, {"do_lower_case": False}),
        (True, {"strip_accents": False}),
        (True, {"tokenize_chinese_chars": False}),
    ],
)
def test_settings_of_the_class_replace_those_of_the_tokenizer(
    tmp_path: Path, lowercase: bool, config: dict[str, object]
) -> None:
    normalizer = bert_normalizer(lowercase=lowercase)
    directory = with_normalizer(tmp_path / "model", normalizer, **config)
    made = correct_settings(directory, tmp_path / "made")
    assert made == tmp_path / "made" / "tokenizer.json"
    assert_equals_transformers(made, directory)
    before, after = (json.loads(path.read_bytes()) for path in (directory / made.name, made))
    assert before | {"normalizer": after["normalizer"]} == after, "nothing else changes"


@pytest.mark.parametrize("model_type", ["roberta", "gpt2"])
def test_prefix_space_of_the_class_is_added(tmp_path: Path, model_type: str) -> None:
    directory = vocabulary_only(tmp_path / "model", model_type, add_prefix_space=True)
    byte_level().save(str(directory / "tokenizer.json"))
    made = Tokenizer.from_file(str(correct_settings(directory, tmp_path / "made")))
    assert made.encode("film").tokens[0] == "Ġ"


@pytest.mark.parametrize(
    ("normalizer", "config"),
    [
        (bert_normalizer(lowercase=True), {"do_lower_case": True}),
        # This class uses tokenizer.json as it is.
        (
            bert_normalizer(lowercase=False),
            {"do_lower_case": True, "tokenizer_class": "PreTrainedTokenizerFast"},
        ),
        (bert_normalizer(lowercase=False), {"do_lower_case": True, "tokenizer_class": "None"}),
        # The class would drop NFKC.
        (
            {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]},
            {"do_lower_case": True},
        ),
    ],
    ids=["equal", "no settings", "unknown class", "other normalizer"],
)
def test_tokenizer_without_other_settings_is_unchanged(
    tmp_path: Path, normalizer: object, config: dict[str, object]
) -> None:
    directory = with_normalizer(tmp_path / "model", normalizer, **config)
    assert correct_settings(directory, tmp_path / "made") == directory / "tokenizer.json"


def with_stated_token(directory: Path, **stated: object) -> Path:
    normalizer = bert_normalizer(lowercase=True)
    return with_normalizer(directory, normalizer, added_tokens_decoder=stated)


def test_token_that_only_the_config_states_is_added(tmp_path: Path) -> None:
    number = str(len(read_words(with_stated_token(tmp_path / "other") / "tokenizer.json")))
    token = {"content": "<|Tool|>", "special": True, "normalized": False, "lstrip": True}
    directory = with_stated_token(tmp_path / "model", **{number: token})
    made = Tokenizer.from_file(str(correct_settings(directory, tmp_path / "made")))
    tokens = made.encode("good <|Tool|>film", add_special_tokens=False).tokens
    assert tokens == ["good", " <|Tool|>", "film"]  # `lstrip` takes the space
    assert made.token_to_id("<|Tool|>") == int(number)
    assert made.get_added_tokens_decoder()[int(number)].special


def test_token_of_the_vocabulary_that_the_config_states_is_kept_whole(tmp_path: Path) -> None:
    words = read_words(with_stated_token(tmp_path / "other") / "tokenizer.json")
    number = words.index("##a")
    directory = with_stated_token(tmp_path / "model", **{str(number): {"content": "##a"}})
    made = Tokenizer.from_file(str(correct_settings(directory, tmp_path / "made")))
    assert made.encode("##a", add_special_tokens=False).ids == [number]


def test_token_that_would_get_another_id_is_rejected(tmp_path: Path) -> None:
    directory = with_stated_token(tmp_path / "model", **{"999": {"content": "<|tool|>"}})
    with pytest.raises(UnsupportedModel, match=r"token `<\|tool\|>` .* has the id 999"):
        correct_settings(directory, tmp_path / "made")


@pytest.mark.parametrize(
    "extra",
    [
        {"additional_special_tokens": ["<|tool|>"]},
        {"additional_special_tokens": [{"__type": "AddedToken", "content": "<|tool|>"}]},
        {"extra_special_tokens": ["[MASK]", "<|tool|>"]},
        {"extra_special_tokens": {"tool_token": "<|tool|>"}},
    ],
)
def test_special_token_without_a_role_is_added(tmp_path: Path, extra: dict[str, object]) -> None:
    normalizer = bert_normalizer(lowercase=True)
    directory = with_normalizer(tmp_path / "model", normalizer, **extra)
    made = correct_settings(directory, tmp_path / "made")
    assert_equals_transformers(made, directory)
    tokens = Tokenizer.from_file(str(made)).encode("good<|tool|>film", add_special_tokens=False)
    assert tokens.tokens == ["good", "<|tool|>", "film"]


@pytest.mark.parametrize("extra", [{}, {"additional_special_tokens": ["<|tool|>"]}])
def test_special_token_with_a_role_is_added(tmp_path: Path, extra: dict[str, object]) -> None:
    normalizer = bert_normalizer(lowercase=True)
    directory = with_normalizer(tmp_path / "model", normalizer, eos_token="<|end|>", **extra)
    made = correct_settings(directory, tmp_path / "made")
    assert_equals_transformers(made, directory)
    tokens = Tokenizer.from_file(str(made)).encode("good<|end|>film", add_special_tokens=False)
    assert tokens.tokens == ["good", "<|end|>", "film"]


def test_special_tokens_that_are_no_texts_are_rejected(tmp_path: Path) -> None:
    normalizer = bert_normalizer(lowercase=True)
    directory = with_normalizer(tmp_path / "model", normalizer, extra_special_tokens=[7])
    with pytest.raises(UnsupportedModel, match="`extra_special_tokens` does not name tokens"):
        correct_settings(directory, tmp_path / "made")


def test_texts_whose_special_tokens_are_split_are_rejected(
    tmp_path: Path, words_only: Path
) -> None:
    normalizer = bert_normalizer(lowercase=True)
    directory = with_normalizer(tmp_path / "other", normalizer, split_special_tokens=True)
    write_json(words_only / "tokenizer_config.json", {"split_special_tokens": True})
    for weights in (directory, words_only):  # the second one has no tokenizer.json
        checkpoint = Checkpoint(weights, ModelSource(ref="here", revision="1"), "local/model")
        with pytest.raises(UnsupportedModel, match="`split_special_tokens`"):
            ensure_fast_tokenizer(checkpoint, tmp_path / "made")


def test_full_disk_is_an_error_of_the_system(
    tmp_path: Path, words_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Tokenizer.save` would raise a bare Exception, which no command foresees."""

    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="No space left"):
        write_fast_tokenizer(words_only, tmp_path / "made")


def test_stated_tokens_without_content_are_rejected(tmp_path: Path) -> None:
    directory = with_stated_token(tmp_path / "model", first={"content": "<|tool|>"})
    with pytest.raises(UnsupportedModel, match="`added_tokens_decoder` does not name tokens"):
        correct_settings(directory, tmp_path / "made")


def test_tokenizer_that_cannot_lowercase_is_rejected(tmp_path: Path) -> None:
    directory = with_normalizer(tmp_path / "model", None, do_lower_case=True)
    with pytest.raises(UnsupportedModel, match="does not lowercase") as caught:
        correct_settings(directory, tmp_path / "made")
    assert "save_pretrained" in caught.value.hint


def test_checkpoint_gets_the_corrected_tokenizer(tmp_path: Path, embedding_source: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(embedding_source, directory)
    write_json(directory / "tokenizer_config.json", {"do_lower_case": False})
    checkpoint = resolve(str(directory), tmp_path / "scratch", HuggingFaceHub())
    assert_equals_transformers(checkpoint.weights / "tokenizer.json", directory)
    assert (checkpoint.weights / "config.json").samefile(directory / "config.json")
    assert checkpoint.source.revision == content_digest(directory)
