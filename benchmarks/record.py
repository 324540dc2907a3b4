"""Describes the machine and commit of a record, and writes records."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"


def parser_of(description: str | None, *, write: bool = False, commit: bool = False) -> argparse.ArgumentParser:
    """Return a benchmark's command line, which has --write and --commit where they are asked for."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if write:
        parser.add_argument("--write", action="store_true", help=f"write a record to {RECORDS.relative_to(ROOT)}")
    if commit:
        parser.add_argument("--commit", help="for the record, if the checkout has no .git; ends in +dirty if it is")
    return parser


def head(what: str, commit: str | None = None) -> dict[str, Any]:
    """Return the first fields of a record: what was measured, when, with which command and sources."""
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return {"what": what, "date": date, "command": command_line(), **checkout(commit)}


def packages(*names: str) -> dict[str, str]:
    """Return the installed versions of distributions."""
    return {name: metadata.version(name) for name in names}


def checkout(named: str | None = None) -> dict[str, object]:
    """Return commit and dirty flag, both None where git cannot tell.

    Files that git does not track, and records, do not make a checkout dirty.

    Args:
        named: the commit, for a checkout that came without its .git; "+dirty" at the end when it is.
    """
    if named is not None:
        return {"commit": named.removesuffix("+dirty"), "dirty": named.endswith("+dirty")}
    sources = ("--", ".", ":(exclude)benchmarks/records")
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no", *sources)
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def command_line() -> list[str]:
    """Return how this benchmark was called, without where things lie on this machine: a path outside the checkout is
    its last part.
    """
    script = Path(sys.argv[0]).resolve()
    return ["python", _place(str(script)), *(_place(argument) for argument in sys.argv[1:])]


def _place(argument: str) -> str:
    flag, equals, value = argument.rpartition("=") if argument.startswith("--") else ("", "", argument)
    path = Path(value)
    if not path.is_absolute():
        return argument
    return f"{flag}{equals}{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}"


def system_name() -> str:
    """Return system, kernel version without the name of whoever built it, and C library: "Linux 6.8.0, glibc 2.39"."""
    version = re.match(r"[\d.]*\d", platform.release())
    return f"{platform.system()} {version[0] if version else ''}, {' '.join(platform.libc_ver())}"


def cpu_name() -> str:
    """Return the processor's name as /proc/cpuinfo has it."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def host(load_before: float) -> dict[str, object]:
    """Return what every record of this machine's processor says of it.

    Args:
        load_before: the load average before anything was measured.
    """
    return {
        "device": cpu_name(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_before": load_before,
        "system": system_name(),
        "python": platform.python_version(),
    }


def gpu_environment() -> dict[str, object]:
    """Return what every record of this machine's GPUs says of them; what cannot be found out is null."""
    from moe_optimizer.inspection.hardware_probe import probe_hardware

    hardware = probe_hardware()
    installed = {each.metadata["Name"].lower(): each.version for each in metadata.distributions()}
    return {
        "device": hardware.gpu.name if hardware.gpu else None,
        "gpus": hardware.num_gpus,
        "driver": hardware.driver_version,
        "cuda": hardware.cuda_version,
        "vllm": installed.get("vllm"),
        "torch": installed.get("torch"),
        "python": platform.python_version(),
    }


def environment() -> dict[str, object]:
    """Return what a record of servers says of this machine: of its GPUs, or of its processor where it has none."""
    from moe_optimizer.inspection.vllm_installation import find_vllm

    gpu = gpu_environment()
    if gpu["device"] is not None:
        return gpu
    found = find_vllm()
    return {**host(os.getloadavg()[0]), "vllm": found.version if found else None, "torch": gpu["torch"]}


def cpu_slug(name: str) -> str:
    """Return it for a file name: "Intel(R) Xeon(R) Platinum 8480C CPU @ 2.0GHz" -> "xeon-platinum-8480c"."""
    plain = re.sub(r"\((?:R|TM)\)|\bIntel\b|\bAMD\b|\bCPU\b|@.*|\d+-Core Processor|Processor", " ", name, flags=re.I)
    return re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-") or "cpu"


def record_path(date: str, machine: str, subject: str) -> Path:
    """Return where a record is stored: <date>_<machine>_<subject>.json."""
    return RECORDS / f"{date}_{machine}_{subject}.json"


def write_record(record: dict[str, Any], machine: str, subject: str) -> None:
    """Store a record that has its "date", and say where."""
    path = record_path(record["date"], machine, subject)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}")


@contextlib.contextmanager
def kept(facts: dict[str, Any], subject: str, *, out: Path | None, write: bool) -> Iterator[Callable[[], None]]:
    """Yield what writes the record of a kernel's benchmark; write it at the end of the block too, also where an error
    or SIGTERM ends it. A kernel that hangs lets no signal through: what was measured before it has to be written then.

    Args:
        facts: the record, which the block fills.
        subject: of a record in `RECORDS`.
        out: where it goes instead.
        write: whether it goes to `RECORDS` without `out`.
    """
    from moe_optimizer.files import write_atomically

    path = out
    if path is None and write:
        path = record_path(facts["date"], facts["environment"]["device"].split()[1].lower(), subject)

    def save() -> None:
        if path is not None:
            write_atomically(path, json.dumps(facts) + "\n")

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    try:
        yield save
    finally:
        signal.signal(signal.SIGTERM, before)
        save()
        if path is not None:
            print(f"wrote {path.name}")


def latest_record(subject: str) -> dict[str, Any] | None:
    """Return the latest record of a subject on a processor like this one; None: there is none."""
    paths = sorted(RECORDS.glob(f"*_{cpu_slug(cpu_name())}_{subject}.json"))
    return json.loads(paths[-1].read_text(encoding="utf-8")) if paths else None


def _git(*arguments: str) -> str | None:
    try:
        shown = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return shown.stdout.strip()
