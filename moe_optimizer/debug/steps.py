"""Compares the engine with transformers operation by operation, and names the first that differs.

Each operation of the engine is given what transformers' own operation was given, so a difference is its own and not one
that came from before. The hidden state behind each layer and the logits show what they add up to.
Legend: T tokens, H query heads, K key/value heads, d head size, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from moe_optimizer.debug.oracle import logprobs_behind
from moe_optimizer.engine import LLMEngine
from moe_optimizer.engine.attention.sdpa import SdpaAttention
from moe_optimizer.engine.layers.moe import MoE
from moe_optimizer.engine.layers.rope import rotate as rotate_ours
from moe_optimizer.engine.models.decoder import DecoderLayer
from moe_optimizer.engine.packed_batch import PackedBatch, Prefill
from moe_optimizer.errors import InputError

BOUND = 2.3e-5
"""Largest difference in float32, relative to the largest value of transformers where that is above 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation."""

    name: str
    difference: float
    """The largest."""
    bound: float
    same: bool


class Comparison:
    """The engine's model and transformers' on one text.

    Args:
        engine: in float32 on a CPU.
        token_ids: the text.
    """

    def __init__(self, engine: LLMEngine, token_ids: list[int]) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._engine = engine
        self.ours: Any = engine.executor.model  # pyrefly: ignore[missing-attribute]
        self.theirs: Any = AutoModelForCausalLM.from_pretrained(
            engine.config.folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.token_ids = torch.tensor(token_ids)
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Any] = {}
        hooks = [module.register_forward_hook(self._keep(name)) for name, module in self.theirs.named_modules()]
        with torch.inference_mode():
            found = self.theirs(self.token_ids[None], output_attentions=True)
        for hook in hooks:
            hook.remove()
        self.logits: Tensor = found.logits[0]
        self.patterns: list[Tensor] = [each[0] for each in found.attentions]
        """[H, T, T] of each layer."""

    @torch.inference_mode()
    def steps(self, layer: int | None = None) -> Iterator[Step]:
        """Yield every operation in the order of the model, of one layer or of all.

        Raises:
            InputError: there is no such layer.
        """
        layers = self.ours.model.layers
        if layer is not None and not 0 <= layer < len(layers):
            raise InputError(f"--layer: got {layer}, expected 0 to {len(layers) - 1}")
        yield _step("embeddings", self.ours.model.embed_tokens(self.token_ids), self.outputs["model.embed_tokens"])
        cos, sin = self.ours.rope(torch.arange(len(self.token_ids)))
        theirs = self.outputs["model.rotary_emb"]
        yield _step("RoPE cosines", cos[:, 0], theirs[0])
        yield _step("RoPE sines", sin[:, 0], theirs[1])
        hidden = self._hidden_states()
        for index in range(len(layers)) if layer is None else (layer,):
            yield from self._layer(index, layers[index], (cos, sin))
            yield _step(f"layer {index}: hidden state", hidden[index], self.outputs[f"model.layers.{index}"])
        yield _step("final norm", self.ours.model.norm(self.inputs["model.norm"]), self.outputs["model.norm"])
        yield _step("logits", self.ours.logits(self.outputs["model.norm"]), self.logits)

    def _hidden_states(self) -> list[Tensor]:
        """Return what the engine's layers make of the text, each from what the one before it made."""
        found: list[Tensor] = []
        layers = self.ours.model.layers
        hooks = [layer.register_forward_hook(lambda _, __, made: found.append(made[0] + made[1])) for layer in layers]
        try:
            logprobs_behind(self._engine, self.token_ids.tolist())
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def _layer(self, index: int, layer: DecoderLayer, rope: tuple[Tensor, Tensor]) -> Iterator[Step]:
        at, attention = f"model.layers.{index}", layer.self_attn
        name = f"layer {index}: "
        x = self.inputs[f"{at}.input_layernorm"]
        yield _step(f"{name}input norm", layer.input_layernorm(x), self.outputs[f"{at}.input_layernorm"])
        projected: dict[str, Tensor] = dict(
            zip("qkv", attention.qkv_proj(self.outputs[f"{at}.input_layernorm"]), strict=True)
        )
        for letter, ours in projected.items():
            yield _step(f"{name}{letter.upper()} projection", ours, self.outputs[f"{at}.self_attn.{letter}_proj"])
            if letter != "v" and attention.qk_norm != "none":
                norm = attention.get_submodule(f"{letter}_norm")
                projection = self.outputs[f"{at}.self_attn.{letter}_proj"]
                by_head = attention.qk_norm == "head"
                normed = norm(projection.unflatten(-1, (-1, attention.head_dim)) if by_head else projection)
                yield _step(f"{name}{letter.upper()} norm", normed, self.outputs[f"{at}.self_attn.{letter}_norm"])
        q, k, v = self._heads(at, attention, projected)
        rotate: Any = import_module(type(self.theirs).__module__).apply_rotary_pos_emb
        theirs = rotate(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *(each[:, 0][None] for each in rope))
        for letter, before, other in zip("QK", (q, k), theirs, strict=True):
            yield _step(f"{name}{letter} rotated", rotate_ours(before, *rope), other[0].transpose(0, 1))
        q_THd, k_TKd = (each[0].transpose(0, 1) for each in theirs)
        probs_HTT = _pattern(attention, q_THd, k_TKd)
        ahead = probs_HTT.triu(1)
        yield _step(f"{name}causal mask", ahead, torch.zeros_like(ahead))
        yield _step(f"{name}attention pattern", probs_HTT, self.patterns[index])
        heads_THd = _attend(attention, q_THd, k_TKd, v)
        want = self.inputs[f"{at}.self_attn.o_proj"].unflatten(-1, (-1, attention.head_dim))
        for head in range(heads_THd.shape[1]):
            yield _step(f"{name}head {head}", heads_THd[:, head], want[:, head])
        o = attention.o_proj(self.inputs[f"{at}.self_attn.o_proj"])
        yield _step(f"{name}attention output", o, self.outputs[f"{at}.self_attn.o_proj"])
        y = self.inputs[f"{at}.post_attention_layernorm"]
        norm = layer.post_attention_layernorm(y)
        yield _step(f"{name}post-attention norm", norm, self.outputs[f"{at}.post_attention_layernorm"])
        yield from self._mlp(name, f"{at}.mlp", layer.mlp)

    def _heads(self, at: str, attention: Any, projected: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return transformers' queries, keys and values as they are before the rotation, by head."""
        found = []
        for letter in "qkv":
            normed = self.outputs.get(f"{at}.self_attn.{letter}_norm")
            tensor = self.outputs[f"{at}.self_attn.{letter}_proj"] if normed is None else normed
            tensor = tensor if attention.clip is None else tensor.clamp(-attention.clip, attention.clip)
            found.append(tensor.reshape(len(projected[letter]), -1, attention.head_dim))
        return found[0], found[1], found[2]

    def _mlp(self, name: str, at: str, mlp: nn.Module) -> Iterator[Step]:
        x = self.inputs.get(at)
        x = self.inputs[at.replace(".mlp", ".block_sparse_moe")] if x is None else x
        kind = "MLP"
        if isinstance(mlp, MoE):
            kind, ours = "experts", mlp.gate(x)
            theirs = self.outputs[f"{at}.gate"]
            logits = theirs if isinstance(theirs, Tensor) else theirs[0]
            if not torch.allclose(logits.sum(-1), torch.ones(len(logits)), atol=1e-4):
                yield _step(f"{name}router", ours, logits)
            else:
                yield _step(f"{name}router", ours.softmax(-1), logits)
            picked, wanted = (each.topk(mlp.top_k).indices.sort().values.float() for each in (ours, logits))
            yield _step(f"{name}chosen experts", picked, wanted)
        theirs = self.outputs[at]
        yield _step(f"{name}{kind}", mlp(x), theirs if isinstance(theirs, Tensor) else theirs[0])

    def _keep(self, name: str) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if inputs and isinstance(inputs[0], Tensor):
                self.inputs[name] = _flat(inputs[0])
            several = isinstance(output, tuple)
            self.outputs[name] = tuple(map(_flat, output)) if several else _flat(output)

        return hook


def _flat(tensor: Any) -> Any:
    """Return a copy, as some are changed in place later, without the dimension of the batch, which is one text."""
    if not isinstance(tensor, Tensor):
        return tensor
    return (tensor[0] if tensor.dim() >= 3 and len(tensor) == 1 else tensor).clone()


def _step(name: str, ours: Tensor, theirs: Tensor) -> Step:
    theirs = theirs.reshape(ours.shape)
    difference = float((ours - theirs).abs().max())
    bound = BOUND * max(1.0, float(theirs.abs().max()))
    # Not "below the bound": a difference that is no number is none that is small.
    return Step(name=name, difference=difference, bound=bound, same=difference <= bound)


def _pattern(attention: Any, q_THd: Tensor, k_TKd: Tensor) -> Tensor:
    """Return what each token attends to, [H, T, T]: with unit vectors as values the output is the pattern."""
    count, width = len(q_THd), attention.head_dim
    columns = []
    for start in range(0, count, width):
        units = torch.eye(count)[:, start : start + width]
        values = torch.nn.functional.pad(units, (0, width - units.shape[1]))
        seen = _attend(attention, q_THd, k_TKd, values[:, None].expand_as(k_TKd))
        columns.append(seen[..., : units.shape[1]])
    return torch.cat(columns, dim=-1).transpose(0, 1)


def _attend(attention: Any, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
    """Return the engine's attention of one prompt, through a cache of its own."""
    count, size = len(q_THd), attention.kv_cache.shape[2]
    num_blocks = -(-count // size)
    batch = PackedBatch(
        copies=[],
        token_ids_T=torch.zeros(count, dtype=torch.int64),
        positions_T=torch.arange(count),
        sampled=torch.arange(count),
        slots_T=torch.arange(count),
        block_tables_SN=torch.arange(num_blocks, dtype=torch.int32)[None],
        context_lengths_S=torch.tensor([count]),
        query_starts_S1=torch.tensor([0, count]),
        num_decodes=0,
        prefills=(Prefill(0, count, 0),),
        block_size=size,
    )
    cache = torch.zeros(attention.kv_cache_shape(num_blocks, size))
    return SdpaAttention().attend(q_THd, k_TKd, v_TKd, cache, batch)
