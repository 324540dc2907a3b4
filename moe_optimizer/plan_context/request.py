"""The request for a plan: everything it is made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.serve_args import split_arguments
from moe_optimizer.specs.activation_norms import ActivationNormsFile
from moe_optimizer.specs.fp8_sensitivity import Fp8SensitivityFile
from moe_optimizer.specs.hardware import HardwareSpec
from moe_optimizer.specs.model import ModelSpec
from moe_optimizer.specs.placement_load import PlacementLoad
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
    one_server: bool = False
    """One server over all machines, whatever the profile says of them."""
    wishes: Mapping[str, WishWithOrigin] = field(default_factory=dict)
    """From flags, see `passes.registry.resolve_wishes`: a pass's name, or "pass.setting", to a wish and its origin."""
    required: frozenset[str] = frozenset()
    """Passes, and flags of their settings, without which no plan is made."""
    engine: str = "vllm"
    batch_size: int | None = None
    """Goes before the profile's."""
    host: str = "127.0.0.1"
    port: int = 8000
    max_model_len: int | None = None
    """Goes before the profile's."""
    any_model_len: bool = False
    """A length beyond the model's own is taken: the environment allows it to vLLM, or vLLM has accepted it already."""
    dtype: str | None = None
    """vLLM's --dtype; None: the model's own."""
    vllm_args: tuple[str, ...] = ()
    """The user's own arguments of `vllm serve`; they replace the planner's."""
    trust_remote_code: bool = False
    fp8_sensitivity: Fp8SensitivityFile | None = None
    """What FP8 changes in each layer, as measured; None: nothing was."""
    activation_norms: ActivationNormsFile | None = None
    """Norms of what the experts' matrices read, on a text; None: nobody measured them."""
    expert_load: PlacementLoad | None = None
    """Measured load to place experts by."""


def pinned_arguments(request: PlanRequest) -> dict[str, str]:
    """Return the user's own flags with their values; "false" for the --no- form, "" for a bare flag.

    A configuration given key by key ("--eplb-config.use_async false") is one argument, the JSON object that vLLM makes
    of its keys: it takes the place of one that is given whole.
    """
    pinned: dict[str, str] = {}
    by_key: dict[str, dict[str, Any]] = {}
    for argument in split_arguments(request.vllm_args):
        flag, dot, path = argument.flag.partition(".")
        if dot:
            _set_nested(by_key.setdefault(flag, {}), path.split("."), argument.value)
        else:
            pinned[flag] = "false" if argument.tokens[0].startswith("--no-") else argument.value
    return pinned | {flag: json.dumps(config) for flag, config in by_key.items()}


def _set_nested(config: dict[str, Any], path: list[str], text: str) -> None:
    """Set the value at a path of keys, as vLLM reads it: JSON where it is that, else a text."""
    for key in path[:-1]:
        if not isinstance(config.get(key), dict):
            config[key] = {}
        config = config[key]
    try:
        config[path[-1]] = json.loads(text)
    except ValueError:
        config[path[-1]] = text
