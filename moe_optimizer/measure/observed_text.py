"""Runs a text through a model in this process, and shows every call of our expert kernel to an observer.

On vLLM's CPU build only, where Python calls the kernel in every step.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.files import read_text
from moe_optimizer.inspection.model_inspector import ModelInspector

if TYPE_CHECKING:
    from moe_optimizer.vllm_plugin.experts.weight_format import ExpertsCall, KernelWeights

_PROFILE = """\
name: observed_text
passes: {flash_dmoe: {mode: on}, fp8: {mode: off}, sparsity_24: {mode: off}, expert_load: {mode: off}}
"""
_WINDOW = 512
_MAX_TEXT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """What is measured on which text; a request to a measuring process."""

    model: str
    """Folder."""
    name: str
    """The model's name in the file that is written."""
    trust_remote_code: bool
    text: str
    """File of UTF-8 text."""
    max_tokens: int
    """Of the model's own tokenizer; the text is cut off after them."""
    output: str
    """File that is written."""
    run_dir: str
    """Folder for the proof of the measuring process, whose plugin writes there until it ends: removed after that."""


Observer = Callable[[int, "KernelWeights", "ExpertsCall"], None]
"""Called after each call of the kernel with the index of the decoder layer; the output, in `call.out`, goes on."""


def check_request(request: TextRequest) -> TextRequest:
    """Check a request before vLLM is started, which takes long; return it with the model's name.

    Raises:
        InputError: there is no such model, no text in the file, or no folder to write to.
        UnsupportedError: the model has no experts.
    """
    output = Path(request.output)
    folder = output.absolute().parent
    if output.is_dir() or not folder.is_dir():
        got = "a folder" if output.is_dir() else f"no folder {folder}"
        raise InputError(f"--output {output}: got {got}, expected a file in a folder that exists")
    if not _text(request):
        raise InputError(f"--text {request.text}: the text is empty")
    model = ModelInspector(trust_remote_code=request.trust_remote_code).inspect(request.model)
    if not model.is_moe:
        raise UnsupportedError(f"{request.model}: the model has no experts")
    return dataclasses.replace(request, model=model.path, name=model.name.rpartition("/")[2])


def _text(request: TextRequest) -> str:
    return read_text(Path(request.text), max_bytes=_MAX_TEXT_BYTES, name=f"--text {request.text}")


def observe_text(request: TextRequest, observe: Observer) -> int:
    """Run the text through the model in windows of 512 tokens; return the number of tokens.

    Raises:
        UnsupportedError: our CPU kernel does not compute this model's experts here.
    """
    profile = Path(request.run_dir) / "profile.yaml"
    profile.write_text(_PROFILE)
    # Before vLLM is imported: it reads its variables then, and loads the plugin in this process.
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "MOE_OPTIMIZER_PROFILE": str(profile),
        "MOE_OPTIMIZER_RUN_DIR": request.run_dir,
    }
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    import vllm

    from moe_optimizer.vllm_plugin.experts.weight_format import PLAIN, weight_format
    from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, current_session

    engine = vllm.LLM(
        model=request.model,
        trust_remote_code=request.trust_remote_code,
        enforce_eager=True,
        max_model_len=_WINDOW + 1,
        enable_prefix_caching=False,
    )
    tokens = engine.get_tokenizer().encode(_text(request), add_special_tokens=False)[: request.max_tokens]
    session = current_session()
    proof = None if session is None else session.proof.passes.get(EXPERTS_PASS)
    if session is None or proof is None or not proof.layers:
        why = proof.why_not if proof is not None else "the plugin is not active"
        raise UnsupportedError(f"{request.model}: our kernel computes none of its layers: {why}")
    plain = weight_format(PLAIN)
    compute = plain.compute

    def observed(weights: KernelWeights, call: ExpertsCall) -> None:
        compute(weights, call)
        layer = session.layer_at(weights.w13.data_ptr())
        assert layer.decoder_layer is not None, f"{layer.name}: no decoder layer"
        observe(layer.decoder_layer, weights, call)

    # After vLLM's warm-up, which runs on dummy tokens.
    plain.compute = observed
    # Else the op takes a call that it knows to the kernel without `compute`.
    plain.read_as_held = False
    prompts: Any = [{"prompt_token_ids": tokens[at : at + _WINDOW]} for at in range(0, len(tokens), _WINDOW)]
    engine.generate(prompts, vllm.SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    return len(tokens)
