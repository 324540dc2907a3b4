"""Measures what FP8 costs on a GPU: perplexity of a small trained model in BF16 and with each way of FP8.

All sides are served at the same time on one GPU, which changes no result. A side with a kernel of ours has a made-up
table of speeds by which that kernel wins at every number of tokens; the record has how often each kernel ran.

    python benchmarks/serving/fp8_quality.py --out FILE

The bundled model's sums are one block of 128 long. --model DIR: another that scripts/train_tiny_moe.py trained.
"""

from __future__ import annotations

import collections
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from perplexity import perplexity  # noqa: E402

from benchmarks.record import gpu_environment, head, parser_of  # noqa: E402
from benchmarks.serving.plans import free_port, plan_here  # noqa: E402
from moe_optimizer.inspection.hardware_probe import probe_hardware  # noqa: E402
from moe_optimizer.inspection.kernel_inventory import read_kernel_inventory  # noqa: E402
from moe_optimizer.inspection.model_inspector import ModelInspector  # noqa: E402
from moe_optimizer.inspection.vllm_installation import find_vllm  # noqa: E402
from moe_optimizer.launcher.launch import running  # noqa: E402
from moe_optimizer.plan.decision import Wish  # noqa: E402
from moe_optimizer.plan.plan import Plan  # noqa: E402
from moe_optimizer.profiles import load_profile  # noqa: E402
from moe_optimizer.profiles.schema import Profile  # noqa: E402
from moe_optimizer.proof.record import read_proofs  # noqa: E402
from moe_optimizer.proof.verdict import model_holders  # noqa: E402
from moe_optimizer.specs.kernel_speeds import KernelSpeeds, LayerShape, SpeedTables, TokenSpeeds  # noqa: E402
from moe_optimizer.specs.software import KernelInventory, VllmInstallation  # noqa: E402

TINY_MOE = ROOT / "examples" / "tiny-moe"
READY_TIMEOUT_S = 400.0
MAX_TOKENS = 8192
"""Of a step, up to which the table says that our kernel wins."""


@dataclass(frozen=True)
class Side:
    """One way of computing."""

    fp8: dict[str, Any] | None
    """Settings of the pass; None: BF16."""
    kernel: str | None = None
    """Ours, for every number of tokens; None: vLLM's."""


