"""`ModelRunner`: turns a packed step into tensors, runs the model, and samples."""

import time
from contextlib import ExitStack

import numpy as np
import psutil
import torch
from torch import Tensor

from moe_optimizer.engine.attention.backend import make_backend
from moe_optimizer.engine.cuda_graphs import DecodeGraphs, capture_sizes
from moe_optimizer.engine.engine_args import EngineConfig
from moe_optimizer.engine.kv_cache import KVCache, fit_cache
from moe_optimizer.engine.layers.linear import Linear, MergedLinear
from moe_optimizer.engine.layers.moe import Experts, MoE
from moe_optimizer.engine.layers.ranks import ALONE, Ranks
from moe_optimizer.engine.models.decoder import CausalLM
from moe_optimizer.engine.models.registry import model_class
from moe_optimizer.engine.packed_batch import PackedBatch, Prefill
from moe_optimizer.engine.protocols import Sampler
from moe_optimizer.engine.sampled_tokens import SampledTokens
from moe_optimizer.engine.sampler import TorchSampler
from moe_optimizer.engine.scheduler_output import SchedulerOutput
from moe_optimizer.engine.sequence import Sequence
from moe_optimizer.engine.weights import load_weights
from moe_optimizer.log import get_logger
from moe_optimizer.ops import use_huge_pages

_log = get_logger(__name__)
Numbers = np.ndarray
_SLOW_START_S = 20.0
"""Chosen: what a user asks about."""
_LEAST_PACKED = 1 << 18
"""Numbers of a matrix: one of 32,768 is slower from a copy in oneDNN's order, one of 393,216 twice as fast."""
_SHARE_FOR_COPIES = 0.25
"""Chosen: the part of the free memory that such copies may take; the KV cache takes half of what is left."""


