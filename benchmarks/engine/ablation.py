"""The record of `moe-optimizer bench --engine embedded --ablate`: what each optimization of that engine is worth.

    python benchmarks/engine/ablation.py examples/tiny-moe --dtype float32 [--write]
    python benchmarks/engine/ablation.py qwen3-moe-0.3b --num-requests 16    # a shape of workload.py, random weights

The naive loop computes the whole text again for each token, one request after the other. Each rung runs in a process
of its own, `--turns` times, and rungs that a device lacks are left out. A rung whose outputs differ from the naive
loop's is an error, except behind an optimization that changes rounding (fused experts, compile, CUDA graphs, FP8): the
share of equal tokens is shown. The first two rungs run on `--naive-requests` of the requests, as speed per token does
not depend on how many.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.engine.workload import model_folder  # noqa: E402
from benchmarks.record import cpu_name, cpu_slug, gpu_environment, head, host, packages, parser_of, write_record  # noqa: E402
from moe_optimizer.measure.ablation.run import render, run_ablation  # noqa: E402
from moe_optimizer.measure.ablation.rungs import AblationSettings  # noqa: E402
from moe_optimizer.plan.json_codec import encode  # noqa: E402


def main() -> None:
    """Climb, print a table, and with --write store a record."""
    parser = parser_of(__doc__, write=True, commit=True)
    parser.add_argument("model", help="folder, or a shape of workload.py")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--naive-requests", type=int, default=4)
    parser.add_argument("--input-len", type=int, nargs=2, default=(16, 64), metavar=("LEAST", "MOST"))
    parser.add_argument("--output-len", type=int, nargs=2, default=(16, 64), metavar=("LEAST", "MOST"))
    parser.add_argument("--shared", type=int, default=32, help="tokens that all prompts begin with")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    settings: dict[str, Any] = {name: value for name, value in vars(args).items() if name not in ("write", "commit")}
    import torch

    load_before = os.getloadavg()[0]
    on_gpu = args.device.startswith("cuda") or (args.device == "auto" and torch.cuda.is_available())
    with tempfile.TemporaryDirectory() as folder:
        name, load_format = model_folder(args.model, Path(folder))
        values: dict[str, Any] = {**settings, "model": name, "load_format": load_format, "on_gpu": on_gpu}
        values |= {each: tuple(values[each]) for each in ("input_len", "output_len")}
        result = run_ablation(
            AblationSettings(**values),
            log_folder=Path(folder),
            on_step=lambda _, text: print(text, file=sys.stderr, flush=True),
        )
    print(render(result))
    record = {**head("what each optimization of the embedded engine adds, from a naive loop up", args.commit),
              "environment": {**host(load_before), **(gpu_environment() if on_gpu else {}),
                              "packages": packages("torch", "transformers")},
              "settings": settings, "rungs": encode(result.rungs)}  # fmt: skip
    if args.write:
        machine = torch.cuda.get_device_name().split()[1].lower() if on_gpu else cpu_slug(cpu_name())
        write_record(record, machine, f"engine_ablation_{Path(args.model).name}")


if __name__ == "__main__":
    main()
