"""What is read from vLLM's sources about its quantisation methods, beside vLLM's own list."""

from __future__ import annotations

from pathlib import Path

from moe_optimizer.inspection.vllm_installation import find_vllm
from moe_optimizer.inspection.vllm_sources import lacks_quantization


def test_no_method_of_vllms_own_list_is_called_lacking() -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    installed = find_vllm()
    assert installed is not None
    assert len(QUANTIZATION_METHODS) > 10
    assert not [method for method in QUANTIZATION_METHODS if lacks_quantization(Path(installed.location), method)]
