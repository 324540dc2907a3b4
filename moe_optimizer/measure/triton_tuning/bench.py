"""Times vLLM's Triton MoE kernel with given launch parameters, on a GPU.

One measurement is the replay of a CUDA graph of several calls. Each call has its own routing, and where all weights
would stay in the L2 cache its own weights, so that weights are read from memory as they are while serving.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moe_optimizer.errors import UnsupportedError
from moe_optimizer.inspection.tuned_configs import Row
from moe_optimizer.specs.triton_shape import Experts

if TYPE_CHECKING:
    from torch import Tensor

_MAX_ERROR = 2e-2
"""As a share of the largest output: sums in another order differ by less in BF16, a lost tile by more."""
_REPLAY_US = 1500.0
"""Chosen: length of one replay, long beside the timer's resolution."""
_CALLS = (4, 32)
_L2_FACTOR = 4


@dataclass(frozen=True, slots=True)
class _Weights:
    w13: Tensor
    """[local experts, 2 * width, hidden]."""
    w2: Tensor
    """[local experts, hidden, width]."""
    quant_config: Any


class TritonBench:
    """vLLM's `fused_experts` on one set of experts, with weights, inputs and routing of a seed.

    Raises:
        UnsupportedError: no GPU, or not enough free memory on it.
    """

    def __init__(self, experts: Experts, *, seed: int = 20) -> None:
        from vllm import __version__
        from vllm.model_executor.layers.fused_moe import fused_moe, override_config

        if not torch.cuda.is_available():
            raise UnsupportedError("tuning needs a GPU, and torch finds none here")
        self.experts = experts
        self.vllm_version = __version__
        self._fused_moe = fused_moe
        self._override = override_config
        self._dtype = getattr(torch, experts.dtype)
        torch.manual_seed(seed)
        self._weights = [self._make_weights() for _ in range(self._copies())]
        self._stream = torch.cuda.Stream()
        self._inputs: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
        self._expected: dict[int, Tensor] = {}
        self._expert_map = self._make_expert_map()

    @property
    def triton_version(self) -> str:
        """The version of Triton that compiles the kernel."""
        import triton

        return triton.__version__

    def stock_row(self, tokens: int) -> Row:
        """Return the row that vLLM takes now: its own file's or its default."""
        experts = self.experts
        weights = self._weights[0]
        row = self._fused_moe.try_get_optimal_moe_config(
            tuple(weights.w13.shape),
            tuple(weights.w2.shape),
            experts.top_k,
            experts.scheme or ("float32" if experts.dtype == "float32" else None),
            tokens,
            list(experts.block) if experts.block else None,
        )
        return {str(name): int(value) for name, value in row.items()}

    def quick_us(self, row: Row, tokens: int) -> float | None:
        """Return the median microseconds of one call, None when the row does not work or gives wrong results."""
        graph = self._captured(row, tokens)
        if graph is None:
            return None
        return statistics.median(self._replay(graph, self._calls(tokens)) for _ in range(5))

    def interleaved_us(self, rows: Sequence[Row], tokens: int, *, rounds: int = 15) -> list[list[float]] | None:
        """Return microseconds of one call for every row and round; rows take turns, so a drifting clock affects all.

        None when a row does not work.
        """
        graphs = [self._captured(row, tokens) for row in rows]
        whole = [graph for graph in graphs if graph is not None]
        if len(whole) < len(graphs):
            return None
        samples: list[list[float]] = [[] for _ in rows]
        for index in range(rounds):
            for place in range(len(rows)):
                at = (place + index) % len(rows)
                samples[at].append(self._replay(whole[at], self._calls(tokens)))
        return samples

    def forget(self, tokens: int) -> None:
        """Free the inputs of a size."""
        self._inputs.pop(tokens, None)
        self._expected.pop(tokens, None)
        gc.collect()
        torch.cuda.empty_cache()

    def _copies(self) -> int:
        """Return the number of sets of weights with which none stays in the L2 cache."""
        experts = self.experts
        size = experts.local_experts * 3 * experts.width * experts.hidden_size
        size *= 1 if experts.scheme else self._dtype.itemsize
        free, _ = torch.cuda.mem_get_info()
        if 3 * size > free:
            raise UnsupportedError(f"tuning needs {3 * size / 1e9:.1f} GB of GPU memory, {free / 1e9:.1f} GB are free")
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        return max(1, min(math.ceil(_L2_FACTOR * cache / size), int(free // (3 * size)), 16))

    def _make_weights(self) -> _Weights:
        experts = self.experts
        w13 = self._random(experts.local_experts, 2 * experts.width, experts.hidden_size, fan_in=experts.hidden_size)
        w2 = self._random(experts.local_experts, experts.hidden_size, experts.width, fan_in=experts.width)
        if not experts.scheme:
            return _Weights(w13, w2, None)
        from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

        w13_fp8, w13_scale = self._to_fp8(w13)
        w2_fp8, w2_scale = self._to_fp8(w2)
        config = fp8_w8a8_moe_quant_config(
            w13_scale, w2_scale, block_shape=list(experts.block) if experts.block else None
        )
        return _Weights(w13_fp8, w2_fp8, config)

    def _random(self, *shape: int, fan_in: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device="cuda").normal_(std=fan_in**-0.5)

    def _to_fp8(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Convert with scales of one: times depend on types and shapes, not on values."""
        block = self.experts.block
        scale_shape = (weight.shape[0],)
        if block:
            scale_shape += (math.ceil(weight.shape[1] / block[0]), math.ceil(weight.shape[2] / block[1]))
        return weight.to(torch.float8_e4m3fn), torch.ones(scale_shape, dtype=torch.float32, device="cuda")

    def _calls(self, tokens: int) -> int:
        """Return the number of calls in one graph, by the expected time of a call."""
        expected = 30.0 + tokens * 0.3
        return max(_CALLS[0], min(_CALLS[1], round(_REPLAY_US / expected)))

    def _inputs_of(self, tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        if tokens not in self._inputs:
            self._inputs[tokens] = [self._make_inputs(tokens) for _ in range(self._calls(tokens))]
        return self._inputs[tokens]

    def _make_inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        experts = self.experts
        x = self._random(tokens, experts.hidden_size, fan_in=1)
        logits = torch.randn(tokens, experts.num_experts, device="cuda")
        weights, ids = torch.softmax(logits, dim=-1).topk(experts.top_k, dim=-1)
        return x, (weights / weights.sum(dim=-1, keepdim=True)).float(), ids.to(torch.int32)

    def _run(self, tokens: int, index: int) -> Tensor:
        experts = self.experts
        x, topk_weights, topk_ids = self._inputs_of(tokens)[index]
        weights = self._weights[index % len(self._weights)]
        return self._fused_moe.fused_experts(
            x,
            weights.w13,
            weights.w2,
            topk_weights,
            topk_ids,
            global_num_experts=-1 if self._expert_map is None else experts.num_experts,
            expert_map=self._expert_map,
            quant_config=weights.quant_config,
        )

    def _make_expert_map(self) -> Tensor | None:
        """Return the map of the first rank under expert parallelism, None without it."""
        experts = self.experts
        if experts.local_experts == experts.num_experts:
            return None
        expert_map = torch.full((experts.num_experts,), -1, dtype=torch.int32, device="cuda")
        expert_map[: experts.local_experts] = torch.arange(experts.local_experts, dtype=torch.int32, device="cuda")
        return expert_map

    def _captured(self, row: Row, tokens: int) -> torch.cuda.CUDAGraph | None:
        """Return a graph of all calls with these launch parameters, None when they fail or the result is wrong."""
        calls = range(len(self._inputs_of(tokens)))
        if tokens not in self._expected:
            self._expected[tokens] = self._run(tokens, 0).float()
        right, failure = False, None
        graph = torch.cuda.CUDAGraph()
        with self._override(dict(row)):
            # Caught inside: vLLM's context manager does not restore its state after an exception.
            try:
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    right = self._is_right(self._run(tokens, 0), tokens)
                torch.cuda.current_stream().wait_stream(self._stream)
                if right:
                    with torch.cuda.graph(graph, stream=self._stream):
                        for index in calls:
                            self._run(tokens, index)
            except Exception as error:  # noqa: BLE001 - a row that does not compile or launch is no row
                failure = error
        if failure is not None or not right:
            torch.cuda.synchronize()  # an error that the device does not recover from ends the run here
            return None
        graph.replay()
        torch.cuda.synchronize()
        return graph

    def _is_right(self, out: Tensor, tokens: int) -> bool:
        want = self._expected[tokens]
        limit = _MAX_ERROR * want.abs().max()
        return bool(((out.float() - want).abs().max() <= limit).item())

    def _replay(self, graph: torch.cuda.CUDAGraph, calls: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return 1000 * start.elapsed_time(end) / calls
