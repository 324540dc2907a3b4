"""Loads a checkpoint into a model: safetensors, or with an explicit flag torch's .bin files."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_optimizer.engine.models.decoder import CausalLM
from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.inspection.weight_files import expected_files

LoadFormat = Literal["auto", "safetensors", "pt", "dummy"]
"""auto and safetensors: safetensors only. pt: torch's .bin files. dummy: random weights, for measurements."""

_NEEDLESS = ("rotary_emb.inv_freq", "lm_head.weight")
"""What a checkpoint may have and a model may not need: tables that are computed, the copy of tied embeddings."""
_DUMMY_RANGE = 1e-2
"""Chosen: small enough that activations of a deep model stay finite."""


def load_weights(model: CausalLM, folder: Path, load_format: LoadFormat, *, seed: int = 0) -> None:
    """Fill every parameter of the model; a tensor that is missing, left over or of another shape is an error."""
    if load_format == "dummy":
        generator = torch.Generator(device=model.model.norm.weight.device).manual_seed(seed)
        for parameter in model.parameters():
            parameter.data.uniform_(-_DUMMY_RANGE, _DUMMY_RANGE, generator=generator)
        return
    places = dict(model.places())
    missing = set(places)
    for name, tensor in _tensors(folder, load_format):
        if name in places:
            missing.discard(name)
            try:
                places[name].fill(tensor)
            except InputError as error:
                raise error.named_by(f"{folder}: {name}") from None
        elif not name.endswith(_NEEDLESS):
            raise InputError(f"{folder}: got tensor {name!r}, expected one of a {type(model).__name__}")
    if missing:
        raise InputError(f"{folder}: {len(missing)} tensors are missing, the first is {min(missing)}")


def _tensors(folder: Path, load_format: LoadFormat) -> Iterator[tuple[str, Tensor]]:
    for path in _files(folder, "pytorch_model.bin" if load_format == "pt" else "model.safetensors"):
        try:
            if load_format == "pt":
                yield from torch.load(path, map_location="cpu", weights_only=True, mmap=True).items()
                continue
            with safe_open(path, framework="pt") as file:
                yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118  (no mapping)
        except pickle.UnpicklingError:
            # Torch's own text tells how to let the file run code.
            raise InputError(f"{path}: got other objects than tensors, or no file of torch") from None
        except (RuntimeError, SafetensorError) as error:
            said = f"{path}: cannot be read as tensors: {str(error).splitlines()[0]}"
            raise InputError(said, hint="the file may be cut off; download it again") from None


def _files(folder: Path, single: str) -> list[Path]:
    paths = expected_files(folder, single)
    missing = [path.name for path in paths if not path.is_file()]
    if not missing:
        return paths
    if single == "model.safetensors" and list(folder.glob("*.bin")):
        raise UnsupportedError(
            f"{folder}: got .bin files only, expected safetensors",
            hint="load_format='pt' reads them; tensors only, no other Python object",
        )
    raise InputError(f"{folder}: got no {', '.join(missing)}, expected the model's weights")
