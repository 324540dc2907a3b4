"""The attention backends against plain torch. Without a GPU Triton's kernels are interpreted."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_optimizer.engine.attention import backend
from moe_optimizer.engine.attention.backend import AttentionBackend, make_backend
from moe_optimizer.engine.attention.paged import PagedAttention
from moe_optimizer.engine.attention.sdpa import SdpaAttention
from moe_optimizer.engine.layers.attention import Attention
from moe_optimizer.engine.packed_batch import PackedBatch, Prefill
from moe_optimizer.errors import UnsupportedError
from moe_optimizer.ops import _load, decode_attention, kernels_available

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which comes with torch for CUDA"
)
NEEDS_KERNELS = pytest.mark.skipif(
    DEVICE.type != "cpu" or not kernels_available()[0], reason="needs a CPU and the compiled kernels"
)
# (tokens of the step, tokens computed before it): one token is a decode, decodes come first.
STEPS = {
    "decodes": [(1, 0), (1, 3), (1, 4), (1, 40), (1, 130)],
    "prefills": [(5, 0), (1, 0), (37, 0)],
    "chunks": [(9, 4), (30, 33), (4, 0)],
    "mixed": [(1, 7), (1, 70), (40, 0), (8, 21)],
}
# Query heads, key/value heads, head size.
HEADS = [(4, 2, 16), (6, 1, 24), (4, 4, 80), (3, 1, 32)]


def make_backends() -> list[Any]:
    paged = pytest.param("paged", marks=NEEDS_KERNELS)
    return [pytest.param("sdpa"), pytest.param("sdpa_padded"), paged, pytest.param("triton", marks=NEEDS_TRITON)]


def make_step(spans: list[tuple[int, int]], block_size: int) -> PackedBatch:
    """A batch whose sequences lie in shuffled blocks."""
    lengths = [tokens + before for tokens, before in spans]
    counts = [-(-length // block_size) for length in lengths]
    shuffled = iter(np.random.default_rng(0).permutation(sum(counts)).tolist())
    tables = np.zeros((len(spans), max(counts)), np.int32)
    for row, count in zip(tables, counts, strict=True):
        row[:count] = [next(shuffled) for _ in range(count)]
    num_decodes = sum(tokens == 1 for tokens, _ in spans) if spans[0][0] == 1 else 0
    slots, starts, prefills = [], [0], []
    for (tokens, before), row in zip(spans, tables, strict=True):
        slots += [
            int(row[place // block_size]) * block_size + place % block_size for place in range(before, before + tokens)
        ]
        if len(starts) > num_decodes:
            prefills.append(Prefill(starts[-1], starts[-1] + tokens, before))
        starts.append(starts[-1] + tokens)
    return PackedBatch(
        copies=[],
        token_ids_T=torch.zeros(len(slots), dtype=torch.int64),
        positions_T=torch.zeros(len(slots), dtype=torch.int64),
        sampled=torch.empty(0),
        slots_T=torch.tensor(slots, device=DEVICE),
        block_tables_SN=torch.from_numpy(tables).to(DEVICE),
        context_lengths_S=torch.tensor(lengths, device=DEVICE),
        query_starts_S1=torch.tensor(starts, device=DEVICE),
        num_decodes=num_decodes,
        prefills=tuple(prefills),
        block_size=block_size,
    )


@NEEDS_KERNELS
@pytest.mark.parametrize("qk_norm", ["none", "head"])
def test_a_few_decodes_are_computed_in_one_call_with_the_bits_of_the_steps(
    monkeypatch: pytest.MonkeyPatch, qk_norm: Any
) -> None:
    config = SimpleNamespace(
        hidden_size=48,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
        rms_norm_eps=1e-6,
        attention_bias=True,
    )
    batch = make_step(STEPS["decodes"], block_size=4)
    torch.manual_seed(0)
    layer = Attention(config, qk_norm)
    for parameter in layer.parameters():
        parameter.data.normal_()
    layer.backend = PagedAttention()
    cache = torch.randn(layer.kv_cache_shape(int(batch.block_tables_SN.max()) + 1, 4))
    x_TC, rope = torch.randn(len(batch.slots_T), 48), (torch.randn(len(batch.slots_T), 1, 24),) * 2
    found = []
    # The backend takes part in the steps alone.
    for owner, name in ((layer.backend, "attend"), (decode_attention, "computed")):
        layer.kv_cache = cache.clone()
        with monkeypatch.context() as patch, torch.inference_mode():
            patch.setattr(owner, name, lambda *_, **__: None)
            found.append((layer(x_TC, rope, batch), layer.kv_cache))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(layer.kv_cache, cache)


def expected(q_THd: Tensor, cache_2BSKd: Tensor, batch: PackedBatch) -> Tensor:
    """Softmax of one token's scores after the other, in float64."""
    keys, values = cache_2BSKd.double()
    out, starts = torch.empty_like(q_THd), batch.query_starts_S1.tolist()
    for row, length in enumerate(batch.context_lengths_S.tolist()):
        tokens = starts[row + 1] - starts[row]
        blocks = batch.block_tables_SN[row, : -(-length // batch.block_size)].long()
        k_LKd, v_LKd = keys[blocks].flatten(0, 1), values[blocks].flatten(0, 1)
        for token in range(tokens):
            seen = length - tokens + token + 1
            q_Hd = q_THd[starts[row] + token].double()
            shared = q_Hd.shape[0] // k_LKd.shape[1]
            k_LHd, v_LHd = (each[:seen].repeat_interleave(shared, 1) for each in (k_LKd, v_LKd))
            probs_HL = (torch.einsum("hd,lhd->hl", q_Hd, k_LHd) * q_Hd.shape[1] ** -0.5).softmax(-1)
            out[starts[row] + token] = torch.einsum("hl,lhd->hd", probs_HL, v_LHd).to(out.dtype)
    return out


def inputs(batch: PackedBatch, heads: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values as slices of one product, and a cache with something in every block."""
    query_heads, kv_heads, size = heads
    torch.manual_seed(1)
    tokens = len(batch.slots_T)
    widths = [query_heads * size, kv_heads * size, kv_heads * size]
    q, k, v = torch.randn(tokens, sum(widths), device=DEVICE).split(widths, dim=-1)
    num_blocks = int(batch.block_tables_SN.max()) + 1
    cache = torch.randn(2, num_blocks, batch.block_size, kv_heads, size, device=DEVICE)
    return q.unflatten(-1, (-1, size)), k.unflatten(-1, (-1, size)), v.unflatten(-1, (-1, size)), cache


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", make_backends())
def test_a_backend_computes_causal_attention_over_its_pages(
    name: Any, step: str, heads: tuple[int, int, int], block_size: int
) -> None:
    batch = make_step(STEPS[step], block_size)
    q, k, v, cache = inputs(batch, heads)
    got = make_backend(name, DEVICE, block_size).attend(q, k, v, cache, batch)
    stored = cache[:, :, :].flatten(1, 2)[:, batch.slots_T]
    assert torch.equal(stored, torch.stack((k, v)))
    assert (got - expected(q, cache, batch)).abs().max() < 2e-6


@NEEDS_TRITON
def test_padding_is_stored_nowhere_and_attends_to_nothing() -> None:
    batch = make_step(STEPS["decodes"], 4)
    batch.slots_T[3:] = -1
    batch.context_lengths_S[3:] = 0
    q, k, v, cache = inputs(batch, HEADS[0])
    before = cache.clone()
    got = make_backend("triton", DEVICE, 4).attend(q, k, v, cache, batch)
    assert torch.equal(got[3:], torch.zeros_like(got[3:]))
    changed = (cache != before).any(-1).any(-1).any(0).flatten().nonzero().flatten()
    assert sorted(changed.tolist()) == sorted(batch.slots_T[:3].tolist())
    assert (got[:3] - expected(q, cache, make_step(STEPS["decodes"], 4))[:3]).abs().max() < 2e-6


class PretendedFlash(ModuleType):
    """The two functions of flash-attn that the backend calls, as its documentation defines them."""

    @staticmethod
    def flash_attn_with_kvcache(
        q: Tensor, keys: Tensor, values: Tensor, *, cache_seqlens: Tensor, block_table: Tensor, causal: bool
    ) -> Tensor:
        starts = torch.arange(len(q) + 1)
        batch = _context(starts, cache_seqlens, block_table, keys.shape[1])
        return expected(q[:, 0], torch.stack((keys, values)), batch)[:, None]

    @staticmethod
    def flash_attn_varlen_func(
        q: Tensor, keys: Tensor, values: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
        max_seqlen_q: int, max_seqlen_k: int, block_table: Tensor, causal: bool,
    ) -> Tensor:  # fmt: skip
        lengths = cu_seqlens_k.diff()
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        assert max_seqlen_k == int(lengths.max())
        return expected(q, torch.stack((keys, values)), _context(cu_seqlens_q, lengths, block_table, keys.shape[1]))


def _context(starts: Tensor, lengths: Tensor, tables: Tensor, block_size: int) -> PackedBatch:
    return PackedBatch(
        copies=[], token_ids_T=torch.empty(0), positions_T=torch.empty(0), sampled=torch.empty(0),
        slots_T=torch.empty(0), block_tables_SN=tables, context_lengths_S=lengths, query_starts_S1=starts,
        num_decodes=0, prefills=(), block_size=block_size,
    )  # fmt: skip


class PretendedVllmFlash(ModuleType):
    """The functions of vLLM's build of FlashAttention that the backend calls, as its documentation defines them."""

    schedules: ClassVar[list[dict[str, Any]]] = []

    @classmethod
    def get_scheduler_metadata(cls, **arguments: Any) -> Tensor:
        cls.schedules.append(arguments)
        return torch.tensor(len(cls.schedules) - 1)

    @classmethod
    def flash_attn_varlen_func(
        cls, q: Tensor, keys: Tensor, values: Tensor, *, max_seqlen_q: int, cu_seqlens_q: Tensor, max_seqlen_k: int,
        seqused_k: Tensor, block_table: Tensor, causal: bool, fa_version: int, scheduler_metadata: Tensor,
    ) -> Tensor:  # fmt: skip
        schedule = cls.schedules[int(scheduler_metadata)]
        sizes = (len(seqused_k), max_seqlen_q, max_seqlen_k, q.shape[1], keys.shape[2], q.shape[2], keys.shape[1])
        names = "batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim", "page_size"
        assert tuple(schedule[name] for name in names) == sizes
        assert torch.equal(schedule["cache_seqlens"], seqused_k)
        assert torch.equal(schedule["cu_seqlens_q"], cu_seqlens_q)
        assert (schedule["causal"], schedule["qkv_dtype"]) == (causal, q.dtype)
        assert {each.dtype for each in (cu_seqlens_q, seqused_k, block_table)} == {torch.int32}
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        assert max_seqlen_k >= int(seqused_k.max())
        assert (causal, fa_version) == (True, 3)
        batch = _context(cu_seqlens_q, seqused_k, block_table, keys.shape[1])
        return expected(q, torch.stack((keys, values)), batch)


@pytest.fixture
def vllm_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that brings FlashAttention 2 and 3, on a Hopper GPU."""
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", PretendedVllmFlash("vllm.vllm_flash_attn"))
    monkeypatch.setattr(backend, "flash_attention_versions", lambda: (2, 3))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))


@pytest.fixture(params=["flash-attn", "vLLM's"])
def flash(request: pytest.FixtureRequest, vllm_flash: None, monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    if request.param == "vLLM's":
        return make_backend("flash", torch.device("cuda"), 16)
    from moe_optimizer.engine.attention.flash_attention import FlashAttention

    monkeypatch.setitem(sys.modules, "flash_attn", PretendedFlash("flash_attn"))
    return FlashAttention()


@NEEDS_TRITON
@pytest.mark.parametrize("step", STEPS)
def test_flash_attention_is_given_what_its_functions_ask_for(step: str, flash: AttentionBackend) -> None:
    batch = make_step(STEPS[step], 16)
    q, k, v, cache = (each.half() for each in inputs(batch, HEADS[0]))
    assert torch.equal(flash.attend(q, k, v, cache, batch), expected(q, cache, batch))


@NEEDS_TRITON
def test_the_layers_of_a_step_share_one_schedule(vllm_flash: None) -> None:
    flash, before = make_backend("flash", torch.device("cuda"), 16), len(PretendedVllmFlash.schedules)
    for step in STEPS.values():
        batch = make_step(step, 16)
        q, k, v, cache = (each.half() for each in inputs(batch, HEADS[0]))
        for _layer in range(3):
            flash.attend(q, k, v, cache, batch)
    assert len(PretendedVllmFlash.schedules) - before == len(STEPS)


@NEEDS_TRITON
@pytest.mark.parametrize(("dtype", "heads"), [(torch.float32, HEADS[0]), (torch.float16, (2, 1, 20))], ids=str)
def test_what_flash_attention_cannot_compute_goes_through_triton(
    dtype: torch.dtype, heads: tuple[int, int, int], flash: AttentionBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "compute", None)
    batch = make_step(STEPS["mixed"], 16)
    q, k, v, cache = (each.to(dtype) for each in inputs(batch, heads))
    assert (flash.attend(q, k, v, cache, batch) - expected(q, cache, batch)).abs().max() < 2e-3


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("capability", "versions", "block_size", "version"),
    [
        ((9, 0), (2, 3), 16, 3),
        ((8, 0), (2, 3), 16, 2),
        ((9, 0), (2,), 16, 2),
        ((8, 0), (3,), 16, None),
        ((7, 5), (2, 3), 16, None),
        ((9, 0), (), 16, None),
        ((9, 0), (2, 3), 4, None),
    ],
)
def test_auto_on_a_gpu_is_the_newest_flash_attention_that_runs_there(
    capability: Any, versions: Any, block_size: int, version: Any, vllm_flash: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(backend, "flash_attention_versions", lambda: versions)
    found = make_backend("auto", torch.device("cuda"), block_size)
    assert getattr(found, "version", None) == version


def test_a_backend_that_was_named_and_cannot_run_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="FlashAttention"):
        make_backend("flash", torch.device("cpu"), 256)


@pytest.mark.parametrize(
    ("absent", "cost"),
    [
        pytest.param({"flash_attn"}, "97 %", marks=NEEDS_TRITON),
        ({"flash_attn", "triton"}, "without CUDA graphs"),
    ],
)
def test_a_backend_that_is_missing_is_a_warning_with_what_it_costs(
    absent: set[str], cost: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else found(name))
    with caplog.at_level("WARNING"):
        make_backend("auto", torch.device("cuda"), 16)
    assert cost in caplog.text


@pytest.mark.parametrize(("module", "block_size"), [("flash_attn", 256), ("vllm.vllm_flash_attn", 16)])
def test_a_flash_attention_that_is_there_and_cannot_be_imported_is_refused_with_the_reason(
    module: str, block_size: int, vllm_flash: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    there = {"triton", "flash_attn"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name in there else found(name))
    monkeypatch.delitem(sys.modules, "moe_optimizer.engine.attention.vllm_flash_attention", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnsupportedError, match="cannot be imported"):
        make_backend("flash", torch.device("cuda"), block_size)


def test_auto_on_a_cpu_reads_pages_in_place_with_kernels_and_copies_them_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_load, "import_kernels", lambda: (ModuleType("kernels"), ""))
    found: AttentionBackend = make_backend("auto", torch.device("cpu"), 16)
    assert isinstance(found, PagedAttention)
    assert not found.capturable
    monkeypatch.setattr(_load, "import_kernels", lambda: (None, "kernels not built"))
    with caplog.at_level("WARNING"):
        assert type(make_backend("auto", torch.device("cpu"), 16)) is SdpaAttention
    assert "kernels not built" in caplog.text
    with pytest.raises(UnsupportedError, match="kernels not built"):
        make_backend("paged", torch.device("cpu"), 16)
