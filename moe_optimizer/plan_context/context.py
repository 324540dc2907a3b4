"""Defines what a pass is given: the request, the device, and the decisions before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from moe_optimizer.costs.memory import MemoryRequest, plan_memory
from moe_optimizer.costs.weights import DTYPE_BYTES, row_filling_bytes
from moe_optimizer.errors import InputError
from moe_optimizer.layouts.question import requests_of_engine
from moe_optimizer.layouts.search import Goal, Limits
from moe_optimizer.plan.decision import Decision, Wish
from moe_optimizer.plan.layout_choice import LayoutChoice
from moe_optimizer.plan.memory_plan import MemoryPlan
from moe_optimizer.plan.pass_params import (
    DisaggregationParams,
    ExpertPlacementParams,
    FlashDmoeParams,
    FourBitParams,
    Fp8Params,
    GraphCaptureParams,
    KvCacheParams,
    ParallelismParams,
    PassParams,
    ReplicasParams,
    SchedulerParams,
    Sparsity24Params,
    SpeculationParams,
)
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan_context.request import PlanRequest, WishWithOrigin
from moe_optimizer.specs.expert_formats import MXFP4
from moe_optimizer.specs.hardware import CpuSpec, GpuSpec, HardwareSpec
from moe_optimizer.specs.kernel_speeds import STOCK
from moe_optimizer.specs.layout import Layout
from moe_optimizer.specs.model import ModelSpec
from moe_optimizer.specs.software import SoftwareSpec
from moe_optimizer.specs.workload import WorkloadSpec

if TYPE_CHECKING:
    from moe_optimizer.profiles.schema import Profile

_Params = TypeVar("_Params", bound=PassParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """Everything a pass may look at. `decided` holds the decisions of the passes before it."""

    request: PlanRequest
    """What is asked for; its `required` are asked for in its `wishes` too."""
    workload: WorkloadSpec
    device: Literal["cuda", "cpu"]
    """What the server will run on."""
    num_gpus: int
    """GPUs of a machine that one server may use; 0 on the CPU."""
    dtype: str
    """What the parts that are not quantised are computed in."""
    num_servers: int = 1
    """Servers that share a machine evenly, of several the fullest one; what is planned is one of them."""
    decided: Mapping[str, Decision] = field(default_factory=dict)
    layout_choice: LayoutChoice | None = None
    """The layout that the search chose; None: nothing was predicted, and the passes go by their own rules."""

    @property
    def layout(self) -> Layout | None:
        """The layout to plan for, if one was chosen."""
        return None if self.layout_choice is None else self.layout_choice.layout

    @property
    def goal(self) -> Goal:
        """What the layout is chosen for."""
        return self.request.goal or self.profile.goal

    @property
    def clients(self) -> int:
        """Clients at the same time, over all servers."""
        return self.request.clients or self.profile.workload.clients or self.workload.batch_size

    @property
    def batch_is_of_clients(self) -> bool:
        """Whether nobody said how many requests a server takes at once, only how many clients there are."""
        request = self.request
        return bool(request.clients) and request.batch_size is None and not request.vllm_args.count("--max-num-seqs")

    @property
    def limits(self) -> Limits:
        """What the layout must keep: a flag or variable, else the profile's."""
        asked, stated = self.request, self.profile.workload
        return Limits(ttft_ms=asked.ttft_ms or stated.ttft_ms, tpot_ms=asked.tpot_ms or stated.tpot_ms)

    @property
    def model(self) -> ModelSpec:
        """The model of the request."""
        return self.request.model

    @property
    def hardware(self) -> HardwareSpec:
        """The hardware of the request."""
        return self.request.hardware

    @property
    def software(self) -> SoftwareSpec:
        """The software of the request."""
        return self.request.software

    @property
    def profile(self) -> Profile:
        """The profile of the request."""
        return self.request.profile

    @property
    def pinned(self) -> ServeArguments:
        """The user's own arguments of `vllm serve`. They go before every decision."""
        return self.request.vllm_args

    def with_layout(self, choice: LayoutChoice | None) -> PlanContext:
        """Return the context for the chosen layout, of the machines that it uses; each may be divided between servers.

        Servers for prefill and decode are divided by the pass that plans them.
        """
        nodes = self.request.num_nodes
        if choice is not None and choice.layout.devices_of_server > self.num_gpus:
            nodes = choice.layout.num_devices // self.num_gpus
        elif choice is not None and not choice.layout.disaggregated:
            nodes = next(count for count in range(nodes, 0, -1) if choice.layout.replicas % count == 0)
        whole = choice is not None and nodes > 1 and not choice.layout.disaggregated
        servers = max(1, choice.layout.replicas // nodes) if choice is not None and whole else 1
        workload = self.workload
        if choice is not None and self.batch_is_of_clients:
            workload = dataclasses.replace(workload, batch_size=requests_of_engine(self.clients, choice.layout))
        return dataclasses.replace(
            self, layout_choice=choice, num_gpus=self.num_gpus // servers, num_servers=self.num_servers * servers,
            workload=workload, request=dataclasses.replace(self.request, num_nodes=nodes),
        )  # fmt: skip

    def with_decision(self, decision: Decision) -> PlanContext:
        """Return the context for the passes after `decision`."""
        params = decision.params
        servers = params.num_servers if isinstance(params, (DisaggregationParams, ReplicasParams)) else 1
        # Of the fullest machine: what is planned of a server must hold on each.
        servers = -(-servers // self.request.num_nodes)
        return dataclasses.replace(
            self,
            num_gpus=self.num_gpus // servers,
            num_servers=self.num_servers * servers,
            decided={**self.decided, decision.pass_name: decision},
        )

    @property
    def gpu(self) -> GpuSpec:
        """The GPU planned for; only where `device` is "cuda"."""
        assert self.hardware.gpu is not None, f"planning for {self.device}"
        return self.hardware.gpu

    @property
    def cpu(self) -> CpuSpec:
        """The host planned for; only where `device` is "cpu"."""
        assert self.hardware.cpu is not None, f"planning for {self.device}"
        return self.hardware.cpu

    @property
    def profile_origin(self) -> str:
        """How `Decision.wish_origin` names the profile."""
        return f"profile {self.profile.name}"

    def section(self, pass_name: str) -> Any:
        """Return the profile's section of one pass."""
        return getattr(self.profile.passes, pass_name)

    def wish(self, key: str) -> WishWithOrigin:
        """Return what is asked of a pass, or of its setting "pass.setting": by flag if at all, else by the profile."""
        if key in self.request.wishes:
            return self.request.wishes[key]
        pass_name, _, setting = key.partition(".")
        return Wish(getattr(self.section(pass_name), setting or "mode")), self.profile_origin

    def is_asked_by_flag(self, pass_name: str) -> bool:
        """Whether a flag asks for the pass by name, which goes before what the profile's section says of it."""
        return self.request.wishes.get(pass_name, (Wish.AUTO, ""))[0] is Wish.ON

    def is_required(self, pass_name: str) -> bool:
        """Whether the plan may not do without this pass."""
        return pass_name in self.request.required or self.section(pass_name).required

    def requires_setting_of(self, pass_name: str) -> bool:
        """Whether the plan may not do without one of the pass's settings, which show only together with the pass."""
        return any(key.startswith(f"{pass_name}.") for key in self.request.required)

    def params(self, kind: type[_Params]) -> _Params | None:
        """Return what was decided by the pass whose params are of this kind; None: nothing yet, or nothing to know."""
        return next((each.params for each in self.decided.values() if isinstance(each.params, kind)), None)

    @property
    def parallelism(self) -> ParallelismParams:
        """How the devices of one server share the model."""
        return self.decided["parallelism"].params_as(ParallelismParams)

    @property
    def asked_sizes(self) -> tuple[int | None, int | None]:
        """Tensor and data parallel size by the user's vLLM arguments, else by the profile; None: not asked for."""
        asked, given = self.profile.passes.parallelism, self.pinned.count
        return (
            given("--tensor-parallel-size") or asked.tensor_parallel_size,
            given("--data-parallel-size") or asked.data_parallel_size,
        )

    @property
    def scheduler(self) -> SchedulerParams:
        """The size of one step."""
        return self.decided["scheduler"].params_as(SchedulerParams)

    @property
    def draft_tokens(self) -> int:
        """Tokens that a step drafts for each request at most, by the plan or by the user's own --speculative-config."""
        if drafting := self.params(SpeculationParams):
            return drafting.draft_tokens
        given = (self.pinned.json_object("--speculative-config") or {}).get("num_speculative_tokens")
        return given if isinstance(given, int) and given > 0 else 0

    def step_tokens(self, requests: int) -> int:
        """Return the most tokens of a step that decodes for up to `requests`: one of each, and the drafts it checks."""
        drafting = self.params(SpeculationParams)
        return drafting.step_tokens(requests) if drafting else requests * (1 + self.draft_tokens)

    @property
    def kv_cache(self) -> KvCacheParams:
        """The key/value cache, which the last pass decides."""
        return self.decided["kv_cache"].params_as(KvCacheParams)

    @property
    def gpu_memory_utilization(self) -> float:
        """Share of a device's memory for the server: the user's vLLM argument, else the profile's.

        Raises:
            InputError: the user's value is not a number in (0, 1].
        """
        flag = "--gpu-memory-utilization"
        text = self.pinned.value(flag)
        if text is None:
            return self.profile.gpu_memory_utilization
        try:
            share = float(text)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise InputError(f"{flag}: got {text!r:.80}, expected a number above 0 and at most 1")
        return share

    def memory_request(self, **changes: Any) -> MemoryRequest:
        """Return a MemoryRequest for this model and machine: one device, one token a sequence, and `changes`.

        Before the scheduler pass has decided them, a step has 2048 tokens.
        """
        if self.device == "cuda":
            device_bytes = int(self.gpu.memory.value)
        else:
            # The processes of the CPU build share one memory, and each takes its own from one NUMA node of it: with
            # a cache that is larger than what is free there, it does not start.
            node = self.cpu.node_memory or self.cpu.memory
            processes = changes.get("num_devices", 1) * self.num_servers
            device_bytes = min(int(self.cpu.memory.value) // processes, int(node.value) // self.num_servers)
        expert_bits, linear_bits = self.converted_bits()
        defaults: dict[str, Any] = {
            "model": self._model_as_served(),
            "device_bytes": device_bytes,
            "num_devices": 1,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": self.workload.batch_size,
            "max_model_len": None,
            "expert_bits": expert_bits,
            "linear_bits": linear_bits,
            "kernel_tokens": self._kernel_tokens(),
            "cuda_graphs": self.device == "cuda",
            "device": self.device,
        }
        return MemoryRequest(**(defaults | changes))

    def _kernel_tokens(self) -> int:
        """Return the most tokens that our CUDA kernels compute in one forward; 0 where they compute none."""
        experts = self.params(FlashDmoeParams)
        if experts is None or experts.kernel != "cuda":
            return 0
        ranges = (each for ranges in experts.dispatch.values() for each in ranges)
        return max((each.up_to for each in ranges if each.use != STOCK), default=0)

    def converted_bits(self) -> tuple[float | None, float | None]:
        """Return the bits of expert and other weights once they are converted while loading, on average, what they are
        filled up with included; None: they are not converted.
        """
        if self.model.quant_method is None and "fp8" in (self.pinned.value("--quantization") or ""):
            return 8, 8
        fp8 = self.params(Fp8Params)
        experts = self.params(FourBitParams) or self.params(Sparsity24Params) or fp8
        expert_bits = None if experts is None else experts.stored_expert_bits
        return expert_bits, None if fp8 is None else fp8.stored_linear_bits

    def _model_as_served(self) -> ModelSpec:
        """Return the model with its weights in `dtype`; a quantised checkpoint keeps its bytes, and what fills its rows
        up where our kernels read them.
        """
        experts = self.params(FlashDmoeParams)
        if self.model.expert_format == MXFP4 and experts is not None and experts.kernel == "cuda":
            more = row_filling_bytes(self.model)
            return dataclasses.replace(
                self.model,
                weight_bytes=self.model.weight_bytes + more,
                expert_weight_bytes=self.model.expert_weight_bytes + more,
            )
        if self.model.quant_method is not None or self.dtype == self.model.dtype:
            return self.model
        scale = DTYPE_BYTES[self.dtype] / DTYPE_BYTES[self.model.dtype]
        return dataclasses.replace(
            self.model,
            dtype=self.dtype,
            weight_bytes=round(self.model.weight_bytes * scale),
            expert_weight_bytes=round(self.model.expert_weight_bytes * scale),
        )

    def split_terms(self) -> dict[str, Any]:
        """Return what a MemoryRequest takes from parallelism, placement and speculation: which device holds what."""
        split, placement = self.parallelism, self.params(ExpertPlacementParams)
        drafting = self.params(SpeculationParams)
        return {
            "num_devices": split.tensor_parallel_size,
            "pipeline_stages": split.pipeline_parallel_size,
            "expert_parallel": split.expert_parallel,
            "data_parallel_size": split.data_parallel_size,
            "expert_copies": placement.num_redundant_experts if placement and placement.mode == "eplb" else None,
            "draft_weight_bytes": drafting.weight_bytes if drafting else 0,
            "draft_kv_bytes_per_token": drafting.kv_bytes_per_token if drafting else 0,
        }

    def memory_terms(self, kv_bits: int) -> dict[str, Any]:
        """Return what a MemoryRequest takes from decisions: `split_terms`, scheduler and graph capture."""
        return self.split_terms() | {
            "max_num_batched_tokens": self.scheduler.max_num_batched_tokens,
            "max_num_seqs": self.scheduler.max_num_seqs,
            "kv_bits": kv_bits,
            "cuda_graphs": self.decided["graph_capture"].params_as(GraphCaptureParams).cuda_graphs,
        }

    def memory(self, **changes: Any) -> MemoryPlan:
        """Return the memory of the fullest device; see `memory_request`."""
        return plan_memory(self.memory_request(**changes))
