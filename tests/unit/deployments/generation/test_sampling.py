from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from numpy.typing import NDArray

from deployments.errors import EngineFailed, InvalidField
from deployments.generation.sampling import Sampler, log_probabilities, smallest_set_reaching
from deployments.messages import SamplingParams
from deployments.top_indices import top_indices

VOCABULARY = 3000
GREEDY = SamplingParams(temperature=0)
Row = NDArray[np.float32]


def logits_of(seed: int = 0, size: int = VOCABULARY, spread: float = 3.0) -> Row:
    row = np.random.default_rng(seed).standard_normal(size) * spread
    return row.astype(np.float32)


def sampler(
    sampling: SamplingParams, prompt: Iterable[int] = (), size: int = VOCABULARY
) -> Sampler:
    return Sampler(sampling, list(prompt), size)


def softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    exact = logits.astype(np.float64)
    weights = np.exp(exact - exact.max())
    return weights / weights.sum()


def reference(logits: Row, sampling: SamplingParams) -> NDArray[np.float64]:
    """Return the probability of each token, with a full sort for every filter."""
    chances = softmax(logits.astype(np.float64) / sampling.temperature)
    order = np.argsort(-chances, kind="stable")
    if sampling.top_k is not None:
        chances[order[sampling.top_k :]] = 0
        chances /= chances.sum()
    if sampling.top_p is not None:
        chances = shared(chances, order, sampling.top_p)
    if sampling.min_p is not None:
        chances[chances < sampling.min_p * chances.max()] = 0
        chances /= chances.sum()
    if sampling.typical_p is not None:
        possible = chances[chances > 0]
        entropy = -(possible * np.log(possible)).sum()
        with np.errstate(divide="ignore"):
            distance = np.abs(-np.log(chances) - entropy)
        chances = shared(chances, np.argsort(distance, kind="stable"), sampling.typical_p)
    return chances


def shared(
    chances: NDArray[np.float64], order: NDArray[np.intp], share: float
) -> NDArray[np.float64]:
    allowed = np.zeros_like(chances)
    for token in order:
        allowed[token] = chances[token]
        if allowed.sum() >= share:
            break
    return allowed / allowed.sum()


def named(sampling: SamplingParams) -> str:
    changed = {k: v for k, v in sampling._asdict().items() if v != SamplingParams()._asdict()[k]}
    return ",".join(f"{name}={str(value)[:12]}" for name, value in changed.items()) or "plain"


CUTS = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5),
    SamplingParams(top_k=7),
    SamplingParams(top_k=10 * VOCABULARY),
    SamplingParams(top_p=0.8),
    SamplingParams(top_p=0.97, temperature=4.0),
    SamplingParams(top_p=1e-9),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=1.0),
    SamplingParams(typical_p=0.4),
    SamplingParams(typical_p=0.9, temperature=4.0),
    SamplingParams(top_k=20, top_p=0.8),
    SamplingParams(top_p=0.9, min_p=0.05),
    SamplingParams(top_k=40, top_p=0.95, min_p=0.02, typical_p=0.8, temperature=0.7),
]


@pytest.mark.parametrize("sampling", CUTS, ids=named)
def test_samples_follow_the_distribution(sampling: SamplingParams) -> None:
    logits = logits_of()
    draws = 4000
    chances = reference(logits, sampling)
    own = sampler(sampling._replace(seed=11))
    counts = np.bincount([own.next(logits) for _ in range(draws)], minlength=VOCABULARY)
    assert not counts[chances == 0].any(), "a token outside the filters was drawn"
    likely = chances * draws >= 5
    expected = np.append(chances[likely], chances[~likely].sum()) * draws
    observed = np.append(counts[likely], counts[~likely].sum())
    expected, observed = expected[expected > 0], observed[expected > 0]
    squares = ((observed - expected) ** 2 / expected).sum()
    freedom_degrees = len(expected) - 1
    assert squares <= freedom_degrees + 5 * np.sqrt(2 * freedom_degrees), "improbable counts"