SIDES = {
    "BF16": Side(None),
    "FP8 experts, vLLM's kernel": Side({"linears": "off"}),
    # Every expert's tokens in BF16, the weights in FP8.
    "FP8 experts, ours, BF16 tokens": Side({"linears": "off"}, "grouped-fp8_weights-n32"),
    # Tokens in FP8 too, with one scale for each of them.
    "FP8 experts, ours, FP8 tokens": Side({"linears": "off"}, "grouped-fp8-n64"),
    # The tensor cores add along all of K.
    "the same in wide tiles": Side({"linears": "off"}, "grouped-fp8-n144"),
    "FP8 experts and linears, vLLM": Side({}),
    "the same, our quantizer": Side({"quantizer": "builtin"}),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the record."""
    parser = parser_of(__doc__, commit=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=TINY_MOE, help="default: examples/tiny-moe")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(SIDES)) as pool:
        started = {
            name: pool.submit(served, options.model, plan_of(options.model, side), Path(folder) / str(number))
            for number, (name, side) in enumerate(SIDES.items())
        }
        results = {name: each.result() for name, each in started.items()}
    for name, result in results.items():
        change = result["perplexity"] / results["BF16"]["perplexity"] - 1
        print(f"{name:32}{result['perplexity']:>10.4f}{change:>+9.3%}  {result['calls_by_kernel'] or ''}")
    options.out.write_text(json.dumps(make_record(results, options.model, options.commit), indent=1) + "\n")
    return 0


def plan_of(model: Path, side: Side) -> Plan:
    """Return the balanced profile's plan for the model on this GPU, with only what the side needs."""
    vllm, kernels = find_vllm(), read_kernel_inventory()
    if vllm is None or vllm.device != "cuda":
        sys.exit("needs a vLLM for CUDA")
    tables = () if side.kernel is None else (_winning(side.kernel, model, vllm, kernels),)
    wished = {"fp8": side.fp8 is not None, "flash_dmoe": side.kernel is not None}
    return plan_here(
        model,
        "--enforce-eager", "--attention-backend", "FLASH_ATTN", "--gpu-memory-utilization", "0.1",
        # Without it vLLM measures what is free, and stops when another server gives some back meanwhile.
        "--kv-cache-memory-bytes", "512M",
        kernel_speeds=SpeedTables(tables=tables),
            profile=_profile(side.fp8 or {}),
            wishes={name: (Wish.ON if wish else Wish.OFF, "benchmark") for name, wish in wished.items()},
            required=frozenset(name for name, wish in wished.items() if wish),
            dtype="bfloat16",
            port=free_port(),
            max_model_len=520,
            batch_size=8,
            num_gpus=1,
    )  # fmt: skip


def _profile(fp8: dict[str, Any]) -> Profile:
    data = load_profile("balanced").model_dump()
    data["passes"]["fp8"] |= fp8
    return Profile.model_validate(data)


def _winning(kernel: str, folder: Path, vllm: VllmInstallation, kernels: KernelInventory) -> KernelSpeeds:
    """Return a table for the model's layers in which one kernel wins everywhere."""
    gpu, model = probe_hardware().gpu, ModelInspector().inspect(folder)
    assert gpu is not None, "vLLM for CUDA, and no GPU"
    rows = (TokenSpeeds(tokens=tokens, stock_us=100.0, ours_us={kernel: 10.0}) for tokens in (1, MAX_TOKENS))
    return KernelSpeeds(
        device=gpu.name,
        weights="fp8_block",
        shape=LayerShape(
            hidden_size=model.hidden_size,
            intermediate_size=model.moe_intermediate_size,
            num_experts=model.num_experts,
            num_global_experts=model.num_experts,
            top_k=model.top_k,
        ),
        kernel_hash=kernels.cuda_sources,
        vllm=vllm.version.partition("+")[0],
        driver="",
        rows=tuple(rows),
        source="made up",
    )


def served(model: Path, plan: Plan, run_dir: Path) -> dict[str, Any]:
    """Serve a plan and return the perplexity, and how often each expert kernel ran where ours are on."""
    text = (model / "heldout.txt").read_text(encoding="utf-8")
    with running(plan, run_dir=run_dir, ready_timeout_s=READY_TIMEOUT_S) as info:
        value = perplexity(info.base_url, info.model, text)
    # Written a last time when the server ended: with what the requests ran.
    passes = [proof.passes for proof in model_holders(read_proofs(run_dir))]
    calls: collections.Counter[str] = collections.Counter()
    for layer in (layer for each in passes if "flash_dmoe" in each for layer in each["flash_dmoe"].layers):
        calls.update(layer.calls_by_kernel)
    return {
        "perplexity": value,
        "calls_by_kernel": dict(calls),
        "quantizer": [each["fp8"].kernel for each in passes if "fp8" in each],
        "serve_args": list(plan.serve_args.words),
        "plan_digest": plan.digest,
        "versions": dict(info.proofs[0].versions) if info.proofs else {},
    }


def make_record(results: dict[str, dict[str, Any]], model: Path, commit: str | None) -> dict[str, Any]:
    """Return the results with what they were measured on."""
    return {
        **head("perplexity of a small trained model in FP8 and in BF16, served by vLLM on one GPU", commit),
        "environment": gpu_environment(),
        "workload": {
            "model": "examples/tiny-moe" if model == TINY_MOE else "trained by scripts/train_tiny_moe.py",
            "metrics": {
                name: json.loads((model / "metrics.json").read_text())[name]
                for name in ("model", "training", "heldout")
            },
            "perplexity": "heldout.txt of the model, windows of 511 tokens, each token predicted once",
        },
        "results": results,
    }


if __name__ == "__main__":
    sys.exit(main())
