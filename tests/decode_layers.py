"""vLLM's attention layers and metadata of a decode step, and a plan that has our kernel compute them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optimizer.ops.kernel_arguments import PagedDecode
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.proof.record import PassProof
from moe_optimizer.vllm_plugin.attention import DECODE_PASS
from moe_optimizer.vllm_plugin.session import PluginSession, start_session
from tests.plugin_state import own_session


@dataclasses.dataclass
class _Plan:
    plugin_decisions: tuple[Decision, ...]
    digest: str = ""


def planned(run_dir: Path, monkeypatch: pytest.MonkeyPatch, *, required: bool = False) -> PluginSession:
    """Make a plan that has the pass this process's own."""
    decision = Decision(
        pass_name=DECODE_PASS, wish=Wish.ON, wish_origin="test", status=Status.ON, value="", reason="",
        applier=Applier.PLUGIN, required=required,
    )  # fmt: skip
    own_session(monkeypatch)
    plan: Any = _Plan((decision,))
    return start_session(PluginSession(run_dir=run_dir, plan=plan))


def make_layer(
    *, heads: int = 8, kv_heads: int = 2, size: int = 64, device: str = "cpu", name: str = "attn", **changed: Any
) -> Any:
    """One of vLLM's attention layers with its FlashAttention backend, as if it had been chosen on this machine.

    vLLM's constructors ask for a server's settings; what they set is set here. `changed`: fields of the backend.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

    impl = FlashAttentionImpl.__new__(FlashAttentionImpl)
    fields = {
        "num_heads": heads, "num_kv_heads": kv_heads, "head_size": size, "scale": size**-0.5, "alibi_slopes": None,
        "sliding_window": (-1, -1), "kv_cache_dtype": "auto", "logits_soft_cap": 0,
        "kv_sharing_target_layer_name": None, "attn_type": AttentionType.DECODER, "sinks": None,
        "vllm_flash_attn_version": 3, "batch_invariant_enabled": False, "supports_quant_query_input": False,
        "num_queries_per_kv": heads // kv_heads, "fa4_hd256": False,
    }  # fmt: skip
    vars(impl).update(fields | changed)
    layer: Any = Attention.__new__(Attention)
    torch.nn.Module.__init__(layer)
    layer.impl, layer.layer_name, layer.attn_backend = impl, name, FlashAttentionBackend
    layer.kv_cache_torch_dtype = torch.bfloat16
    for scale in ("_q_scale", "_k_scale", "_v_scale"):
        layer.register_buffer(scale, torch.ones((), device=device))
    return layer


def make_model(layers: Sequence[Any]) -> torch.nn.Module:
    """A model that has these attention layers, and others."""
    model: Any = torch.nn.Module()
    model.layers = torch.nn.ModuleList()
    for layer in layers:
        block: Any = torch.nn.Module()
        block.attn, block.mlp = layer, torch.nn.Linear(2, 2)
        model.layers.append(block)
    return model


def server_config(**changed: Any) -> Any:
    """What the plugin asks of vLLM's settings."""
    from vllm.config import CUDAGraphMode

    mode = changed.pop("cudagraph_mode", "FULL_AND_PIECEWISE")
    fields: dict[str, Any] = {
        "speculative_config": None, "kv_transfer_config": None,
        "compilation_config": SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode]),
        "model_config": SimpleNamespace(max_model_len=40960),
        "scheduler_config": SimpleNamespace(max_num_seqs=256),
    }  # fmt: skip
    return SimpleNamespace(**fields | changed)


def install(session: PluginSession, model: torch.nn.Module, config: Any = None) -> PassProof:
    """Install the kernel as a worker does once its model is loaded; return the pass's entry in the proof."""
    from moe_optimizer.vllm_plugin.attention.decode_attention import install_decode_attention

    runner = SimpleNamespace(get_model=lambda: model)
    install_decode_attention(session, SimpleNamespace(vllm_config=config or server_config(), model_runner=runner))
    return session.proof.passes[DECODE_PASS]


def metadata_of(call: PagedDecode, **changed: Any) -> Any:
    """vLLM's metadata of a decode step that attends as a call does; `changed`: other fields."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    tokens, device = call.q.shape[0], call.q.device
    fields: dict[str, Any] = {
        "num_actual_tokens": tokens,
        "max_query_len": 1,
        "query_start_loc": torch.arange(tokens + 1, dtype=torch.int32, device=device),
        "max_seq_len": int(call.lengths.max()),
        "seq_lens": call.lengths,
        "block_table": call.block_table,
        "slot_mapping": torch.full((tokens,), -1, dtype=torch.int64, device=device),
    }
    known = {field.name for field in dataclasses.fields(FlashAttentionMetadata)}
    # 0.26 has cascade attention, whose fields have no defaults.
    of_cascade = ("common_prefix_len", "cu_prefix_query_lens", "prefix_kv_lens", "suffix_kv_lens")
    fields |= {name: None for name in of_cascade if name in known}
    fields |= {"use_cascade": False} if "use_cascade" in known else {}
    metadata = FlashAttentionMetadata(**fields)
    for name, value in changed.items():
        setattr(metadata, name, value)
    return metadata


def attend(layer: Any, call: PagedDecode, metadata: Any, *, graphs: str = "NONE") -> torch.Tensor:
    """Store new keys, if the call has some, and attend, as vLLM's ops do it; `graphs`: the mode in which vLLM runs."""
    from vllm.config import CUDAGraphMode
    from vllm.model_executor.layers.attention.attention import unified_kv_cache_update

    if call.new_keys is not None and call.new_values is not None:
        context = SimpleNamespace(
            attn_metadata={layer.layer_name: metadata}, no_compile_layers={layer.layer_name: layer},
            slot_mapping={layer.layer_name: call.slots}, cudagraph_runtime_mode=CUDAGraphMode[graphs],
        )  # fmt: skip
        layer.kv_cache = call.cache
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("vllm.forward_context._forward_context", context)
            unified_kv_cache_update(call.new_keys, call.new_values, layer.layer_name)
    return layer.impl.forward(
        layer, call.q, call.new_keys, call.new_values, call.cache, metadata,
        output=call.out, output_scale=None, output_block_scale=None,
    )  # fmt: skip
