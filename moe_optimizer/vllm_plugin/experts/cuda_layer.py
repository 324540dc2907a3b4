"""One MoE layer on our CUDA kernels: which kernel for how many tokens, checked once, then called.

Knows vLLM by nothing but the tensors that it hands over.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_optimizer.ops import cuda_dispatch
from moe_optimizer.ops.cuda_variants import rounds_activations, variant_named
from moe_optimizer.ops.kernel_arguments import CudaProblem
from moe_optimizer.proof.record import LayerProof
from moe_optimizer.specs.kernel_speeds import STOCK, TokenRange, kernel_for
from moe_optimizer.vllm_plugin.experts.op import dtype_name
from moe_optimizer.vllm_plugin.experts.self_check import CheckedKernel, LayerUnderCheck, check_layer
from moe_optimizer.vllm_plugin.experts.weight_format import ExpertsCall, KernelWeights, WeightFormat
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, PluginSession

_CHECKED_TOKENS = 32
"""Chosen: most tokens of one self-check call; more would run the same tiles again."""
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """What is known of a layer besides its weights."""

    name: str
    dtype: torch.dtype
    top_k: int
    expert_map: torch.Tensor | None
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None


class CudaLayer:
    """A layer's weights with the kernels that the plan gives it.

    Args:
        weights: in place, as vLLM keeps them; scales in the form that the kernels take.
        form: their format.
        ranges: the plan's dispatch; a layer that fails its check has none.
    """

    def __init__(
        self, weights: KernelWeights, form: WeightFormat, facts: LayerFacts, ranges: Sequence[TokenRange]
    ) -> None:
        self.address = weights.w13.data_ptr()
        self._weights = weights
        self._form = form
        self._facts = facts
        self._ranges = tuple(ranges)
        self._error: float | None = None
        self._session: PluginSession | None = None

    def use_for(self, tokens: int) -> str:
        """Return the name of the kernel for this many tokens."""
        return kernel_for(self._ranges, tokens)

    def check(self, session: PluginSession) -> None:
        """Run each planned kernel once on the layer's own weights; a wrong one leaves the layer to vLLM.

        Not while a graph is captured: it reads results on the host.

        Raises:
            RequiredNotAppliedError: a kernel is wrong, and the plan requires ours.
        """
        self._session = session
        if not self._ranges:
            return
        if torch.cuda.is_current_stream_capturing():
            self._refuse(session, "it was not tried before a CUDA graph was captured")
            return
        cuda_dispatch.prepare_device(self._weights.w13.device)
        kernels = {
            each.use: CheckedKernel(
                run=functools.partial(self.run, each.use),
                tokens=min(each.up_to, _CHECKED_TOKENS),
                rounds_activations=rounds_activations(each.use),
            )
            for each in self._ranges
            if each.use != STOCK
        }
        result = check_layer(self._under_check(), kernels)
        if result.reason:
            self._refuse(session, f"self-check failed: {result.reason}")
            return
        self._error = result.error
        pass_names, entry = self.proof_entry()
        session.add_layer(pass_names, self.address, entry)

    def proof_entry(self) -> tuple[tuple[str, ...], LayerProof]:
        """Return the passes that the layer counts for, and its facts for the proof."""
        weights, facts = self._weights, self._facts
        entry = LayerProof(
            name=facts.name,
            num_local_experts=weights.w13.shape[0],
            hidden_size=weights.w2.shape[1],
            intermediate_size=weights.w2.shape[2],
            dtype=dtype_name(facts.dtype),
            expert_map=facts.expert_map is not None,
            weight_format=weights.format,
            weight_dtype=dtype_name(weights.w13.dtype),
            self_check_error=self._error,
        )
        return (EXPERTS_PASS,), entry

    def covers(self, x: torch.Tensor) -> bool:
        """Return whether the kernels can read these activations in place: they copy 16 bytes at a time."""
        return x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0

    def run(self, name: str, call: ExpertsCall) -> None:
        """Enqueue a kernel on the current stream; capturable."""
        problem = CudaProblem(
            x=call.x,
            w13=self._weights.w13,
            w2=self._weights.w2,
            out=call.out,
            topk_weights=call.topk_weights.to(torch.float32).contiguous(),
            topk_ids=call.topk_ids.contiguous(),
            expert_map=call.expert_map,
            w13_scale=self._weights.w13_scale,
            w2_scale=self._weights.w2_scale,
        )
        cuda_dispatch.run(problem, variant_named(name))

    def note_run(self, name: str, x: torch.Tensor) -> None:
        """Count one forward of these tokens in the proof, by our kernel of this name or by vLLM's."""
        if self._session is None:
            return
        if name == STOCK:
            self._session.left_to_stock(self.address)
        else:
            self._session.called(self.address, x.shape[0], self.proof_entry, kernel=name)

    def _under_check(self) -> LayerUnderCheck:
        facts = self._facts
        return LayerUnderCheck(
            name=facts.name,
            format=self._form,
            weights=self._weights,
            dtype=facts.dtype,
            hidden_size=self._weights.w2.shape[1],
            num_local_experts=self._weights.w13.shape[0],
            top_k=facts.top_k,
            expert_map=facts.expert_map,
            w13_bias=facts.w13_bias,
            w2_bias=facts.w2_bias,
        )

    def _refuse(self, session: PluginSession, reason: str) -> None:
        self._ranges = ()
        session.refused(EXPERTS_PASS, f"{self._facts.name}: {reason}")
