"""Calls of the gate product and top-k, for the kernel's emulation and for a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_optimizer.ops import reference
from moe_optimizer.ops.kernel_arguments import GateTopk, Router
from moe_optimizer.ops.topk_router import topk_router
from tests.kernel_emulator import guarded

RULES: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen3": (128, {"top_k": 8}),
    "olmoe": (64, {"top_k": 8, "renormalize": False}),
    "qwen3-next": (512, {"top_k": 10}),
    "of 160": (160, {"top_k": 6, "renormalize": False, "routed_scaling_factor": 16.0}),
    "qwen2, 60 experts": (60, {"top_k": 4, "renormalize": False}),
    "all of 7": (7, {"top_k": 7}),
    "one": (1, {"top_k": 1}),
    "deepseek-v2": (160, {"top_k": 6, "renormalize": False, "num_expert_group": 8, "topk_group": 3}),
    "deepseek-v3": (
        256,
        {"top_k": 8, "scoring": "sigmoid", "num_expert_group": 8, "topk_group": 4, "bias": True,
         "routed_scaling_factor": 2.5},
    ),
    "sigmoid": (32, {"top_k": 4, "scoring": "sigmoid"}),
    "softmax with a bias": (64, {"top_k": 6, "bias": True}),
    "most": (1024, {"top_k": 32, "scoring": "sigmoid", "renormalize": False}),
}  # fmt: skip
"""Experts and options of models, and the edges; `bias`: with one."""


def make_gate_case(
    tokens: int, experts: int, hidden: int, *, device: str = "cpu", padding: int = 0, seed: int = 1,
    **options: Any,
) -> GateTopk:  # fmt: skip
    """Return fresh random inputs with poisoned outputs; `padding`: elements between rows of x and of the gate."""
    g = torch.Generator().manual_seed(seed)
    place = guarded if device == "cpu" else lambda tensor: tensor.to(device)
    x = torch.randn(tokens, hidden + padding, generator=g).bfloat16()
    gate = (torch.randn(experts, hidden + padding, generator=g) * 2 / hidden**0.5).bfloat16()
    bias = place(torch.randn(experts, generator=g) * 0.1) if options.pop("bias", False) else None
    logits = place(torch.full((tokens, experts), float("nan")).bfloat16())
    return GateTopk(
        x=place(x)[:, :hidden],
        gate=place(gate)[:, :hidden],
        router=Router(logits=logits, score_bias=bias, **options),
        topk_weights=place(torch.full((tokens, options["top_k"]), float("nan"))),
        topk_ids=place(torch.full((tokens, options["top_k"]), -7, dtype=torch.int32)),
    )


def assert_gated(call: GateTopk) -> None:
    """The logits are those of one rounding, but for the last bit; ids and weights are what torch chooses from them."""
    logits = call.router.logits
    exact = call.x.double() @ call.gate.double().T
    want = reference.gate_logits(call.x, call.gate)
    # Half a unit of the rounding to BF16, and what FP32 sums of H terms lose.
    terms = call.x.double().abs() @ call.gate.double().abs().T
    bound = exact.abs() * 2.0**-8 + terms * 2.0**-20 + 1e-30
    assert ((logits.double() - exact).abs() <= bound).all()
    assert (logits != want).sum() <= 2 + 0.02 * want.numel(), "few logits differ from torch's in the last bit"
    assert_routed(call)


def assert_routed(call: GateTopk) -> None:
    """Ids and weights are what torch chooses from the call's logits."""
    options = call.router._asdict()
    logits = options.pop("logits")
    weights, ids = topk_router(logits, **options)
    clear = ~close_calls(logits, ids, **options)
    assert torch.equal(call.topk_ids[clear], ids[clear])
    torch.testing.assert_close(call.topk_weights[clear], weights[clear], rtol=2e-5, atol=1e-7)


def close_calls(
    logits: Tensor, ids: Tensor, *, scoring: str = "softmax", score_bias: Tensor | None = None,
    num_expert_group: int | None = None, **_others: Any,
) -> Tensor:  # fmt: skip
    """Return of which tokens [T] an expert or a group is nearly, and not exactly, as good as a chosen one.

    There two implementations choose differently if the last bit of a score differs.

    Args:
        logits: [T, E].
        ids: [T, k], of the chosen experts.
        scoring, score_bias, num_expert_group, _others: as of `topk_router`.
    """
    scores = logits.double()
    choice = scores.softmax(-1) if scoring == "softmax" else scores.sigmoid()
    choice = choice if score_bias is None else choice + score_bias
    margin = 1e-6 * choice.abs().amax(-1, keepdim=True)

    def close(values: Tensor) -> Tensor:
        gaps = values.sort(-1).values.diff(dim=-1)
        return ((gaps > 0) & (gaps <= margin)).any(-1)

    least = choice.gather(-1, ids.long()).amin(-1, keepdim=True)
    found = close(torch.where(choice >= least - margin, choice, least - 1))
    if score_bias is not None and num_expert_group is not None:
        groups = choice.unflatten(-1, (num_expert_group, -1))
        found |= close(groups.topk(min(2, groups.shape[-1])).values.sum(-1))
    return found


def results(call: GateTopk) -> tuple[Tensor, Tensor, Tensor]:
    """Copies of what the call wrote."""
    return call.router.logits.clone(), call.topk_ids.clone(), call.topk_weights.clone()


def poisoned(call: GateTopk) -> GateTopk:
    """The same call after its outputs were overwritten."""
    call.router.logits.fill_(float("nan"))
    call.topk_ids.fill_(-7)
    call.topk_weights.fill_(float("nan"))
    return call
