"""Keeps what `quality` found of a plan in the user's cache, and tells it to later plans that serve the same."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from moe_optimizer.errors import InputError
from moe_optimizer.files import read_text, write_atomically
from moe_optimizer.log import get_logger
from moe_optimizer.plan.decision import UNJUDGED, Status
from moe_optimizer.plan.json_codec import decode_text, encode
from moe_optimizer.plan.pass_params import FourBitParams, Fp8Params, Sparsity24Params
from moe_optimizer.resources import cache_dir

if TYPE_CHECKING:
    from moe_optimizer.measure.quality.result import QualityResult
    from moe_optimizer.plan.plan import Plan

SCHEMA_VERSION = 1
_FOLDER = "quality"
_MAX_BYTES = 1 << 16
_WHERE_ONLY = ("--host", "--port")
"""Arguments that change no output."""
_CONVERTED = (Fp8Params, FourBitParams, Sparsity24Params)
"""Say which weights are converted, and to what."""

logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What one quality run against stock vLLM found of a plan."""

    plan_digest: str
    date: str
    profile: str
    """By whose thresholds."""
    kl_mean: float | None
    """Nats a token; None: no number came out."""
    failed: tuple[str, ...]
    """Metrics that were not kept."""
    thresholds: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    """The profile's section `quality` as it was then; empty in files that do not hold it, which allow nothing."""
    schema_version: int = SCHEMA_VERSION

    def __str__(self) -> str:
        kl = "no number" if self.kl_mean is None else f"mean KL {self.kl_mean:.2g} nats a token"
        verdict = f"did not keep {', '.join(self.failed)}" if self.failed else "kept every threshold"
        return f"`quality` judged it on {self.date}: it {verdict} of profile {self.profile} ({kl})"


def keep(plan: Plan, result: QualityResult) -> Path:
    """Write what was found of a plan; return the file."""
    judgement = Judgement(
        plan_digest=plan.digest,
        date=time.strftime("%Y-%m-%d"),
        profile=plan.profile_name,
        kl_mean=result.kl_mean.value,
        failed=tuple(dict.fromkeys(each.metric for each in result.failed)),
        thresholds=plan.profile["quality"],
    )
    path = _path(plan)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(path, json.dumps(encode(judgement)))
    return path


def with_judgement(plan: Plan) -> Plan:
    """Return a plan whose decisions say that a quality run has judged them, where one has judged this plan."""
    if not any(UNJUDGED in each.reason for each in plan.decisions if each.status is Status.ON):
        return plan
    path, found = _path(plan), _found(plan)
    if found is None:
        return plan
    told = str(found) if _by_same_thresholds(found, plan) else f"{found}; this plan's thresholds are others"
    judged = tuple(
        dataclasses.replace(each, reason=each.reason.replace(UNJUDGED, told), evidence=(*each.evidence, str(path)))
        if UNJUDGED in each.reason and each.status is Status.ON
        else each
        for each in plan.decisions
    )
    return plan.replace(decisions=judged)


def allows(plan: Plan) -> bool:
    """Return whether a quality run has judged this plan by the thresholds that it has now, and it kept every one."""
    found = _found(plan)
    if found is None or found.kl_mean is None or found.failed:
        return False
    return _by_same_thresholds(found, plan)


def _by_same_thresholds(found: Judgement, plan: Plan) -> bool:
    return dict(found.thresholds) == dict(plan.profile["quality"])


def _found(plan: Plan) -> Judgement | None:
    path = _path(plan)
    if not path.exists():
        return None
    try:
        text = read_text(path, max_bytes=_MAX_BYTES)
        return decode_text(Judgement, text, origin=str(path), schema_version=SCHEMA_VERSION)
    except InputError as error:
        logger.warning("%s", error)
        return None


def _path(plan: Plan) -> Path:
    """Return the file for plans of the same model, machine, vLLM, arguments, decisions and weights."""
    decided = [(each.pass_name, each.status.value, each.value) for each in plan.decisions]
    # The words of a decision leave out groups, kept layers and what is rounded.
    converted = [encode(each.params) for each in plan.decisions if isinstance(each.params, _CONVERTED)]
    activations = plan.profile["passes"]["four_bit"]["activations"]
    gpu = plan.hardware.gpu.name if plan.hardware.gpu and plan.num_gpus else None
    what = [
        encode(plan.model), gpu, plan.num_gpus, plan.vllm_version, decided, converted, activations,
        list(plan.serve_args.without(*_WHERE_ONLY).words),
    ]  # fmt: skip
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / _FOLDER / f"{key}.json"
