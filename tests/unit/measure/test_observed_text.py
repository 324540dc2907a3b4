"""The folder in which a text is run through a model; the whole of it runs in tests/vllm/test_layer_sensitivity.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.errors import UnsupportedError
from moe_optimizer.measure.observed_text import TextRequest, observe_text


def test_what_the_plugin_writes_its_proof_to_outlives_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread writes until the process ends; a folder that is being removed then has a file that nobody expects."""
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "MOE_OPTIMIZER_PROFILE", "MOE_OPTIMIZER_RUN_DIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    (tmp_path / "text.txt").write_text("a text")
    written: list[Path] = []

    def start(**_: Any) -> None:
        proof = Path(os.environ["MOE_OPTIMIZER_RUN_DIR"]) / "proof"
        proof.mkdir()
        written.append(proof / "engine-0.json")
        written[0].touch()
        raise UnsupportedError("a stand-in of vLLM")

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=start))
    request = TextRequest(
        model=str(tmp_path),
        name="stand-in",
        trust_remote_code=False,
        text=str(tmp_path / "text.txt"),
        max_tokens=10,
        output=str(tmp_path / "out.json"),
        run_dir=str(tmp_path),
    )
    with pytest.raises(UnsupportedError):
        observe_text(request, lambda *_: None)
    assert written[0].exists()
