from __future__ import annotations

import errno
import json
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import host_description
from cluster.diagnosis import HostDescription, MemoryNeed, StoreDescription, diagnose
from cluster.doctor import format_findings
from cluster.host_description import read_host_description
from cluster.ports import open_listener
from cluster.replica_resources import REPLICA_BYTES
from deployments.host.gpus import Gpu
from deployments.host.machine import CpuInfo
from hundredfold.__main__ import main
from tests.support.checked_configs import APP, CPU_ENCODER, INGRESS, create_config
from tests.support.ipv6 import needs_ipv6
from tests.support.old_setpriv import install_old_setpriv
from tests.support.ordinary_rights import ordinary_rights

GIGABYTE = 10**9
H200 = Gpu(name="NVIDIA H200", driver="580.159.03", compute_capability=(9, 0))
OLD = replace(H200, driver="535.1")
P400 = Gpu(name="Quadro P400", driver="580.159.03", compute_capability=(6, 1))
GOOD = HostDescription(
    config=Path("serve_config.yaml"),
    config_error=None,
    cpu=CpuInfo("Xeon", "6-143-8", ("avx2", "avx512_vnni", "amx_int8"), "x86_64"),
    cores=8,
    memory_bytes=64 * GIGABYTE,
    free_bytes=60 * GIGABYTE,
    needed=MemoryNeed(4 * GIGABYTE, 20 * GIGABYTE),
    gpus=(),
    visible_gpus=(),
    knows_gpu_memory=False,
    gpu_memory_in_bytes=False,
    python="3.11.7",
    python_is_optimized=True,
    packages={"ray": "2.60", "onnxruntime": "1", "tokenizers": "1", "numpy": "2", "torch": "2+cpu"},
    store=StoreDescription(path="/store", models=4, is_writable=True, free_bytes=90 * GIGABYTE),
    ports={},
    http_port=8000,
    can_listen=True,
    open_files=65_536,
    shared_bytes=GIGABYTE,
    can_keep_cores_awake=True,
    schedules_sessions=False,
    has_setpriv=True,
)
FOR_CUDA = {name: v for name, v in GOOD.packages.items() if name != "onnxruntime"}
SERVING_ONLY = {name: v for name, v in GOOD.packages.items() if name != "torch"}
SERVING_ONLY_CUDA = {**SERVING_ONLY, "onnxruntime-gpu": "1"}
del SERVING_ONLY_CUDA["onnxruntime"]
WITH_GPU: dict[str, Any] = {"gpus": (H200,), "visible_gpus": (H200,), "knows_gpu_memory": True}


def test_good_host_has_nothing_to_do() -> None:
    findings = diagnose(GOOD)
    assert {finding.level for finding in findings} == {"ok"}
    assert not any(finding.action for finding in findings)


