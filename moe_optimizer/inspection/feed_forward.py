"""Counts feed-forward layers: dense, routed experts, shared experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moe_optimizer.inspection.config import Config, Names
from moe_optimizer.inspection.json_file import shown
from moe_optimizer.inspection.layer_rules import ExpertRule, all_layers
from moe_optimizer.inspection.shapes import ExpertLayer, Site

MAX_EXPERTS = 1 << 16
"""More routed experts than this in a layer is taken for a mistake; the largest published count is under 1000."""

COUNT: Names = (
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "moe_num_experts",
    "num_routed_experts",
    "num_moe_experts",
    "n_experts",
    "ffn_config.moe_num_experts",
    "moe_config.num_experts",
    "moe_config.moe_num_experts",
)
TOP_K: Names = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
    "experts_per_token",
    "num_selected_experts",
    "num_activated_experts",
    "router_topk",
    "moe_router_topk",
    "n_activated_experts",
    "ffn_config.moe_top_k",
    "moe_config.moe_top_k",
)
SHARED_COUNT: Names = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
INTERMEDIATE: Names = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "inner_dim", "intermediate_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A feed-forward part that every token uses."""

    width: Names = INTERMEDIATE
    """One number, or an array with one for each layer."""
    gated: Names | bool = True
    bias: Names | bool = False
    adjust: Callable[[Config, tuple[int, ...]], tuple[int, ...]] | None = None
    """Turns the layers' widths in the file into the ones that are built."""
    copies: int = 1
    """Feed-forward parts in one decoder layer."""
    multiple_of_hidden: int = 0
    """Width as a multiple of the hidden size where the file gives none; 0: the file must."""

    def params(self, config: Config, hidden_size: int, num_layers: int) -> tuple[int, ...]:
        """Return the parameters for each layer, as if all layers were dense."""
        default = hidden_size * self.multiple_of_hidden or None
        widths = config.per_layer(self.width, num_layers, default)
        if widths is None:
            config.required(self.width)
            return ()
        if self.adjust is not None:
            widths = self.adjust(config, widths)
        gated, bias = config.flag(self.gated), config.flag(self.bias)
        return tuple(self.copies * mlp_params(hidden_size, width, gated=gated, bias=bias) for width in widths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Experts that every token uses."""

    count: Names | int = SHARED_COUNT
    """Field with their number, or the number where the architecture fixes it."""
    width: Names = ()
    """Field with the width; empty: the routed experts' width. Absent or 0 in the file: no shared expert."""
    width_is_total: bool = False
    """The width covers all shared experts together instead of one."""
    total_width: Names = ()
    """Field with the width of all shared experts together that files of this family may have instead of a count;
    alone it means one shared expert."""
    gate: bool = False
    """A learned scalar gate (one row of the hidden size)."""
    bias: Names | bool = False
    gated: bool = True

    def per_layer(
        self, config: Config, hidden_size: int, expert_widths: tuple[int, ...]
    ) -> tuple[tuple[int, int], ...]:
        """Return each layer's number of shared experts and their parameters."""
        num_layers = len(expert_widths)
        total = config.integer(self.total_width, 0) or 0
        if isinstance(self.count, int):
            counts = (self.count,) * num_layers
        else:
            counts = config.per_layer(self.count, num_layers, 0) or ()
        if total:
            widths, counts = (total,) * num_layers, tuple(count or 1 for count in counts)
        elif self.width:
            own = config.per_layer(self.width, num_layers, 0 if self.width_is_total else None)
            widths = own if own is not None else expert_widths
        else:
            widths = expert_widths
        if not (total or self.width_is_total):
            widths = tuple(count * width for count, width in zip(counts, widths, strict=True))
        bias = config.flag(self.bias)
        return tuple(
            (count, mlp_params(hidden_size, width, gated=self.gated, bias=bias) + hidden_size * self.gate)
            if count and width
            # vLLM and transformers make the gate also where there is nothing behind it.
            else (0, hidden_size * (self.gate and self.width_is_total))
            for count, width in zip(counts, widths, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Routed experts with their router."""

    count: Names = COUNT
    top_k: Names = TOP_K
    width: Names = "moe_intermediate_size"
    layers: ExpertRule = all_layers
    default_top_k: int | None = None
    """What the architecture uses when the file does not say."""
    gated: Names | bool = True
    bias: Names | bool = False
    router_bias: Names | bool = False
    correction_bias: Names | bool = False
    """A bias for each expert that only takes part in the selection, where the architecture's class holds it as a
    parameter. Most hold it as a buffer that a rule sets; such a one is no parameter and is not counted."""
    router_scales: bool = False
    """The router scales its input (a vector of the hidden size) and its outputs (one for each expert)."""
    shared: Shared | None = None
    latent: Names = ()
    """Field with the width of the latent that the experts work on."""
    latent_bias: Names | bool = False
    """Biases of the projections into and out of the latent."""
    latent_norm: Names | bool = False
    """A norm over the latent."""
    modules: tuple[str, ...] = ()
    """Names of an expert's projection under its layer, where a part with a common name stands beside them."""
    routes_shared: bool = False
    """The router has a row for each shared expert too."""
    dense_beside: Names | bool = False
    """The dense feed-forward part exists in expert layers too."""
    zero_experts: Names = ()
    """Field with the number of routed choices that have no weights."""
    arrays: bool = False
    """The numbers of experts, and of those that a token uses, may be arrays with an entry for each layer, or one."""
    one_is_dense: bool = True
    """A single routed expert means an ordinary feed-forward layer."""

    def per_layer(self, config: Config, hidden_size: int, num_layers: int) -> tuple[ExpertLayer | None, ...] | None:
        """Return each layer's experts (None for a dense layer), or None when the model has no routed experts.

        Raises:
            InputError: a field is missing, out of range or contradicts another.
        """
        for names in (self.count, self.top_k):
            if isinstance(config.get(names), list) and not self.arrays:
                raise config.error(config.name_of(names), config.get(names), "an integer")
        counts = config.per_layer(self.count, num_layers)
        if counts is None or max(counts, default=0) <= (1 if self.one_is_dense else 0):
            return None
        if max(counts) > MAX_EXPERTS:
            raise config.error(config.name_of(self.count), max(counts), f"an integer from 0 to {MAX_EXPERTS}")
        sparse = self.layers(config, num_layers)
        top_ks = config.per_layer(self.top_k, num_layers, self.default_top_k, minimum=1)
        widths = config.per_layer(self.width, num_layers)
        if not any(sparse):
            return None
        if top_ks is None or widths is None:
            config.required(self.top_k if top_ks is None else self.width)
            return None
        shared = self.shared.per_layer(config, hidden_size, widths) if self.shared else ((0, 0),) * num_layers
        return tuple(
            self._layer(
                Site(config, hidden_size, layer, None),
                count=counts[layer],
                top_k=top_ks[layer],
                width=widths[layer],
                shared=shared[layer],
            )
            if sparse[layer] and counts[layer]
            else None
            for layer in range(num_layers)
        )

    def contradictions(self, config: Config) -> Iterator[str]:
        """Yield what several fields say differently that all name the experts, or those that a token uses."""
        for used, names in ((self.count, COUNT), (self.top_k, TOP_K)):
            first = config.name_of(used)
            value = config.get(first)
            for name in names:
                if config.has(name) and config.get(name) != value:
                    yield f"{first}: got {shown(value)}, and {name}: {shown(config.get(name))}; the first is used"

    def _layer(self, site: Site, *, count: int, top_k: int, width: int, shared: tuple[int, int]) -> ExpertLayer:
        config, hidden_size = site.config, site.hidden_size
        choices = count + (config.integer(self.zero_experts, 0, maximum=MAX_EXPERTS) or 0)
        if top_k > choices:
            raise config.error(
                config.name_of(self.top_k), top_k, f"at most the {choices} experts of layer {site.layer}"
            )
        if width < 1:
            raise config.error(config.name_of(self.width), width, "at least 1")
        num_shared, shared_params = shared
        latent = config.integer(self.latent, 0) or 0
        gated = config.flag(self.gated)
        router = hidden_size * (choices + num_shared * self.routes_shared)
        router += choices * (config.flag(self.router_bias) + config.flag(self.correction_bias))
        router += (hidden_size + choices) * self.router_scales
        return ExpertLayer(
            num_experts=count,
            top_k=top_k,
            intermediate_size=width,
            hidden_size=latent or hidden_size,
            matrices=3 if gated else 2,
            expert_params=mlp_params(latent or hidden_size, width, gated=gated, bias=config.flag(self.bias)),
            router_params=router,
            num_shared_experts=num_shared,
            shared_params=shared_params,
            latent_params=2 * hidden_size * latent
            + latent * config.flag(self.latent_norm)
            + (hidden_size + latent) * (latent > 0 and config.flag(self.latent_bias)),
            modules=self.modules,
        )


def mlp_params(hidden_size: int, width: int, *, gated: bool, bias: bool) -> int:
    """Return the parameters of an up (and gate) projection to `width` and a projection back."""
    inner = 2 if gated else 1
    return (inner + 1) * hidden_size * width + bias * (inner * width + hidden_size)
