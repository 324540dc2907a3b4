"""The second half of a batch gets a description of its own for the attention kernels, not the first one's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.proof.record import PassProof
from moe_optimizer.vllm_plugin import patch as patches
from moe_optimizer.vllm_plugin.patch import PatchState, apply_when_imported
from moe_optimizer.vllm_plugin.session import PluginSession, start_session
from moe_optimizer.vllm_plugin.worker.half_batches import HALF_BATCH_METADATA, OVERLAP_PASS
from tests.plugin_state import own_patches, own_session
from tests.vllm.conftest import tiny_plan


class Builder:
    """A builder whose descriptions vLLM reuses with other blocks, as FlashAttention's."""

    supports_update_block_table = True


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PassProof:
    """What this process's proof says of the pass."""
    own_session(monkeypatch)
    session = start_session(PluginSession(run_dir=tmp_path, plan=tiny_plan()))
    return session.proof.passes.setdefault(OVERLAP_PASS, PassProof(requested="on"))


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.v1.worker.utils import AttentionGroup

    own_patches(monkeypatch)
    assert apply_when_imported(HALF_BATCH_METADATA).state is PatchState.APPLIED

    def of(count: int) -> Any:
        fields: dict[str, Any] = {"backend": None, "layer_names": [], "kv_cache_spec": None, "kv_cache_group_id": 0}
        return AttentionGroup(**fields | {"metadata_builders": [Builder() for _ in range(count)]})

    yield of
    patches.undo(HALF_BATCH_METADATA.target)


def test_of_two_halves_none_is_described_as_the_other(group: Any) -> None:
    halves = group(2)
    builders = [halves.get_metadata_builder(half) for half in range(2)]
    assert builders == halves.metadata_builders
    assert not any(builder.supports_update_block_table for builder in builders)


def test_a_whole_batch_is_described_once_for_all_layers(group: Any) -> None:
    assert group(1).get_metadata_builder().supports_update_block_table


def test_the_proof_says_that_a_step_was_split_once_one_was(group: Any, entry: PassProof) -> None:
    halves = group(2)
    halves.get_metadata_builder(0)
    assert entry.found == ""
    halves.get_metadata_builder(1)
    assert entry.found == "steps were split"
