"""Defines a Qwen3-MoE network for fast training on a CPU; its weights are saved under the Hugging Face names.

Tokens are sorted by expert and every expert multiplies one contiguous block, so a step is 3 * E matrix products per
layer whatever the routing is, and no scatter-add whose order could change the result.

Letters: T tokens, H hidden size, E experts, I expert width, k experts per token, B sequences, L sequence length,
N query heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the network, in elements."""

    vocab_size: int
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    num_experts: int = 16
    experts_per_token: int = 4
    expert_width: int = 128
    max_position: int = 2048
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6


class _TakeRows(torch.autograd.Function):
    """Copy every token row once per expert it goes to, sorted by expert.

    The gradient is a gather by the inverse permutation and a sum over k: deterministic, unlike a scatter-add.
    """

    @staticmethod
    def forward(ctx, x_TH: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x_TH.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        grad = grad_outputs[0].index_select(0, inverse)
        return grad.view(-1, ctx.top_k, grad.shape[-1]).sum(1), None, None, None


class _PutBack(torch.autograd.Function):
    """Undo the sorting of `_TakeRows`: row t * k + j is what the j-th expert of token t answered."""

    @staticmethod
    def forward(ctx, y: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return y.index_select(0, inverse)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grad_outputs[0].index_select(0, order), None, None


def _matrix(*shape: int, fan_in: int, scale: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * (scale / math.sqrt(fan_in)))


class SparseMoe(nn.Module):
    """Router and experts: softmax over E, the k largest, renormalised to sum 1; SwiGLU experts."""

    def __init__(self, shape: Shape, residual_scale: float) -> None:
        super().__init__()
        self.shape = shape
        h, e, i = shape.hidden_size, shape.num_experts, shape.expert_width
        self.gate = _matrix(e, h, fan_in=h)
        self.gate_up_proj = _matrix(e, 2 * i, h, fan_in=h)
        self.down_proj = _matrix(e, h, i, fan_in=i, scale=residual_scale)

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return (output [T, H], load-balancing loss of this layer: 1 when balanced, E / k when all tokens agree)."""
        num_experts, top_k = self.shape.num_experts, self.shape.experts_per_token
        scores_TE = functional.linear(x_TH, self.gate).softmax(-1)
        weights_Tk, experts_Tk = scores_TE.topk(top_k, dim=-1)
        weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)

        flat = experts_Tk.reshape(-1)
        order = flat.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        counts = torch.bincount(flat, minlength=num_experts)

        rows = _TakeRows.apply(x_TH, order, inverse, top_k)
        assert isinstance(rows, Tensor)
        blocks = [
            self._expert(block, gate_up, down)
            for block, gate_up, down in zip(
                rows.split(counts.tolist()), self.gate_up_proj.unbind(0), self.down_proj.unbind(0), strict=True
            )
        ]
        y = _PutBack.apply(torch.cat(blocks), order, inverse)
        assert isinstance(y, Tensor)
        out_TH = (y.view(-1, top_k, x_TH.shape[-1]) * weights_Tk.unsqueeze(-1)).sum(1)

        share_E = counts.float() / flat.numel()
        balance = num_experts * (share_E * scores_TE.mean(0)).sum()
        return out_TH, balance

    @staticmethod
    def _expert(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = functional.linear(x, gate_up).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, down)


class Attention(nn.Module):
    """Causal grouped-query attention with RMS-normalised heads and rotary positions (halves rotated, not pairs)."""

    def __init__(self, shape: Shape, residual_scale: float) -> None:
        super().__init__()
        self.shape = shape
        h, q, kv = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = _matrix(q, h, fan_in=h)
        self.k_proj = _matrix(kv, h, fan_in=h)
        self.v_proj = _matrix(kv, h, fan_in=h)
        self.o_proj = _matrix(h, q, fan_in=q, scale=residual_scale)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps)

    def forward(self, x_BLH: Tensor, cos_LD: Tensor, sin_LD: Tensor) -> Tensor:
        """Return [B, L, H]; cos and sin are those of `TinyMoe._angles`."""
        batch, length, _ = x_BLH.shape
        dim = self.shape.head_dim

        def heads(weight: Tensor) -> Tensor:
            return functional.linear(x_BLH, weight).view(batch, length, -1, dim)

        query = _rotate(self.q_norm(heads(self.q_proj)).transpose(1, 2), cos_LD, sin_LD)
        key = _rotate(self.k_norm(heads(self.k_proj)).transpose(1, 2), cos_LD, sin_LD)
        value = heads(self.v_proj).transpose(1, 2)
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return functional.linear(out.transpose(1, 2).reshape(batch, length, -1), self.o_proj)


def _rotate(x: Tensor, cos_LD: Tensor, sin_LD: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos_LD + torch.cat((-second, first), dim=-1) * sin_LD).type_as(x)


class Layer(nn.Module):
    """Attention and experts, each behind an RMS norm and added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        residual_scale = 1.0 / math.sqrt(2 * shape.num_layers)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.self_attn = Attention(shape, residual_scale)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.mlp = SparseMoe(shape, residual_scale)

    def forward(self, x_BLH: Tensor, cos_LD: Tensor, sin_LD: Tensor) -> tuple[Tensor, Tensor]:
        """Return (residual stream [B, L, H], load-balancing loss of this layer)."""
        x_BLH = x_BLH + self.self_attn(self.input_layernorm(x_BLH), cos_LD, sin_LD)
        out_TH, balance = self.mlp(self.post_attention_layernorm(x_BLH).flatten(0, 1))
        return x_BLH + out_TH.view_as(x_BLH), balance


class TinyMoe(nn.Module):
    """The whole network; output embeddings are the input embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Parameter(torch.randn(shape.vocab_size, shape.hidden_size) * 0.02)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)

    def forward(self, token_ids_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Return (logits [B, L, V], load-balancing loss averaged over the layers)."""
        cos_LD, sin_LD = self._angles(token_ids_BL.shape[1], token_ids_BL.device)
        x_BLH = functional.embedding(token_ids_BL, self.embed_tokens)
        balances: list[Tensor] = []
        for layer in self.layers:
            x_BLH, balance = layer(x_BLH, cos_LD, sin_LD)
            balances.append(balance)
        return functional.linear(self.norm(x_BLH), self.embed_tokens), torch.stack(balances).mean()

    def _angles(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        dim = self.shape.head_dim
        frequencies = self.shape.rope_theta ** (-torch.arange(0, dim, 2, device=device).float() / dim)
        angles = torch.outer(torch.arange(length, device=device).float(), frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()
