"""A manifest says on what kind of processor a stage was made: another kind gives other last digits."""

from pathlib import Path

import pytest

from pipelines.core import provenance

INTEL = """processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8488C
flags\t\t: fpu sse2 avx avx2 avx512f avx512_bf16 amx_bf16 amx_tile

processor\t: 1
model name\t: Intel(R) Xeon(R) Platinum 8488C
"""
AMD = "model name : AMD EPYC\nflags : fpu avx avx2 fma\n"
ARM = "processor : 0\nFeatures : fp asimd sve\n"


@pytest.mark.parametrize(
    ("told", "processor"),
    [
        (INTEL, "Intel(R) Xeon(R) Platinum 8488C, amx_bf16"),
        (AMD, "AMD EPYC, avx2"),
        (ARM, "sve"),
        ("", ""),
        (None, ""),
    ],
)
def test_the_kind_of_processor_is_told(
    told: str | None, processor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if told is not None:
        (tmp_path / "cpuinfo").write_text(told)
    monkeypatch.setattr(provenance, "PROCESSOR", tmp_path / "cpuinfo")
    provenance.facts.cache_clear()
    facts = provenance.facts()
    provenance.facts.cache_clear()
    assert facts["machine"]["processor"] == processor
    assert provenance.as_tags(facts)["machine"].endswith(f" ({processor})" if processor else " processors")
