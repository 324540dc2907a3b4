"""The record of `moe-optimizer bench --engine embedded --ablate`: what each optimization of that engine is worth.

    python benchmarks/engine/ablation.py examples/tiny-moe --dtype float32 [--write]
    python benchmarks/engine/ablation.py qwen3-moe-0.3b --num-requests 16    # a shape of workload.py, random weights

The naive loop computes the whole text again for each token, one request after the other. Each rung runs in a process
of its own, `--turns` times, and rungs that a device lacks are left out. A rung whose outputs differ from the naive
loop's is an error, except behind an optimization that changes rounding (fused experts, compile, CUDA graphs, FP8): the
share of equal tokens is shown. The first two rungs run on `--naive-requests` of the requests, as speed per token does
not depend on how many.

With --write the record is written after every rung. One that was cut off, by `--limit-s` or by the machine, is
`unfinished`, and the same command on the same day and sources goes on where it ended.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.engine.workload import model_folder  # noqa: E402
from benchmarks.record import (  # noqa: E402
    cpu_name,
    cpu_slug,
    gpu_environment,
    head,
    host,
    packages,
    parser_of,
    record_path,
    write_record,
)
from moe_optimizer.measure.ablation.run import Climb, render, run_ablation  # noqa: E402
from moe_optimizer.measure.ablation.rungs import AblationSettings, Rung  # noqa: E402
from moe_optimizer.measure.process import MeasurementError  # noqa: E402
from moe_optimizer.plan.json_codec import decode, encode  # noqa: E402


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
    parser.add_argument("--limit-s", type=float, help="end after so many seconds, with what was found")
    args = parser.parse_args()
    left_out = ("write", "commit", "limit_s")
    settings: dict[str, Any] = {name: value for name, value in vars(args).items() if name not in left_out}
    begun = time.monotonic()
    import torch

    on_gpu = args.device.startswith("cuda") or (args.device == "auto" and torch.cuda.is_available())
    machine = torch.cuda.get_device_name().split()[1].lower() if on_gpu else cpu_slug(cpu_name())
    subject = f"engine_ablation_{Path(args.model).name}"
    environment = {**host(os.getloadavg()[0]), **(gpu_environment() if on_gpu else {})}
    record: dict[str, Any] = {
        **head("what each optimization of the embedded engine adds, from a naive loop up", args.commit),
        "environment": {**environment, "packages": packages("torch", "transformers")},
        "settings": settings,
        "rungs": [],
    }
    climb = _climbed(record_path(record["date"], machine, subject), record) if args.write else Climb()

    def keep(**unfinished: Any) -> None:
        if args.write:
            write_record({**record, "rungs": encode(climb.rungs), **unfinished}, machine, subject)

    with tempfile.TemporaryDirectory() as folder:
        name, load_format = model_folder(args.model, Path(folder))
        values: dict[str, Any] = {**settings, "model": name, "load_format": load_format, "on_gpu": on_gpu}
        values |= {each: tuple(values[each]) for each in ("input_len", "output_len")}
        result = run_ablation(
            AblationSettings(**values),
            log_folder=Path(folder),
            on_step=lambda _, text: print(f"{time.monotonic() - begun:.0f} s: {text}", file=sys.stderr, flush=True),
            climb=climb,
            on_rung=lambda: keep(unfinished={"outputs": climb.outputs}),
            limit_s=None if args.limit_s is None else args.limit_s - (time.monotonic() - begun),
        )
    print(render(result))
    keep()


def _climbed(path: Path, record: dict[str, Any]) -> Climb:
    """Return how far the record that was cut off has come; one of other settings or sources has come nowhere."""
    if not path.exists():
        return Climb()
    before = json.loads(path.read_text(encoding="utf-8"))
    same = all(before.get(name) == encode(record[name]) for name in ("commit", "dirty", "settings"))
    if "unfinished" not in before or not same:
        return Climb()
    return Climb([decode(Rung, each, origin=path.name) for each in before["rungs"]], before["unfinished"]["outputs"])


if __name__ == "__main__":
    try:
        main()
    except MeasurementError as error:
        sys.exit(f"error: {error}")