class ModelRunner:
    """The model, its KV cache and the sampler, on one device."""

    def __init__(self, config: EngineConfig, sampler: Sampler | None = None, ranks: Ranks = ALONE) -> None:
        self.config, self.block_size = config, config.args.block_size
        on_device = config.device if config.args.gpu_sampler else torch.device("cpu")
        compiles = config.compile and on_device == config.device
        self.sampler = sampler or TorchSampler(on_device, config.args.seed, compiled=compiles)
        self.model = load_model(config, ranks)
        backend = make_backend(config.args.attention_backend, config.device, self.block_size)
        for attention in self.model.attention_layers():
            attention.backend = backend
        self.cache_size = fit_cache(config, self.model)
        self.kv_cache = KVCache(config, self.model, self.cache_size)
        self._sampled_S = torch.zeros(config.args.max_num_seqs, dtype=torch.int64, device=config.device)
        self.graphs = self._capture() if config.cuda_graphs and backend.capturable else None

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> SampledTokens:
        """Start to compute a step, behind those before it; return the tokens of `step.sampled`."""
        logits_SV = self.compute(self.prepare(step))
        if not step.sampled:
            return SampledTokens.of([])
        tokens = self.sampler.sample(logits_SV, step.sampled)
        self._sampled_S[: len(step.sampled)] = tokens.token_ids_S
        for row, sequence in enumerate(step.sampled):
            sequence.row = row
        return tokens

    @torch.inference_mode()
    def compute(self, batch: PackedBatch) -> Tensor:
        """Compute a step; return the logits [S, V] of the sampled tokens."""
        self.kv_cache.copy(batch.copies)
        if not len(batch.token_ids_T):
            return torch.empty(0)
        hidden_SH = None if self.graphs is None else self.graphs.hidden(batch)
        if hidden_SH is None:
            batch = batch.to(self.config.device)
            hidden_SH = self._hidden(batch).index_select(0, batch.sampled)
        return self.model.logits(hidden_SH)

    def prepare(self, step: SchedulerOutput) -> PackedBatch:
        """Pack a step that the scheduler has made room for, in host memory: decodes, and prefills behind them."""
        num_decodes, sequences = len(step.decodes), step.decodes + [sequence for sequence, _ in step.prefills]
        token_ids, positions = self.prepare_decode(step)
        more_ids, more_positions, prefills = self.prepare_prefill(step)
        positions_T = np.array(positions + more_positions, np.int64)
        starts_S1 = np.array([*range(num_decodes + 1), *(each.end for each in prefills)])
        lengths_S = positions_T[starts_S1[1:] - 1] + 1
        tables_SN, slots_T = self.slot_mapping(sequences, positions_T, np.diff(starts_S1))
        return PackedBatch(
            copies=step.copies, token_ids_T=torch.tensor(token_ids + more_ids, dtype=torch.int64),
            positions_T=torch.from_numpy(positions_T), slots_T=torch.from_numpy(slots_T),
            block_tables_SN=torch.from_numpy(tables_SN), context_lengths_S=torch.from_numpy(lengths_S),
            query_starts_S1=torch.from_numpy(starts_S1), num_decodes=num_decodes, prefills=tuple(prefills),
            sampled=torch.from_numpy(starts_S1[1:][lengths_S == [each.num_tokens for each in sequences]] - 1),
            block_size=self.block_size,
        )  # fmt: skip

    def prepare_decode(self, step: SchedulerOutput) -> tuple[list[int], list[int]]:
        """Return the one token id of each decode and its position; -1 - row for a token that is on the device still."""
        ids = [each.token_ids[-1] if len(each.token_ids) == each.num_tokens else -1 - each.row for each in step.decodes]
        return ids, [each.num_computed_tokens for each in step.decodes]

    def prepare_prefill(self, step: SchedulerOutput) -> tuple[list[int], list[int], list[Prefill]]:
        """Return token ids and positions of the prefills, and where each lies, packed one behind the other."""
        token_ids, positions, prefills, begin = list[int](), list[int](), list[Prefill](), len(step.decodes)
        for sequence, count in step.prefills:
            computed = sequence.num_computed_tokens
            token_ids += sequence.token_ids[computed : computed + count]
            positions += range(computed, computed + count)
            prefills.append(Prefill(begin, begin + count, computed))
            begin += count
        return token_ids, positions, prefills

    def slot_mapping(self, sequences: list[Sequence], positions_T: Numbers, counts_S: Numbers) -> list[Numbers]:
        """Return the block tables [S, N], filled up with block 0, and the slot [T] of each token in the KV cache."""
        tables = [sequence.block_table.block_ids for sequence in sequences]
        width = max(map(len, tables), default=0)
        rows = bytearray().join([table.tobytes().ljust(width * table.itemsize, b"\0") for table in tables])
        tables_SN = np.frombuffer(rows, np.int32).reshape(len(tables), width)
        blocks_T = tables_SN[np.repeat(np.arange(len(tables)), counts_S), positions_T // self.block_size]
        return [tables_SN, blocks_T * np.int64(self.block_size) + positions_T % self.block_size]

    def _hidden(self, batch: PackedBatch) -> Tensor:
        return self.model(batch.following(self._sampled_S))

    @torch.inference_mode()
    def _capture(self) -> DecodeGraphs:
        begun = time.monotonic()
        graphs = DecodeGraphs(
            self._hidden, capture_sizes(self.config.args.max_num_seqs), block_size=self.block_size,
            max_blocks=-(-self.cache_size.max_model_len // self.block_size), device=self.config.device,
        )  # fmt: skip
        if (spent := time.monotonic() - begun) > _SLOW_START_S:
            _log.warning(
                "%.0f s went into kernels and CUDA graphs: fewer sequences (max_num_seqs) need fewer graphs, and "
                "enforce_eager=True and compile_layers=False leave them out, for slower decodes", spent,
            )  # fmt: skip
        return graphs


def _pack(model: CausalLM) -> None:
    """Have the head and the large matrices computed from second copies, as far as the memory holds them."""
    model.head.pack()
    large = [
        module for module in model.modules()
        if isinstance(module, (Linear, MergedLinear)) and module.weight.numel() >= _LEAST_PACKED
    ]  # fmt: skip
    needed = sum(module.weight.nbytes for module in large)
    if needed > _SHARE_FOR_COPIES * psutil.virtual_memory().available:
        if model.head.packed is not None:
            _log.warning("products take twice the time: copies of the weights in oneDNN's order need %.1f GiB, over a "
                         "quarter of the free memory", needed / (1 << 30))  # fmt: skip
        return
    for module in large:
        module.pack()


def load_model(config: EngineConfig, ranks: Ranks = ALONE) -> CausalLM:
    """Build the model on its device and load its weights."""
    with config.device, ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(config.dtype)
        model = model_class(config.hf_config)(config.hf_config, config.max_model_len, config.dtype, ranks)
    model.requires_grad_(requires_grad=False)
    model.to(config.device)
    load_weights(model, config.folder, config.args.load_format, seed=config.args.seed)
    if config.args.packed_weights:
        _pack(model)
    for module in model.modules():
        if isinstance(module, Experts) and config.args.quantization == "fp8":
            module.to_fp8()
        if isinstance(module, MoE):
            module.fused = config.args.fused_moe
        # A chain of small operations in one kernel rounds to the model's dtype once instead of after each.
        for name in getattr(module, "fused_methods", ()) if config.compile else ():
            setattr(module, name, torch.compile(getattr(module, name), dynamic=True))
    for weight in model.parameters():
        use_huge_pages(weight.data)
    return model.eval()
