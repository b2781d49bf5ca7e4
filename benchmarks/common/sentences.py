"""Benchmark inputs: sentences of STS-B, SST-2 and SQuAD files, or generated sentences."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.errors import BenchmarkError
from build_artifacts.evaluation import BadEvaluationData
from build_artifacts.evaluation.files import FileLayout, FileLocation, as_number, read_records
from build_artifacts.evaluation.similarity import ScoredPair, read_pairs
from build_artifacts.evaluation.squad import SquadQuestion, read_questions

# Outside of the checkout, because the data sets have their own licenses.
DEFAULT_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
STSB_NAME = "stsb-test.tsv"
SST2_NAME = "sst2-dev.tsv"
SQUAD_NAME = "squad2-warsaw.json"
SST2_EXPECTED = "`label` and `sentence`: tab-separated columns"
SST2_LAYOUT = FileLayout(
    names={"label": ("label",), "sentence": ("sentence",)},
    required=frozenset(("label", "sentence")),
    orders=(("label", "sentence"),),
    key="label",
    fits=lambda cell: as_number(cell) is not None,
)

GENERATED_COUNT = 2_758  # the number of sentences in STS-B's test split
# Words per sentence follow a log-normal distribution. With the period and the special tokens,
# lengths match those of STS-B: 14 tokens on average, at most 46.
LOG_WORDS_MEAN = 2.18
LOG_WORDS_DEVIATION = 0.68
MIN_WORDS, MAX_WORDS = 2, 43

# Each word is one token of the BERT vocabulary.
COMMON_WORDS = (
    "the a of and to in is on with at for by from are was it this that his her their two three "
    "man woman girl boy dog cat horse bird child group people player team game ball field street "
    "house car train city river mountain garden kitchen table water food bread music guitar piano "
    "song story news government president minister company market bank police army court school "
    "student teacher doctor family mother father friend summer winter morning night day year week "
    "runs plays walks sits stands eats drinks reads writes sings holds makes takes gives says told "
    "opens closes cuts rides jumps sleeps works lives moves turns shows finds keeps small large "
    "young old black white red green blue new long short high early late good bad quiet happy near "
    "over under after before while because about into across through between against"
)


@dataclass(frozen=True, slots=True)
class Sentences:
    """Texts of one run, which a benchmark sends to a server or an engine."""

    origin: str  # file name, or parameters of the generation
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LabeledText:
    text: str
    label: int


def load_sentences(data: Path | None, seed: int) -> Sentences:
    """Read the sentences of STS-B's test split in file order, or generate sentences.

    `data` is the directory of the file. If it is None, the default directory is used, and sentences
    are generated if the file is missing there. Raises BenchmarkError if a given directory lacks the
    file, or if the file is invalid.
    """
    path = (data or DEFAULT_DATA) / STSB_NAME
    if data is None and not path.is_file():
        return generate_sentences(GENERATED_COUNT, seed)
    pairs = read_scored_pairs(path)
    return Sentences(STSB_NAME, tuple(text for pair in pairs for text in (pair.left, pair.right)))


def generate_sentences(count: int, seed: int) -> Sentences:
    """Generate `count` sentences of common words. Equal seeds give equal sentences."""
    rng = random.Random(seed)
    words = COMMON_WORDS.split()
    texts = tuple(_generate_sentence(rng, words) for _ in range(count))
    return Sentences(f"generated, seed {seed}", texts)


def _generate_sentence(rng: random.Random, words: list[str]) -> str:
    count = round(rng.lognormvariate(LOG_WORDS_MEAN, LOG_WORDS_DEVIATION))
    sample = rng.choices(words, k=min(max(count, MIN_WORDS), MAX_WORDS))
    return " ".join(sample).capitalize() + "."


def read_scored_pairs(path: Path) -> list[ScoredPair]:
    """Read `score`, `sentence1` and `sentence2` of each record of an STS-B file.

    Raises BenchmarkError if the file is invalid.
    """
    with _translate_errors():
        return read_pairs(path)


def read_labeled_texts(path: Path) -> list[LabeledText]:
    """Read `label` and `sentence` of each record of an SST-2 file.

    Raises BenchmarkError if the file is invalid.
    """
    with _translate_errors():
        return [
            LabeledText(record.text("sentence"), int(record.number("label")))
            for record in read_records(FileLocation(path, SST2_EXPECTED), SST2_LAYOUT)
        ]


def read_answerable_questions(path: Path) -> list[SquadQuestion]:
    """Read the questions of a SQuAD file that have an answer.

    Raises BenchmarkError if the file is invalid or has no such question.
    """
    with _translate_errors():
        questions = [question for question in read_questions(path) if question.golds]
    if not questions:
        raise BenchmarkError(
            f"`{path}` contains no question with an answer",
            hint="name another file with --squad FILE",
        )
    return questions


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except BadEvaluationData as exc:
        hint = f"{exc.hint}; name the directory of a valid file with --data DIR"
        raise BenchmarkError(exc.message, hint=hint) from exc
