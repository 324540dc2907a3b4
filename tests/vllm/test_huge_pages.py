"""The CPU experts class puts a loaded layer's weights on huge pages, or the proof says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_optimizer.vllm_plugin.session import PluginSession
from tests.ops.test_huge_pages import huge_bytes
from tests.vllm.expert_layers import PASS, activated, make_cpu_experts, make_layer


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginSession:
    return activated(tmp_path, monkeypatch)


def test_a_loaded_layer_is_on_huge_pages_or_the_proof_says_why_not(session: PluginSession) -> None:
    layer = make_layer(2048)  # 32 MiB and 16 MiB
    make_cpu_experts().process_weights_after_loading(layer)
    (entry,) = session.proof.passes[PASS].layers
    if entry.why_small_pages:
        pytest.skip(f"this machine: {entry.why_small_pages}")
    for weight in (layer.w13_weight, layer.w2_weight):
        assert huge_bytes(weight.data_ptr() + (4 << 20)) >= 8 << 20


def test_weights_too_small_for_a_huge_page_are_said_to_be(session: PluginSession) -> None:
    make_cpu_experts().process_weights_after_loading(make_layer(16))
    (entry,) = session.proof.passes[PASS].layers
    assert "smaller" in entry.why_small_pages
