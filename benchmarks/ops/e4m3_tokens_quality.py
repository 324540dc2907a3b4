"""Measures what E4M3 products cost beside BF16 ones: the bundled model, experts in MXFP4 or FP8, in FP32 on the CPU.

    python benchmarks/ops/e4m3_tokens_quality.py --write

Weights and tokens are rounded as our kernels for many tokens round them: the layer's input with a scale per token, the
input of the second product with one per token and 128 columns, both to E4M3. All else stays FP32, so what is seen is
the rounding alone. MXFP4 weights are exact in E4M3. Perplexity, KL and agreement of the next token against the weights
as they are, on the model's held-out text and on the corpus of `moe-optimizer quality`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402
from perplexity import START, windows_of  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from benchmarks.record import cpu_slug, head, host, packages, parser_of, write_record  # noqa: E402
from moe_optimizer.ops.fp8_quant import dequantize_fp8, quantize_fp8  # noqa: E402
from moe_optimizer.ops.mxfp4 import dequantize_mxfp4, quantize_mxfp4  # noqa: E402

TINY_MOE = ROOT / "examples" / "tiny-moe"
CORPUS_WINDOWS = 3  # of each text
E4M3_MOST = 448.0
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8": lambda matrix: dequantize_fp8(*quantize_fp8(matrix[None], granularity="block"))[0],
    "mxfp4": lambda matrix: dequantize_mxfp4(*quantize_mxfp4(matrix)),
}


def rounded(rows: Tensor, columns: int) -> Tensor:
    """Return [n, K] with each run of `columns` rounded to E4M3 under a scale of its own."""
    runs = rows.unflatten(-1, (-1, columns))
    scale = runs.abs().amax(-1, keepdim=True).clamp(min=1e-30) / E4M3_MOST
    return ((runs / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def experts(module: Any, x: Tensor, ids: Tensor, shares: Tensor, *, rounds: bool) -> Tensor:
    """Compute transformers' Qwen3MoeExperts, with `rounds` on rounded tokens."""
    out, tokens = torch.zeros_like(x), rounded(x, x.shape[-1]) if rounds else x
    for expert in range(module.num_experts):
        rows, slots = torch.nonzero(ids == expert, as_tuple=True)
        gate, up = (tokens[rows] @ module.gate_up_proj[expert].T).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up
        hidden = rounded(hidden, 128) if rounds else hidden
        out.index_add_(0, rows, hidden @ module.down_proj[expert].T * shares[rows, slots, None])
    return out


@torch.no_grad()
def log_probabilities(model: Any, windows: Tensor) -> Tensor:
    """Return those of each window's next tokens [n, V]."""
    return torch.cat([model(each).logits[:, :-1].log_softmax(-1).flatten(0, 1) for each in windows.split(8)])


def measured(windows: dict[str, Tensor]) -> dict[str, dict[str, dict[str, float]]]:
    """Return, for each text and each way to compute the experts, what is found."""
    model = AutoModelForCausalLM.from_pretrained(TINY_MOE, dtype=torch.float32).eval()
    modules = [layer.mlp.experts for layer in model.model.layers]
    stored = [{name: value.detach().clone() for name, value in module.named_parameters()} for module in modules]
    reference = {text: log_probabilities(model, each) for text, each in windows.items()}
    found: dict[str, dict[str, dict[str, float]]] = {text: {} for text in windows}
    for name, convert in {"bf16": None, **WEIGHTS}.items():
        for module, values in zip(modules, stored, strict=True):
            for each, value in values.items():
                if convert is not None:
                    converted = torch.stack([convert(matrix.bfloat16()) for matrix in value])
                    module.get_parameter(each).data.copy_(converted)
        for rounds in (False, True) if convert is not None else (False,):
            for module in modules:
                module.forward = partial(experts, module, rounds=rounds)
            for text, each in windows.items():
                logs, targets = log_probabilities(model, each), each[:, 1:].flatten()
                before = reference[text]
                divergence = (before.exp() * (before - logs)).sum(-1)
                found[text][name + (", E4M3 tokens" if rounds else "")] = {
                    "perplexity": math.exp(-logs.gather(1, targets[:, None]).mean()),
                    "kl_mean": float(divergence.mean()),
                    "kl_p99": float(divergence.quantile(0.99)),
                    "top1_agreement": float((before.argmax(-1) == logs.argmax(-1)).float().mean()),
                }
    return found


def texts() -> dict[str, Tensor]:
    """Return the windows of 512 tokens of each text."""
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_MOE)
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    full = lambda text: [each for each in windows_of(ids(text), ids(START)) if len(each) == 512]  # noqa: E731
    read = partial(Path.read_text, encoding="utf-8")
    corpus = [full(read(path))[:CORPUS_WINDOWS] for path in sorted((ROOT / "configs" / "corpus").glob("*.txt"))]
    return {
        "heldout": torch.tensor(full(read(TINY_MOE / "heldout.txt"))),
        "corpus": torch.tensor([each for windows in corpus for each in windows]),
    }


def main() -> int:
    """Measure, print a table, and with --write store the record."""
    options = parser_of(__doc__, write=True).parse_args()
    machine, windows = host(os.getloadavg()[0]), texts()
    found = measured(windows)
    for text, ways in found.items():
        for name, numbers in ways.items():
            print(f"{text:9}{name:22}" + "".join(f"{key} {value:.5f}  " for key, value in numbers.items()))
    if options.write:
        record = {
            **head("the bundled model, experts in FP8 and MXFP4, tokens as they are and in E4M3, in FP32"),
            "environment": {**machine, "packages": packages("torch", "transformers")},
            "positions": {text: each[:, 1:].numel() for text, each in windows.items()},
            "results": found,
        }
        write_record(record, cpu_slug(str(machine["device"])).split("-")[0], "e4m3_tokens_quality")
    return 0


if __name__ == "__main__":
    sys.exit(main())
