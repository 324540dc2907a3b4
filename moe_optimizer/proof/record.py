"""Writes and reads the Proof: a file per vLLM process with what was applied there and what really ran.

The launcher, tests and benchmarks accept nothing else as evidence that a pass is active.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.files import read_bytes, write_atomically
from moe_optimizer.log import get_logger
from moe_optimizer.plan.json_codec import decode_text, encode
from moe_optimizer.specs.layer_name import decoder_layer

SCHEMA_VERSION = 1
PROOF_DIR = "proof"
"""Folder of the proof files, beside plan.json."""
WARMING_FILE = "warming"
"""Lies beside plan.json while the launcher warms a server up: what runs until then is no user's traffic."""
COMPARED_REPLAYS = 2
"""Replays of each CUDA graph that a worker compares, of those without padding."""
PADDED_REPLAYS = 4
"""The most of those that have some, so that a server that is warmed up has to replay as many."""
DRAINING_FILE = "draining"
"""Lies beside plan.json once the launcher stops a server: it takes no new requests."""
HEARTBEAT_QUERY = "?heartbeat"
"""Begins the query with which the launcher asks a server how it gets on; such lines are kept out of its log."""
UNFINISHED_METRIC = "moe_optimizer_unfinished_requests"
"""On the server's page of metrics: what its engines were given and have not ended, as the API server knows it."""
_FLUSH_INTERVAL_S = 1.0
"""Chosen: a reader sees counts that are at most this old, and no forward pass waits for the disk."""
PROOF_PAUSE_S = 1.5
"""Until a proof surely has what happened before."""
WARMING_S = 0.2
"""Chosen: between two writes while a server is warmed up, which waits for what its proofs say."""
_MAX_PROOF_BYTES = 64 << 20

logger = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class LayerProof:
    """One MoE layer in one process."""

    name: str
    num_local_experts: int
    hidden_size: int
    intermediate_size: int
    dtype: str
    """Of the activations; of the weights too where `weight_dtype` says no other."""
    expert_map: bool
    """Whether this process holds only a part of the experts (expert parallelism)."""
    calls: int = 0
    """Times the kernel ran for this layer, as seen from Python: replays of a CUDA graph are not counted."""
    tokens: int = 0
    """Tokens in those calls together, padding included."""
    weight_format: str = "plain"
    """Format of the weights in memory: "plain" (as vLLM loads them, in `dtype`) or the one they were converted to."""
    weight_dtype: str = ""
    """Element type of the weights; "" where it is `dtype`."""
    loaded_bytes: int = 0
    """Bytes of the experts' weights as vLLM loaded them; 0: not known."""
    weight_bytes: int = 0
    """Bytes of the weights in memory, scales included."""
    why_small_pages: str = ""
    """Why the weights are not on huge pages, which the CPU kernels read faster; "" where they are, or on a GPU."""
    output_error: float | None = None
    """Relative change of the layer's output by the planned format, on random tokens; None: not measured."""
    saturated: float | None = None
    """Share of FP8 weights whose magnitude is the largest that FP8 has; None: not in FP8, or not looked at."""
    why_plain: str = ""
    """Why the layer stays plain although the plan names another format; "" where it does not."""
    self_check_error: float | None = None
    """Largest error of the kernels on the layer's own weights, as a share of what was allowed; None: not checked."""
    calls_by_kernel: dict[str, int] = field(default_factory=dict)
    """Kernel -> calls as seen from Python, with vLLM's own as "stock"; empty where there is one kernel."""
    router: str = ""
    """What multiplies the gate and chooses the experts: "gate_topk up to 32" tokens, or "vLLM: " and why; "" where the
    plan leaves it to vLLM."""
    router_calls: int = 0
    """Times our launch did, as seen from Python."""

    @property
    def num_weights(self) -> int:
        """Weights of the experts here: w13 [E, 2I, H] and w2 [E, H, I]."""
        return 3 * self.num_local_experts * self.intermediate_size * self.hidden_size

    @property
    def stored(self) -> str:
        """How the weights are stored: "bf16", "fp16" or "fp32" as vLLM loads them, else the format they are held in."""
        plain = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(self.dtype, self.dtype)
        return plain if self.weight_format == "plain" else self.weight_format

    @property
    def computed_in(self) -> str:
        """What a kernel computes with: the activations' dtype, and the weights' format where they were converted."""
        return self.dtype if self.weight_format == "plain" else f"{self.dtype} with {self.weight_format} weights"

    @property
    def decoder_layer(self) -> int | None:
        """Index of the decoder layer that it belongs to; None where its name has none."""
        return decoder_layer(self.name)


