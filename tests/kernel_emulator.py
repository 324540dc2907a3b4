"""The CUDA kernels' emulation on the CPU (tests/unit/ops/emulation): built once per source state; problems for it."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import math
import mmap
import os
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_optimizer.ops import reference
from moe_optimizer.ops.cuda_variants import DirectVariant, GemmMode, GroupedVariant, Variant
from moe_optimizer.ops.kernel_arguments import CudaProblem, experts_fields

ROOT = Path(__file__).resolve().parents[1]
EMULATION = ROOT / "tests/unit/ops/emulation"
_PAGE = mmap.PAGESIZE
COMPILED_WITHIN_S = 1500.0
"""The largest takes 34 s of processor time, which was 233 s beside nine other processes on two cores."""


def guarded(tensor: Tensor) -> Tensor:
    """Return a copy that ends where an unreadable page begins: a kernel that reads past the end crashes the test."""
    size = tensor.numel() * tensor.element_size()
    pages = -(-max(size, 1) // _PAGE) + 1
    memory = mmap.mmap(-1, pages * _PAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    protected = libc.mprotect(ctypes.c_void_p(base + (pages - 1) * _PAGE), ctypes.c_size_t(_PAGE), 0)
    assert protected == 0, os.strerror(ctypes.get_errno())
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=(pages - 1) * _PAGE - size)
    copy = flat.view(tensor.dtype).view(tensor.shape)
    copy.copy_(tensor)
    return copy


@dataclass(frozen=True)
class Case:
    """Random inputs of one call."""

    problem: CudaProblem

    def reference(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """What the call must compute; ids that name no expert must not be in the case."""
        p = self.problem
        assert p.topk_ids is not None
        assert p.topk_weights is not None
        w13, w2, w13_scale, w2_scale = p.w13, p.w2, p.w13_scale, p.w2_scale
        if p.int4:
            w13, w13_scale = int4_weights(w13, w13_scale, p.w13_zero), None
            w2, w2_scale = int4_weights(w2, w2_scale, p.w2_zero), None
        return reference.fused_experts(
            p.x, w13, w2, p.topk_weights, p.topk_ids,
            expert_map=p.expert_map, activation=p.activation,
            w13_scale=w13_scale, w2_scale=w2_scale, w13_bias=p.w13_bias, w2_bias=p.w2_bias,
            compute_dtype=dtype,
        )  # fmt: skip


def assert_close(case: Case, out: torch.Tensor) -> None:
    """Error at most twice that of torch in BF16, both against FP32."""
    want = case.reference().float()
    in_bf16 = (case.reference(torch.bfloat16).float() - want).norm()
    error = (out.float() - want).norm()
    assert error <= 2 * in_bf16 + 1e-3 * want.norm(), (error / want.norm(), in_bf16 / want.norm())


def make_case(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    width: int,
    *,
    fp8: str | None = None,
    mxfp4: bool = False,
    int4: int | None = None,
    zero_points: bool = False,
    activation: str = "silu",
    bias: bool = False,
    ids: Tensor | None = None,
    expert_map: Tensor | None = None,
    int64_ids: bool = False,
    seed: int = 1,
) -> Case:
    """Fresh random inputs; `fp8`: None, "block" or "channel"; `mxfp4`: random codes and exponents; `int4`: a group."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=g).bfloat16()
    w13 = torch.randn(experts, 2 * width, hidden, generator=g) / hidden**0.5
    w2 = torch.randn(experts, hidden, width, generator=g) / width**0.5
    w13_scale = w2_scale = None
    if fp8 == "block":
        blocks = lambda n: -(-n // 128)  # noqa: E731
        w13_scale = torch.rand(experts, blocks(2 * width), blocks(hidden), generator=g) * 0.1 + 0.02
        w2_scale = torch.rand(experts, blocks(hidden), blocks(width), generator=g) * 0.1 + 0.02
    elif fp8 == "channel":
        w13_scale = torch.rand(experts, 2 * width, generator=g) * 0.1 + 0.02
        w2_scale = torch.rand(experts, hidden, generator=g) * 0.1 + 0.02
    dtype = torch.bfloat16 if fp8 is None else torch.float8_e4m3fn
    factor = 1 if fp8 is None else 16
    if mxfp4:
        (w13, w13_scale), (w2, w2_scale) = (_random_mxfp4(w.shape, g) for w in (w13, w2))
        dtype, factor = torch.uint8, 1
    w13_zero = w2_zero = None
    if int4 is not None:
        w13, w13_scale, w13_zero = _random_int4(w13.shape, int4, zero_points, g)
        w2, w2_scale, w2_zero = _random_int4(w2.shape, int4, zero_points, g)
        dtype, factor = torch.uint8, 1
    global_experts = experts if expert_map is None else expert_map.shape[0]
    fresh = [torch.randperm(global_experts, generator=g)[:top_k] for _ in range(tokens)]
    chosen = torch.stack(fresh) if ids is None else ids
    problem = CudaProblem(
        x=guarded(x),
        w13=guarded((w13 * factor).to(dtype)),
        w2=guarded((w2 * factor).to(dtype)),
        out=guarded(torch.full((tokens, hidden), float("nan")).bfloat16()),
        topk_weights=guarded(torch.rand(tokens, top_k, generator=g)),
        topk_ids=guarded(chosen.to(torch.int64 if int64_ids else torch.int32)),
        expert_map=None if expert_map is None else guarded(expert_map.int()),
        w13_scale=None if w13_scale is None else guarded(w13_scale),
        w2_scale=None if w2_scale is None else guarded(w2_scale),
        w13_bias=guarded(torch.randn(experts, 2 * width, generator=g)) if bias else None,
        w2_bias=guarded(torch.randn(experts, hidden, generator=g)) if bias else None,
        activation=activation,
        w13_zero=None if w13_zero is None else guarded(w13_zero),
        w2_zero=None if w2_zero is None else guarded(w2_zero),
    )
    return Case(problem)


def _random_mxfp4(shape: torch.Size, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Every code as likely, scales over a range of 2**6 such that products are about 1."""
    experts, rows, columns = shape
    codes = torch.randint(0, 256, (experts, rows, columns // 2), generator=g).to(torch.uint8)
    middle = 127 - 2 - round(math.log2(columns) / 2)
    exponents = middle + torch.randint(-5, 2, (experts, rows, columns // 32), generator=g)
    return codes, exponents.to(torch.uint8)


def _random_int4(
    shape: torch.Size, group: int, zero_points: bool, g: torch.Generator
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Every code and zero point as likely, scales such that products are about 1."""
    experts, rows, columns = shape
    codes = torch.randint(0, 256, (experts, rows, columns // 2), generator=g).to(torch.uint8)
    groups = (experts, rows, columns // group)
    scale = (torch.rand(groups, generator=g) + 0.1) * 0.3 / columns**0.5
    zero = torch.randint(0, 16, groups, generator=g).to(torch.uint8) if zero_points else None
    return codes, scale.bfloat16(), zero


def int4_weights(codes: Tensor, scale: Tensor | None, zero: Tensor | None) -> Tensor:
    """The weights [E, N, K] in FP32, which holds them exactly."""
    assert scale is not None
    values = torch.stack((codes & 0xF, codes >> 4), -1).flatten(-2).float()
    groups = values.unflatten(-1, (scale.shape[-1], -1))
    points = torch.full_like(scale, 8) if zero is None else zero
    return ((groups - points.float().unsqueeze(-1)) * scale.float().unsqueeze(-1)).flatten(-2)


class Emulator:
    """Runs the kernels thread by thread, in a workspace of NaN and -1: a read of what nobody wrote shows."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def layout(self, problem: CudaProblem, variant: Variant, blocks: int, buffer: int = 0) -> dict[str, Any]:
        """Bytes of the workspace, fields of the launch, addresses of the workspace's parts."""
        return self.module.cuda_layout(*problem.call(variant, blocks), buffer)

    def direct(self, problem: CudaProblem, *, blocks: int = 3, seed: int = 1) -> Tensor:
        """The two kernels for small batches, the first with at most `blocks` multiprocessors."""
        self._run(problem, DirectVariant(), blocks, seed)
        return problem.out

    def grouped(self, problem: CudaProblem, mode: GemmMode, *, blocks: int = 2, tile_tokens: int | None = None,
                num_stages: int | None = None, paired: bool = False, seed: int = 1) -> Tensor:  # fmt: skip
        """Routing, both GEMMs and the combine."""
        self._run(problem, GroupedVariant(mode, tile_tokens, num_stages, paired), blocks, seed)
        return problem.out

    def routing(
        self, problem: CudaProblem, tile_tokens: int, *, paired: bool = False, seed: int = 1
    ) -> dict[str, Tensor]:
        """The routing kernels alone: sorted_token, pair_position, expert_offsets, and the tile table."""
        variant, sizes = GroupedVariant(GemmMode.BF16, tile_tokens, paired=paired), problem.sizes
        buffer = self._run(problem, variant, 2, seed, routing_only=True)
        addresses = self.layout(problem, variant, 2, buffer.data_ptr())["workspace"]

        def part(name: str, count: int) -> Tensor:
            start = addresses[name] - buffer.data_ptr()
            return buffer[start : start + 4 * count].view(torch.int32)

        num_tiles = int(part("num_tiles", 1))
        return {
            "expert_offsets": part("expert_offsets", sizes.num_experts + 1),
            "sorted_token": part("sorted_token", sizes.num_pairs),
            "pair_position": part("pair_position", sizes.num_pairs),
            "tiles": part("tiles", 4 * num_tiles).view(num_tiles, 4)[:, :3],
        }

    def router(self, problem: CudaProblem, *, seed: int = 1) -> tuple[Tensor, Tensor]:
        """Ids and weights that the gate chooses."""
        assert problem.router is not None
        ids = torch.full((problem.x.shape[0], problem.top_k), -7, dtype=torch.int32)
        weights = torch.full(ids.shape, float("nan"))
        experts = experts_fields(problem, problem.out)
        self.module.router(experts, problem.router.fields(), ids.data_ptr(), weights.data_ptr(), seed)
        return ids, weights

    def _run(
        self, problem: CudaProblem, variant: Variant, blocks: int, seed: int, *, routing_only: bool = False
    ) -> Tensor:
        """Run a call, check that its counter is back at 0, and return its workspace."""
        buffer = torch.full((self.layout(problem, variant, blocks)["bytes"],), 0xFF, dtype=torch.uint8)
        counter = torch.zeros((), dtype=torch.int32)
        call = problem.call(variant, blocks)
        self.module.cuda_run(*call, buffer.data_ptr(), counter.data_ptr(), seed, routing_only)
        assert int(counter) == 0
        return buffer


def build_emulator() -> Emulator:
    """Return the emulation of the experts' kernels; skips where it cannot be compiled."""
    return Emulator(compiled_emulation("emulated_kernels"))


def compiled_emulation(name: str) -> ModuleType:
    """Return a module of tests/unit/ops/emulation, compiled unless this source state was compiled before.

    Skips where there is no g++ or no pybind11.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to compile the kernels' emulation")
    pybind11 = pytest.importorskip("pybind11", reason="needs pybind11 to compile the kernels' emulation")
    includes = [pybind11.get_include(), sysconfig.get_path("include")]
    sources = [*EMULATION.glob("*"), *(ROOT / "csrc/include").rglob("*"), *(ROOT / "csrc/launch").glob("*.h"),
               ROOT / "csrc/bindings/from_python.h"]  # fmt: skip
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources) if path.is_file()))
    digest.update(f"{sysconfig.get_config_var('SOABI')} {pybind11.__version__}".encode())
    folder = Path(tempfile.gettempdir()) / f"moeopt-emulation-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{name}-{digest.hexdigest()[:16]}.so"
    with (folder / "lock").open("w") as lock:  # one test worker compiles, the others wait for it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            partial = folder / f"{library.name}.{os.getpid()}"
            subprocess.run(
                [compiler, "-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror", "-Wno-clobbered", "-shared", "-fPIC",
                 "-fvisibility=hidden", "-DMOEOPT_EMULATE", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc/include'}",
                 f"-I{EMULATION}", *(f"-isystem{folder}" for folder in includes),
                 str(EMULATION / f"{name}.cpp"), "-o", str(partial)],
                check=True, timeout=COMPILED_WITHIN_S,
            )  # fmt: skip
            partial.replace(library)
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_poisoned_output(case: Case) -> CudaProblem:
    """The same problem with a fresh output full of NaN."""
    return replace(case.problem, out=guarded(torch.full_like(case.problem.out, float("nan"))))
