"""Runs a text through a model in this process and shows every call of our expert kernel to an observer.

On vLLM's CPU build only: there the kernel is called from Python in every step.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.inspection import ModelInspector

if TYPE_CHECKING:
    from moe_optimizer.vllm_plugin.experts.weight_format import ExpertsCall, KernelWeights

_PROFILE = """\
name: observed_text
passes: {flash_dmoe: {mode: on}, fp8: {mode: off}, sparsity_24: {mode: off}, expert_load: {mode: off}}
"""
_WINDOW = 512


@dataclass(frozen=True, slots=True)
class ObservedText:
    """What was run."""

    tokens: int
    layer_index: Callable[[int], int]
    """Address of a layer's w13 -> index of the decoder layer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every measurement on a text is told: the model, the text, and the file to write."""
    parser.add_argument("model", help="model folder")
    parser.add_argument("text", type=Path, help="file of UTF-8 text that is like the traffic to come")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parser.add_argument("--max-tokens", type=int, default=4096)


def check_arguments(options: argparse.Namespace) -> tuple[str, str]:
    """Check them before vLLM is started, which takes long.

    Returns:
        The model's name for the file, without what is before the last slash, and the text.

    Raises:
        InputError: there is no such model, no text in the file, no folder to write to, or nothing to run.
        UnsupportedError: the model has no experts.
    """
    if options.max_tokens < 1:
        raise InputError(f"--max-tokens: got {options.max_tokens}, expected at least 1")
    folder = options.output.absolute().parent
    if options.output.is_dir() or not folder.is_dir():
        got = "a folder" if options.output.is_dir() else f"no folder {folder}"
        raise InputError(f"--output {options.output}: got {got}, expected a file in a folder that is there")
    try:
        text = options.text.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{options.text}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InputError(f"{options.text}: not UTF-8 text") from None
    if not text:
        raise InputError(f"{options.text}: the text is empty")
    model = ModelInspector().inspect(options.model)
    if not model.is_moe:
        raise UnsupportedError(f"{options.model}: the model has no experts")
    return model.name.rpartition("/")[2], text


def observe_text(
    model: str, text: str, *, max_tokens: int, observe: Callable[[KernelWeights, ExpertsCall], None]
) -> ObservedText:
    """Run `text` through the model, in windows of 512 tokens.

    Args:
        model: folder.
        text: cut off after `max_tokens`.
        max_tokens: of the model's own tokenizer.
        observe: called after each call of the kernel, whose output is in `call.out` and goes on.

    Raises:
        UnsupportedError: our CPU kernel does not compute this model's experts here.
    """
    # Before vLLM is imported: it reads its variables then, and loads the plugin in this process.
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.yaml"
        profile.write_text(_PROFILE)
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "MOE_OPTIMIZER_PROFILE": str(profile),
            "MOE_OPTIMIZER_RUN_DIR": folder,
        }
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        return _observe(model, text, max_tokens, observe)


def _observe(
    model: str, text: str, max_tokens: int, observe: Callable[[KernelWeights, ExpertsCall], None]
) -> ObservedText:
    import vllm

    from moe_optimizer.specs.layer_name import decoder_layer
    from moe_optimizer.vllm_plugin.experts.weight_format import PLAIN, weight_format
    from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, current_session

    engine = vllm.LLM(model=model, enforce_eager=True, max_model_len=_WINDOW + 1, enable_prefix_caching=False)
    tokens = engine.get_tokenizer().encode(text, add_special_tokens=False)[:max_tokens]
    session = current_session()
    proof = None if session is None else session.proof.passes.get(EXPERTS_PASS)
    if session is None or proof is None or not proof.layers:
        why = proof.why_not if proof is not None else "the plugin is not active"
        raise UnsupportedError(f"{model}: our kernel computes none of its layers: {why}")
    plain = weight_format(PLAIN)
    compute = plain.compute

    def observed(weights: KernelWeights, call: ExpertsCall) -> None:
        compute(weights, call)
        observe(weights, call)

    def layer_index(address: int) -> int:
        name = session.layer_at(address).name
        index = decoder_layer(name)
        assert index is not None, f"{name}: no decoder layer"
        return index

    # Only now: vLLM's warm-up ran on tokens that nobody would send.
    plain.compute = observed
    prompts: Any = [{"prompt_token_ids": tokens[at : at + _WINDOW]} for at in range(0, len(tokens), _WINDOW)]
    engine.generate(prompts, vllm.SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    return ObservedText(len(tokens), layer_index)
