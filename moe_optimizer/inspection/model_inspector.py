"""Reads a model folder into a ModelSpec without running any of its code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_optimizer.errors import InputError, MoeOptimizerError, UnsupportedError
from moe_optimizer.inspection.attention import HIDDEN
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.families import GENERIC, class_defaults, find_family
from moe_optimizer.inspection.family import LAYERS, Family
from moe_optimizer.inspection.hub import expanded, resolve_model
from moe_optimizer.inspection.json_file import read_json_object
from moe_optimizer.inspection.model_spec import build_spec
from moe_optimizer.inspection.quantization_scheme import read_quantization
from moe_optimizer.inspection.safetensors_header import read_tensors
from moe_optimizer.inspection.servable import (
    configuration_classes,
    is_servable,
    runs_through_transformers,
    with_quantization,
)
from moe_optimizer.plan.json_codec import encode
from moe_optimizer.specs.model import ModelSpec

NESTS = (
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
    "language_model_config",
    "language_model",
    "llm",
    "text_model_config",
)
"""Fields that hold a language model's own configuration, in order of preference. Two levels occur (an omni
model's thinker holds a text_config)."""
MAX_NESTS = 3
INHERITED = ("tie_word_embeddings", "torch_dtype", "dtype", "max_position_embeddings")
"""Fields that stand beside the nested object and hold for it too."""


class ModelInspector:
    """Turns a model folder or hub id into a `ModelSpec`.

    Reads config.json, hf_quant_config.json and safetensors headers; never weights, never code.

    Args:
        trust_remote_code: accept a model whose class only its own repository has.
    """

    def __init__(self, trust_remote_code: bool = False) -> None:
        self.trust_remote_code = trust_remote_code

    def inspect(self, model: str | Path) -> ModelSpec:
        """Return what the model is.

        Raises:
            InputError: the model is not found, or a file is broken or contradicts itself.
            UnsupportedError: well formed, but of a kind that cannot be served safely or is not known.
            What the files warn of is noted on either.
        """
        warnings: list[str] = []
        try:
            return self._read(model, warnings)
        except MoeOptimizerError as error:
            for warning in warnings:
                error.add_note(warning)
            raise

    def _read(self, model: str | Path, warnings: list[str]) -> ModelSpec:
        folder = resolve_model(model)
        root = Config(read_json_object(folder / "config.json", repeated=warnings), where="config.json: ")
        config = _language_config(root)
        architectures = _architectures(root)
        model_type = config.text("model_type") or root.text("model_type")
        servable = is_servable(architectures)
        needs_remote_code = _needs_remote_code(root, served=servable[0])
        # The language model's own architecture says most, then its model_type, then the outer architecture.
        family = find_family(*_architectures(config), model_type, *architectures)
        if family is None:
            if root.get("is_encoder_decoder") is True:
                raise UnsupportedError(
                    f"config.json: is_encoder_decoder: {model_type or 'the model'} has an encoder, "
                    "expected a causal language model"
                )
            if needs_remote_code and not self.trust_remote_code:
                name = architectures[0] if architectures else model_type
                raise UnsupportedError(
                    f"config.json: auto_map: {name} is only defined by the model's own code, no built-in class has it",
                    hint="--trust-remote-code runs that code in the server; read it first",
                )
            family = GENERIC
            warnings.append(
                f"config.json: model_type {model_type!r} is not one of the known families: "
                "read by its field names, counts are estimates"
            )
        config = config.with_defaults(_defaults(config, root, model_type, family))
        decoder = family.decoder(config)
        tensors = read_tensors(folder)
        if servable[0] is False and all(layer.mixer.kind != "state" for layer in decoder.layers):
            fallback = runs_through_transformers(architectures[0], model_type)
            servable = fallback if fallback[0] else servable
        quantization = read_quantization(root, config, folder)
        servable = with_quantization(servable, quantization.method)
        # A hub id as given, or a folder's last component.
        name = folder.resolve().name if expanded(str(model)).is_dir() else str(model)
        return build_spec(
            name=name,
            # A hub id whose weights are not in the cache is for vLLM to fetch: the snapshot has only metadata.
            path=name if name == str(model) and tensors is None and not expanded(name).is_dir() else str(folder),
            architecture=architectures[0] if architectures else "",
            model_type=model_type,
            config=config,
            decoder=decoder,
            quantization=quantization,
            servable=servable,
            tensors=tensors,
            needs_remote_code=needs_remote_code,
            exact=family is not GENERIC,
            warnings=tuple(warnings),
        )


def to_inspect_json(spec: ModelSpec) -> dict[str, Any]:
    """Return what `inspect --json` prints (docs/schemas/inspect.schema.json): all fields, and num_moe_layers."""
    return {**encode(spec), "num_moe_layers": spec.num_moe_layers}


def _needs_remote_code(root: Config, *, served: bool | None) -> bool:
    """Whether vLLM reads this model only with code of the model's own: its class, or the class of its configuration."""
    auto_map = root.sub("auto_map")
    if auto_map is None:
        return False
    auto_map.text("AutoConfig")  # vLLM reads it and would end with a TypeError
    classes = configuration_classes()
    if not served or classes is None or "AutoConfig" not in auto_map.raw:
        return served is False or not _architectures(root)
    return not classes.has(root.text("model_type"), _architectures(root))


def _defaults(config: Config, root: Config, model_type: str, family: Family) -> dict[str, object]:
    """Return the class defaults; the sizes that make the model come from them only in a nested object.

    Multi-modal files leave out of a nested object what equals its class's defaults; at the top level such a
    file is broken.
    """
    defaults = class_defaults(model_type, family)
    if config.raw is not root.raw:
        return defaults
    return {name: value for name, value in defaults.items() if name not in (*HIDDEN, *LAYERS)}


def _architectures(root: Config) -> tuple[str, ...]:
    entries = root.items("architectures") or []
    for i, entry in enumerate(entries):
        if not isinstance(entry, str):
            raise root.error(f"architectures[{i}]", entry, "a string")
    return tuple(entry for entry in entries if isinstance(entry, str))


def _language_config(root: Config) -> Config:
    """Return the part of config.json that describes the language model: itself, or a nested object.

    Raises:
        InputError: nested deeper than any real configuration, or a nest is not an object.
    """
    config = root
    for _ in range(MAX_NESTS):
        inner = _nested(config)
        if inner is None:
            return config
        config = inner
    if _nested(config) is not None:
        raise InputError(f"{config.where[:-1]}: nested again, expected a language model within {MAX_NESTS} levels")
    return config


def _nested(config: Config) -> Config | None:
    for name in NESTS:
        value = config.raw.get(name)
        if name == "text_config" and value is not None and not isinstance(value, dict):
            # Passing over it would describe another model than transformers builds; the other names also occur
            # as plain text (the id of the language model).
            raise config.error(name, value, "an object")
        if isinstance(value, dict) and value:
            inherited = {field: config.raw[field] for field in INHERITED if field in config.raw}
            return Config({**inherited, **value}, where=f"{config.where}{name}.")
    return None
