"""Reads a drafting model's folder: an EAGLE-3 head, or a language model of its own."""

from __future__ import annotations

from typing import Literal

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.attention import HIDDEN
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.hub import resolve_model
from moe_optimizer.inspection.json_file import read_json_object
from moe_optimizer.inspection.model_inspector import ModelInspector
from moe_optimizer.inspection.safetensors_header import read_tensors
from moe_optimizer.specs.draft import DraftSpec

_EAGLE3 = "eagle3"


def read_draft(model: str | None, *, origin: str) -> DraftSpec | None:
    """Return what a drafting model is; None where none is named.

    Args:
        model: a hub id or a folder.
        origin: who named it, for errors.

    Raises:
        InputError: it is not found, its files are broken, or it drafts in a way that is not planned here.
        UnsupportedError: a language model of a kind that cannot be read.
    """
    if model is None:
        return None
    try:
        folder = resolve_model(model)
        config = Config(read_json_object(folder / "config.json"), where=f"{model}: config.json: ")
    except InputError as error:
        raise error.named_by(origin) from None
    method = _method(config, origin)
    if method == "draft":
        spec = ModelInspector().inspect(model)
        return DraftSpec(
            name=model,
            path=spec.path,
            method=method,
            vocab_size=spec.vocab_size,
            num_layers=spec.num_layers,
            weight_bytes=spec.weight_bytes,
            kv_bytes_per_token=spec.kv_bytes_per_token,
        )
    # The speculators library keeps the layer's shape in an object of its own.
    layer = config.sub("transformer_layer_config") or config
    heads = layer.required("num_attention_heads")
    head_dim = layer.integer("head_dim", 0) or layer.required(HIDDEN) // heads
    layers = layer.integer("num_hidden_layers", 1) or 1
    tensors = read_tensors(folder) or ()
    return DraftSpec(
        name=model,
        path=str(folder),
        method=method,
        vocab_size=layer.required("vocab_size"),
        num_layers=layers,
        weight_bytes=sum(tensor.num_bytes for tensor in tensors),
        kv_bytes_per_token=4 * (layer.integer("num_key_value_heads", heads) or heads) * head_dim * layers,
    )


def _method(config: Config, origin: str) -> Literal["eagle3", "draft"]:
    architectures = config.items("architectures") or []
    said = " ".join(str(each) for each in (*architectures, config.text("speculators_model_type"))).lower()
    if _EAGLE3 in said:
        return "eagle3"
    for other in ("eagle", "medusa", "mlpspeculator", "dflash", "dspark"):
        if other in said:
            raise InputError(
                f"{origin}: got a drafting model of kind {said.strip()!r:.60}, expected an EAGLE-3 head or a language "
                "model",
                hint="give vLLM's own --speculative-config after --; the plan then leaves it to vLLM",
            )
    return "draft"
