from __future__ import annotations

import os

import pytest

from deployments.host.machine import CpuInfo, parse_cpu_info, usable_cores

X86 = """\
processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC
stepping\t: 1
flags\t\t: fpu sse2 avx2 avx512f later_than_known

processor\t: 1
model name\t: another one
flags\t\t: amx_int8
"""
ARM = """\
processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd asimddp i8mm bf16 sve
CPU implementer\t: 0x41
CPU part\t: 0xd4f
"""


def test_parse_cpu_info_describes_the_first_processor() -> None:
    info = parse_cpu_info(X86)
    assert info.name == "AMD EPYC"
    assert info.generation == "25-17-1"
    assert info.flags == ("avx2", "avx512f")


@pytest.mark.parametrize(
    ("flags", "machine", "overflows"),
    [
        (("avx2", "avx512f"), "x86_64", True),
        (("avx2", "avx_vnni"), "x86_64", False),
        (("avx2", "avx512f", "avx512_vnni"), "x86_64", False),
        (("asimddp",), "aarch64", False),
    ],
)
def test_int8_overflows_on_x86_without_vnni(
    flags: tuple[str, ...], machine: str, overflows: bool
) -> None:
    assert CpuInfo("some", "1", flags, machine).int8_overflows is overflows


def test_parse_cpu_info_reads_arm_features_and_part_number() -> None:
    info = parse_cpu_info(ARM)
    assert info.generation == "0xd4f"
    assert info.flags == ("asimddp", "i8mm", "bf16", "sve")
    assert info.name


def test_parse_cpu_info_of_empty_text_returns_a_default() -> None:
    info = parse_cpu_info("")
    assert info.name
    assert (info.generation, info.flags) == ("", ())


def test_usable_cores_respects_the_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert 1 <= usable_cores() <= len(allowed)
