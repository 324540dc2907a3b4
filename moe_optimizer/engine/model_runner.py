"""`ModelRunner`: turns a scheduled step into tensors, runs the model, and samples."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from torch import Tensor

from moe_optimizer.engine.attention.base import make_backend
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
        last_tokens = [
            *range(len(step.decodes)),
            *(
                prefill.end - 1
                for prefill, (sequence, _) in zip(context.prefills, step.prefills, strict=True)
                if prefill.num_computed + prefill.end - prefill.begin == sequence.num_tokens
            ),
        ]
        rows = torch.tensor(last_tokens, dtype=torch.int64, device=hidden_TH.device)
        return self.model.logits(hidden_TH.index_select(0, rows)).float()

    def prepare(self, step: SchedulerOutput) -> tuple[Tensor, Tensor, AttentionContext]:
        """Return the token ids and positions of a step, decodes first, and where attention finds them."""
        device = self.config.device
        decode_ids, decode_positions, tables_DN = self._prepare_decodes(step.decodes)
        chunks = [self._prepare_prefill(sequence, count) for sequence, count in step.prefills]
        token_ids = np.concatenate([decode_ids, *(ids for ids, _, _ in chunks)])
        positions = np.concatenate([decode_positions, *(places for _, places, _ in chunks)])
        size = self.config.args.block_size
        tables = [(decode_positions, tables_DN), *((places, table[None]) for _, places, table in chunks)]
        slots = np.concatenate([_slots(places, table, size) for places, table in tables])

        begin, prefills = len(step.decodes), []
        for (sequence, count), (_, _, table) in zip(step.prefills, chunks, strict=True):
            block_ids = torch.from_numpy(table).to(device)
            prefills.append(Prefill(begin, begin + count, sequence.num_computed_tokens, block_ids))
            begin += count
        context = AttentionContext(
            slots_T=torch.from_numpy(slots).to(device),
            num_decodes=len(step.decodes),
            block_tables_DN=torch.from_numpy(tables_DN).to(device),
            context_lengths_D=torch.from_numpy(decode_positions + 1).to(device),
            prefills=tuple(prefills),
            block_size=size,
        )
        return torch.from_numpy(token_ids).to(device), torch.from_numpy(positions).to(device), context

    def _prepare_decodes(self, sequences: list[Sequence]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the last token and its position of each sequence, and the block tables, padded with zeros."""
        token_ids = np.array([sequence.token_ids[-1] for sequence in sequences], dtype=np.int64)
        positions = np.array([sequence.num_computed_tokens for sequence in sequences], dtype=np.int64)
        lengths = np.array([len(sequence.block_table.block_ids) for sequence in sequences], dtype=np.int64)
        tables = np.zeros((len(sequences), int(lengths.max()) if sequences else 0), dtype=np.int32)
        block_ids = chain.from_iterable(sequence.block_table.block_ids for sequence in sequences)
        tables[np.arange(tables.shape[1]) < lengths[:, None]] = np.fromiter(block_ids, np.int32, int(lengths.sum()))
        return token_ids, positions, tables

    def _prepare_prefill(self, sequence: Sequence, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the next `count` tokens of a sequence, their positions and the blocks up to their end."""
        begin = sequence.num_computed_tokens
        end = begin + count
        num_blocks = -(-end // self.config.args.block_size)
        table = np.array(sequence.block_table.block_ids[:num_blocks], dtype=np.int32)
        return np.array(sequence.token_ids[begin:end], dtype=np.int64), np.arange(begin, end), table

    def _peak_bytes(self) -> int:
        """Return what the largest step needs beside weights and cache; 0 where that is host memory."""
        if self.config.device.type != "cuda":
            return 0
        vocabulary = self.config.args.max_num_seqs * self.config.hf_config.vocab_size
        hidden = self.config.args.max_num_batched_tokens * self.config.hf_config.hidden_size
        # Logits in float32 and the sampler's copies of them; some thirty activations as wide as the hidden state.
        return 5 * 4 * vocabulary + 30 * 4 * hidden


def _slots(positions: np.ndarray, tables: np.ndarray, block_size: int) -> np.ndarray:
    """Return the cache slot of each position; row i of `tables` is position i's, or its one row everybody's."""
    rows = np.arange(len(positions)) if len(tables) == len(positions) else 0
    return tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size


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
