"""Runs what benchmarks/jobs.yaml describes, as many jobs at once as the GPUs of this machine have room for.

    python benchmarks/jobs.py [JOB...] --out FOLDER [--gpus 0,1,2,3] [--total-s 560] [--file benchmarks/jobs.yaml]

Without jobs it lists what there is. Each job has GPUs of its own and a folder of its own, FOLDER/JOB, with its log and
what its commands write; FOLDER/jobs.json says how each ended, and is written after each. They start in the order given;
a later one goes first where its GPUs are free and those of an earlier one are not. When the time of a job or of all is
over, or this program gets SIGINT or SIGTERM, commands get SIGTERM and ten seconds later SIGKILL, and all that they
started too. Jobs that lack GPUs, packages or commands are left out, and said to be. Timings of jobs that ran at the
same time are those of a machine whose other GPUs and processors were busy.
Exit code: 0, 1 if a job failed or was left out, 2 if the command line or the file is wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import util
from pathlib import Path
from string import Template
from typing import Annotated

from pydantic import Field

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.record import checkout, parser_of  # noqa: E402
from moe_optimizer.child_process import child_process  # noqa: E402
from moe_optimizer.errors import InputError, MoeOptimizerError  # noqa: E402
from moe_optimizer.files import write_atomically  # noqa: E402
from moe_optimizer.inspection.kernel_inventory import read_kernel_inventory  # noqa: E402
from moe_optimizer.inspection.kernel_speeds import read_tables, shipped_dir  # noqa: E402
from moe_optimizer.near_match import did_you_mean  # noqa: E402
from moe_optimizer.specs.software import KernelInventory  # noqa: E402
from moe_optimizer.yaml_model import Section, read_section  # noqa: E402

JOBS = ROOT / "benchmarks" / "jobs.yaml"
GRACE_S = 10.0
"""Between SIGTERM and SIGKILL: servers end in it, and records are written."""
FIRST_PORT, PORTS_OF_A_JOB = 8500, 100
CACHES = ("XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR")
_MODEL = re.compile(r"\$models/(\w+)")


class Job(Section):
    """What runs on some GPUs."""

    about: str
    gpus: Annotated[int, Field(ge=1, le=64)]
    seconds: Annotated[float, Field(gt=0, le=86_400)]
    """The most that its commands may take together."""
    run: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    """Command lines without a shell, one after the other, whether or not one before fails."""
    packages: Annotated[tuple[str, ...], Field(strict=False)] = ()
    commands: Annotated[tuple[str, ...], Field(strict=False)] = ()
    empty_caches: bool = False
    """Whether what its commands compile is kept apart."""

    def missing(self, num_gpus: int) -> str | None:
        """Return why it cannot run here, or None."""
        if self.gpus > num_gpus:
            return f"needs {self.gpus} GPUs"
        packages = [name for name in self.packages if util.find_spec(name) is None]
        commands = [name for name in self.commands if shutil.which(name) is None]
        return f"needs {', '.join(packages + commands)}" if packages or commands else None


class Jobs(Section):
    """A file of jobs."""

    models: Annotated[dict[str, str], Field(default_factory=dict)]
    """Name -> arguments of benchmarks/serving/dummy_model.py."""
    jobs: dict[str, Job]

    def models_of(self, texts: Sequence[str]) -> list[str]:
        """Return the models that are named in `texts`, each after those it is made from.

        Raises:
            InputError: there is no such model.
        """
        found: list[str] = []
        for name in (name for text in texts for name in _MODEL.findall(text)):
            if name not in self.models:
                raise InputError(f"model: got {name!r}, expected one of {', '.join(self.models)}")
            found += [*self.models_of([self.models[name]]), name]
        return list(dict.fromkeys(found))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended."""

    job: str
    gpus: tuple[str, ...]
    seconds: float
    how: str
    """`ok`; otherwise what was wrong."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the jobs and print how they ended."""
    parser = parser_of(__doc__, commit=True)
    parser.add_argument("names", nargs="*", metavar="JOB")
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    parser.add_argument("--file", type=Path, default=JOBS)
    parser.add_argument("--gpus", help="numbers of those to use (default: all that CUDA shows)")
    parser.add_argument("--total-s", type=float, default=86_400.0, help="for all jobs")
    options = parser.parse_args(arguments)
    try:
        jobs = read_section(Jobs, options.file, origin=options.file.name, what="jobs")
        if not options.names:
            print("\n".join(listed(jobs)))
            return 0
        if options.out is None:
            parser.error("--out is missing")
        chosen = chosen_of(jobs, options.names)
        gpus = tuple(options.gpus.split(",")) if options.gpus else visible_gpus()
        commit = commit_of(options.commit)
        if not has_tables(read_kernel_inventory()):
            print(
                "note: no shipped table is of the kernels built here: plans leave the experts to vLLM's",
                file=sys.stderr,
            )
        runner = Runner(gpus, options.out, commit=commit, total_s=options.total_s, on_end=printed)
        with on_signals(runner.stop):
            runner.run(chosen, jobs)
    except MoeOptimizerError as error:
        print(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return 2
    return 0 if all(each.how == "ok" for each in runner.outcomes) else 1


def listed(jobs: Jobs) -> list[str]:
    """Return a line for each job."""
    width = max(map(len, jobs.jobs))
    return [f"{name:{width}}  {job.gpus} GPU  {job.seconds:4.0f} s  {job.about}" for name, job in jobs.jobs.items()]


def chosen_of(jobs: Jobs, names: Sequence[str]) -> dict[str, Job]:
    """Return the jobs of these names.

    Raises:
        InputError: there is no such job.
    """
    for name in names:
        if name not in jobs.jobs:
            hint = did_you_mean(name, tuple(jobs.jobs))
            raise InputError(f"job: got {name!r}, expected one of {', '.join(jobs.jobs)}", hint=hint)
    return {name: jobs.jobs[name] for name in names}


def has_tables(kernels: KernelInventory) -> bool:
    """Return whether tables of kernel speeds that ship are of the CUDA kernels that are built, if any are."""
    tables = (table for path in shipped_dir().glob("*.json") for table in read_tables(path))
    return not kernels.cuda_ops or any(table.kernel_hash == kernels.cuda_sources for table in tables)


def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs that CUDA shows, as CUDA_VISIBLE_DEVICES names them."""
    if (setting := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(each.strip() for each in setting.split(",") if each.strip())
    if shutil.which("nvidia-smi") is None:
        return ()
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False)
    return tuple(found.stdout.split()) if found.returncode == 0 else ()  # it says on stdout that there is no driver


def commit_of(named: str | None) -> str:
    """Return what benchmarks get as --commit.

    Raises:
        InputError: git does not tell, and nobody said: the records would be of no commit.
    """
    found = checkout(named)
    if found["commit"] is None:
        raise InputError("--commit: got nothing, and this checkout has no .git", hint="name the commit")
    return f"{found['commit']}{'+dirty' if found['dirty'] else ''}"


def printed(outcome: Outcome) -> None:
    """Print a line of how a job ended."""
    gpus = ",".join(outcome.gpus) or "-"
    print(f"{outcome.job:26}  GPU {gpus:8} {outcome.seconds:5.0f} s  {outcome.how}", flush=True)


class Runner:
    """Runs jobs, each in a thread, on GPUs of their own.

    Args:
        gpus: as CUDA_VISIBLE_DEVICES names them.
        folder: for what the jobs leave; jobs of earlier calls may lie in it.
        commit: what benchmarks get as --commit.
        total_s: seconds for all.
        on_end: is told of each that ended.
    """

    def __init__(
        self, gpus: Sequence[str], folder: Path, *, commit: str, total_s: float, on_end: Callable[[Outcome], None]
    ) -> None:
        self.outcomes: list[Outcome] = []
        """In the order in which jobs ended."""
        self._gpus, self._free = tuple(gpus), list(gpus)
        self._folder, self._commit, self._on_end = folder.resolve(), commit, on_end
        self._end = time.monotonic() + total_s
        self._changed, self._stopped = threading.Condition(), threading.Event()

    def stop(self, *_: object) -> None:
        """End what runs and start nothing more; a signal handler."""
        self._stopped.set()

    def run(self, chosen: Mapping[str, Job], jobs: Jobs) -> None:
        """Run `chosen`, name -> job, with models of `jobs`.

        Raises:
            InputError: a job names a model that there is not.
        """
        waiting = dict(chosen)
        for name, job in chosen.items():
            if why := job.missing(len(self._gpus)):
                del waiting[name]
                self._ended(Outcome(job=name, gpus=(), seconds=0.0, how=f"left out: {why}"))
        with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(max_workers=len(chosen)) as threads:
            make_models(jobs, [text for job in waiting.values() for text in job.run], Path(scratch) / "models")
            started = [
                threads.submit(self._run_job, number, name, waiting[name], own, Path(scratch))
                for number, (name, own) in enumerate(self._places(waiting))
            ]
        for each in started:
            each.result()  # raises what went wrong in this program

    def _places(self, waiting: Mapping[str, Job]) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield each job's name and GPUs as soon as they are free."""
        left = dict(waiting)
        while left:
            with self._changed:
                fitting = next((name for name, job in left.items() if job.gpus <= len(self._free)), None)
                if fitting is None:
                    self._changed.wait()
                    continue
                own = tuple(sorted(self._free, key=self._gpus.index)[: left.pop(fitting).gpus])
                self._free = [gpu for gpu in self._free if gpu not in own]
            yield fitting, own

    def _run_job(self, number: int, name: str, job: Job, gpus: tuple[str, ...], scratch: Path) -> None:
        began = time.monotonic()
        how = "failed: this program's error"
        try:
            how = self._ran(number, name, job, gpus, scratch)
        finally:
            with self._changed:
                self._ended(Outcome(job=name, gpus=gpus, seconds=round(time.monotonic() - began, 1), how=how))
                self._free += gpus
                self._changed.notify()

    def _ended(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps([asdict(each) for each in self.outcomes], indent=1)
        write_atomically(self._folder / "jobs.json", text + "\n")
        self._on_end(outcome)

    def _ran(self, number: int, name: str, job: Job, gpus: Sequence[str], scratch: Path) -> str:
        """Run the job's commands; return "ok" or what was wrong."""
        end = min(time.monotonic() + job.seconds, self._end)
        out = self._folder / name
        out.mkdir(parents=True, exist_ok=True)
        values = {
            "out": str(out),
            "models": str(scratch / "models"),
            "scratch": str(scratch),
            "commit": self._commit,
            "port": str(FIRST_PORT + PORTS_OF_A_JOB * number),
            **{f"gpu{index}": gpu for index, gpu in enumerate(gpus)},
        }
        environ = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        if job.empty_caches:
            environ |= {variable: str(scratch / name / variable.lower()) for variable in CACHES}
        wrong: list[str] = []
        with (out / "log.txt").open("wb") as log:
            for line in job.run:
                words = shlex.split(Template(line).substitute(values))
                log.write(f"$ {shlex.join(words)}\n".encode())
                log.flush()
                how = self._command(words, end, log.fileno(), environ)
                log.write(f"# {how}\n".encode())
                if how != "ok":
                    wrong.append(f"{next((word for word in words if word.endswith('.py')), words[0])}: {how}")
        return f"failed: {'; '.join(wrong)}" if wrong else "ok"

    def _command(self, words: Sequence[str], end: float, log: int, environ: Mapping[str, str]) -> str:
        """Run a command to its end, or to the end of its time; return "ok" or how it ended."""
        if self._stopped.is_set() or time.monotonic() >= end:
            return "not started: stopped" if self._stopped.is_set() else "not started: no time left"
        command = [sys.executable, *words[1:]] if words[0] == "python" else words
        try:
            with child_process(
                command, grace_s=GRACE_S, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=environ
            ) as process:
                while process.poll() is None and not self._stopped.is_set():
                    if time.monotonic() >= end:
                        return "its time was over"
                    time.sleep(0.05)
                code = process.poll()
        except OSError as error:
            return str(error)
        return "stopped" if code is None else "ok" if code == 0 else f"exit code {code}"


@contextlib.contextmanager
def on_signals(handler: Callable[..., None]) -> Iterator[None]:
    """Have SIGINT and SIGTERM call `handler` for the length of the block."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, kept in before.items():
            signal.signal(number, kept)


def make_models(jobs: Jobs, texts: Sequence[str], folder: Path) -> None:
    """Write the models that are named in `texts`."""
    folder.mkdir(exist_ok=True)
    for name in jobs.models_of(texts):
        words = shlex.split(Template(jobs.models[name]).substitute(models=folder))
        script = str(ROOT / "benchmarks" / "serving" / "dummy_model.py")
        subprocess.run([sys.executable, script, str(folder / name), *words], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
