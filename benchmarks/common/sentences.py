"""What the benchmarks send: the sentences of STS-B where they are at hand, else generated ones."""

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

# Beside the checkout, because data sets have licences of their own.
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

GENERATED_COUNT = 2_758  # as many as STS-B's test half has, so that figures compare
# Words per sentence are log-normal with these parameters and bounds; with full stop and special
# tokens that gives STS-B's lengths: 14 tokens on average, 46 at most.
LOG_WORDS_MEAN = 2.18
LOG_WORDS_DEVIATION = 0.68
MIN_WORDS, MAX_WORDS = 2, 43

# Common words, each one token of the BERT vocabulary.
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
    """The texts of a run and where they came from."""

    origin: str  # the file, or how they were generated
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LabeledText:
    """A sentence and the index of its label."""

    text: str
    label: int


def load_sentences(data: Path | None, seed: int) -> Sentences:
    """Every sentence of STS-B's test half, in the file's order, else generated ones.

    `data` is the directory to look in; None: the default one, which may be absent. Raises
    BenchmarkError when a directory was named and has no such file.
    """
    path = (data or DEFAULT_DATA) / STSB_NAME
    if data is None and not path.is_file():
        return generated(GENERATED_COUNT, seed)
    pairs = read_scored_pairs(path)
    return Sentences(STSB_NAME, tuple(text for pair in pairs for text in (pair.left, pair.right)))


def generated(count: int, seed: int) -> Sentences:
    """`count` sentences of common words; equal for equal seeds."""
    chance = random.Random(seed)
    words = COMMON_WORDS.split()
    texts = tuple(_sentence(chance, words) for _ in range(count))
    return Sentences(f"generated, seed {seed}", texts)


def _sentence(chance: random.Random, words: list[str]) -> str:
    drawn = round(chance.lognormvariate(LOG_WORDS_MEAN, LOG_WORDS_DEVIATION))
    chosen = chance.choices(words, k=min(max(drawn, MIN_WORDS), MAX_WORDS))
    return " ".join(chosen).capitalize() + "."


def read_scored_pairs(path: Path) -> list[ScoredPair]:
    """STS-B: `score`, `sentence1`, `sentence2`. Raises BenchmarkError."""
    with _bad_data():
        return read_pairs(path)


def read_labeled_texts(path: Path) -> list[LabeledText]:
    """SST-2: `label`, `sentence`. Raises BenchmarkError."""
    with _bad_data():
        return [
            LabeledText(record.text("sentence"), int(record.number("label")))
            for record in read_records(FileLocation(path, SST2_EXPECTED), SST2_LAYOUT)
        ]


def read_answerable_questions(path: Path) -> list[SquadQuestion]:
    """Those questions of a SQuAD file that have an answer. Raises BenchmarkError."""
    with _bad_data():
        questions = [question for question in read_questions(path) if question.golds]
    if not questions:
        raise BenchmarkError(
            f"`{path}` has no question with an answer", hint="name another file with --squad FILE"
        )
    return questions


@contextmanager
def _bad_data() -> Iterator[None]:
    try:
        yield
    except BadEvaluationData as exc:
        hint = f"{exc.hint}; name the directory of a good one with --data DIR"
        raise BenchmarkError(exc.message, hint=hint) from exc
