"""Servers that start at the same time: several of the bundled model take hardly longer than one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from moe_optimizer.errors import MoeOptimizerError
from moe_optimizer.launcher.server_info import ServerInfo
from moe_optimizer.launcher.supervisor import Supervisor
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.record import Proof, read_proofs
from tests.gpu.plans import always_ours, gpu_plan
from tests.vllm.conftest import Answer, ask

READY_TIMEOUT_S = 400.0
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class Seen:
    """What a server answered and left; or why it did not."""

    answers: tuple[Answer, ...] = ()
    proofs: tuple[Proof, ...] = ()
    error: Exception | None = None

    def answered(self) -> tuple[Answer, ...]:
        """Return the answers; fail with the server's own error where there are none."""
        if self.error is not None:
            raise self.error
        return self.answers


def with_and_without(name: str, folder: Path) -> dict[Wish, Seen]:
    """Ask two servers of the bundled model at once, with the pass on and off; ours computes the experts of both."""
    common = ("--no-enable-prefix-caching", "--logprobs-mode", "raw_logits", "--cudagraph-capture-sizes")
    plans = {
        wish: gpu_plan(
            *common, "1", "2", "4", "8",
            speeds=always_ours, wishes={name: (wish, "test")}, max_model_len=512, batch_size=8,
        )
        for wish in (Wish.ON, Wish.OFF)
    }  # fmt: skip
    return asked_at_once(plans, folder)


def asked_at_once(
    plans: Mapping[_Key, Plan], folder: Path, *, then: Callable[[_Key, ServerInfo], None] = lambda _key, _info: None
) -> dict[_Key, Seen]:
    """Start a server for each plan, ask it the tests' questions, and stop all.

    Args:
        plans: by what the caller calls them.
        folder: gets their run folders.
        then: called for each server once it has answered.
    """
    seen: dict[_Key, Seen] = {}
    folders = {key: folder / f"run-{number}" for number, key in enumerate(plans)}
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        runs = {key: Supervisor(plan, folders[key]) for key, plan in plans.items()}
        for run in runs.values():
            stack.enter_context(run.started())
        for key, run in runs.items():
            try:
                info = run.wait_until_ready(READY_TIMEOUT_S)
                seen[key] = Seen(ask(info.base_url))
                then(key, info)
            except (MoeOptimizerError, OSError) as error:
                seen[key] = Seen(error=error)
        for run in runs.values():
            run.ask_to_stop()
    # Proofs are written a last time when a server ends: with what the requests ran.
    return {key: Seen(each.answers, read_proofs(folders[key]), each.error) for key, each in seen.items()}
