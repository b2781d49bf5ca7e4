from __future__ import annotations

from pathlib import Path

import pytest

from deployments.artifacts.types import Device, ModelHead, TaskName
from deployments.config import AppArgs, GeneratorSettings
from deployments.engines.base import MAX_PASS_SCORES
from deployments.errors import ModelUnavailable
from deployments.messages import ModelRef
from deployments.registry import open_model
from deployments.replicas.device_memory import DeviceMemory
from deployments.replicas.generator import GeneratorReplica
from deployments.replicas.pool_memory import PoolMemory, count_score_bytes
from deployments.replicas.tokenizer import TokenizerReplica
from deployments.tasks import TASKS, Task
from deployments.tokenization.encodings import measure_tokenizer
from tests.support.artifacts import WIDTH, seal_tiny, tiny_manifest, with_tasks
from tests.support.decoder_artifacts import DECODER
from tests.support.fakes import ListRecorder, TokenizeLog

REF = ModelRef("tiny/model", "0" * 12)
LIMIT = 100


@pytest.mark.parametrize(
    ("size", "size_settings", "advice"),
    [
        (LIMIT, "", "Retry later, or raise `gpu_memory`"),
        (LIMIT + 1, "", "Raise `gpu_memory`"),
        (LIMIT, "`kv_slots`", "Retry later, or raise `gpu_memory`, or lower `kv_slots`"),
        (LIMIT + 1, "`kv_slots`", "Raise `gpu_memory`, or lower `kv_slots`"),
    ],
)
def test_refusal_advises_what_can_help(
    tmp_path: Path, size: int, size_settings: str, advice: str
) -> None:
    memory = PoolMemory(None, DeviceMemory(tmp_path / "gpu", LIMIT), size_settings)
    assert memory.take(40, is_pinned=False)
    assert memory.build_refusal(REF, size).message == (
        f"Model tiny/model needs {size} bytes of memory; `gpu_memory` allows {LIMIT}, of which 60 "
        f"are available. {advice}"
    )
    memory.close()


async def test_refusal_of_a_generator_names_the_settings_of_its_kv_cache(
    store: Path, refs: dict[str, ModelRef]
) -> None:
    settings = GeneratorSettings(pool_bytes=1)
    args = AppArgs(store=store, encoders={}, generators={Device.CPU: settings})
    replica = GeneratorReplica(args, Device.CPU, ListRecorder())
    advice = (
        "Raise `pool_bytes`, or lower `kv_cache_bytes`, `kv_slots` or `max_context_tokens` of "
        "`generators.cpu`"
    )
    with pytest.raises(ModelUnavailable, match=advice):
        async with replica.pool.lease(refs[DECODER]):
            pass
    await replica.close()


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
async def test_second_tokenizer_of_tasks_with_windows_counts(task: Task, tmp_path: Path) -> None:
    labels = ("entailment", "neutral", "contradiction") if task.head is ModelHead.LABELS else ()
    directory = seal_tiny(tmp_path, "tiny/model", labels=labels, tasks=(TaskName(task.name),))
    replica = TokenizerReplica(AppArgs(store=tmp_path, encoders={}), TokenizeLog())
    ref = ModelRef("tiny/model", directory.name)
    async with replica.pool.lease(ref):
        pass
    manifest = open_model(tmp_path, ref).manifest
    example = task.example
    parsed = task.parse(example["inputs"], example.get("parameters", {}), manifest)
    copies = 1 if parsed.windowing is None else 2
    assert replica.pool.bytes == copies * measure_tokenizer(directory)
    await replica.close()


async def test_refusal_of_a_tokenizer_names_the_setting(tmp_path: Path) -> None:
    directory = seal_tiny(tmp_path, "tiny/model")
    args = AppArgs(store=tmp_path, encoders={}, tokenizer_pool_bytes=1)
    replica = TokenizerReplica(args, TokenizeLog())
    with pytest.raises(ModelUnavailable, match="Raise `tokenizer_pool_bytes`"):
        async with replica.pool.lease(ModelRef("tiny/model", directory.name)):
            pass
    await replica.close()


@pytest.mark.parametrize(("max_tokens", "longest"), [(16, 64), (256, 256)])
def test_scores_of_sparse_encoders_count_for_each_pass(
    max_tokens: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAX_PASS_SCORES, Device.CPU, 64 * WIDTH)
    manifest = tiny_manifest().model_copy(update={"max_tokens": max_tokens})
    assert count_score_bytes(manifest, Device.CPU, 2) == 0
    sparse = with_tasks(manifest, TaskName.SPARSE_EMBEDDINGS)
    assert count_score_bytes(sparse, Device.CPU, 2) == 2 * longest * WIDTH * 16
