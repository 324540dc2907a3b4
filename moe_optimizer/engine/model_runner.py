"""`ModelRunner`: turns a scheduled step into tensors, runs the model, and samples."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from moe_optimizer.engine.attention.choice import make_backend
from moe_optimizer.engine.attention.context import AttentionContext, Prefill
from moe_optimizer.engine.engine_args import EngineConfig
from moe_optimizer.engine.kv_cache import KVCache, fit_cache
from moe_optimizer.engine.layers.moe import Experts
from moe_optimizer.engine.models.decoder import CausalLM
from moe_optimizer.engine.models.registry import model_class
from moe_optimizer.engine.outputs import SampledToken
from moe_optimizer.engine.protocols import Sampler
from moe_optimizer.engine.sampler import TorchSampler
from moe_optimizer.engine.scheduler_output import SchedulerOutput
from moe_optimizer.engine.sequence import Sequence
from moe_optimizer.engine.weights import load_weights


class ModelRunner:
    """The model, its KV cache and the sampler, on one device.

    Raises:
        MoeOptimizerError: the model cannot be loaded, or does not fit.
    """

    def __init__(self, config: EngineConfig, sampler: Sampler | None = None) -> None:
        self.config = config
        self.sampler = sampler or TorchSampler(config.device, config.args.seed)
        self.model = load_model(config)
        backend = make_backend(config.args.attention_backend, config.device)
        for attention in self.model.attention_layers():
            attention.backend = backend
        self.cache_size = fit_cache(config, self.model, self._peak_bytes())
        self.kv_cache = KVCache(config, self.model, self.cache_size)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> list[SampledToken]:
        """Compute a step; return a token for each of `step.sampled`."""
        self.kv_cache.move(step)
        if not step.num_tokens:
            return []
        logits = self.logits(step)
        return self.sampler.sample(logits, step.sampled) if step.sampled else []

    def logits(self, step: SchedulerOutput) -> Tensor:
        """Compute a step; return the logits [S, V] of `step.sampled`, in float32."""
        token_ids, positions, context = self.prepare(step)
        hidden_TH = self.model(token_ids, positions, context)
        places = list(range(len(step.decodes)))
        for prefill, (sequence, count) in zip(context.prefills, step.prefills, strict=True):
            if sequence.num_computed_tokens + count == sequence.num_tokens:
                places.append(prefill.end - 1)
        return self.model.logits(hidden_TH.index_select(0, self._tensor(places))).float()

    def prepare(self, step: SchedulerOutput) -> tuple[Tensor, Tensor, AttentionContext]:
        """Return the token ids and positions of a step, decodes first, and where attention finds them."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        size = self.config.args.block_size
        for sequence, count in [*((sequence, 1) for sequence in step.decodes), *step.prefills]:
            span = range(sequence.num_computed_tokens, sequence.num_computed_tokens + count)
            blocks = sequence.block_table.block_ids
            token_ids += sequence.token_ids[span.start : span.stop]
            positions += span
            slots += [blocks[position // size] * size + position % size for position in span]
        lengths, tables_DN = self.prepare_decode(step.decodes)
        context = AttentionContext(
            slots_T=self._tensor(slots),
            num_decodes=len(step.decodes),
            block_tables_DN=tables_DN,
            context_lengths_D=lengths,
            prefills=tuple(self.prepare_prefill(step)),
            block_size=size,
        )
        return self._tensor(token_ids), self._tensor(positions), context

    def prepare_decode(self, sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
        """Return the context lengths and the block tables, padded with zeros."""
        tables = [sequence.block_table.block_ids for sequence in sequences]
        padded = np.zeros((len(tables), max(map(len, tables), default=0)), dtype=np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        lengths = [sequence.num_computed_tokens + 1 for sequence in sequences]
        return self._tensor(lengths), torch.from_numpy(padded).to(self.config.device)

    def prepare_prefill(self, step: SchedulerOutput) -> Iterator[Prefill]:
        """Yield where the prefills of a step begin and end, and the blocks up to their end."""
        begin = len(step.decodes)
        for sequence, count in step.prefills:
            num_blocks = -(-(sequence.num_computed_tokens + count) // self.config.args.block_size)
            block_ids = torch.tensor(sequence.block_table.block_ids[:num_blocks], dtype=torch.int32)
            yield Prefill(begin, begin + count, sequence.num_computed_tokens, block_ids.to(self.config.device))
            begin += count

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.config.device)

    def _peak_bytes(self) -> int:
        """Return what the largest step needs beside weights and cache; 0 where that is host memory."""
        if self.config.device.type != "cuda":
            return 0
        vocabulary = self.config.args.max_num_seqs * self.config.hf_config.vocab_size
        hidden = self.config.args.max_num_batched_tokens * self.config.hf_config.hidden_size
        # Logits in float32 and the sampler's copies of them; some thirty activations as wide as the hidden state.
        return 5 * 4 * vocabulary + 30 * 4 * hidden


def load_model(config: EngineConfig) -> CausalLM:
    """Build the model on its device and load its weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.dtype)
    try:
        with config.device:
            model = model_class(config.hf_config)(config.hf_config, config.max_model_len, config.dtype)
    finally:
        torch.set_default_dtype(before)
    model.requires_grad_(requires_grad=False)
    model.to(config.device)
    load_weights(model, config.folder, config.args.load_format, seed=config.args.seed)
    if config.args.quantization == "fp8":
        for module in model.modules():
            if isinstance(module, Experts):
                module.to_fp8()
    return model.eval()
