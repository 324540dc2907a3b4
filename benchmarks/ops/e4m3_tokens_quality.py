"""Measures what formats of experts and E4M3 products cost: perplexity, KL and agreement of the next token, in FP32.

    python benchmarks/ops/e4m3_tokens_quality.py --write                     the bundled model, on the CPU
    python benchmarks/ops/e4m3_tokens_quality.py --model DIR --out FILE      another one, on a GPU where there is one

Weights and tokens are rounded as our kernels for many tokens round them: the layer's input with a scale per token, the
input of the second product with one per token and 128 columns, both to E4M3. All else stays FP32, so what is seen is
the rounding alone. MXFP4 weights are exact in E4M3; INT4 weights are multiplied in BF16 only. Against the weights as
they are, on the model's held-out text and on the corpus of `moe-optimizer quality`. DIR is a folder of
`scripts/train_judged_moe.py`; FILE is written after each format.
"""

from __future__ import annotations

import json
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

from benchmarks.record import cpu_slug, gpu_environment, head, host, packages, parser_of, write_record  # noqa: E402
from moe_optimizer.files import write_atomically  # noqa: E402
from moe_optimizer.ops.fp8_quant import dequantize_fp8, quantize_fp8  # noqa: E402
from moe_optimizer.ops.int4 import GROUPS, dequantize_int4, quantize_int4  # noqa: E402
from moe_optimizer.ops.mxfp4 import dequantize_mxfp4, quantize_mxfp4  # noqa: E402

TINY_MOE = ROOT / "examples" / "tiny-moe"
CORPUS_WINDOWS = 3  # of each text
WINDOWS_AT_ONCE = 8
E4M3_MOST = 448.0
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8": lambda matrix: dequantize_fp8(*quantize_fp8(matrix[None], granularity="block"))[0],
    "mxfp4": lambda matrix: dequantize_mxfp4(*quantize_mxfp4(matrix)),
}
IN_BF16: dict[str, Callable[[Tensor], Tensor]] = {
    f"int4-{group}": lambda matrix, group=group: dequantize_int4(quantize_int4(matrix, group)) for group in GROUPS
}
"""Formats whose kernels round no tokens."""


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
    return model(windows).logits[:, :-1].log_softmax(-1).flatten(0, 1)


def measured(folder: Path, windows: dict[str, Tensor], on_format: Callable[[dict[str, Any]], None]) -> None:
    """Report, after each way to compute the experts, what was found of each text."""
    device = "cuda" if torch.cuda.is_available() and folder != TINY_MOE else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)
    modules = [layer.mlp.experts for layer in model.model.layers]
    stored = [{name: value.detach().clone() for name, value in module.named_parameters()} for module in modules]
    parts = {text: [each.to(device) for each in all_of.split(WINDOWS_AT_ONCE)] for text, all_of in windows.items()}
    reference = {text: [log_probabilities(model, each).cpu() for each in all_of] for text, all_of in parts.items()}
    found: dict[str, dict[str, dict[str, float]]] = {text: {} for text in windows}
    for name, convert in {"bf16": None, **WEIGHTS, **IN_BF16}.items():
        for module, values in zip(modules, stored, strict=True):
            for each, value in values.items():
                if convert is not None:
                    converted = torch.stack([convert(matrix.bfloat16()).float() for matrix in value])
                    module.get_parameter(each).data.copy_(converted)
        for rounds in (False, True) if name in WEIGHTS else (False,):
            for module in modules:
                module.forward = partial(experts, module, rounds=rounds)
            for text, all_of in parts.items():
                found[text][name + (", E4M3 tokens" if rounds else "")] = compared(model, all_of, reference[text])
        on_format(found)


def compared(model: Any, parts: list[Tensor], reference: list[Tensor]) -> dict[str, float]:
    """Return the perplexity, and how far the distributions are from those of the reference."""
    surprises, divergences, agreements = [], [], []
    for windows, at in zip(parts, reference, strict=True):
        logs, before = log_probabilities(model, windows), at.to(windows.device)
        surprises.append(-logs.gather(1, windows[:, 1:].reshape(-1, 1)))
        divergences.append((before.exp() * (before - logs)).sum(-1))
        agreements.append((before.argmax(-1) == logs.argmax(-1)).float())
    divergence = torch.cat(divergences)
    return {
        "perplexity": math.exp(torch.cat(surprises).mean()),
        "kl_mean": float(divergence.mean()),
        "kl_p99": float(divergence.quantile(0.99)),
        "top1_agreement": float(torch.cat(agreements).mean()),
    }


def texts(folder: Path) -> dict[str, Tensor]:
    """Return the windows of 512 tokens of each text."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    full = lambda text: [each for each in windows_of(ids(text), ids(START)) if len(each) == 512]  # noqa: E731
    read = partial(Path.read_text, encoding="utf-8")
    corpus = [full(read(path))[:CORPUS_WINDOWS] for path in sorted((ROOT / "configs" / "corpus").glob("*.txt"))]
    return {
        "heldout": torch.tensor(full(read(folder / "heldout.txt"))),
        "corpus": torch.tensor([each for windows in corpus for each in windows]),
    }


def main() -> int:
    """Measure, print a table, and keep the record."""
    parser = parser_of(__doc__, write=True, commit=True)
    parser.add_argument("--model", type=lambda text: Path(text).resolve(), default=TINY_MOE, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="FILE", help="for the record of another model than the bundled one")
    options = parser.parse_args()
    bundled = options.model == TINY_MOE
    if options.write and not bundled:
        parser.error("--write: got --model too, expected --out: the record it would write is the bundled model's")
    machine, windows = host(os.getloadavg()[0]), texts(options.model)
    environment = machine if bundled else gpu_environment()
    trained = {} if bundled else json.loads((options.model / "metrics.json").read_text(encoding="utf-8"))
    record: dict[str, Any] = {
        **head("a model's experts in several formats, tokens as they are and in E4M3, in FP32", options.commit),
        "environment": {**environment, "packages": packages("torch", "transformers")},
        **({} if bundled else {"model": trained}),
        "positions": {text: each[:, 1:].numel() for text, each in windows.items()},
    }

    def keep(found: dict[str, Any]) -> None:
        record["results"] = found
        if options.out:
            write_atomically(options.out, json.dumps(record, indent=1) + "\n")

    measured(options.model, windows, keep)
    for text, ways in record["results"].items():
        for name, numbers in ways.items():
            print(f"{text:9}{name:22}" + "".join(f"{key} {value:.5f}  " for key, value in numbers.items()))
    if options.write:
        write_record(record, cpu_slug(str(machine["device"])).split("-")[0], "e4m3_tokens_quality")
    return 0


if __name__ == "__main__":
    sys.exit(main())
