from __future__ import annotations

from pathlib import Path

import pytest

from deployments.artifacts.types import Device
from deployments.config import AppArgs, GeneratorSettings
from deployments.errors import ModelUnavailable
from deployments.messages import ModelRef
from deployments.replicas.device_memory import DeviceMemory
from deployments.replicas.generator import GeneratorReplica
from deployments.replicas.pool_memory import PoolMemory
from tests.support.decoder_artifacts import DECODER
from tests.support.fakes import ListRecorder

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