@pytest.mark.parametrize("sampling", CUTS, ids=named)
def test_filters_retain_the_expected_tokens(sampling: SamplingParams) -> None:
    # Twelve tokens with similar probabilities: 2,000 draws contain every token that is kept.
    logits = logits_of(seed=4, size=12, spread=0.5)
    own = sampler(sampling._replace(seed=1), size=12)
    come = {own.next(logits) for _ in range(2000)}
    chances = reference(logits, sampling)
    assert come <= set(np.flatnonzero(chances))
    assert come >= set(np.flatnonzero(chances > 0.005))


@pytest.mark.parametrize("size", [1, 5, 64, 65, 3000])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 8.0, 1e4])
def test_smallest_set_reaching_is_minimal(size: int, spread: float) -> None:
    draw = np.random.default_rng(size)
    for share in (1e-9, *draw.random(20), 1 - 1e-9):
        ranks = (draw.standard_normal(size) * spread).round(2 if share < 0.5 else 6)
        weights = np.exp(-draw.random(size) * 5)
        order = np.argsort(-ranks, kind="stable")
        reached = np.cumsum(weights[order]) / weights.sum()
        needed = int((reached < share).sum()) + 1
        assert sorted(smallest_set_reaching(ranks, weights, share)) == sorted(order[:needed])


def test_smallest_set_may_reach_the_share_exactly() -> None:
    assert smallest_set_reaching(np.array([2.0, 1.0]), np.ones(2), 0.5).tolist() == [0]


def test_temperature_zero_is_greedy() -> None:
    logits = logits_of()
    assert sampler(GREEDY).next(logits) == logits.argmax()


def test_top_k_one_is_greedy_with_ties() -> None:
    logits = np.zeros(50, np.float32)
    logits[[7, 20]] = 4.0
    own = sampler(SamplingParams(top_k=1, seed=3), size=50)
    assert [own.next(logits) for _ in range(20)] == [7] * 20


def test_top_k_limits_tied_tokens() -> None:
    logits = np.zeros(500, np.float32)
    own = sampler(SamplingParams(top_k=3, seed=3), size=500)
    assert {own.next(logits) for _ in range(200)} == {0, 1, 2}


def only(token: int, size: int) -> NDArray[np.bool_]:
    return np.arange(size) == token


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(top_k=5, repetition_penalty=1.3),
        SamplingParams(top_p=0.9, frequency_penalty=0.2),
        SamplingParams(typical_p=0.5),
    ],
    ids=named,
)
def test_seed_reproduces_the_tokens(sampling: SamplingParams) -> None:
    def answer(seed: int | None) -> tuple[list[int], int]:
        own = sampler(sampling._replace(seed=seed), prompt=range(50))
        return [own.next(logits_of(step)) for step in range(30)], own.seed

    assert answer(5) == answer(5)
    assert answer(5)[0] != answer(6)[0]
    assert answer(-5) == answer(-5)
    drawn, seed = answer(None)
    assert 0 <= seed < 2**63
    assert answer(seed)[0] == drawn
    assert answer(None)[1] != seed


def test_penalties_count_generated_tokens() -> None:
    logits = np.linspace(1.0, 0.0, 400, dtype=np.float32)
    own = sampler(SamplingParams(temperature=0, presence_penalty=2.0), size=400)
    assert [own.next(logits) for _ in range(400)] == list(range(400))
    own = sampler(SamplingParams(temperature=0, repetition_penalty=1e9), prompt=range(7), size=400)
    assert own.next(logits) == 7


def test_huge_bias_selects_the_token() -> None:
    logits = logits_of()
    biased = sampler(SamplingParams(logit_bias=((17, 1e300),), seed=1))
    assert {biased.next(logits) for _ in range(20)} == {17}
    banned = sampler(SamplingParams(logit_bias=((int(logits.argmax()), -1e300),), temperature=0))
    assert banned.next(logits) == top_indices(logits, 2)[1]


def test_choice_depends_on_the_step_number_only() -> None:
    logits = logits_of()
    first, second = sampler(SamplingParams(seed=8)), sampler(SamplingParams(seed=8))
    first.next(logits, allowed=only(3, VOCABULARY))
    second.next(logits_of(1))
    assert [first.next(logits) for _ in range(5)] == [second.next(logits) for _ in range(5)]


