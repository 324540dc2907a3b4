"""A tier beside disaggregation: vLLM's own connectors, of both servers, take the plan's words and load in its order.

What they copy needs GPUs: tests/gpu/test_disaggregated_tiers.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.vllm.conftest import ROOT

SERVERS = ("prefill-0", "decode-0")
BLOCK, PROMPT = 128, 300
"""Tokens: two whole blocks and a part."""
NIXL, TIER = "NixlConnector", "OffloadingConnector"


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.connected_tiers", str(BLOCK), str(PROMPT)],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("server", SERVERS)
def test_both_connectors_fit_together_and_take_nothing_from_the_server(seen: dict[str, Any], server: str) -> None:
    said = seen[server]
    assert said["layout"]
    assert (said["hybrid cache manager"], said["whole graphs"]) == (True, True)
    # vLLM looks for what counts a connector's transfers by the connector's name.
    assert said["stats"] == [NIXL, TIER]


@pytest.mark.parametrize("server", SERVERS)
def test_both_schedulers_wait_for_steps_in_flight_before_they_give_blocks_away(
    seen: dict[str, Any], server: str
) -> None:
    assert seen[server]["takes blocks in"]


@pytest.mark.parametrize("server", SERVERS)
def test_a_prompt_that_the_tier_has_is_loaded_from_it_unless_it_comes_from_the_other_server(
    seen: dict[str, Any], server: str
) -> None:
    blocks = PROMPT // BLOCK * BLOCK
    assert seen[server]["loads"] == {
        "read for another server": [0, None],
        "read for another server again": [blocks, TIER],
        "read by another server": [PROMPT, NIXL],
        "read by another server, for another prompt": [blocks, TIER],
    }


@pytest.mark.parametrize("server", SERVERS)
def test_the_cpu_build_has_no_tier(seen: dict[str, Any], server: str) -> None:
    if seen[server]["tier on this platform"] == "not asked":
        pytest.skip("not vLLM's CPU build")
    assert "CUDA-alike" in seen[server]["tier on this platform"]