@pytest.mark.parametrize(
    ("changes", "name", "level", "says"),
    [
        ({"cores": 1}, "processor", "problem", "two cores"),
        ({"cpu": CpuInfo("Old", "", ("avx2",), "x86_64")}, "processor", "note", "VNNI"),
        ({"cpu": CpuInfo("Arm", "", ("i8mm",), "aarch64")}, "processor", "ok", "dot-product"),
        ({"free_bytes": GIGABYTE}, "memory", "problem", "need about 4.0 GB"),
        ({"free_bytes": 5 * GIGABYTE}, "memory", "note", "full pools and builds may take 20.0 GB"),
        ({"python_is_optimized": False}, "packages", "note", "--enable-optimizations"),
        ({"needed": None}, "config", "note", "`hundredfold check serve_config.yaml`"),
        ({"config_error": "line 2: no list"}, "config", "problem", "cannot be read: line 2"),
        ({"needed": None}, "memory", "note", "its need is unknown"),
        (WITH_GPU, "GPU", "problem", "`onnxruntime-gpu` is not installed"),
        ({**WITH_GPU, "packages": {**FOR_CUDA, "onnxruntime-gpu": "1"}}, "GPU", "ok", "Ray gets 1"),
        (
            {"gpus": (OLD,), "visible_gpus": (OLD,)},
            "GPU",
            "problem",
            "-> install driver 580 or later, then run `",
        ),
        (
            {"gpus": (P400,), "visible_gpus": (P400,)},
            "GPU",
            "problem",
            "or leave the GPU out: `make serve NO_GPU=1` or `hundredfold serve --no-gpu`",
        ),
        ({"packages": {**FOR_CUDA, "onnxruntime-gpu": "1"}}, "GPU", "note", "-> run `nvidia-smi`"),
        (
            {
                **WITH_GPU,
                "packages": {**FOR_CUDA, "onnxruntime-gpu": "1"},
                "knows_gpu_memory": False,
            },
            "GPU",
            "note",
            "-> set `gpu_memory` of the config in bytes",
        ),
        (
            {
                **WITH_GPU,
                "packages": {**FOR_CUDA, "onnxruntime-gpu": "1"},
                "knows_gpu_memory": False,
                "gpu_memory_in_bytes": True,
            },
            "GPU",
            "ok",
            "Ray gets 1",
        ),
        (
            {
                **WITH_GPU,
                "packages": {**FOR_CUDA, "onnxruntime-gpu": "1"},
                "gpus": (H200, P400),
                "visible_gpus": (H200, P400),
            },
            "GPU",
            "note",
            "-> set `CUDA_VISIBLE_DEVICES=0`, because CUDA 13 does not run on Quadro P400",
        ),
        (
            {"packages": {**GOOD.packages, "onnxruntime-gpu": "1"}},
            "packages",
            "problem",
            "overwrite each other",
        ),
        ({"packages": FOR_CUDA}, "packages", "problem", "serving needs onnxruntime"),
        ({"packages": SERVING_ONLY}, "packages", "note", "install `.[build]`"),
        ({"packages": SERVING_ONLY_CUDA}, "packages", "note", "install `.[gpu-build]`"),
        ({"store": replace(GOOD.store, models=0)}, "store", "note", "hundredfold demo"),
        (
            {"store": replace(GOOD.store, models=0, is_writable=False)},
            "store",
            "problem",
            "cannot build here",
        ),
        (
            {"store": replace(GOOD.store, models=0, free_bytes=5)},
            "store",
            "problem",
            "name another directory",
        ),
        ({"store": replace(GOOD.store, is_writable=False)}, "store", "note", "read-only"),
        ({"store": replace(GOOD.store, free_bytes=5)}, "store", "problem", "models gc"),
        ({"ports": {8000: "pid 7 (nginx)"}}, "ports", "note", "PORT=8001"),
        ({"ports": {8265: "pid 7 (ray)"}}, "ports", "ok", "pid 7 (ray)"),
        ({"http_port": 80, "can_listen": False}, "ports", "note", "CAP_NET_BIND_SERVICE"),
        ({"open_files": 1024}, "limits", "problem", "ulimit -Hn"),
        ({"shared_bytes": 64 << 20}, "limits", "note", "--shm-size"),
        ({"has_setpriv": False}, "limits", "note", "util-linux 2.33 or later"),
        ({"can_keep_cores_awake": False}, "wake-ups", "note", "root"),
        ({"schedules_sessions": True}, "sessions", "note", "sched_autogroup_enabled=0"),
    ],
)
def test_finding_says_what_it_means_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], name: str, level: str, says: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    findings = diagnose(replace(GOOD, **changes))
    (finding,) = (found for found in findings if found.name == name)
    assert finding.level == level
    assert says in format_findings([finding])
    if level == "problem":
        assert finding.action


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (WITH_GPU, "GPU"),
        ({**WITH_GPU, "packages": {**GOOD.packages, "onnxruntime-gpu": "1"}}, "GPU"),
        ({**WITH_GPU, "packages": {**GOOD.packages, "torch": "2", "transformers": "5"}}, "GPU"),
        ({"packages": FOR_CUDA}, "packages"),
        ({"packages": {**GOOD.packages, "onnxruntime-gpu": "1"}}, "packages"),
    ],
    ids=["no engine for CUDA", "both families", "torch only", "none", "both on the CPU"],
)
def test_packages_are_mended_by_a_command_that_installs(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], name: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (finding,) = (f for f in diagnose(replace(GOOD, **changes)) if f.name == name)
    advice = format_findings([finding])
    # `make serve` installs nothing into an existing virtual environment.
    assert f"run `{sys.executable} -m cluster.installation serve` in the checkout" in finding.action
    assert "make serve" not in advice


