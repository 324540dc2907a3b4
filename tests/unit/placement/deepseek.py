"""vLLM's default EPLB policy (DeepSeek's), from the installed vLLM's own files but without importing all of vLLM."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from moe_optimizer.vllm_plugin.compat import vllm_root


def default_policy() -> Any:
    """Return the class `DefaultEplbPolicy`; skips the test where no vLLM is installed."""
    pytest.importorskip("torch")
    root = vllm_root()
    if root is None:
        pytest.skip("needs an installed vLLM to compare with")
    folder = root / "distributed" / "eplb" / "policy"
    package = ModuleType("vllm_eplb_policy")
    package.__path__ = [str(folder)]
    sys.modules.setdefault(package.__name__, package)
    return importlib.import_module("vllm_eplb_policy.default").DefaultEplbPolicy


def default_placement(load, num_ranks, num_replicas, num_nodes=1, num_groups=1) -> np.ndarray:
    """Return what vLLM's policy makes of a load when it sorts equal loads in the order of their experts.

    On its own it leaves equal loads in an order that depends on the CPU's vector instructions, so that its placement,
    and by a rounding how even it is, differs between machines.
    """
    import torch

    policy = default_policy()
    stable = SimpleNamespace(**vars(np) | {"argsort": partial(np.argsort, kind="stable")})
    with patch.object(sys.modules[policy.__module__], "np", stable):
        placement = policy.rebalance_experts(
            torch.from_numpy(np.asarray(load)), num_replicas, num_groups, num_nodes, num_ranks
        )
    return placement.numpy()
