from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deployments.artifacts.types import Device
from deployments.batching.batch_policy import collate
from deployments.engines import EncoderEngine
from deployments.engines.onnx.encoder import OnnxEngine
from deployments.errors import HardwareUnavailable, RequirementMissing
from deployments.tuning.costs import TuningTarget
from deployments.tuning.host import Host
from deployments.tuning.opening import ShapeDispatchEngine, open_tuned_engine
from tests.support.cost_tables import variant
from tests.support.fakes import build_item
from tests.support.tuning_artifacts import WRONG_GRAPH_NAME, seal_tunable, write_table

ITEM = build_item([5, 9, 31])


def run_item(engine: EncoderEngine) -> np.ndarray:
    return np.array(engine.run(collate([ITEM])).items[0])


def have_equal_outputs(a: EncoderEngine, b: EncoderEngine) -> bool:
    return bool(np.allclose(run_item(a), run_item(b), atol=1e-5))


def with_gpu(target: TuningTarget) -> TuningTarget:
    return TuningTarget(target.artifact, target.manifest, Device.GPU, target.settings)


def test_default_candidate_is_opened_without_a_table(tmp_path: Path) -> None:
    default, is_tuned, _ = open_tuned_engine(
        seal_tunable(tmp_path / "a", names=["astray", "plain"], wrong=["astray"])
    )
    plain = open_tuned_engine(seal_tunable(tmp_path / "b")).engine
    assert not is_tuned
    assert not have_equal_outputs(
        default, plain
    )  # `default` is the first candidate, `astray`, whose outputs are wrong


def test_unsupported_default_is_replaced_by_the_next_candidate(tmp_path: Path) -> None:
    engine, is_tuned, serving = open_tuned_engine(
        seal_tunable(tmp_path, names=["far", "plain"], absent=["far"])
    )
    assert not is_tuned
    assert serving == variant("plain")
    assert engine.info.compute_type == "cpu-fp32"


def test_winner_is_opened_with_its_options(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, names=["astray", "plain"], wrong=["astray"])
    default = open_tuned_engine(target).engine
    write_table(target, {"1x16": "plain+spinning"})
    engine, is_tuned, serving = open_tuned_engine(target)
    assert is_tuned
    assert serving == variant("plain+spinning")
    assert isinstance(engine, OnnxEngine)
    assert not have_equal_outputs(engine, default)


def test_several_winners_open_one_engine(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, names=["plain", "astray"], wrong=["astray"])
    default = open_tuned_engine(target).engine
    write_table(target, {"1x4": "plain", "1x16": "astray"})
    engine, is_tuned, serving = open_tuned_engine(target)
    assert is_tuned
    assert serving is None
    assert isinstance(engine, ShapeDispatchEngine)
    assert have_equal_outputs(engine, default)
    long_batch = collate([build_item(np.arange(5, 21))])
    assert not np.allclose(
        engine.run(long_batch).items[0], default.run(long_batch).items[0], atol=1e-3
    )


def test_table_with_two_quantized_winners_selects_nothing(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, names=["int8", "int8-twin"])
    write_table(target, {"1x16": "int8", "8x16": "int8-twin"})
    _, is_tuned, serving = open_tuned_engine(target)
    assert not is_tuned, "so it is measured again"
    assert serving == variant("int8")


def test_stale_table_opens_the_default(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path)
    write_table(target, {"1x16": "twin"}, engines={"onnxruntime": "onnxruntime 1.2.3"})
    assert not open_tuned_engine(target).is_tuned


def other_host(target: TuningTarget, **changes: object) -> Host:
    return target.host.model_copy(update={"name": "another CPU", **changes})


def test_table_of_a_host_that_computes_alike_selects_and_is_not_tuned(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, names=["astray", "plain"], wrong=["astray"])
    default = open_tuned_engine(target).engine
    write_table(target, {"1x16": "plain"}, host=other_host(target, cores=96))
    engine, is_tuned, serving = open_tuned_engine(target)
    assert not is_tuned
    assert serving == variant("plain")
    assert not have_equal_outputs(engine, default)


def test_most_similar_host_selects(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, names=["astray", "plain"], wrong=["astray"])
    near, far = 2 * target.host.cores, 32 * target.host.cores
    write_table(target, {"1x16": "astray"}, host=other_host(target, cores=far))
    write_table(target, {"1x16": "plain"}, host=other_host(target, cores=near))
    plain = open_tuned_engine(seal_tunable(tmp_path / "b")).engine
    assert have_equal_outputs(open_tuned_engine(target).engine, plain)


def test_table_of_a_host_with_other_instructions_does_not_select(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, names=["astray", "plain"], wrong=["astray"])
    default = open_tuned_engine(target).engine
    write_table(target, {"1x16": "plain"}, host=other_host(target, flags=("abacus",)))
    assert have_equal_outputs(open_tuned_engine(target).engine, default)


@pytest.mark.parametrize(
    "winners", [{"1x16": "astray"}, {"1x4": "twin", "1x16": "astray"}], ids=["alone", "of two"]
)
def test_damaged_winner_opens_the_default(
    tmp_path: Path, winners: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    target = seal_tunable(tmp_path, names=["plain", "twin", "astray"], wrong=["astray"])
    write_table(target, winners)
    (target.artifact / WRONG_GRAPH_NAME).write_bytes(b"no graph any more")
    engine, is_tuned, serving = open_tuned_engine(target)
    assert not is_tuned
    assert serving == variant("plain")
    assert isinstance(engine, OnnxEngine)
    assert "the default candidate is used" in caplog.text


def test_default_is_not_a_rejected_candidate(tmp_path: Path) -> None:
    names = ["astray", "plain", "gone"]
    target = seal_tunable(tmp_path / "a", names=names, wrong=["astray"], absent=["gone"])
    write_table(target, {"1x16": "gone"}, rejected={"astray": "mean cosine 0.1 < 0.985"})
    engine, is_tuned, serving = open_tuned_engine(target)
    assert not is_tuned
    assert serving == variant("plain")
    assert have_equal_outputs(engine, open_tuned_engine(seal_tunable(tmp_path / "b")).engine)


def test_default_may_be_a_candidate_that_was_not_measured(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, names=["plain", "twin", "gone"], absent=["gone"])
    write_table(target, {"1x16": "gone"}, unmeasured={"plain": "not enough memory"})
    assert open_tuned_engine(target).variant == variant("plain")


def test_device_without_graph_raises_hardware_unavailable(tmp_path: Path) -> None:
    with pytest.raises(HardwareUnavailable, match="tiny/embedder has no graph for the gpu encoder"):
        open_tuned_engine(with_gpu(seal_tunable(tmp_path)))


def test_no_supported_candidate_raises_with_every_reason(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, names=["plain", "far"], absent=["far"])
    only_far = target.manifest.model_copy(update={"candidates": target.candidates[1:]})
    with pytest.raises(RequirementMissing, match=r"cannot run on the cpu encoder: far: .*Abacus"):
        open_tuned_engine(TuningTarget(target.artifact, only_far, Device.CPU, target.settings))