def test_gpu_is_described_with_its_compute_capability() -> None:
    host = replace(GOOD, **WITH_GPU, packages={**FOR_CUDA, "onnxruntime-gpu": "1"})
    (finding,) = (found for found in diagnose(host) if found.name == "GPU")
    assert "NVIDIA H200, compute capability 9.0, driver 580.159.03" in finding.found
    unnamed = (replace(H200, compute_capability=(0, 0)),)
    unknown = replace(host, gpus=unnamed, visible_gpus=unnamed)
    (finding,) = (found for found in diagnose(unknown) if found.name == "GPU")
    assert "NVIDIA H200, driver 580.159.03" in finding.found


@pytest.mark.parametrize(("budget", "in_bytes"), [("0.85", False), ("30000000000", True)])
def test_config_tells_whether_gpu_memory_is_in_bytes(
    tmp_path: Path, budget: str, in_bytes: bool
) -> None:
    config = tmp_path / "config.yaml"
    args = f"{{gpu_memory: {budget}}}"
    config.write_text(f"applications: [{{import_path: deployments.app:build_app, args: {args}}}]\n")
    assert read_host_description(config).gpu_memory_in_bytes is in_bytes


def measure(config: Path, **changes: Any) -> MemoryNeed:
    config.write_text(yaml.safe_dump(create_config(changes)))
    needed = read_host_description(config).needed
    assert needed is not None
    return needed


def test_memory_is_that_of_the_replicas_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.yaml"
    monkeypatch.setattr(host_description, "usable_cores", lambda: 2)
    shipped = measure(config)
    assert shipped.minimum == pytest.approx(4 * GIGABYTE, rel=0.05)
    pools = 400 * GIGABYTE
    larger = measure(config, **{f"{APP}.args.encoders.cpu.pool_bytes": pools})
    assert larger.minimum == shipped.minimum
    assert larger.maximum > pools
    monkeypatch.setattr(host_description, "usable_cores", lambda: 8)
    assert measure(config).maximum > 3 * (4 << 30) + shipped.maximum, "one encoder per two cores"
    monkeypatch.setattr(host_description, "usable_cores", lambda: 32)
    assert measure(config).minimum == shipped.minimum + 7 * REPLICA_BYTES, "one ingress per 4 cores"
    one = {f"{INGRESS}.num_replicas": 1}
    assert measure(config, **one).minimum == shipped.minimum
    monkeypatch.setattr(host_description, "usable_cores", lambda: 8)
    fewer = {f"{CPU_ENCODER}.autoscaling_config.max_replicas": 1}
    assert measure(config, **fewer).maximum < measure(config).maximum - 3 * (4 << 30)
    pulls = {f"{INGRESS}.user_config.builds": {"allow_pull": True, "max_memory_bytes": pools}}
    assert measure(config, **pulls).maximum == measure(config).maximum + pools


