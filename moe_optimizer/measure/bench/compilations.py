"""Counts what servers compile while requests are sent: such a round says nothing of how fast they are."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_optimizer.inspection.compiler_caches import cache_folders, cached_kernels
from moe_optimizer.proof.record import PROOF_PAUSE_S, read_proofs
from moe_optimizer.proof.verdict import model_holders


def compilations(run_dirs: Sequence[Path], environ: Mapping[str, str]) -> int:
    """Return how much was compiled so far, as far as it is seen; only a difference of two calls means something.

    Seen: kernels that appear in the caches of compilers on this machine, whichever server needed them, and what the
    workers of our servers count.

    Args:
        run_dirs: of servers whose workers write proofs; none for a server without our plugin.
        environ: of the server, which names the folders of its caches.
    """
    if run_dirs:
        time.sleep(PROOF_PAUSE_S)
    counts = [proof.compilations for folder in run_dirs for proof in model_holders(read_proofs(folder))]
    own = sum(each.before_ready + each.after_ready for each in counts if each is not None)
    return own + sum(1 for _ in cached_kernels(cache_folders(environ)))
