"""Feed-forward layers: dense, routed experts, shared experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moe_optimizer.inspection.config import Config, Names
from moe_optimizer.inspection.layer_rules import ExpertRule, all_layers
from moe_optimizer.inspection.shapes import ExpertLayer

MAX_EXPERTS = 1 << 16
"""More routed experts than this in a layer is taken for a mistake; the largest published count is under 1000."""

INTERMEDIATE: Names = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "inner_dim", "intermediate_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A feed-forward part that every token uses."""

    width: Names = INTERMEDIATE
    """One number, or an array with one for each layer."""
    gated: Names | bool = True
    bias: Names | bool = "mlp_bias"
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

    count: Names | int
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Routed experts with their router."""

    count: Names
    top_k: Names
    width: Names
    layers: ExpertRule = all_layers
    default_top_k: int | None = None
    """What the architecture uses when the file does not say."""
    gated: Names | bool = True
    bias: Names | bool = False
    router_bias: Names | bool = False
    correction_bias: Names | bool = False
    """A bias for each expert that only takes part in the selection."""
    corrected_layers: ExpertRule | None = None
    """The layers that have the correction bias; None: all expert layers."""
    router_scales: bool = False
    """The router scales its input (a vector of the hidden size) and its outputs (one for each expert)."""
    shared: Shared | None = None
    latent: Names = ()
    """Field with the width of the latent that the experts work on."""
    modules: tuple[str, ...] = ()
    """Names of an expert's projection under its layer, where a part with a common name stands beside them."""
    routes_shared: bool = False
    """The router has a row for each shared expert too."""
    dense_beside: Names | bool = False
    """The dense feed-forward part exists in expert layers too."""
    zero_experts: Names = ()
    """Field with the number of routed choices that have no weights."""
    one_is_dense: bool = True
    """A single routed expert means an ordinary feed-forward layer."""

    def per_layer(self, config: Config, hidden_size: int, num_layers: int) -> tuple[ExpertLayer | None, ...] | None:
        """Return each layer's experts (None for a dense layer), or None when the model has no routed experts.

        Raises:
            InputError: a field is missing, out of range or contradicts another.
        """
        counts = config.per_layer(self.count, num_layers)
        if counts is None or max(counts, default=0) <= (1 if self.one_is_dense else 0):
            return None
        self._check(config, max(counts))
        sparse = self.layers(config, num_layers)
        top_ks = config.per_layer(self.top_k, num_layers, self.default_top_k, minimum=1)
        widths = config.per_layer(self.width, num_layers)
        if not any(sparse):
            return None
        if top_ks is None or widths is None:
            config.required(self.top_k if top_ks is None else self.width)
            return None
        corrected = self.corrected_layers(config, num_layers) if self.corrected_layers else sparse
        return tuple(
            self._layer(
                config, hidden_size, layer, counts[layer], top_ks[layer], widths[layer], num_layers, corrected[layer]
            )
            if sparse[layer] and counts[layer]
            else None
            for layer in range(num_layers)
        )

    def _layer(
        self,
        config: Config,
        hidden_size: int,
        layer: int,
        count: int,
        top_k: int,
        width: int,
        num_layers: int,
        corrected: bool,
    ) -> ExpertLayer:
        zero = (config.integer(self.zero_experts, 0, maximum=MAX_EXPERTS) or 0) if self.zero_experts else 0
        if top_k > count + zero:
            field = (
                self.top_k if isinstance(self.top_k, str) else next(n for n in self.top_k if config.get(n) is not None)
            )
            raise config.error(field, top_k, f"at most the {count + zero} experts of layer {layer}")
        if width < 1:
            raise config.error(self.width if isinstance(self.width, str) else self.width[0], width, "at least 1")
        latent = (config.integer(self.latent, 0) or 0) if self.latent else 0
        expert_hidden = latent or hidden_size
        gated = config.flag(self.gated)
        num_shared, shared_params = self._shared(config, hidden_size, width, layer, num_layers)
        choices = count + zero
        router = hidden_size * (choices + num_shared * self.routes_shared)
        router += choices * (config.flag(self.router_bias) + (corrected and config.flag(self.correction_bias)))
        router += (hidden_size + choices) * self.router_scales
        return ExpertLayer(
            num_experts=count,
            top_k=top_k,
            intermediate_size=width,
            hidden_size=expert_hidden,
            matrices=3 if gated else 2,
            expert_params=mlp_params(expert_hidden, width, gated=gated, bias=config.flag(self.bias)),
            router_params=router,
            num_shared_experts=num_shared,
            shared_params=shared_params,
            latent_params=2 * hidden_size * latent,
            modules=self.modules,
        )

    def _shared(
        self, config: Config, hidden_size: int, expert_width: int, layer: int, num_layers: int
    ) -> tuple[int, int]:
        shared = self.shared
        if shared is None:
            return 0, 0
        total = (config.integer(shared.total_width, 0) or 0) if shared.total_width else 0
        if total:
            params = mlp_params(hidden_size, total, gated=shared.gated, bias=config.flag(shared.bias))
            named = 0 if isinstance(shared.count, int) else config.integer(shared.count, 0)
            return named or 1, params + hidden_size * shared.gate
        if isinstance(shared.count, int):
            count = shared.count
        else:
            count = (config.per_layer(shared.count, num_layers, 0) or (0,) * num_layers)[layer]
        width = expert_width
        if shared.width:
            width = (
                config.per_layer(shared.width, num_layers, 0 if shared.width_is_total else expert_width)
                or (0,) * num_layers
            )[layer]
        total = width if shared.width_is_total else count * width
        if not count or not total:
            return 0, 0
        params = mlp_params(hidden_size, total, gated=shared.gated, bias=config.flag(shared.bias))
        return count, params + hidden_size * shared.gate

    def _check(self, config: Config, count: int) -> None:
        if count > MAX_EXPERTS:
            field = (
                self.count if isinstance(self.count, str) else next(n for n in self.count if config.get(n) is not None)
            )
            raise config.error(field, count, f"an integer from 0 to {MAX_EXPERTS}")


def mlp_params(hidden_size: int, width: int, *, gated: bool, bias: bool) -> int:
    """Return the parameters of an up (and gate) projection to `width` and a projection back."""
    inner = 2 if gated else 1
    return (inner + 1) * hidden_size * width + bias * (inner * width + hidden_size)