def test_memory_of_a_config_with_problems_is_unknown(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("applications: [x]\n")
    assert read_host_description(config).needed is None
    assert read_host_description(tmp_path / "none.yaml").needed is None


def test_missing_package_is_named_although_the_config_cannot_be_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("cluster.linting.linter", "cluster.replica_resources"):
        monkeypatch.setitem(sys.modules, module, None)  # its import fails as without Ray
    host = replace(read_host_description(Path("serve_config.yaml")), packages={})
    assert host.needed is None
    assert {finding.name for finding in diagnose(host)} >= {"memory", "packages"}


def test_config_names_store_and_port(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    (tmp_path / "store" / "org--model").mkdir(parents=True)
    args = f"{{store: {tmp_path / 'store'}}}"
    config.write_text(
        "http_options: {port: 8123}\n"
        f"applications: [{{import_path: deployments.app:build_app, args: {args}}}]\n"
    )
    host = read_host_description(config)
    assert (host.http_port, host.store.models) == (8123, 1)
    assert host.store.is_writable


@pytest.mark.parametrize(
    ("options", "server", "is_taken"),
    [
        ("host: 127.0.0.1", "127.0.0.1", True),
        ("host: 127.0.0.1", "::1", False),
        ("host: '::1'", "::1", True),
        ("host: '::1'", "127.0.0.1", False),
        ("host: '::'", "127.0.0.1", True),
        ("host: 203.0.113.1", "127.0.0.1", False),  # not an address of this host
        ("", "127.0.0.1", True),
        ("", "::1", True),
        ("host: localhost", "::1", True),
    ],
)
@needs_ipv6
def test_taken_port_is_one_of_the_configured_address(
    tmp_path: Path, options: str, server: str, is_taken: bool
) -> None:
    config = tmp_path / "config.yaml"
    with open_listener(server, 0) as listener:
        port = listener.getsockname()[1]
        config.write_text(f"http_options:\n  port: {port}\n  {options}\n")
        assert (port in read_host_description(config).ports) is is_taken


def test_port_that_needs_a_permission_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_port_free(host: str, port: int) -> bool:
        if port < 1024:
            raise PermissionError(errno.EACCES, "Permission denied")
        return True

    monkeypatch.setattr(host_description, "is_port_free", is_port_free)
    config = tmp_path / "config.yaml"
    for port, can_listen in ((80, False), (8000, True)):
        config.write_text(f"http_options: {{port: {port}}}\n")
        host = read_host_description(config)
        assert (host.can_listen, host.ports) == (can_listen, {})


@pytest.mark.parametrize(
    "text",
    [
        "applications: [x]\nhttp_options: 8000\n",
        "applications: 1\nhttp_options: {port: 70000}\n",
        "applications: [{import_path: deployments.app:build_app, args: [1]}]\n",
        "http_options: {port: http}\ndate: 2024-13-45\n",
    ],
)
def test_invalid_config_counts_as_the_defaults(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUNDREDFOLD_STORE", str(tmp_path))
    config = tmp_path / "config.yaml"
    config.write_text(text)
    host = read_host_description(config)
    assert (host.http_port, host.store.path) == (8000, str(tmp_path))


def test_unreadable_store_has_no_models(public_directory: Path) -> None:
    (public_directory / "org--model").mkdir()
    public_directory.chmod(0o311)
    with ordinary_rights():
        host = read_host_description(public_directory / "none.yaml", public_directory)
    assert host.store.models == 0


def test_store_in_a_closed_directory_has_no_models(public_directory: Path) -> None:
    closed = public_directory / "closed"
    (closed / "store" / "org--model").mkdir(parents=True)
    closed.chmod(0o600)
    with ordinary_rights():
        host = read_host_description(public_directory / "none.yaml", closed / "store")
    assert host.store.models == 0


def test_old_setpriv_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_old_setpriv(tmp_path, monkeypatch)
    assert not read_host_description(tmp_path / "none.yaml", tmp_path).has_setpriv


@pytest.mark.parametrize(
    ("prefix", "options", "is_optimized"),
    [
        ("/home/me/.pyenv/versions/3.11.7", "'--prefix=/home/me' '--enable-shared'", False),
        ("/home/me/.pyenv/versions/3.11.7", "'--enable-optimizations' '--with-lto'", True),
        ("/usr", "'--enable-shared' '--prefix=/usr'", True),
        ("/usr", None, True),
    ],
)
def test_python_of_pyenv_is_optimized_only_on_request(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prefix: str,
    options: str | None,
    is_optimized: bool,
) -> None:
    monkeypatch.setattr(sys, "base_prefix", prefix)
    monkeypatch.setattr(sysconfig, "get_config_var", {"CONFIG_ARGS": options}.get)
    host = read_host_description(tmp_path / "serve_config.yaml")
    assert host.python_is_optimized is is_optimized


def test_doctor_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--store", str(tmp_path / "none")]) in (0, 1)
    printed = json.loads(capsys.readouterr().out)
    assert printed["host"]["store"]["models"] == 0
    assert {finding["name"] for finding in printed["findings"]} >= {"processor", "GPU", "ports"}
