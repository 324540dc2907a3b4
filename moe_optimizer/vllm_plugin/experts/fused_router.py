"""Has one launch of ours multiply the gate and choose the experts of few tokens, where vLLM's layer holds its gate.

vLLM has no place for it: its MoE runner calls the gate, then the router with the logits. Both belong to one layer, and
one method of each is replaced on that object alone. The gate's `forward` computes the choice beside the logits and
keeps it; the router's `_compute_routing` takes what was kept for these very logits. What vLLM does before, between and
after (streams, captured ids, the dtype of ids) stays, and logits that were exchanged between them are routed by vLLM.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from moe_optimizer.errors import RequiredNotAppliedError, described
from moe_optimizer.log import get_logger
from moe_optimizer.ops import gate_topk
from moe_optimizer.ops.gate_topk import why_no_kernel
from moe_optimizer.ops.kernel_arguments import GateTopk, Router
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.vllm_plugin.compat import why_changed
from moe_optimizer.vllm_plugin.experts.cuda import MoeOptimizerCudaExperts
from moe_optimizer.vllm_plugin.experts.cuda_layer import ALIGNMENT
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, PluginSession

logger = get_logger(__name__)

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_TOPK_ROUTER = f"{_FUSED_MOE}.router.fused_topk_router"
_PADDING_MASK = "_get_padding_mask"
RELIED_ON: Mapping[str, Mapping[str, str]] = {
    f"{_FUSED_MOE}.runner.moe_runner:MoERunner._forward_impl": {
        "0.26, 0.27": "2cc89697dad12fe9", "0.32, 0.33": "b03b7186619f566a",
    },
    f"{_FUSED_MOE}.runner.moe_runner:MoERunner._apply_quant_method": {
        "0.26, 0.27": "bbda843e141ce564", "0.32": "1ac02fcc15707716", "0.33": "bd73fd8b7f3d7032",
    },
    f"{_FUSED_MOE}.router.fused_moe_router:FusedMoERouter.select_experts": {
        "0.26, 0.27": "b628b949010ecbe0", "0.32, 0.33": "ad68472378f9569e",
    },
    f"{_FUSED_MOE}.router.base_router:BaseRouter._select_experts": {
        "0.26, 0.27": "aecb13cdb8dd6b7a", "0.32, 0.33": "116bab6917a85a10",
    },
    f"{_TOPK_ROUTER}:FusedTopKRouter._compute_routing": {"0.26 to 0.33": "976b25b15a5c5723"},
    f"{_TOPK_ROUTER}:{_PADDING_MASK}": {"0.26": "", "0.27 to 0.33": "9f6ba0e562a4071e"},
    "vllm.model_executor.layers.linear:ReplicatedLinear.forward": {"0.26 to 0.33": "0b29f3a6dce5005c"},
}  # fmt: skip
"""What of vLLM this replaces or counts on -> versions -> `compat.fingerprint` of its source; "": it is not there."""
_RELATIVE, _WEIGHTS = 2.0**-7, 1e-3
"""Chosen: logits may differ in the last bit of BF16; weights by what functions of FP32 do."""


def install_fused_routers(session: PluginSession, model: torch.nn.Module) -> None:
    """Put the launch into each layer of a loaded model whose experts are ours, as far as the plan has it.

    Called before the model's first forward. A layer that is not covered stays as it is, with the reason in the proof.

    Raises:
        RequiredNotAppliedError: one rank of several found its kernel wrong: all must choose the same experts.
    """
    decision = session.wanted(EXPERTS_PASS)
    most = 0 if decision is None else decision.params_as(FlashDmoeParams).fused_router
    if not most:
        return
    session.routes(None, "vLLM: the layer was not found in the loaded model")
    unknown, position, said = why_changed(RELIED_ON), 0, set[str]()
    for runner, _ in layers_of_ours(model):
        reason = unknown or _uncovered(runner, most)
        if not reason:
            router = FusedRouter(session, runner, most)
            reason = router.why_wrong((1, most) if position else range(1, most + 1))
            position += 1
            if not reason:
                router.install()
            elif session.proof.world_size > 1:
                raise RequiredNotAppliedError(
                    f"gate_topk is not usable on rank {session.proof.model_rank}, and the ranks must choose the same "
                    f"experts: {reason}",
                    hint="passes: {flash_dmoe: {fused_router: off}} in the profile",
                )
        session.routes(
            runner.routed_experts.w13_weight.data_ptr(), f"vLLM: {reason}" if reason else f"gate_topk up to {most}"
        )
        if reason and reason not in said:
            said.add(reason)
            logger.info("vLLM multiplies the gate of %s and chooses: %s", runner.layer_name, reason)


def _uncovered(runner: Any, most: int) -> str:
    try:
        return why_not(runner) or why_no_kernel(_call(runner, most)) or ""
    except Exception as error:  # noqa: BLE001 - vLLM is starting; its own gate stays
        return f"fallback: {described(error)}"


def _call(runner: Any, tokens: int) -> GateTopk:
    """Return a call for a runner's gate and router, on memory that holds nothing."""
    weight, router = runner.gate.weight, runner.router
    x, logits = weight.new_empty((tokens, weight.shape[1])), weight.new_empty((tokens, weight.shape[0]))
    rule = Router(logits, router.top_k, renormalize=router.renormalize, scoring=router.scoring_func)
    weights = torch.empty((tokens, router.top_k), device=weight.device)
    return GateTopk(x, weight, rule, weights, torch.empty_like(weights, dtype=torch.int32))


