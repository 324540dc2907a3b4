"""Sums the parameters of a decoder, part by part, over its layers."""

from __future__ import annotations

from dataclasses import dataclass

from moe_optimizer.inspection.shapes import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamCounts:
    """Number of parameters of each part; the parts are disjoint, but for `idle` and `kv`."""

    experts: int
    """All routed experts, those of attention included."""
    attention: int
    """Token mixers without their experts."""
    dense: int
    shared_experts: int
    routers: int
    latents: int
    """Projections into and out of the latents that experts work on."""
    norms: int
    """Norms and scales of the layers, and what lies outside the layers but for embedding and head."""
    embedding: int
    lm_head: int
    idle: int
    """What one token does not use: of the experts, and of parts for other modalities."""
    kv: int
    """What tensor parallelism copies when there are more devices than key/value heads."""

    @property
    def total(self) -> int:
        """Parameters of the whole decoder."""
        layers = self.experts + self.attention + self.dense + self.shared_experts + self.routers + self.latents
        return layers + self.norms + self.embedding + self.lm_head


def count_params(decoder: Decoder) -> ParamCounts:
    """Return the sums over the decoder's layers."""
    layers = decoder.layers
    routed = [layer.experts for layer in layers if layer.experts is not None]
    attention_experts = sum(layer.mixer.expert_params for layer in layers)
    idle_experts = sum((moe.num_experts - min(moe.top_k, moe.num_experts)) * moe.expert_params for moe in routed)
    return ParamCounts(
        experts=attention_experts + sum(moe.num_experts * moe.expert_params for moe in routed),
        attention=sum(layer.mixer.params for layer in layers) - attention_experts,
        dense=sum(layer.dense_params for layer in layers),
        shared_experts=sum(moe.shared_params for moe in routed),
        routers=sum(moe.router_params for moe in routed),
        latents=sum(moe.latent_params for moe in routed),
        norms=sum(layer.norm_params for layer in layers) + decoder.final_params,
        embedding=decoder.embedding_params,
        lm_head=decoder.lm_head_params,
        idle=idle_experts + sum(layer.mixer.idle_params for layer in layers) + decoder.idle_params,
        kv=sum(layer.mixer.kv_params for layer in layers),
    )
