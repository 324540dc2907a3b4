"""Turns a configuration into a decoder's shapes by the rules of its family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from moe_optimizer.inspection.attention import HIDDEN, Attention
from moe_optimizer.inspection.config import Config, Names
from moe_optimizer.inspection.feed_forward import Dense, Experts
from moe_optimizer.inspection.layer_rules import ExpertRule, KindRule, all_layers, every
from moe_optimizer.inspection.shapes import NO_MIXER, Decoder, ExpertLayer, Layer, Mixer, MixerRule, Site

LAYERS: Names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
VOCAB: Names = ("vocab_size", "padded_vocab_size", "n_vocab")
WINDOW: Names = ("sliding_window", "sliding_window_size", "window_size")
ACTIVATION: Names = (
    "hidden_act",
    "hidden_activation",
    "activation_function",
    "activation",
    "mlp_hidden_act",
    "ffn_config.ffn_act_fn.name",
)

LAYER_LISTS = ("layers_block_type", "hybrid_override_pattern", "layer_types", "block_configs")
"""Fields with an entry for each layer, in files that leave their number out."""

EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Fields that mean routed experts wherever an architecture has them."""

MAX_LAYERS = 1 << 10
"""More decoder layers than this is taken for a mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The rules of the models with these names."""

    names: tuple[str, ...]
    """The model_types that mean such a model, then architectures that are none of them in camel case."""
    layers: Names = LAYERS
    kinds: KindRule = field(default=every("attention"))
    """Name of each layer's mixer: a key of `mixers`, "sliding" and "chunked" (windowed "attention" unless
    `mixers` says otherwise) or "none"."""
    mixers: Mapping[str, MixerRule] = field(default_factory=lambda: {"attention": Attention()})
    window: Names = WINDOW
    dense: Dense | None = field(default_factory=Dense)
    experts: Experts | None = None
    feed_forward: ExpertRule = all_layers
    """Which layers have a feed-forward part at all."""
    norms: int | Callable[[Config], int] = 2
    """Norms of the hidden size in each layer, outside mixer and feed-forward part."""
    norm: Literal["rms", "layer", "none"] = "rms"
    """rms: one vector, also of a layer norm without bias; layer: weight and bias; none: no parameters."""
    positions: Names = ()
    """Field with the number of learned positions."""
    embedding_norm: bool = False
    head_bias: Names | bool = False
    tied: Names | bool = "tie_word_embeddings"
    layer_extra: Callable[[Site], int] = lambda _: 0
    """Further parameters of a layer outside its parts."""
    model_extra: Callable[[Config, int], int] = lambda *_: 0
    """Further parameters outside the layers: called with config and hidden size."""
    extra_embeddings: Callable[[Config], int] = lambda _: 0
    """Further embedding tables."""
    rewrite: Callable[[Config], Config] = lambda config: config
    """Puts fields of an unusual form into the usual one before anything is read."""
    idle_extra: Callable[[Config, tuple[ExpertLayer | None, ...]], int] = lambda *_: 0
    """Further parameters that no text token uses, such as experts for other modalities: called with the
    configuration as it is in the file, and the layers' experts."""
    disagreement: Callable[[Config], str | None] = lambda _: None
    """Tells where vLLM and transformers would build different models."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """What the architecture assumes for fields that real files leave out. Never an expert count, which would make
    experts in dense models, but for an architecture whose files state nothing."""

    def decoder(self, config: Config) -> Decoder:
        """Return the decoder that a configuration of this family describes.

        Raises:
            InputError: a field is missing, of the wrong type, out of range or contradicts another.
        """
        original = config.with_defaults(self.defaults)
        config = self.rewrite(original)
        hidden_size = config.required(HIDDEN)
        vocab_size = config.required(VOCAB)
        num_layers = self._num_layers(config)
        _check_layer_types(config)
        kinds = self.kinds(config, num_layers)
        has_feed_forward = self.feed_forward(config, num_layers)
        experts = self.experts.per_layer(config, hidden_size, num_layers) if self.experts else None
        dense = self._dense_params(config, hidden_size, num_layers, has_feed_forward, experts)
        norm_params = hidden_size * {"rms": 1, "layer": 2, "none": 0}[self.norm]
        norms = self.norms if isinstance(self.norms, int) else self.norms(config)
        if experts and all(entry is None or entry.num_experts == 1 for entry in experts):
            # Built with an expert class of one expert, which every token uses all the same.
            dense = tuple(count + (entry.params if entry else 0) for count, entry in zip(dense, experts, strict=True))
            experts = None
        layers = tuple(
            Layer(
                mixer=self._mixer(kinds[i], config, hidden_size, i),
                dense_params=dense[i],
                experts=experts[i] if experts else None,
                norm_params=norms * norm_params + self.layer_extra(Site(config, hidden_size, i, None)),
            )
            for i in range(num_layers)
        )
        tied = config.flag(self.tied)
        idle = self.idle_extra(original, experts) if experts else 0
        return Decoder(
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            layers=layers,
            embedding_params=vocab_size * hidden_size
            + (config.required(self.positions) * hidden_size if self.positions else 0)
            + self.extra_embeddings(config),
            lm_head_params=(0 if tied else vocab_size * hidden_size) + vocab_size * config.flag(self.head_bias),
            final_params=idle + norm_params * (1 + self.embedding_norm) + self.model_extra(config, hidden_size),
            idle_params=idle,
            warnings=self._warnings(config, experts is not None),
            expert_activation=config.text(ACTIVATION) if experts else "",
            expert_has_bias=bool(experts and self.experts and config.flag(self.experts.bias)),
        )

    def _warnings(self, config: Config, has_experts: bool) -> tuple[str, ...]:
        notes: list[str] = []
        note = self.disagreement(config)
        if note is not None:
            notes.append(f"{config.where}{note}")
        if self.experts is not None and has_experts:
            notes += [f"{config.where}{text}" for text in self.experts.contradictions(config)]
        if self.experts is None:
            counts = {name: config.raw.get(name) for name in EXPERT_COUNTS}
            ignored = next((name for name, count in counts.items() if isinstance(count, int) and count > 1), None)
            if ignored is not None:
                notes.append(f"{config.where}{ignored}: is ignored, the architecture has no routed experts")
        assumed = config.defaults.get("(experts)")
        if self.experts is not None and not has_experts and assumed and not config.has(self.experts.count):
            notes.append(
                f"{config.where.rstrip('.: ')}: no number of experts, so the model is taken for dense; "
                f"the config class of vLLM and transformers would assume {assumed} experts"
            )
        return tuple(notes)

    def _num_layers(self, config: Config) -> int:
        """Return the number of layers: the field, or the length of a field with one entry for each layer."""
        if config.integer(self.layers) is None:
            for name in LAYER_LISTS:
                entries = config.get(name)
                if isinstance(entries, (str, list)) and 0 < len(entries) <= MAX_LAYERS:
                    return len(entries)
        return config.required(self.layers, maximum=MAX_LAYERS)

    def _mixer(self, kind: str, config: Config, hidden_size: int, layer: int) -> Mixer:
        if kind == "none":
            return NO_MIXER
        window = None
        if kind.startswith(("sliding", "chunked")):
            window = config.integer(self.window if kind.startswith("sliding") else "attention_chunk_size") or None
        rule = self.mixers.get(kind)
        if rule is None and kind in ("sliding", "chunked"):
            rule = self.mixers.get("attention")
        if rule is None:
            raise config.error(config.name_of(self.layers), kind, f"layers of kind {' or '.join(self.mixers)}")
        return rule(Site(config, hidden_size, layer, window))

    def _dense_params(
        self,
        config: Config,
        hidden_size: int,
        num_layers: int,
        has_feed_forward: tuple[bool, ...],
        experts: tuple | None,
    ) -> tuple[int, ...]:
        beside = self.experts is not None and config.flag(self.experts.dense_beside)
        wanted = tuple(
            has_feed_forward[i] and (beside or experts is None or experts[i] is None) for i in range(num_layers)
        )
        if self.dense is None or not any(wanted):
            return (0,) * num_layers
        params = self.dense.params(config, hidden_size, num_layers)
        return tuple(count if want else 0 for count, want in zip(params, wanted, strict=True))


def _check_layer_types(config: Config) -> None:
    """Refuse a list of anything but words, also where the family's layers do not depend on it: no loader takes it."""
    for i, entry in enumerate(config.items("layer_types") or ()):
        if not isinstance(entry, str):
            raise config.error(f"layer_types[{i}]", entry, "a string")
