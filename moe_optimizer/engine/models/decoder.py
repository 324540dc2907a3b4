"""`CausalLM`: a stack of decoder layers between embedding and logits, the same for every family.

Legend: T tokens, H hidden size, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moe_optimizer.engine.layers.attention import Attention, QKNorm
from moe_optimizer.engine.layers.linear import Embedding, Layer, Place
from moe_optimizer.engine.layers.moe import MoE, Names
from moe_optimizer.engine.layers.norm import RMSNorm
from moe_optimizer.engine.layers.ranks import ALONE, Ranks
from moe_optimizer.engine.layers.rope import RotaryEmbedding
from moe_optimizer.engine.packed_batch import PackedBatch


class DecoderLayer(nn.Module):
    """Attention and a feed-forward layer, each added to its input."""

    def __init__(self, config: Any, attention: Attention, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(
        self, x_TH: Tensor, residual_TH: Tensor, rope: tuple[Tensor, Tensor], batch: PackedBatch
    ) -> tuple[Tensor, Tensor]:
        """Return what is to be added next, and the sum so far: the next norm adds them."""
        x_TH, residual_TH = self.input_layernorm.add(x_TH, residual_TH)
        x_TH = self.self_attn(x_TH, rope, batch)
        x_TH, residual_TH = self.post_attention_layernorm.add(x_TH, residual_TH)
        return self.mlp(x_TH), residual_TH


class Decoder(nn.Module):
    """Everything before the logits. The names of its parts are those of the checkpoints."""

    def __init__(self, embedding: Embedding, layers: list[DecoderLayer], norm: RMSNorm) -> None:
        super().__init__()
        self.embed_tokens = embedding
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    def forward(self, rope: tuple[Tensor, Tensor], batch: PackedBatch) -> Tensor:
        x_TH = self.embed_tokens(batch.token_ids_T)
        residual_TH = torch.zeros_like(x_TH)
        for layer in self.layers:
            x_TH, residual_TH = layer(x_TH, residual_TH, rope, batch)
        return self.norm.add(x_TH, residual_TH)[0]


class CausalLM(nn.Module, ABC):
    """A model that predicts the next token. A family says what its layers are and what its weights are called.

    `config` is transformers' configuration; `dtype` that of the weights, and torch's default while the model is built.
    """

    expert_names: Names = ("gate_proj", "up_proj", "down_proj")
    """What a checkpoint calls the matrices of an expert."""
    mlp_name = "mlp"
    """What a checkpoint calls the feed-forward part of a layer."""
    qk_norm: QKNorm = "none"

    def __init__(self, config: Any, max_positions: int, dtype: torch.dtype, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.config, self.ranks = config, ranks
        layers = [
            DecoderLayer(config, Attention(config, self.qk_norm, ranks), self.mlp(index))
            for index in range(config.num_hidden_layers)
        ]
        sizes = (config.vocab_size, config.hidden_size)
        self.model = Decoder(Embedding(*sizes, ranks=ranks), layers, RMSNorm(config.hidden_size, config.rms_norm_eps))
        self.lm_head = None if config.tie_word_embeddings else Embedding(*sizes, ranks=ranks)
        self.rope = RotaryEmbedding(config, max_positions, dtype)

    @abstractmethod
    def mlp(self, layer: int) -> nn.Module:
        """Return the feed-forward part of a layer: `MLP` or `moe`."""

    def moe(self, num_experts: int, intermediate_size: int, *, renormalize: bool) -> MoE:
        sizes, top_k = (num_experts, self.config.hidden_size, intermediate_size), self.config.num_experts_per_tok
        return MoE(sizes, self.expert_names, top_k=top_k, renormalize=renormalize, ranks=self.ranks)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return the last hidden state [T, H] of every token."""
        return self.model(self.rope(batch.positions_T), batch)

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Return the logits [T, V] of the tokens behind these."""
        return self.head.logits(hidden_TH)

    @property
    def head(self) -> Embedding:
        return self.model.embed_tokens if self.lm_head is None else self.lm_head

    def attention_layers(self) -> Iterator[Attention]:
        yield from (module for module in self.modules() if isinstance(module, Attention))

    def places(self) -> Iterator[tuple[str, Place]]:
        """Yield what a checkpoint calls its tensors, and where they go."""
        for module, layer in self.named_modules():
            for name, place in layer.places(module) if isinstance(layer, Layer) else ():
                yield name.replace(".mlp.", f".{self.mlp_name}."), place
