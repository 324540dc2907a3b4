"""Memory, descriptors and threads of a server under mixed load with aborts and disconnects.

    python benchmarks/soak/mixed_load.py [--minutes 60] [--clients 6] [--write]

Each client sends one request after the other, chosen at random: plain, streamed, chat, several choices, a long prompt;
some are refused by the server, and of the others some are left in the middle of the answer or before it. Every ten
seconds each process of the run is looked at. The first third warms up caches; over the rest the figures must be flat:
at its end no more threads and descriptors than at its begin but for those of requests, and memory within 5 %. At the
end no request may be left in the server.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import cpu_name, cpu_slug, head, host, parser_of, write_record  # noqa: E402
from benchmarks.soak.served import ServedRun, served  # noqa: E402
from tests.free_ports import free_port  # noqa: E402

_SAMPLE_S = 10.0
_MEMORY_GROWTH = 0.05
_KINDS = {"plain": 6, "streamed": 6, "chat": 3, "choices": 2, "long": 2, "refused": 1, "left": 4, "left_streamed": 4}
"""Kind of request -> how often, of all."""


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the load, print the figures, and with --write store a record.

    Raises:
        AssertionError: something is not flat, a request failed or was left over.
    """
    parser = parser_of(__doc__, write=True, commit=True)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=6)
    args = parser.parse_args(arguments)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        figures = _soak(Path(folder), args.minutes * 60, args.clients)
    print(json.dumps({key: value for key, value in figures.items() if key != "samples"}, indent=1))
    if args.write:
        record = {
            **head("mixed load with aborts and disconnects", args.commit),
            "environment": host(load_before),
            **figures,
        }
        write_record(record, cpu_slug(cpu_name()), "soak_mixed_load")
    assert not figures["failed"], figures["failed"]
    assert figures["left_in_the_server"] == 0, figures["left_in_the_server"]
    assert figures["exit_code"] == 0, figures["exit_code"]
    assert all(each["flat"] for each in figures["processes"].values()), figures["processes"]
    return figures


def _soak(folder: Path, seconds: float, clients: int) -> dict[str, Any]:
    port = free_port()
    with (folder / "stderr").open("w") as said, served(folder / "run", port, said) as run:
        titles = {str(process.pid): _title(process) for process in run.processes()}
        stop, counts = threading.Event(), Counter[str]()
        threads = [threading.Thread(target=_client, args=(seed, port, run, stop, counts)) for seed in range(clients)]
        for thread in threads:
            thread.start()
        begin = time.monotonic()
        samples = []
        while time.monotonic() - begin < seconds:
            time.sleep(_SAMPLE_S)
            if run.launcher.poll() is not None:
                stop.set()
                raise RuntimeError(f"it ended: {(folder / 'stderr').read_text(encoding='utf-8')[-2000:]}")
            samples.append({"at_s": round(time.monotonic() - begin), **_sample(run)})
        stop.set()
        for thread in threads:
            thread.join()
        left = _left(port)
    last = (folder / "stderr").read_text(encoding="utf-8").splitlines()[-1]
    return {
        "minutes": round(seconds / 60, 1),
        "clients": clients,
        "requests": dict(sorted(counts.items())),
        "failed": {name: count for name, count in counts.items() if name.startswith("failed")},
        "left_in_the_server": left,
        "exit_code": run.code,
        "last_line": last,
        "processes": {f"{titles.get(pid, 'other')} {pid}": figures for pid, figures in _judged(samples)},
        "samples": samples,
    }


def _title(process: psutil.Process) -> str:
    words = [word for word in process.cmdline() if "." in word or "::" in word]
    return Path(words[-1 if "::" in words[-1] else 0]).name if words else process.name()


def _sample(run: ServedRun) -> dict[str, dict[str, float]]:
    looked = {}
    for process in run.processes():
        try:
            with process.oneshot():
                memory = process.memory_full_info().uss / 2**20
                figures = {"mib": round(memory, 1), "fds": process.num_fds(), "threads": process.num_threads()}
        except psutil.Error:
            continue
        looked[str(process.pid)] = figures
    return looked


def _judged(samples: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield for each process its figures after the first third of the time and at the end."""
    steady = samples[len(samples) // 3 :]
    part = max(1, len(steady) // 4)
    for pid in sorted(set.intersection(*(set(sample) for sample in samples)) - {"at_s"}, key=int):
        known = [sample[pid] for sample in steady]
        first, last = (
            {name: statistics.median(each[name] for each in some) for name in known[0]}
            for some in (known[:part], known[-part:])
        )
        # Of descriptors and threads the least counts: each open connection adds some for a moment.
        least = [{name: min(each[name] for each in some) for name in some[0]} for some in (known[:part], known[-part:])]
        flat = last["mib"] <= first["mib"] * (1 + _MEMORY_GROWTH) + 1
        flat &= all(least[1][name] <= least[0][name] for name in ("fds", "threads"))
        yield pid, {"begin": first, "end": last, "flat": flat}


def _client(seed: int, port: int, run: ServedRun, stop: threading.Event, counts: Counter[str]) -> None:
    choice = random.Random(seed)
    while not stop.is_set():
        kind = choice.choices(list(_KINDS), list(_KINDS.values()))[0]
        try:
            _request(kind, choice, port, run.ready["model"])
            counts[kind] += 1
        except (OSError, http.client.HTTPException, AssertionError) as error:
            counts[f"failed: {kind}: {type(error).__name__}: {error}"[:200]] += 1


def _request(kind: str, choice: random.Random, port: int, model: str) -> None:
    words = 400 if kind == "long" else choice.randint(1, 60)
    prompt = " ".join(choice.choice(("def", "return", "self", "import", "(x)", "for")) for _ in range(words))
    body: dict[str, Any] = {"model": model, "max_tokens": choice.randint(1, 48), "temperature": choice.choice((0, 1))}
    path = "/v1/completions"
    if kind == "chat":
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    body |= {"choices": {"n": 3, "temperature": 1}, "refused": {"max_tokens": -1}}.get(kind, {})
    if kind in ("left", "left_streamed"):
        body |= {"max_tokens": 200, "ignore_eos": True}
    body["stream"] = kind in ("streamed", "left_streamed")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        if kind == "left":
            time.sleep(choice.random())
            return
        answer = connection.getresponse()
        expected = 400 if kind == "refused" else 200
        assert answer.status == expected, f"{answer.status}: {answer.read()[:120]!r}"
        if kind == "left_streamed":
            answer.read(choice.randint(1, 2000))
            return
        said = answer.read()
        assert kind != "streamed" or said.rstrip().endswith(b"[DONE]"), "the stream was cut off"
    finally:
        connection.close()


def _left(port: int) -> float:
    """Return how many requests the server still has, half a minute after the last one at most."""
    left = -1.0
    for _ in range(30):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
            lines = page.read().decode().splitlines()
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting{")
        left = sum(float(line.split()[-1]) for line in lines if line.startswith(names))
        if not left:
            break
        time.sleep(1)
    return left


if __name__ == "__main__":
    main()
