"""Building kernels: the script's failure is ours to report, and an interrupt ends all of it."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from moe_optimizer.cli import build
from moe_optimizer.errors import UnsupportedError
from moe_optimizer.specs.software import KernelInventory
from tests.eventually import eventually, is_running

pytestmark = pytest.mark.usefixtures("heeded_signals")


def script(folder: Path, text: str) -> Path:
    path = folder / "build.sh"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_failed_build_is_unsupported_here(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="exit code 4"):
        build.run_build(script(tmp_path, "exit 4"))


def test_a_missing_script_says_where_kernels_come_from(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        build.run_build(tmp_path / "build.sh")
    assert "checkout" in (caught.value.hint or "")


def test_the_output_of_the_build_goes_to_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    build.run_build(script(tmp_path, "echo compiling"))
    assert capfd.readouterr() == ("", "compiling\n")


def test_an_interrupt_ends_the_compilers_too(tmp_path: Path) -> None:
    path = script(tmp_path, f"sleep 600 & echo $! > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; wait")
    thread = threading.Thread(target=_interrupt_when, args=(tmp_path / "pid",))
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        build.run_build(path)
    thread.join()
    compiler = int((tmp_path / "pid").read_text(encoding="utf-8"))
    assert eventually(lambda: not is_running(compiler))


def _interrupt_when(path: Path) -> None:
    eventually(path.is_file)
    os.kill(os.getpid(), signal.SIGINT)


def test_what_is_built_is_told_apart_from_what_ran() -> None:
    inventory = KernelInventory(
        built=True, reason="", cpu_ops=("fused_experts",), cuda_ops=("fused_experts",), cuda_archs=("sm_90a",),
        source_hash="0123456789abcdef",
    )  # fmt: skip
    sources, cpu, cuda = build.render_inventory(inventory).splitlines()
    assert sources.split()[-1] == "0123456789ab"
    assert cpu.split() == ["cpu", "fused_experts"]
    assert cuda.split() == ["cuda", "fused_experts", "for", "sm_90a"]


def test_why_there_are_no_cuda_kernels_is_said() -> None:
    inventory = KernelInventory(
        built=True, reason="", cpu_ops=("fused_experts",), cuda_ops=(), cuda_archs=(), source_hash="0123456789abcdef",
        cuda_why_not="no nvcc found",
    )  # fmt: skip
    assert build.render_inventory(inventory).splitlines()[-1].split(maxsplit=1) == [
        "cuda",
        f"none: {inventory.cuda_why_not}",
    ]
