from __future__ import annotations

import os

import pytest

from deployments.machine import CpuInfo, parse_cpu_info, usable_cores

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


def test_the_first_processor_is_described() -> None:
    found = parse_cpu_info(X86)
    assert found.name == "AMD EPYC"
    assert found.generation == "25-17-1"
    assert found.flags == ("avx2", "avx512f")


@pytest.mark.parametrize(
    ("flags", "machine", "overflows"),
    [
        (("avx2", "avx512f"), "x86_64", True),
        (("avx2", "avx_vnni"), "x86_64", False),
        (("avx2", "avx512f", "avx512_vnni"), "x86_64", False),
        (("asimddp",), "aarch64", False),
    ],
)
def test_int8_products_overflow_on_x86_without_vnni(
    flags: tuple[str, ...], machine: str, overflows: bool
) -> None:
    assert CpuInfo("some", "1", flags, machine).int8_overflows is overflows


def test_arm_has_features_and_a_part_number() -> None:
    found = parse_cpu_info(ARM)
    assert found.generation == "0xd4f"
    assert found.flags == ("asimddp", "i8mm", "bf16", "sve")
    assert found.name


def test_nothing_known_is_still_a_processor() -> None:
    found = parse_cpu_info("")
    assert found.name
    assert (found.generation, found.flags) == ("", ())


def test_cores_are_those_of_the_affinity_at_most() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert 1 <= usable_cores() <= len(allowed)
