"""Puts our kernel into the attention layers of a loaded model for decode steps of few requests, where it is faster.

vLLM has no place for it. A layer's `impl` computes; it is one object of each layer, and FlashAttention's is replaced by
one that asks how many requests a step has, and stores their new keys in the same launch. vLLM's ops of attention are
opaque to compiled graphs, so they stay as they are; a CUDA graph keeps what was chosen when it was captured. What is
faster is measured here, by shape: it depends on the GPU, the heads of this rank and vLLM's FlashAttention. Ranks need
not agree, as each has heads of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from moe_optimizer.log import get_logger
from moe_optimizer.ops.kernel_arguments import PagedDecode
from moe_optimizer.ops.paged_decode import MAX_TOKENS, plain, run_kernel, why_no_kernel
from moe_optimizer.vllm_plugin.attention import DECODE_PASS, speeds
from moe_optimizer.vllm_plugin.compat import why_changed
from moe_optimizer.vllm_plugin.session import PluginSession

logger = get_logger(__name__)

KERNEL, ISA = "paged_decode (cuda)", "sm_90a"

_FLASH_ATTN = "vllm.v1.attention.backends.flash_attn"
_ATTENTION = "vllm.model_executor.layers.attention.attention"
RELIED_ON: Mapping[str, Mapping[str, str]] = {
    f"{_FLASH_ATTN}:FlashAttentionImpl.forward": {"0.26": "876f6a9dafcbac29", "0.32": "5a9e5a89b6782e1e"},
    f"{_FLASH_ATTN}:FlashAttentionImpl.do_kv_cache_update": {"0.26 to 0.32": "3e8d87902f984cfd"},
    f"{_FLASH_ATTN}:FlashAttentionMetadata": {"0.26": "57f7cc3612565487", "0.32": "42c2462fd6903d4f"},
    f"{_ATTENTION}:unified_attention_with_output": {"0.26 to 0.32": "79b98cef475f5bca"},
    f"{_ATTENTION}:unified_kv_cache_update": {"0.26": "d46291997d665dba", "0.32": "06a3913574e8607c"},
}  # fmt: skip
"""What of vLLM this replaces or counts on -> versions -> `compat.fingerprint` of its source."""
_CHECKED_LENGTHS = (640, 1, 17, 2000, 0, 16, 33, 300)
"""Contexts of the requests of a check; 0 is the padding row of a captured graph."""
_CHECKED_BLOCK = 16
_RELATIVE = 2.0**-6
"""Chosen: weights are rounded to BF16 for their product, and the result once more."""


def install_decode_attention(session: PluginSession, worker: Any) -> None:
    """Have our kernel compute decode steps of few requests in each attention layer for which it is faster.

    Called before the model's first forward.

    Raises:
        RequiredNotAppliedError: no layer gets it, and the plan requires the pass. Any other failure leaves the model as
            it is, with the reason in the proof.
    """
    if session.wanted(DECODE_PASS) is None or session.proof.passes[DECODE_PASS].why_not:
        return
    with session.falling_back(DECODE_PASS), torch.inference_mode():
        reason = why_changed(RELIED_ON) or why_not_server(worker.vllm_config) or _installed(session, worker)
        if reason:
            session.refused(DECODE_PASS, reason)


def why_not_server(vllm_config: Any) -> str:
    """Return what of this server's settings does not go with it, or ""."""
    from vllm import envs
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
    from vllm.config import CUDAGraphMode

    if is_breakable_cudagraph_enabled():
        return "VLLM_USE_BREAKABLE_CUDAGRAPH: a graph holds the storing of keys, and attention runs outside of it"
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT: a request's bits must not depend on the others, and the kernel's parts do"
    if vllm_config.speculative_config is not None:
        return "speculation: a step has several tokens of a request"
    if vllm_config.kv_transfer_config is not None:
        return "a KV connector may write keys of earlier steps while attention starts"
    # Such a graph is captured with one token of each request, and serves any other division too.
    if vllm_config.compilation_config.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL:
        return "cudagraph_mode FULL: one graph serves decode steps and prompts"
    return ""


def _installed(session: PluginSession, worker: Any) -> str:
    """Measure, choose and replace; return why no layer gets the kernel, or ""."""
    layers = dict(attention_layers(worker.model_runner.get_model()))
    if not layers:
        return "the model has no attention layers of vLLM's own class"
    reasons = {name: why_not_layer(layer) for name, layer in layers.items()}
    covered = {name: layer for name, layer in layers.items() if not reasons[name]}
    refusals = "; ".join(dict.fromkeys(reason for reason in reasons.values() if reason))
    if not covered:
        return refusals
    by_shape: dict[tuple[int, int, int], list[Any]] = {}
    for layer in covered.values():
        by_shape.setdefault(_shape(layer), []).append(layer)
    most: dict[tuple[int, int, int], int] = {}
    said = [f"{len(layers) - len(covered)} layers stay vLLM's: {refusals}"] if refusals else []
    for shape, alike in by_shape.items():
        wrong = why_wrong(alike[0], MAX_TOKENS)
        if wrong:
            return wrong
        most[shape], words = _chosen(alike[0], worker.vllm_config)
        said.append(f"{shape[0]} heads on {shape[1]} of {shape[2]}, {len(alike)} layers: {words}")
    torch.cuda.empty_cache()  # vLLM looks next at how much memory is left
    found = "; ".join(said)
    logger.info("%s: %s", DECODE_PASS, found)
    if not any(most.values()):
        return f"it is not faster than vLLM's attention at every length: {found}"
    _replace(session, by_shape, most)
    session.applied(DECODE_PASS, kernel=KERNEL, isa=ISA)
    session.proof.passes[DECODE_PASS].found = found
    return ""