@dataclass(slots=True, kw_only=True)
class PassProof:
    """One pass of the plan in one process."""

    requested: str
    """The decision's value."""
    applied: bool = False
    ran: bool = False
    """The kernel computed at least one forward of every layer that it was given in this process."""
    why_not: str = ""
    """Why it is not applied, or not to some layers; "" when it is applied to all."""
    timed_no_faster: bool = False
    """Whether `why_not` is only that this process timed it beside vLLM's own, and it was not faster."""
    found: str = ""
    """Detail of what ran, for example "up to 512"; "" where there is none."""
    kernel: str = ""
    """For example "fused_experts (cpu)"."""
    isa: str = ""
    """The instruction set that the kernel chose."""
    digest: str = ""
    """Digest of what was applied, where the decision has one."""
    canary: str = ""
    """Outcome of the latest canary, for example "passed before ready: 48 layers, ..."; "" where none has run."""
    rearrangements: int = 0
    """Times that experts were placed anew by the load of the serving model (vLLM's EPLB)."""
    moved_experts: int = 0
    """Slots that got another expert by those, all layers together."""
    layers: tuple[LayerProof, ...] = ()

    @property
    def calls(self) -> int:
        """Kernel calls of all layers together."""
        return sum(layer.calls for layer in self.layers)


@dataclass(slots=True, kw_only=True)
class PatchProof:
    """One patch of vLLM in one process."""

    target: str
    state: str
    detail: str


@dataclass(slots=True, kw_only=True)
class CompilationProof:
    """What one worker compiled, as far as it is seen: Triton, CuTe-DSL and TileLang kernels by vLLM's monitor, graphs
    of torch.compile, and what appears in the caches of DeepGEMM and FlashInfer.
    """

    before_ready: int = 0
    loaded: int = 0
    """Kernels of Triton that were found in its cache before the worker was ready: nothing was compiled for them."""
    after_ready: int = 0
    """Each let a request wait."""
    last: tuple[str, ...] = ()
    """The last ones after it was ready, with the step that needed them."""


@dataclass(slots=True, kw_only=True)
class MemoryProof:
    """Bytes that the parts of one worker take, to stand beside those of the memory plan."""

    weight_bytes: int
    kv_cache_bytes: int
    activation_bytes: int | None
    """As vLLM measured them, with an estimate for its graphs; None where it does not (CPU)."""
    workspace_bytes: int | None = None
    """What is neither weights nor cache, and outside PyTorch's allocator or a graph's: GPU. On a CPU all the rest of
    the process, activations too. None where it is not known.
    """


@dataclass(slots=True, kw_only=True)
class CacheSaturation:
    """Numbers that serving has stored in an FP8 cache, of samples of it so far."""

    values: int = 0
    """Those that are not zero."""
    saturated: int = 0
    """Those of them whose magnitude is the largest that FP8 has."""


