"""Patches vLLM's online FP8 to use the planned quantiser of 128x128 blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from moe_optimizer.errors import KernelUnavailableError
from moe_optimizer.log import get_logger
from moe_optimizer.plan.pass_params import Fp8Params
from moe_optimizer.vllm_plugin.experts.weight_format_fp8 import FP8_PASS
from moe_optimizer.vllm_plugin.patch import Patch
from moe_optimizer.vllm_plugin.server_facts import world
from moe_optimizer.vllm_plugin.session import PluginSession, current_session

logger = get_logger(__name__)
_BLOCK = [128, 128]


def _replacement(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def per_block_cast_to_fp8(x: Any, block_size: Any = _BLOCK, use_ue8m0: bool = False) -> Any:
        session = current_session()
        decision = None if session is None else session.wanted(FP8_PASS)
        # Scales that are powers of two are another format, for another kernel.
        if session is None or decision is None or use_ue8m0 or list(block_size) != _BLOCK:
            return original(x, block_size, use_ue8m0)
        with session.falling_back(FP8_PASS, "vLLM's own quantizer is used: "):
            result, used = _quantized(x, decision.params_as(Fp8Params).quantizer)
            _note(session, used)
            return result
        return original(x, block_size, use_ue8m0)

    return per_block_cast_to_fp8


def _quantized(matrix: Any, quantizer: Any) -> tuple[Any, str]:
    """Return the matrix with its scales, and the name of the quantiser that made them."""
    from moe_optimizer.ops.fp8_quant import quantize_fp8

    try:
        return quantize_fp8(matrix, quantizer=quantizer), quantizer
    except KernelUnavailableError as error:
        _say_once(str(error))
        return quantize_fp8(matrix), "builtin"


@functools.cache
def _say_once(reason: str) -> None:
    # Every expert's matrices are converted one by one: thousands of calls with one reason.
    logger.warning("fp8: the builtin quantizer is used instead: %s", reason)


def _note(session: PluginSession, used: str) -> None:
    session.proof.model_rank, session.proof.world_size = world()
    session.applied(FP8_PASS, kernel=f"FP8 quantizer {used}", isa="")
    session.ran(FP8_PASS)


ONLINE_FP8_QUANTIZER = Patch(
    target="vllm.utils.deep_gemm:per_block_cast_to_fp8",
    why="vLLM's online FP8 converts every weight with this function and has no other quantiser to choose",
    remove_when="vLLM lets the quantiser of its online FP8 be chosen",
    fingerprints={"0.26 to 0.33": "892375fae126e419"},
    replacement=_replacement,
)
