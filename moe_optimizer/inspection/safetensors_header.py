"""Reads names, types, shapes and sizes of a checkpoint's tensors from safetensors headers; never the data."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.files import open_regular
from moe_optimizer.inspection.json_file import LFS_HINT, LFS_POINTER, read_json_object

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
MAX_TOTAL_HEADER_BYTES = 160_000_000
"""All headers of a checkpoint together; the largest published one has 30 MB."""
MAX_INDEX_BYTES = 32 << 20
"""The index of a checkpoint with 140,000 tensors has 14 MB."""
MAX_DIMENSIONS = 16
"""Weights have up to five; a product of thousands of numbers takes longer to print than to refuse."""

_TYPES = {
    4: ("F4",),
    6: ("F6_E2M3", "F6_E3M2"),
    8: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    16: ("I16", "U16", "F16", "BF16"),
    32: ("I32", "U32", "F32"),
    64: ("I64", "U64", "F64", "C64"),
}
DTYPE_BITS = {name: bits for bits, names in _TYPES.items() for name in names}
"""Every type of the format (safetensors 0.8) -> bits of an element."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Endings of files whose loading runs code."""
PICKLES_BESIDE = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "optimizer.bin")
"""Files with such an ending that trainers leave and that hold no weights to serve."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def elements(self) -> int:
        """Number of stored elements."""
        return math.prod(self.shape)


def read_tensors(folder: Path) -> tuple[Tensor, ...] | None:
    """Return the tensors of a checkpoint folder, or None when it holds no weights or only a part of them.

    Raises:
        InputError: a header or the index is broken.
        UnsupportedError: the only weights are in GGUF, or pickles, which run code when they are loaded.
    """
    files = _weight_files(folder)
    if files is None:
        return None
    return tuple(read_files(files))


def read_files(files: Iterable[Path]) -> Iterator[Tensor]:
    """Yield the tensors of these files.

    Raises:
        InputError: a file is not a whole safetensors file.
    """
    budget = MAX_TOTAL_HEADER_BYTES
    for path in files:
        header, length, size = read_header(path, max_bytes=min(MAX_HEADER_BYTES, budget), name=path.name)
        header.pop("__metadata__", None)
        budget -= length
        yield from _tensors(header, path.name, data_bytes=size - 8 - length)


def _weight_files(folder: Path) -> list[Path] | None:
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except OSError as error:
        raise InputError(f"{folder.name}: cannot be read: {error.strerror}") from None
    shards = [name for name in names if name.endswith(".safetensors")]
    pickles = [name for name in names if name.endswith(PICKLES) and name not in PICKLES_BESIDE]
    gguf = next((name for name in names if name.endswith(".gguf")), None)
    if not shards and gguf:
        raise UnsupportedError(
            f"{gguf}: GGUF weights, expected safetensors",
            hint="take the model's original repository, or another copy of it in safetensors",
        )
    if not shards and pickles:
        raise UnsupportedError(
            f"{pickles[0]}: pickled weights, expected safetensors",
            hint="loading a pickle runs code from it; convert the weights to safetensors. Tensors alone are read by: "
            "python -m moe_optimizer.cli.engine_server --load-format pt --model FOLDER",
        )
    index = "model.safetensors.index.json"
    if index in names:
        listed = _indexed_files(folder / index)
        return [folder / name for name in listed] if set(listed) <= set(shards) else None
    # A repository may carry the same weights a second time in the layout of another program.
    own = [name for name in shards if not name.startswith("consolidated")]
    chosen = ["model.safetensors"] if "model.safetensors" in own else own or shards
    if any(_is_part_of_more(name, len(chosen)) for name in chosen):
        return None
    return [folder / name for name in chosen] or None


def _is_part_of_more(name: str, num_files: int) -> bool:
    """Whether a name ("model-00001-of-00003.safetensors") speaks of more files than there are."""
    match = re.search(r"-of-(\d{1,6})\.safetensors$", name)
    return match is not None and int(match.group(1)) > num_files


def _indexed_files(path: Path) -> list[str]:
    weight_map = read_json_object(path, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{path.name}: weight_map: got no entries, expected tensor names with their files")
    files: set[str] = set()
    for file in weight_map.values():
        if not isinstance(file, str) or "/" in file or "\\" in file or not file.endswith(".safetensors"):
            raise InputError(f"{path.name}: weight_map: got {file!r:.80}, expected a safetensors file of this folder")
        files.add(file)
    return sorted(files)


def read_header(path: Path, *, max_bytes: int, name: str) -> tuple[dict[str, Any], int, int]:
    """Return a file's header with its metadata, the header's length and the size of the file.

    Args:
        path: the file.
        max_bytes: the longest header that is read.
        name: what error messages call the file.

    Raises:
        InputError: it cannot be read, or does not begin as a safetensors file.
    """
    with open_regular(path, name=name) as stream:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise InputError(f"{name}: got {size} bytes, expected a safetensors file", hint=_CUT_OFF)
        if LFS_POINTER.startswith(prefix):
            # As the length of a header these eight bytes would be 2 * 10^18.
            raise InputError(f"{name}: got a git-lfs pointer, expected a safetensors file", hint=LFS_HINT)
        length = int.from_bytes(prefix, "little")
        if not 2 <= length <= max_bytes:
            raise InputError(f"{name}: got a header of {length} bytes, expected 2 to {max_bytes}")
        if length > size - 8:
            raise InputError(f"{name}: the header says {length} bytes, the file has {size}", hint=_CUT_OFF)
        data = stream.read(length)
    try:
        header = json.loads(data)
    except (ValueError, RecursionError):
        raise InputError(f"{name}: the header is not valid JSON", hint=_CUT_OFF) from None
    if not isinstance(header, dict):
        raise InputError(f"{name}: the header is not an object")
    return header, length, size


def _tensors(header: dict[str, object], file: str, *, data_bytes: int) -> Iterator[Tensor]:
    ranges: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        fields = entry if isinstance(entry, dict) else {}
        dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
        if not (isinstance(dtype, str) and _integers(shape) and _integers(offsets) and len(offsets) == 2):
            raise InputError(f"{file}: tensor {name!r:.80}: expected dtype, shape and data_offsets")
        if dtype not in DTYPE_BITS:
            raise InputError(
                f"{file}: tensor {name!r:.80}: dtype: got {dtype!r:.40}, expected one of {', '.join(DTYPE_BITS)}"
            )
        if len(shape) > MAX_DIMENSIONS:
            raise InputError(
                f"{file}: tensor {name!r:.80}: got {len(shape)} dimensions, expected at most {MAX_DIMENSIONS}"
            )
        start, end = offsets
        if not start <= end <= data_bytes:
            message = f"{file}: tensor {name!r:.80}: ends at byte {end} of the data, the file holds {data_bytes}"
            raise InputError(message, hint=_CUT_OFF)
        needed = (math.prod(shape) * DTYPE_BITS[dtype] + 7) // 8
        if needed != end - start:
            raise InputError(f"{file}: tensor {name!r:.80}: {dtype} {shape} needs {needed} bytes, got {end - start}")
        ranges.append((start, end, name))
        yield Tensor(name, dtype, tuple(shape), end - start)
    _check_layout(ranges, file, data_bytes)


def _check_layout(ranges: list[tuple[int, int, str]], file: str, data_bytes: int) -> None:
    """Refuse tensors [start, end) that overlap, leave holes or leave a rest: no loader takes such a file."""
    ranges.sort()
    position = 0
    for start, end, name in ranges:
        if start != position:
            raise InputError(f"{file}: tensor {name!r:.80}: starts at byte {start} of the data, expected {position}")
        position = end
    if position != data_bytes:
        raise InputError(f"{file}: the tensors end at byte {position} of the data, the file holds {data_bytes}")


def _integers(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)


_CUT_OFF = "the file may be cut off; download it again"