def _replace(
    session: PluginSession, by_shape: Mapping[tuple[int, int, int], Sequence[Any]], most: Mapping[Any, int]
) -> None:
    from moe_optimizer.vllm_plugin.attention.impl import ChosenDecode, DecodeAttentionImpl

    choices = {shape: ChosenDecode(tokens) for shape, tokens in most.items() if tokens}

    def used() -> None:
        for each in choices.values():
            each.on_use = None
        session.ran(DECODE_PASS)

    for shape, choice in choices.items():
        choice.on_use = used
        choice.on_refusal = lambda reason: session.refused(DECODE_PASS, f"fallback: {reason}")
        for layer in by_shape[shape]:
            layer.impl = DecodeAttentionImpl(layer.impl, choice)


def attention_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers with a KV cache of vLLM's plain attention, by name, in the model's order."""
    from vllm.model_executor.layers.attention import Attention

    modules: Iterable[tuple[str, Any]] = model.named_modules()
    for name, layer in modules:
        if type(layer) is Attention:
            yield name, layer


def why_not_layer(layer: Any) -> str:
    """Return what of an attention layer the kernel does not compute, or ""."""
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    impl = layer.impl
    if type(impl) is not FlashAttentionImpl:
        return f"the backend is {type(impl).__name__}, not FlashAttention"
    if impl.attn_type != AttentionType.DECODER:
        return f"{impl.attn_type} attention"
    if impl.sliding_window != (-1, -1):
        return "a sliding window"
    for name, what in (("alibi_slopes", "ALiBi"), ("sinks", "sinks"), ("logits_soft_cap", "a soft cap")):
        value = getattr(impl, name)
        if isinstance(value, torch.Tensor) or value:
            return what
    if impl.kv_sharing_target_layer_name is not None:
        return "another layer's cache"
    if impl.dcp_world_size > 1 or impl.pcp_world_size > 1:
        return "context parallelism"
    if impl.kv_cache_dtype not in ("auto", "bfloat16"):
        return f"a KV cache in {impl.kv_cache_dtype}"
    if layer.kv_cache_torch_dtype != torch.bfloat16:
        return f"a KV cache in {layer.kv_cache_torch_dtype}"
    return why_no_kernel(_random_call(layer, 1)) or ""


def _shape(layer: Any) -> tuple[int, int, int]:
    return layer.impl.num_heads, layer.impl.num_kv_heads, layer.impl.head_size


def _random_call(layer: Any, tokens: int) -> PagedDecode:
    """Return a call of a layer's shape on a small cache of random numbers, whose blocks lie scattered."""
    (heads, kv_heads, size), device = _shape(layer), layer._k_scale.device
    g = torch.Generator(device).manual_seed(tokens)
    lengths = _CHECKED_LENGTHS[:tokens]
    width = -(-max(lengths) // _CHECKED_BLOCK)
    blocks = torch.randperm(tokens * width, device=device, generator=g, dtype=torch.int32)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=g).bfloat16()

    q = numbers(tokens, heads, size)
    cache = numbers(len(blocks), _CHECKED_BLOCK, kv_heads, 2 * size).transpose(1, 2)
    of_requests = torch.tensor(lengths, dtype=torch.int32, device=device)
    table, last = blocks.view(tokens, width), of_requests.long().clamp(min=1) - 1
    rows = torch.arange(tokens, device=device)
    slots = table[rows, last // _CHECKED_BLOCK].long() * _CHECKED_BLOCK + last % _CHECKED_BLOCK
    new = numbers(tokens, kv_heads, size), numbers(tokens, kv_heads, size), slots.masked_fill(of_requests == 0, -1)
    return PagedDecode(q, cache, table, of_requests, layer.impl.scale, torch.empty_like(q), *new)


def why_wrong(layer: Any, max_tokens: int) -> str:
    """Return in what the kernel differs from plain torch for a layer's shape, or ""."""
    for tokens in {1, max_tokens}:
        call = _random_call(layer, tokens)
        stored = call.cache.clone()
        run_kernel(call)
        theirs = plain(call._replace(cache=stored)).float()
        if not torch.equal(call.cache, stored):
            return f"stores other keys than plain torch at {tokens} requests"
        off = (call.out.float() - theirs).abs().flatten(1).amax(-1)
        if not (off <= _RELATIVE * theirs.abs().flatten(1).amax(-1)).all():
            return f"differs from plain torch by {float(off.max()):.2g} at {tokens} requests"
    return ""


def _chosen(layer: Any, vllm_config: Any) -> tuple[int, str]:
    """Return up to how many requests our kernel computes layers of one shape, and why in words."""
    timed = speeds.times(layer, vllm_config)
    most = speeds.faster_up_to(timed)
    shown = ", ".join(
        f"{each.ours_us:.1f} us for {each.vllm_us:.1f} at {each.tokens} x {each.length}" for each in timed
    )
    return most, f"{f'ours up to {most}' if most else 'FlashAttention'} ({shown})"
