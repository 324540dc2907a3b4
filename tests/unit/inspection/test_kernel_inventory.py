from __future__ import annotations

import importlib.machinery
import json
from typing import Any

import pytest

from moe_optimizer.inspection.kernel_inventory import read_kernel_inventory

EXTENSION = "_kernels" + importlib.machinery.EXTENSION_SUFFIXES[0]
MANIFEST: dict[str, Any] = {
    "source_hash": "ab" * 32,
    "cpu_ops": ["fused_experts"],
    "cuda_ops": ["fused_experts"],
    "cuda_archs": ["sm_90a"],
    "extension": EXTENSION,
    "compiler": "g++ 12",
    "nvcc": None,
    "isa_paths": ["avx512", "generic"],
    "kernels": [],
}


@pytest.fixture
def build(tmp_path):
    """Return a function that writes a manifest and the extension it names; None leaves a file out."""

    def write(manifest: Any = MANIFEST, extension: str | None = EXTENSION):
        if manifest is not None:
            text = manifest if isinstance(manifest, str) else json.dumps(manifest)
            (tmp_path / "build_info.json").write_text(text)
        if extension is not None:
            (tmp_path / extension).write_bytes(b"")
        return read_kernel_inventory(tmp_path)

    return write


def test_built_kernels_are_listed(build):
    inventory = build()
    assert (inventory.built, inventory.reason) == (True, "")
    assert (inventory.cpu_ops, inventory.cuda_ops) == (("fused_experts",), ("fused_experts",))
    assert (inventory.cuda_archs, inventory.source_hash) == (("sm_90a",), "ab" * 32)


def test_the_reason_for_no_cuda_kernels_is_the_builds_own(build):
    assert build(MANIFEST | {"cuda_ops": [], "cuda_why_not": "no nvcc found"}).cuda_why_not == "no nvcc found"
    assert build(MANIFEST | {"cuda_ops": []}).cuda_why_not == ""  # an older build


@pytest.mark.parametrize("extension", ["_kernels.so", "_kernels.abi3.so"])
def test_extension_for_every_python_is_taken(build, extension):
    assert build(MANIFEST | {"extension": extension}, extension).built


@pytest.mark.parametrize(
    ("manifest", "extension", "reason"),
    [
        (None, None, "not built"),
        (MANIFEST, None, f"kernels are gone: {EXTENSION} is missing"),
        (MANIFEST | {"extension": "_kernels.cpython-27-none.so"}, "_kernels.cpython-27-none.so", "for another Python"),
        (MANIFEST | {"extension": f"../{EXTENSION}"}, EXTENSION, "file name"),
        (MANIFEST | {"extension": "_kernels"}, "_kernels", "for another Python"),
        (MANIFEST | {"extension": ""}, EXTENSION, "extension: "),
        (MANIFEST | {"source_hash": 7}, EXTENSION, "source_hash: got 7"),
        (MANIFEST | {"cpu_ops": "fused_experts"}, EXTENSION, "cpu_ops: "),
        (MANIFEST | {"cuda_archs": [90]}, EXTENSION, "cuda_archs: got [90]"),
        ("[]", EXTENSION, "got list"),
        ("{", EXTENSION, "cannot read build_info.json"),
        ("[" * 100_000, EXTENSION, "cannot read build_info.json"),
        ("x" * 1_000_001, EXTENSION, "expected at most"),
    ],
)
def test_what_cannot_be_used_counts_as_not_built_with_the_reason_and_what_to_do(build, manifest, extension, reason):
    inventory = build(manifest, extension)
    assert reason in inventory.reason
    assert "build.sh" in inventory.reason
    assert (inventory.built, inventory.cpu_ops, inventory.cuda_ops, inventory.source_hash) == (False, (), (), "")