@dataclass(slots=True, kw_only=True)
class Proof:
    """The proof of one process."""

    role: str
    """"frontend", "engine", "worker" or "helper"."""
    rank: int
    pid: int
    plan_digest: str
    """"" until a process that plans by itself has planned."""
    versions: Mapping[str, str]
    """Distribution or module -> version, as loaded in this process."""
    world_size: int = 0
    """Number of processes that hold a part of the model; 0 in a process that holds none."""
    model_rank: int = -1
    """This process's rank among them; -1 in a process that holds none."""
    passes: dict[str, PassProof] = field(default_factory=dict)
    patches: tuple[PatchProof, ...] = ()
    served_model_name: str = ""
    """The label `model_name` of vLLM's metrics; "" in a process that holds no part of the model."""
    compilations: CompilationProof | None = None
    """None in a process that compiles nothing, or where nobody looks."""
    memory: MemoryProof | None = None
    """None in a process without a part of the model, and before its first step."""
    cache_saturation: CacheSaturation | None = None
    """None in a process without a cache in FP8."""
    schema_version: int = SCHEMA_VERSION


class ProofWriter:
    """Keeps this process's proof file up to date.

    Hot paths change the objects in `proof` and call `touch`; a daemon thread writes at most once a second.
    A file that cannot be written is logged once, and vLLM keeps serving.
    """

    def __init__(self, run_dir: Path, proof: Proof) -> None:
        self.proof = proof
        self.path = run_dir / PROOF_DIR / f"{proof.role}-{proof.rank}-{proof.pid}.json"
        self._marker = run_dir / WARMING_FILE
        self._dirty, self._soon = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._failed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Write the file, and keep writing it from a daemon thread when touched."""
        self.write()
        self._thread = threading.Thread(target=self._keep_writing, name="moe-optimizer-proof", daemon=True)
        self._thread.start()
        atexit.register(self.write)

    def touch(self, *, counts: bool = False) -> None:
        """Have the thread write the changed proof.

        Args:
            counts: nothing but counts has changed. They come with the launches of a prompt's step, in which a write
                would have the step wait for the interpreter: it comes a second later.
        """
        if not counts and not self._soon.is_set():
            self._soon.set()
        # Asked of each forward of each layer; setting what is set takes its lock. What the caller has changed before is
        # in the proof that is written after `clear`.
        if not self._dirty.is_set():
            self._dirty.set()

    def write(self) -> None:
        """Write the file now."""
        self._soon.clear()
        self._dirty.clear()
        with self._lock:
            try:
                # On one line: with line breaks Python's own encoder writes it, and steps wait for the interpreter.
                write_atomically(self.path, json.dumps(encode(self.proof), sort_keys=True))
            except (OSError, RuntimeError) as error:
                # RuntimeError: a pass was added to the proof while it was being encoded; the next write has it.
                if isinstance(error, OSError) and not self._failed:
                    self._failed = True
                    logger.warning("proof file %s cannot be written: %s", self.path, error)
                self._dirty.set()

    def _keep_writing(self) -> None:
        pause, written_at = threading.Event(), float("-inf")
        while True:
            self._dirty.wait()
            interval = WARMING_S if self._marker.exists() else _FLUSH_INTERVAL_S
            self._soon.wait(interval)
            pause.wait(max(0.0, written_at + interval - time.monotonic()))
            self.write()
            written_at = time.monotonic()


def read_proofs(run_dir: Path) -> tuple[Proof, ...]:
    """Return the proofs under `run_dir`, by role, rank and pid. No folder yet: none.

    Raises:
        InputError: a file is not a proof of this schema.
    """
    folder = run_dir / PROOF_DIR
    if not folder.is_dir():
        return ()
    proofs = []
    for path in folder.glob("*.json"):
        try:
            text = read_bytes(path, max_bytes=_MAX_PROOF_BYTES).decode(errors="replace")
        except InputError:
            if path.exists():
                raise
            continue  # the next server of this folder has removed it meanwhile
        proofs.append(decode_text(Proof, text, origin=f"{path}: not a proof", schema_version=SCHEMA_VERSION))
    return tuple(sorted(proofs, key=lambda proof: (proof.role, proof.rank, proof.pid)))
