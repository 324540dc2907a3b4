"""Computes the time of one step of a server in named parts: some sequences decode, some prompt tokens are read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from moe_optimizer.costs import comm
from moe_optimizer.costs.roofline import DecodeStep, decode_cache_bytes, decode_step_bytes, memory_bandwidth, peak_flops
from moe_optimizer.costs.weights import kv_head_share
from moe_optimizer.layouts import constants as fitted
from moe_optimizer.layouts.experts import ExpertTimes, expert_times
from moe_optimizer.layouts.question import LayoutQuestion
from moe_optimizer.specs.layout import Layout
from moe_optimizer.specs.quantity import Quantity, Source

EXPERTS, MATRICES, ATTENTION, SMALL = "experts", "matrices", "attention", "small kernels"
SAMPLING, EXCHANGE, LOCK_STEP, HOST, LAUNCHES = "sampling", "exchange", "lock step", "host", "launches"
_BYTES = 2
"""Of an activation."""
_FP8_BITS = 8


@dataclass(frozen=True, slots=True)
class Tokens:
    """What one data parallel copy computes in a step."""

    sequences: float
    """That write an answer, one token each."""
    context: float
    """Cached tokens of each of them."""
    prompt: float = 0.0
    """Tokens of prompts that are read."""
    prompt_length: float = 1.0
    """Tokens of a whole prompt."""

    @property
    def total(self) -> float:
        """Tokens of the forward pass."""
        return self.sequences + self.prompt

    @property
    def sampled(self) -> float:
        """Sequences that get a token: those that write, and prompts that end."""
        return self.sequences + self.prompt / self.prompt_length


@dataclass(slots=True)
class StepModel:
    """The steps of one layout."""

    question: LayoutQuestion
    layout: Layout
    _experts: ExpertTimes = field(init=False)
    _linear_params: float = field(init=False)
    """Of the dense products that one GPU multiplies each token with."""
    _matrix_bytes: float = field(init=False)
    """Of them, read in each step."""

    def __post_init__(self) -> None:
        """Work out what all steps have in common.

        Raises:
            UnsupportedError: the GPU's memory bandwidth is not known.
        """
        model, size = self.question.model, self.layout.tensor_parallel_size
        memory_bandwidth(self.question.gpu)  # without one nothing can be said
        self._experts = expert_times(self.question, self.layout)
        split = model.attention_params - model.kv_params + model.dense_params + model.shared_expert_params
        self._linear_params = split / size + model.kv_params * kv_head_share(model, size) + model.router_params
        self._matrix_bytes = decode_step_bytes(self._bytes_request(1)).matrices

    def step_us(self, tokens: Tokens) -> float:
        """Return the time of a step that all stages of a pipeline work through."""
        return sum(part.value for part in self.parts(tokens).values())

    def parts(self, tokens: Tokens) -> dict[str, Quantity]:
        """Return the time of each part of a step, in us, all layers together."""
        parts = self._in_a_graph(tokens)
        if self._is_launched(tokens):
            waiting = self.launches_us - sum(part.value for part in parts.values())
            ref = f"without a graph, as in {fitted.PROMPT_LEDGER}"
            parts |= {LAUNCHES: Quantity(waiting, "us", Source.MODELLED, ref)} if waiting > 0 else {}
        return parts

    def graph_us(self, tokens: Tokens) -> float:
        """Return the time of a step whose kernels come from a CUDA graph."""
        return sum(part.value for part in self._in_a_graph(tokens).values())

    @property
    def launches_us(self) -> float:
        """The least time of a step whose kernels are launched one by one."""
        more = fitted.LAUNCH_EXCHANGE_US * (self.layout.devices_of_stage > 1)
        more += fitted.LAUNCH_LATENT_US * (self.question.model.attention.kind == "mla")
        return (fitted.LAUNCH_LAYER_US + more) * self.question.model.num_layers

    def _is_launched(self, tokens: Tokens) -> bool:
        """Whether a step has no graph and its launches count."""
        question = self.question
        if not question.processes or question.prompt_graphs or not tokens.prompt:
            return False
        # For each request vLLM counts the tokens that it checks at once: drafts, which are prompts of one token here.
        few = 2 * question.most_running(self.layout) if tokens.prompt_length > 1 else fitted.CAPTURED_TOKENS
        return tokens.total > min(fitted.CAPTURED_TOKENS, few)

    def _in_a_graph(self, tokens: Tokens) -> dict[str, Quantity]:
        parts = {
            EXPERTS: self._experts_us(tokens),
            MATRICES: self._matrices_us(tokens),
            ATTENTION: self._attention_us(tokens),
            SMALL: self._small_kernels_us(tokens),
            SAMPLING: self._sampling_us(tokens),
            EXCHANGE: self._exchange_us(tokens),
        }
        if self.layout.tensor_parallel_size * self.layout.pipeline_parallel_size == 1:
            parts[HOST] = Quantity(fitted.HOST_US, "us", Source.MODELLED, f"as in {fitted.SERVED}")
        doublings = math.log2(self.layout.data_parallel_size)
        if doublings:
            waiting = fitted.LOCK_STEP_US * doublings
            parts[LOCK_STEP] = Quantity(waiting, "us", Source.MODELLED, f"as in {fitted.LAYOUTS}")
        return parts

    def _experts_us(self, tokens: Tokens) -> Quantity:
        layers = self.question.model.num_moe_layers
        if not layers:
            return Quantity(0.0, "us", Source.MODELLED, "the model has no experts")
        one = self._experts.layer_us(tokens.total * self.layout.data_parallel_size)
        return Quantity(layers * one.value, "us", one.source, one.ref)

    def _matrices_us(self, tokens: Tokens) -> Quantity:
        question, model, gpu = self.question, self.question.model, self.question.gpu
        reading = self._matrix_bytes / (gpu.memory_bandwidth.value * fitted.MATRIX_BANDWIDTH_SHARE)
        head = (model.lm_head_params or model.embedding_params) / self.layout.tensor_parallel_size
        flop = 2 * (self._linear_params * tokens.total + head * tokens.sampled)
        fp8 = question.linear_bits == _FP8_BITS and gpu.supports("fp8")
        block = fp8 and model.weight_block is not None
        share = fitted.FP8_MATRIX_FLOP_SHARE if fp8 else fitted.MATRIX_FLOP_SHARE
        share = fitted.FP8_BLOCK_MATRIX_FLOP_SHARE if block else share
        computing = flop / (peak_flops(gpu, _FP8_BITS if fp8 else 16).value * share)
        power = fitted.READ_AND_MULTIPLY_POWER
        more = 2 * (model.attention.kind == "mla") + 2 * (model.num_shared_experts > 0)
        calls = (4 + more) * model.num_layers + 1
        quantised_us = (fitted.FP8_BLOCK_CALL_US if block else fitted.FP8_CALL_US) * fp8
        calls_us = fitted.MATRIX_CALL_US * calls + quantised_us * (2 + more) * model.num_layers
        value = 1e6 * (reading**power + computing**power) ** (1 / power) + calls_us
        ledgers = fitted.LEDGER
        if fp8:
            ledgers += f" and {fitted.LINEARS if block else fitted.FP8_LEDGER}"
        return Quantity(value, "us", Source.MODELLED, f"bytes and operations, and calls as in {ledgers}")

    def _attention_us(self, tokens: Tokens) -> Quantity:
        model, gpu, attention = self.question.model, self.question.gpu, self.question.model.attention
        size, layers = self.layout.tensor_parallel_size, attention.num_attention_layers
        peak = peak_flops(gpu, 16).value
        cached = decode_cache_bytes(self._bytes_request(tokens.context)) * tokens.sequences
        reading = cached / (gpu.memory_bandwidth.value * fitted.CACHE_BANDWIDTH_SHARE)
        heads, latent = attention.num_heads / size, attention.kind == "mla"
        # Each head reads the cached latent for keys and values alike.
        width = model.kv_bytes_per_token / _BYTES / layers if latent and layers else attention.head_dim
        flop = 4 * heads * width * tokens.sequences * tokens.context * layers
        decoding = max(reading, flop / (peak * fitted.DECODE_ATTENTION_FLOP_SHARE))
        cache_heads = 1.0 if latent else max(1.0, attention.num_kv_heads / size)
        flop = 2 * heads * attention.head_dim * tokens.prompt * tokens.prompt_length * layers
        prefilling = flop / (peak * fitted.PREFILL_ATTENTION_FLOP_SHARE)
        each_us = fitted.ATTENTION_LAYER_US + fitted.ATTENTION_SEQUENCE_US * cache_heads * tokens.sequences
        value = 1e6 * (decoding + prefilling) + each_us * model.num_layers
        return Quantity(value, "us", Source.MODELLED, f"cache bytes, and calls as in {fitted.LEDGER}")

    def _small_kernels_us(self, tokens: Tokens) -> Quantity:
        model, bandwidth = self.question.model, self.question.gpu.memory_bandwidth.value
        moved = fitted.SMALL_KERNELS_PASSES * tokens.total * model.hidden_size * _BYTES / bandwidth * 1e6
        of_prompts = fitted.PROMPT_TOKEN_US * tokens.prompt / self.layout.tensor_parallel_size
        value = model.num_layers * (fitted.SMALL_KERNELS_LAYER_US + moved) + of_prompts
        ref = f"as in {fitted.LEDGER}"
        if self._has_fused_router(tokens):
            value -= fitted.FUSED_ROUTER_US * model.num_moe_layers
            ref += f", less a launch as in {fitted.ROUTER}"
        return Quantity(value, "us", Source.MODELLED, ref)

    def _has_fused_router(self, tokens: Tokens) -> bool:
        """Whether one launch of ours stands for two of vLLM's, the gate and the choice of experts."""
        few = tokens.total <= self.question.fused_router_tokens
        return few and self._experts.ours and self.layout.devices_of_server == 1

    def _sampling_us(self, tokens: Tokens) -> Quantity:
        moved = fitted.SAMPLING_PASSES * tokens.sampled * self.question.model.vocab_size * 4
        value = fitted.SAMPLING_US + moved / self.question.gpu.memory_bandwidth.value * 1e6
        return Quantity(value, "us", Source.MODELLED, f"as in {fitted.LEDGER}")

    def _exchange_us(self, tokens: Tokens) -> Quantity:
        """Return the time of what GPUs send each other: all-reduces of slices, gathers of data parallel copies, and
        activations between the stages of a pipeline.
        """
        model, gpu, layout = self.question.model, self.question.gpu, self.layout
        hidden, links = tokens.total * model.hidden_size * _BYTES, self.question.links
        slices = comm.Group(layout.tensor_parallel_size)
        terms: list[tuple[int, Quantity]] = [(2 * model.num_layers, comm.all_reduce_us(hidden, gpu, slices, links))]
        if layout.data_parallel_size > 1 and model.is_moe:
            # vLLM's default: the tokens of all copies go to all GPUs, and the sums come back.
            copies = comm.Group(layout.data_parallel_size, self._machines_of_stage())
            everyone = hidden * layout.data_parallel_size
            terms.append((2 * model.num_moe_layers, comm.gather_us(everyone, gpu, copies, links)))
        if layout.pipeline_parallel_size > 1:
            across = layout.devices_of_server > self.question.gpus_per_machine
            sent = comm.send_us(hidden, gpu, across_machines=across)
            terms.append((layout.pipeline_parallel_size - 1, sent))
        used = [(count, term) for count, term in terms if term.value]
        value = sum(count * term.value for count, term in used)
        source = reduce(or_, (term.source for _, term in used or terms))
        return Quantity(value, "us", source, "; ".join(term.ref for _, term in used))

    def _machines_of_stage(self) -> int:
        return -(-self.layout.devices_of_stage // self.question.gpus_per_machine)

    def _bytes_request(self, context: float) -> DecodeStep:
        return DecodeStep(
            model=self.question.model,
            batch=1,
            context=round(context),
            num_gpus=self.layout.tensor_parallel_size,
            expert_bits=self.question.expert_bits,
            linear_bits=self.question.linear_bits,
            kv_bits=self.question.memory.kv_bits,
        )
