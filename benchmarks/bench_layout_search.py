"""Times the search over layouts for 1 to 512 GPUs, in processor time of one process.

python benchmarks/bench_layout_search.py [--write]
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.record import cpu_name, cpu_slug, head, host, parser_of, write_record  # noqa: E402
from moe_optimizer.layouts.search import Limits, rank  # noqa: E402
from tests.builders import deepseek_v3, qwen3_30b_a3b  # noqa: E402
from tests.unit.layouts.questions import question  # noqa: E402

REPETITIONS = 7


def main() -> int:
    """Print a line for each model and number of GPUs, and write the record."""
    options = parser_of(__doc__, write=True).parse_args()
    rows = []
    for model in (qwen3_30b_a3b(), deepseek_v3()):
        for gpus in (1, 8, 64, 512):
            asked = question(model, gpus=min(8, gpus), machines=max(1, gpus // 8), hardware="h200", clients=64 * gpus)
            samples, found = [], rank(asked, "balanced", Limits())
            for _ in range(REPETITIONS):
                started = time.process_time()
                rank(asked, "balanced", Limits())
                samples.append(time.process_time() - started)
            count = len(found.within) + len(found.do_not_fit)
            rows.append({"model": model.name, "gpus": gpus, "layouts": count, "s": samples})
            print(f"{model.name}, {gpus} GPUs: {count} layouts in {statistics.median(samples):.3f} s")
    if options.write:
        what = "the search over layouts: processor time in s of one call"
        record = {**head(what), "environment": host(os.getloadavg()[0]), "rows": rows}
        write_record(record, cpu_slug(cpu_name()).split("-")[0], "layout_search")
    return 0


if __name__ == "__main__":
    sys.exit(main())
