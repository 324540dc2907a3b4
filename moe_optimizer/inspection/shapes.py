"""Holds the shapes and parameter counts of a decoder's parts, as the families' rules derive them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from moe_optimizer.inspection.config import Config


@dataclass(frozen=True, slots=True)
class Site:
    """Where a part of the decoder sits."""

    config: Config
    hidden_size: int
    layer: int
    """Index of the layer."""
    window: int | None
    """Tokens that the layer sees; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """The token mixer of one layer: attention, a recurrent layer, or several side by side."""

    kind: Literal["attention", "mla", "state", "none"] = "attention"
    """attention and mla cache something for every token; state keeps a fixed size; none: the layer has no mixer."""
    params: int
    """Weights, biases and norms inside the mixer."""
    expert_params: int = 0
    """The part of `params` that is routed attention experts."""
    idle_params: int = 0
    """The part of `expert_params` that one token does not use."""
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    has_head_norms: bool = False
    """Whether one norm is for all query heads, and one for all key heads."""
    cache_elements: int = 0
    """Elements that one more token adds to the cache."""
    window: int | None = None
    """Tokens kept, for a layer that does not see the whole sequence."""
    state_elements: int = 0
    """Elements of fixed-size state for one sequence (recurrent and convolution layers)."""
    kv_params: int = 0
    """The part of `params` that tensor parallelism copies to every device when there are more devices than
    key/value heads (key/value projections; for mla the down projections and the latent's norm)."""


MixerRule = Callable[[Site], Mixer]
"""Derives the shape of one kind of token mixer."""

NO_MIXER = Mixer(kind="none", params=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    """The experts of one MoE layer."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """Width of one routed expert."""
    hidden_size: int
    """Input width of one routed expert."""
    matrices: int
    expert_params: int
    """Parameters of one routed expert, biases included."""
    router_params: int
    """Gate weights and biases, per-expert scales."""
    num_shared_experts: int
    shared_params: int
    """All shared experts of the layer and their gate."""
    modules: tuple[str, ...] = ()
    """Names of an expert's projection under the layer, where they are not the usual ones."""
    latent_params: int = 0
    """Projections into and out of a latent that the routed experts work on."""

    @property
    def routed_params(self) -> int:
        """Parameters of all routed experts."""
        return self.num_experts * self.expert_params

    @property
    def params(self) -> int:
        """Parameters of everything in the layer that belongs to its experts."""
        return self.routed_params + self.router_params + self.shared_params + self.latent_params


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer."""

    mixer: Mixer
    dense_params: int
    """The feed-forward part that every token uses and that is no shared expert; 0 where there is none."""
    experts: ExpertLayer | None
    norm_params: int
    """Norms and scales outside the mixer and the feed-forward part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A whole causal language model, multi-token-prediction layers left out."""

    hidden_size: int
    vocab_size: int
    layers: tuple[Layer, ...]
    embedding_params: int
    """Input embedding tables."""
    lm_head_params: int
    """0 when the output matrix is the input embedding."""
    final_params: int
    """Norms and projections outside the layers."""
    idle_params: int
    """Parameters outside the routed experts that a text token does not use (experts for other modalities)."""
    expert_activation: str
    expert_has_bias: bool
    warnings: tuple[str, ...] = ()

    @property
    def total_params(self) -> int:
        """Parameters of all parts together."""
        moe = sum(layer.experts.params for layer in self.layers if layer.experts)
        layers = sum(layer.mixer.params + layer.dense_params + layer.norm_params for layer in self.layers)
        return moe + layers + self.final_params + self.embedding_params + self.lm_head_params