def layers_of_ours(model: torch.nn.Module) -> Iterator[tuple[Any, MoeOptimizerCudaExperts]]:
    """Yield each of vLLM's MoE runners whose experts are of a class of ours for GPUs."""
    for runner in model.modules():
        experts = _experts_of(runner)
        if isinstance(experts, MoeOptimizerCudaExperts) and hasattr(runner, "router"):
            yield runner, experts


def _experts_of(runner: Any) -> Any:
    method = getattr(getattr(runner, "routed_experts", None), "quant_method", None)
    return getattr(getattr(method, "moe_kernel", None), "fused_experts", None)


def why_not(runner: Any) -> str:
    """Return why the kernel cannot take the place of a runner's gate and router, or ""."""
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
    from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

    gate, router, config = runner.gate, runner.router, runner.moe_config
    if gate is None:
        return "the model multiplies its gate itself"
    if runner._fse_fuse_gate:
        return "vLLM multiplies the gates of routed and shared experts together"
    if type(gate) is not ReplicatedLinear or type(gate.quant_method) is not UnquantizedLinearMethod:
        return f"the gate is a {type(gate).__name__} with {type(gate.quant_method).__name__}"
    if gate.bias is not None or gate.weight.dtype != torch.bfloat16 or not gate.return_bias:
        return f"the gate has a bias or {gate.weight.dtype} weights"
    if type(router) is not FusedTopKRouter:
        return f"the router is a {type(router).__name__}, which was not compared"
    if router.eplb_state is not None:
        return "EPLB"
    for name in ("dp_size", "pcp_size"):
        if getattr(config, name, 1) > 1:
            return f"{name}={getattr(config, name)}: logits are exchanged before they are routed"
    if getattr(config, "is_sequence_parallel", False):
        return "sequence parallelism: logits are exchanged before they are routed"
    return ""


class FusedRouter:
    """Gate and router of one layer.

    Args:
        session: this process's.
        runner: vLLM's.
        most: tokens of a forward up to which the launch is used, where the experts are ours.
    """

    def __init__(self, session: PluginSession, runner: Any, most: int) -> None:
        self._session = session
        self._runner = runner
        self._most = most
        self._gate: Any = runner.gate
        self._router: Any = runner.router
        self._stock_gate: Callable[..., Any] = runner.gate.forward
        self._stock_routing: Callable[..., Any] = runner.router._compute_routing
        self._padding = getattr(importlib.import_module(_TOPK_ROUTER), _PADDING_MASK, None)
        self._kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def install(self) -> None:
        """Replace the two methods on the layer's own objects."""
        self._gate.forward = self.forward
        self._router._compute_routing = self.routing

    def forward(self, x: torch.Tensor) -> Any:
        """Return what the gate does; keep the choice of experts, where the launch made it."""
        if not self._covers(x):
            return self._stock_gate(x)
        padding = None if self._padding is None else self._padding(x.shape[0])
        self._kept = self._launched(x, padding)
        self._session.routed(self._runner.routed_experts.w13_weight.data_ptr())
        return self._kept[0], None

    def routing(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, *arguments: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and ids that were kept for these logits, else the router's own."""
        kept, self._kept = self._kept, None
        if kept is not None and kept[0] is router_logits:
            return kept[1], kept[2]
        return self._stock_routing(hidden_states, router_logits, *arguments, **named)

    def why_wrong(self, sizes: Any) -> str:
        """Return in what the launch differs from vLLM's gate and router on the layer's own weights, or "".

        Args:
            sizes: numbers of tokens to try.
        """
        weight = self._gate.weight
        try:
            with torch.inference_mode():
                g = torch.Generator(device=weight.device).manual_seed(0)
                for tokens in sizes:
                    x = torch.randn(tokens, weight.shape[1], device=weight.device, generator=g).to(weight.dtype)
                    reason = self._difference(x)
                    if reason:
                        return f"{reason} at {tokens} tokens"
        except Exception as error:  # noqa: BLE001 - vLLM is starting; its own gate stays
            return f"fallback: {described(error)}"
        return ""

    def _difference(self, x: torch.Tensor) -> str:
        theirs, (ours, weights, ids) = self._stock_gate(x)[0].float(), self._launched(x, None)
        logits = ours.float()
        if not ((logits - theirs).abs() <= _RELATIVE * theirs.abs().amax(-1, keepdim=True)).all():
            return f"logits differ by up to {float((logits - theirs).abs().max()):.2g}"
        their_weights, their_ids = self._stock_routing(x, ours, None)
        # Of equal logits vLLM may take another one.
        if not torch.equal(logits.gather(1, ids.long()), logits.gather(1, their_ids.long())):
            return f"it chooses {ids.tolist()}, vLLM {their_ids.tolist()}"
        off = float((weights - their_weights).abs().max())
        return "" if off <= _WEIGHTS else f"weights differ by up to {off:.2g}"

    def _launched(
        self, x: torch.Tensor, padding: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weight, router = self._gate.weight, self._router
        logits = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
        weights, ids = gate_topk(
            x, weight, top_k=router.top_k, renormalize=router.renormalize, scoring=router.scoring_func,
            is_padding=padding, logits=logits,
        )  # fmt: skip
        return logits, weights, ids

    def _covers(self, x: torch.Tensor) -> bool:
        tokens = x.shape[0]
        experts = _experts_of(self._runner)
        return (
            0 < tokens <= self._most
            and isinstance(experts, MoeOptimizerCudaExperts)
            and experts.computes(tokens)
            and x.dtype == self._gate.weight.dtype
            and x.is_contiguous()
            and x.data_ptr() % ALIGNMENT == 0
        )
