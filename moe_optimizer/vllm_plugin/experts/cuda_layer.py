"""Runs one MoE layer on our CUDA kernels: each planned kernel is checked before it is called."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import torch

from moe_optimizer.ops import cuda_dispatch
from moe_optimizer.ops.cuda_variants import variant_named
from moe_optimizer.ops.kernel_arguments import CudaProblem
from moe_optimizer.proof.record import LayerProof
from moe_optimizer.specs.kernel_speeds import STOCK, TokenRange, kernel_for, rounds_activations
from moe_optimizer.vllm_plugin.experts.layer import ExpertsLayer
from moe_optimizer.vllm_plugin.experts.self_check import CheckedKernel, NotCheckedError, check_layer
from moe_optimizer.vllm_plugin.experts.weight_format import ExpertsCall, KernelWeights
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, PluginSession

_LEAST_CHECKED = 32
"""Chosen: the self-check tries a range up to this many tokens even where the first forward has fewer."""
ALIGNMENT = 16
"""Bytes that the kernels copy at a time."""


class CudaLayer:
    """A layer with the kernels that the plan gives it.

    Args:
        layer: its weights are in place, as vLLM keeps them; scales in the form that the kernels take.
        ranges: the plan's dispatch; a layer that fails its check has none.
        passes: that the layer counts for.
        known: further fields of its entry in the proof; with any, it is entered even where vLLM computes it alone.
    """

    def __init__(
        self,
        layer: ExpertsLayer,
        ranges: Sequence[TokenRange],
        *,
        passes: tuple[str, ...] = (EXPERTS_PASS,),
        **known: Any,
    ) -> None:
        self.address = layer.weights.w13.data_ptr()
        self._layer = layer
        self._ranges = tuple(ranges)
        self._passes = passes
        self._known = known
        self._error: float | None = None
        self._session: PluginSession | None = None

    @property
    def has_kernels(self) -> bool:
        """Whether the plan gives it kernels, and they were not found wrong."""
        return bool(self._ranges)

    def use_for(self, tokens: int) -> str:
        """Return the name of the kernel for this many tokens."""
        return kernel_for(self._ranges, tokens)

    def sizes(self, largest: int, *, position: int = 0) -> dict[str, tuple[int, ...]]:
        """Return the planned kernels that a check tries, and the numbers of tokens.

        The first layer of a shape tries every kernel at both ends of its ranges, up to `largest`: what depends on the
        number of tokens shows there. The others, which differ in their weights, try one kernel each, in turn, at its
        fewest tokens: 48 layers with all of them would take a minute of every start.

        Args:
            largest: most tokens of a forward.
            position: of the layer among those of its shape.
        """
        found = self._ends_of_ranges(largest)
        if not position or not found:
            return found
        name = list(found)[position % len(found)]
        return {name: (min(found[name]),)}

    def _ends_of_ranges(self, largest: int) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        first = 1
        for each in self._ranges:
            ends = tuple(dict.fromkeys((first, min(each.up_to, largest))))
            if each.use != STOCK and first <= largest:
                found[each.use] = (*found.get(each.use, ()), *ends)
            first = each.up_to + 1
        return found

    def check(self, session: PluginSession, *, tokens: int) -> None:
        """Run planned kernels on the layer's own weights (see `sizes`); if one is wrong, vLLM computes the layer.

        Not while a graph is captured, because it reads results on the host.

        Args:
            session: this process's.
            tokens: of the layer's first forward: vLLM's own, to measure memory, has as many as any later one.

        Raises:
            RequiredNotAppliedError: a kernel is wrong, and the plan requires ours.
        """
        self._session = session
        if not self._ranges:
            if self._known:
                self._enter(session)
            return
        if torch.cuda.is_current_stream_capturing():
            self._refuse(session, "it was not tried before a CUDA graph was captured")
            return
        began = time.monotonic()
        cuda_dispatch.prepare_device(self._layer.weights.w13.device)
        position = session.layers_of_shape(tuple(self._layer.weights.w13.shape))
        kernels = {
            name: CheckedKernel(
                run=functools.partial(self.run, name), tokens=sizes, rounds_activations=rounds_activations(name)
            )
            for name, sizes in self.sizes(max(tokens, _LEAST_CHECKED), position=position).items()
        }
        try:
            result = check_layer(self._layer, kernels)
        except NotCheckedError as error:
            self._refuse(session, f"not tried: {error}")
            return
        finally:
            session.self_checks_s += time.monotonic() - began
        if result.reason:
            self._refuse(session, f"self-check failed: {result.reason}")
            return
        self._error = result.error
        self._enter(session)

    def _enter(self, session: PluginSession) -> None:
        pass_names, entry = self.proof_entry()
        session.add_layer(pass_names, self.address, entry)

    def proof_entry(self) -> tuple[tuple[str, ...], LayerProof]:
        """Return the passes that the layer counts for, and its entry in the proof."""
        return self._passes, self._layer.proof(self_check_error=self._error, **self._known)

    def covers(self, x: torch.Tensor) -> bool:
        """Return whether the kernels can use these activations in place: they copy 16 bytes at a time."""
        return x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0

    def rewrite_scales(self, weights: KernelWeights) -> None:
        """Bring scales that are kept in another form than vLLM's up to date, where captured graphs read them."""
        held = self._layer.weights
        for old, new in ((held.w13_scale, weights.w13_scale), (held.w2_scale, weights.w2_scale)):
            if old is not None and new is not None and old.data_ptr() != new.data_ptr():
                # They were made in a forward; vLLM reloads weights outside of one.
                with torch.inference_mode():
                    old.copy_(new)

    def described(self, weights: KernelWeights) -> ExpertsLayer:
        """Return the layer with other weights than the kernels read: those that vLLM holds now."""
        return dataclasses.replace(self._layer, weights=weights)

    def run(self, name: str, call: ExpertsCall) -> None:
        """Enqueue a kernel on the current stream; capturable."""
        weights = self._layer.weights
        problem = CudaProblem(
            x=call.x,
            w13=weights.w13,
            w2=weights.w2,
            out=call.out,
            topk_weights=call.topk_weights.to(torch.float32).contiguous(),
            topk_ids=call.topk_ids.contiguous(),
            expert_map=call.expert_map,
            w13_scale=weights.w13_scale,
            w2_scale=weights.w2_scale,
            w13_zero=weights.w13_zero,
            w2_zero=weights.w2_zero,
            w13_bias=call.w13_bias,
            w2_bias=call.w2_bias,
            activation=self._layer.format.activation,
        )
        cuda_dispatch.run(problem, variant_named(name))

    def note_run(self, name: str, x: torch.Tensor) -> None:
        """Count one forward of these tokens in the proof, by our kernel of this name or by vLLM's."""
        if self._session is None:
            return
        if name == STOCK:
            self._session.called_stock(self.address)
        else:
            self._session.called(self.address, x.shape[0], self.proof_entry, kernel=name)

    def _refuse(self, session: PluginSession, reason: str) -> None:
        self._ranges = ()
        for pass_name in self._passes:
            session.refused(pass_name, f"{self._layer.name}: {reason}")
