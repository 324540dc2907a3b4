"""Defines the request for a plan: everything it is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moe_optimizer.layouts.search import Goal
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.serve_args import NO_ARGUMENTS, ServeArguments
from moe_optimizer.specs.activation_norms import ActivationNormsFile
from moe_optimizer.specs.draft import DraftSpec
from moe_optimizer.specs.expert_load import PlacementLoad
from moe_optimizer.specs.hardware import HardwareSpec
from moe_optimizer.specs.layer_sensitivity import LayerSensitivityFile
from moe_optimizer.specs.model import ModelSpec
from moe_optimizer.specs.software import SoftwareSpec

if TYPE_CHECKING:
    from moe_optimizer.profiles.schema import Profile

WishWithOrigin = tuple[Wish, str]
"""A wish and who made it, for example (Wish.ON, "flag --enable-fp8")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Everything a plan is made from. Equal requests give equal plans."""

    model: ModelSpec
    hardware: HardwareSpec
    software: SoftwareSpec
    profile: Profile
    num_gpus: int | None = None
    """GPUs to use, of all machines together; None: all there are."""
    num_nodes: int = 1
    """Machines, all like `hardware`."""
    wishes: Mapping[str, WishWithOrigin] = field(default_factory=dict)
    """From flags, see `passes.registry.resolve_wishes`: a pass's name, or "pass.setting", to a wish and its origin."""
    required: frozenset[str] = frozenset()
    """Passes, and flags of their settings, without which no plan is made."""
    strict: bool = False
    """Make no plan that refuses a wish."""
    engine: str = "vllm"
    batch_size: int | None = None
    """Goes before the profile's, as the next six do."""
    clients: int | None = None
    goal: Goal | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    layout: str | None = None
    """Exactly this layout, whatever the goal; None: the search chooses."""
    search_layouts: bool = True
    """False: the largest tensor parallelism, as for stock vLLM."""
    host: str = "127.0.0.1"
    port: int = 8000
    max_model_len: int | None = None
    """Goes before the profile's."""
    any_model_len: bool = False
    """A length beyond the model's own is taken: the environment allows it to vLLM, or vLLM has accepted it already."""
    dtype: str | None = None
    """vLLM's --dtype; None: the model's own."""
    vllm_args: ServeArguments = NO_ARGUMENTS
    """The user's own arguments of `vllm serve`; they replace the planner's."""
    trust_remote_code: bool = False
    fp8_sensitivity: LayerSensitivityFile | None = None
    """What FP8 changes in each layer, as measured; None: nothing was."""
    four_bit_sensitivity: LayerSensitivityFile | None = None
    """What four bits change in each layer, as measured; None: nothing was."""
    activation_norms: ActivationNormsFile | None = None
    """Norms of what the experts' matrices read, on a text; None: nobody measured them."""
    draft: DraftSpec | None = None
    """The model that drafts tokens; None: none is named."""
    expert_load: PlacementLoad | None = None
    """Measured load to place experts by."""
    will_measure: bool = False
    """What no table of kernel speeds answers is measured before a server starts, and the plan made again."""
    worker_threads: int | None = None
    """Threads of a CPU worker, as it says itself; None: they follow from how vLLM binds it."""
    inside_vllm: bool = False
    """vLLM runs already: decisions about its arguments change nothing."""
