"""`generations`: outputs kept in a file, and compared with later ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_optimizer.debug.oracle import PROMPTS
from moe_optimizer.engine import LLM, SamplingParams
from moe_optimizer.errors import InputError
from moe_optimizer.files import write_atomically
from moe_optimizer.inspection.json_file import read_json_object

_MAX_BYTES = 64 << 20
_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationsReport:
    """The output of `debug generations --json`."""

    outputs: int
    saved: bool
    """Whether they were kept; else they were compared."""
    changed: tuple[str, ...]
    """Each output that differs: its prompt, the first token that does, before and now."""


def generations(folder: Path, *, save: Path | None, against: Path | None, max_tokens: int = 48) -> GenerationsReport:
    """Generate greedily and with a seed; keep the tokens in `save`, or compare them with those of `against`.

    Raises:
        InputError: neither file or both are named, or it cannot be read.
    """
    if (save is None) == (against is None):
        raise InputError("--save, --against: expected one of them")
    before = None if against is None else _kept(against.expanduser())
    llm = LLM(str(folder), dtype="float32", device="cpu", max_num_seqs=8)
    found: dict[str, Any] = {}
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
    seeded = SamplingParams(temperature=0.8, seed=_SEED, max_tokens=max_tokens)
    for kind, params in (("greedy", greedy), ("seeded", seeded)):
        outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
        found |= {
            f"{kind}: {prompt!r}": output.outputs[0].token_ids for prompt, output in zip(PROMPTS, outputs, strict=True)
        }
    if save is not None:
        write_atomically(save.expanduser(), json.dumps(found, indent=1) + "\n")
        return GenerationsReport(outputs=len(found), saved=True, changed=())
    return GenerationsReport(outputs=len(found), saved=False, changed=tuple(_changes(before or {}, found)))


def _kept(path: Path) -> dict[str, list[int]]:
    kept: dict[str, Any] = read_json_object(path, max_bytes=_MAX_BYTES)
    for name, token_ids in kept.items():
        if not isinstance(token_ids, list) or not all(isinstance(each, int) for each in token_ids):
            raise InputError(f"{path.name}: {name!r}: expected a list of token ids", hint="--save writes such a file")
    return kept


def _changes(before: dict[str, list[int]], now: dict[str, list[int]]) -> list[str]:
    changed = []
    for name in before.keys() | now.keys():
        old, new = before.get(name, []), now.get(name, [])
        if old != new:
            place = next((at for at, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), None)
            shown = min(len(old), len(new)) if place is None else place
            changed.append(f"{name}: token {shown}: before {old[shown : shown + 1]}, now {new[shown : shown + 1]}")
    return sorted(changed)
