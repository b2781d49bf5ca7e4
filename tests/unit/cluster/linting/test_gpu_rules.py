"""The linter checks GPU shares and GPU memory budgets of deployments."""

from typing import Any

import pytest

from tests.support.checked_configs import (
    APP,
    CPU_ENCODER,
    GPU_ENCODER,
    GPU_GENERATOR,
    INGRESS,
    check_config,
    to_dotted_path,
)


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        ({f"{GPU_ENCODER}.ray_actor_options": {}}, GPU_ENCODER, "must be above 0"),
        ({f"{GPU_ENCODER}.ray_actor_options.num_gpus": 2}, GPU_ENCODER, "at most 1: an encoder"),
        ({f"{GPU_GENERATOR}.ray_actor_options.num_gpus": 1.5}, GPU_GENERATOR, "a whole number"),
        ({f"{GPU_GENERATOR}.ray_actor_options.num_gpus": 0.6}, GPU_GENERATOR, "use at most 0.5"),
        ({f"{CPU_ENCODER}.ray_actor_options.num_gpus": 1}, CPU_ENCODER, "uses no GPU"),
    ],
)
def test_wrong_share_of_a_gpu_is_reported(changes: dict[str, Any], path: str, message: str) -> None:
    (problem,) = check_config(changes)
    assert to_dotted_path(problem.path) == f"{path}.ray_actor_options.num_gpus"
    assert message in problem.message


@pytest.mark.parametrize("share", [0.25, 1, 2])
def test_own_gpus_and_smaller_shares_are_accepted(share: float) -> None:
    assert check_config({f"{GPU_GENERATOR}.ray_actor_options.num_gpus": share}) == []


def test_limit_above_the_budget_of_the_gpu_is_reported() -> None:
    budget = 1 << 34
    changes = {
        f"{APP}.args.gpu_memory": budget,
        f"{APP}.args.encoders.gpu.pool_bytes": budget + 1,
        f"{APP}.args.generators.gpu.kv_cache_bytes": budget,
    }
    (problem,) = check_config(changes)
    assert to_dotted_path(problem.path) == f"{APP}.args.encoders.gpu.pool_bytes"
    assert str(budget) in problem.message


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"target_s": 31}, "target_s"),
        ({"generation_target_s": 121}, "generation_target_s"),
        ({"default": "npu"}, "default"),
        ({"prices": {"cpu": 1}}, "prices"),
        ({"prices": {"cpu": 1, "gpu": 0}}, "prices.gpu"),
    ],
)
def test_placement_without_effect_is_reported(changes: dict[str, Any], key: str) -> None:
    path = f"{INGRESS}.user_config.placement"
    problems = check_config({f"{path}.{name}": value for name, value in changes.items()})
    assert [to_dotted_path(problem.path) for problem in problems] == [f"{path}.{key}"]


def test_auto_without_a_gpu_in_the_configuration_is_reported() -> None:
    changes = {
        f"{INGRESS}.user_config.placement.default": "auto",
        f"{APP}.args.encoders": {"cpu": {}},
        f"{APP}.args.generators": {"cpu": {}},
    }
    paths = {to_dotted_path(problem.path) for problem in check_config(changes)}
    assert f"{INGRESS}.user_config.placement.default" in paths
