"""Times a tuned Triton configuration beside vLLM's own, on one GPU, with other inputs than it was tuned on.

    python benchmarks/ops/bench_tuned_configs.py CONFIG.json [--tokens 1,8,64] --out RECORD.json

CONFIG.json is a file that `moe-optimizer tune` wrote; its .tuning.json must lie beside it. For every number of tokens
both rows run in turns, 25 rounds, as CUDA graphs with cold weights. The sizes between the tuned ones show that nothing
got slower there: both sides then run the same row, and the ratio is the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent), str(ROOT / "benchmarks")]

TOKENS = (1, 2, 3, 8, 12, 24, 32, 64, 100, 256, 512, 700, 1024, 2048, 4096, 8192)


def main() -> int:
    """Measure every size and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--commit", help="for the record, where the checkout came without its .git; +dirty when it is")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    # Without the file: its folder must not be where vLLM looks.
    os.environ.pop("VLLM_TUNED_CONFIG_FOLDER", None)
    from bench_cuda_timing import device_facts
    from record import head

    from moe_optimizer.inspection.tuned_configs import nearest, read_rows, state_path
    from moe_optimizer.measure.triton_tuning.bench import TritonBench
    from moe_optimizer.measure.triton_tuning.tune import TuneRequest

    tuning = json.loads(state_path(options.config).read_text(encoding="utf-8"))
    identity = tuning["identity"]
    request = TuneRequest(
        **{name: identity[name] for name in ("shape", "num_experts", "top_k", "hidden_size", "dtype")},
        tokens=(), budget_s=0.0, folder="", shipped_folder="",
    )  # fmt: skip
    bench, rows = TritonBench(request.experts, seed=77), read_rows(options.config)
    sizes = []
    for tokens in map(int, options.tokens.split(",")):
        stock, tuned = bench.stock_row(tokens), nearest(rows, tokens)
        samples = bench.interleaved_us([stock, tuned], tokens, rounds=25)
        assert samples is not None, f"a row of {tokens} tokens does not run"
        ratios = [left / right for left, right in zip(*samples, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        sizes.append(
            {
                "tokens": tokens,
                "same_row": stock == tuned,
                "stock": stock,
                "tuned": tuned,
                "stock_us": statistics.median(samples[0]),
                "tuned_us": statistics.median(samples[1]),
                "ratio": statistics.median(ratios),
                "ratio_quartiles": [low, high],
                "samples_us": {"stock": samples[0], "tuned": samples[1]},
            }
        )
        print(f"{tokens:>6} {sizes[-1]['stock_us']:>9.1f} us {sizes[-1]['tuned_us']:>9.1f} us "
              f"{sizes[-1]['ratio']:.3f}x{'  same row' if stock == tuned else ''}", flush=True)  # fmt: skip
        bench.forget(tokens)
    record = {
        **head("tuned Triton configuration beside vLLM's own", options.commit),
        "file": options.config.name,
        "experts": identity,
        "tuning": list(tuning["verdicts"].values()),
        "rows_tried": {tokens: len(tried) for tokens, tried in tuning["measured"].items()},
        "environment": device_facts(),
        "sizes": sizes,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
