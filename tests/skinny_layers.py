"""vLLM's dense layers in a process without groups of ranks, and a plan that has our kernel multiply in them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.proof.record import PassProof
from moe_optimizer.vllm_plugin.linears import SKINNY_PASS
from moe_optimizer.vllm_plugin.session import PluginSession, start_session
from tests.plugin_state import own_session


@dataclasses.dataclass
class _Plan:
    plugin_decisions: tuple[Decision, ...]
    digest: str = ""


def planned(run_dir: Path, monkeypatch: pytest.MonkeyPatch, *, required: bool = False) -> PluginSession:
    """Make a plan that has the pass this process's own, with nothing chosen yet."""
    from moe_optimizer.vllm_plugin.linears import op

    decision = Decision(
        pass_name=SKINNY_PASS, wish=Wish.ON, wish_origin="test", status=Status.ON, value="", reason="",
        applier=Applier.PLUGIN, required=required,
    )  # fmt: skip
    own_session(monkeypatch)
    monkeypatch.setattr(op, "chosen", op.ChosenLinears())
    plan: Any = _Plan((decision,))
    return start_session(PluginSession(run_dir=run_dir, plan=plan))


def without_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have vLLM's layers be whole."""
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear

    for name, value in (("rank", 0), ("world_size", 1)):
        for module in (linear, parameter):
            monkeypatch.setattr(module, f"get_tensor_model_parallel_{name}", lambda value=value: value)


def install(session: PluginSession, model: Any, *, lora: Any = None) -> PassProof:
    """Install the kernel as a worker does once its model is loaded; return the pass's entry in the proof."""
    from moe_optimizer.vllm_plugin.linears.skinny_linears import install_skinny_linears

    config = SimpleNamespace(lora_config=lora)
    runner = SimpleNamespace(get_model=lambda: model)
    install_skinny_linears(session, SimpleNamespace(vllm_config=config, model_runner=runner))
    return session.proof.passes[SKINNY_PASS]
