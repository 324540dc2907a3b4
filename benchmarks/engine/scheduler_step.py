"""Time of scheduler and block manager in a step of decodes: `schedule` and `commit`, without a model.

    python benchmarks/engine/scheduler_step.py [--sequences 256] [--write]

Sequences of different lengths, so that about one in sixteen needs a block at every step. Thread time, in which other
processes' turns on the processor do not count. The first steps, which compute the prompts, are left out.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import cpu_name, cpu_slug, head, host, parser_of, write_record  # noqa: E402
from moe_optimizer.engine.block_manager import BlockManager  # noqa: E402
from moe_optimizer.engine.sampling_params import SamplingParams  # noqa: E402
from moe_optimizer.engine.scheduler import Scheduler  # noqa: E402
from moe_optimizer.engine.sequence import SequenceGroup  # noqa: E402

_STEPS = 400
_FIRST = 5


def main() -> None:
    """Measure, print, and with --write store a record."""
    parser = parser_of(__doc__, write=True, commit=True)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    turns = [_step_times_us(args.sequences) for _ in range(args.turns)]
    medians = [statistics.median(times) for times in turns]
    print(f"{statistics.median(medians):.1f} us a step of {args.sequences} decodes; turns {medians}")
    record = {
        **head("thread time of the engine's scheduler and block manager in one step of decodes", args.commit),
        "environment": host(load_before),
        "sequences": args.sequences,
        "steps_per_turn": _STEPS - _FIRST,
        "median_us_of_turns": medians,
        "p90_us_of_turns": [sorted(times)[len(times) * 9 // 10] for times in turns],
    }
    if args.write:
        write_record(record, cpu_slug(cpu_name()), "engine_scheduler_step")


def _step_times_us(count: int) -> list[float]:
    scheduler = Scheduler(BlockManager(count * 80), max_num_seqs=count, max_num_batched_tokens=256 * count)
    params = SamplingParams(max_tokens=_STEPS + 1)
    for number in range(count):
        prompt = list(range(number, number + 100 + number % 37))
        group = SequenceGroup(
            request_id=str(number), prompt=None, prompt_token_ids=prompt, params=params, arrival=number,
            max_num_tokens=len(prompt) + _STEPS + 1,
        )  # fmt: skip
        scheduler.add(group.sequences[0])
    times = []
    for _ in range(_STEPS):
        begun = time.thread_time_ns()
        step = scheduler.schedule()
        scheduler.commit(step)
        times.append((time.thread_time_ns() - begun) / 1e3)
        for sequence in step.sampled:
            sequence.token_ids.append(7)
    return times[_FIRST:]


if __name__ == "__main__":
    main()