@pytest.mark.parametrize("sampling", [*CUTS, GREEDY], ids=named)
def test_next_does_not_modify_logits(sampling: SamplingParams) -> None:
    logits = logits_of()
    logits.setflags(write=False)
    before = logits.copy()
    for own in (
        sampler(sampling),
        sampler(sampling._replace(repetition_penalty=1.5, logit_bias=((4, -9.0),)), range(9)),
    ):
        own.next(logits, allowed=logits > 0, forbidden=(5, 6))
        own.next(logits, forbidden=(5, 6))
        own.next(logits)
    log_probabilities(logits, 3, 5)
    assert (logits == before).all()


HOSTILE = [
    SamplingParams(temperature=1e-6),
    SamplingParams(temperature=1e-300, top_k=40),
    SamplingParams(temperature=5e-324),
    SamplingParams(temperature=100.0, top_p=0.999999),
    SamplingParams(temperature=1e300, typical_p=0.9),
    SamplingParams(top_p=1e-9, typical_p=1e-9),
    SamplingParams(typical_p=1e-300, temperature=1e-6),
    SamplingParams(min_p=1.0, top_k=2),
    SamplingParams(logit_bias=tuple((token, 1e300) for token in range(0, VOCABULARY, 2))),
    SamplingParams(logit_bias=tuple((token, -1e300) for token in range(VOCABULARY))),
    SamplingParams(repetition_penalty=1e-300, temperature=0.1),
    SamplingParams(repetition_penalty=1e300, temperature=1e-6, top_p=0.5),
    SamplingParams(frequency_penalty=1e30, presence_penalty=-1e30, typical_p=0.7),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sampling", [*HOSTILE, *CUTS, GREEDY], ids=named)
def test_random_parameters_yield_an_allowed_token(sampling: SamplingParams) -> None:
    draw = np.random.default_rng(7)
    own = sampler(sampling._replace(seed=1), prompt=range(0, VOCABULARY, 3))
    for step in range(60):
        logits = logits_of(step, spread=float(draw.choice([0.0, 1e-3, 5.0, 1e4])))
        logits[draw.random(VOCABULARY) < 0.1] = -np.inf
        allowed = draw.random(VOCABULARY) < draw.choice([0.002, 0.5, 1.0])
        forbidden = draw.integers(0, VOCABULARY, 3).tolist()
        can_come = allowed & (logits > -np.inf)
        can_come[forbidden] = False
        if not can_come.any():
            continue
        assert can_come[own.next(logits, allowed, forbidden)]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(), SamplingParams(top_k=4)], ids=named)
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_nan_or_infinite_logits_fail(sampling: SamplingParams, broken: float) -> None:
    logits = logits_of()
    logits[1234] = broken
    with pytest.raises(EngineFailed, match="NaN or infinite"):
        sampler(sampling).next(logits)
    with pytest.raises(EngineFailed, match="NaN or infinite"):
        log_probabilities(logits, 3, 2)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(), SamplingParams(top_k=4)], ids=named)
def test_no_possible_token_fails(sampling: SamplingParams) -> None:
    logits = logits_of()
    nothing = np.zeros(VOCABULARY, np.bool_)
    with pytest.raises(EngineFailed, match="no token is possible"):
        sampler(sampling).next(logits, allowed=nothing)
    with pytest.raises(EngineFailed, match="no token is possible"):
        sampler(sampling).next(logits, allowed=nothing, forbidden=[3])
    with pytest.raises(InvalidField, match="`grammar` allows no token here"):
        sampler(sampling).next(logits, allowed=only(3, VOCABULARY), forbidden=[3])
    with pytest.raises(EngineFailed, match="no token is possible"):
        sampler(sampling).next(np.full(VOCABULARY, -np.inf, np.float32))


def test_log_probabilities_match_softmax() -> None:
    logits = logits_of()
    exact = np.log(softmax(logits))
    own, others = log_probabilities(logits, 100, 20)
    best = np.argsort(-logits, kind="stable")[:20]
    assert own == pytest.approx(exact[100], abs=1e-5)
    assert [token for token, _ in others] == best.tolist()
    assert [chance for _, chance in others] == pytest.approx(exact[best].tolist(), abs=1e-5)
    assert log_probabilities(logits, 100, 0) == (own, [])


def test_tied_alternatives_are_ordered_by_id() -> None:
    logits = np.zeros(1000, np.float32)
    logits[[900, 30]] = 2.0
    _, others = log_probabilities(logits, 0, 4)
    assert [token for token, _ in others] == [30, 900, 0, 1]
