"""Times the attention of decode steps of few requests: `paged_decode` beside vLLM's FlashAttention, on a GPU.

    python benchmarks/ops/bench_cuda_attention.py [--write | --out FILE] [--tokens 1,2,4,8] [--lengths 640,4096,32768]

Keys are cold: a graph has as many calls as read more than L2 holds, each on blocks of its own; where 320 do not, the
table says "L2". Before every call a small kernel makes its queries, as in a model: a side's time less that of this
kernel alone is what attention costs there.
  alone   queries, attention
  layer   queries, the new keys go into the cache (theirs: vLLM's launch, or torch's; ours: in the launch of attention),
          attention, a copy of the result: as in a layer
FlashAttention is called as vLLM 0.26 does it in a captured graph (scheduler metadata made before, splits up to 32, the
longest context as bound). Without vLLM for CUDA torch's scaled_dot_product_attention takes its place, on keys that
are gathered before and stand there contiguous: then the record says so. Sides alternate. Times are microseconds without
the queries; the floor is of the data sheet's 3.35 TB/s.
"""

from __future__ import annotations

import functools
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from benchmarks.record import head, kept, parser_of  # noqa: E402

if TYPE_CHECKING:
    from bench_cuda_sides import Call
    from torch import Tensor

    from moe_optimizer.ops.kernel_arguments import PagedDecode

BLOCK = 16
"""Keys: vLLM's default on GPUs."""
COLD_BYTES = 200 << 20
"""Of the keys and values that a graph reads: four times what L2 holds, unless that takes too many calls."""
L2_BYTES = 50 << 20
MIN_CALLS, MAX_CALLS = 8, 320
MAX_SPLITS = 32
"""vLLM's default of `flash_attn_max_num_splits_for_cuda_graph`."""
BOUND = 40960
"""The longest context of Qwen3-30B-A3B, which a captured graph has."""
BANDWIDTH = 3.35e12


@dataclass(frozen=True)
class Heads:
    """The attention of one layer of a model, on one rank."""

    name: str
    heads: int
    kv_heads: int
    size: int

    @property
    def key_bytes(self) -> int:
        """Of a key and its value, all heads."""
        return 2 * 2 * self.kv_heads * self.size


SHAPES = {
    shape.name: shape
    for shape in (
        Heads("qwen3-30b", 32, 4, 128),
        Heads("qwen3-30b-tp2", 16, 2, 128),
        Heads("qwen3-30b-tp4", 8, 1, 128),
        Heads("mixtral", 32, 8, 128),
        Heads("gpt-oss", 64, 8, 64),
        Heads("mha-32", 32, 32, 128),
    )
}


def main() -> int:
    """Time what the arguments say; 0 unless a kernel is wrong."""
    parser = parser_of(__doc__, write=True, commit=True)
    parser.add_argument("--out", type=Path, help="the record, wherever it should be")
    parser.add_argument("--tokens", default="1,2,4,8")
    parser.add_argument("--lengths", default="128,640,2048,4096,16384,32768")
    parser.add_argument("--shapes", default="qwen3-30b,qwen3-30b-tp4,mixtral,gpt-oss")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--total-s", type=float, default=100, help="starts no case beyond so many seconds")
    options = parser.parse_args()
    from bench_cuda_machine import why_not_here

    why_not = why_not_here()
    if why_not:
        print(f"bench_cuda_attention: {why_not}", file=sys.stderr)
        return 3
    from bench_cuda_timing import device_facts

    theirs = "FlashAttention" if flash_attention() else "SDPA, keys gathered before"
    ends = time.monotonic() + options.total_s
    facts: dict[str, Any] = {
        **head(f"paged_decode beside {theirs}: L2-cold keys, CUDA graphs, sides interleaved", options.commit),
        "environment": device_facts(), "theirs": theirs, "cases": [], "wrong": [], "left_out": [],
    }  # fmt: skip
    print(
        f"{'':16} {'T':>2} {'keys':>6} {'what':>8} {'floor':>7} {'theirs':>8} {'ours':>8}   theirs: {theirs}",
        flush=True,
    )
    with kept(facts, "attention", out=options.out, write=options.write) as save:
        for name in options.shapes.split(","):
            for length in map(int, options.lengths.split(",")):
                for tokens in map(int, options.tokens.split(",")):
                    if time.monotonic() > ends:
                        facts["left_out"].append(f"{name} {length} {tokens}")
                        continue
                    measure(SHAPES[name], tokens, length, options.repetitions, facts)
                    save()
    for what in ("wrong", "left_out"):
        if facts[what]:
            print(f"{what}: {', '.join(facts[what])}")
    return 1 if facts["wrong"] else 0


def flash_attention() -> Any:
    """Return vLLM's module of FlashAttention, or None."""
    try:
        from vllm import vllm_flash_attn
    except ImportError:
        return None
    return vllm_flash_attn if hasattr(vllm_flash_attn, "get_scheduler_metadata") else None


class Step:
    """The attention of one layer's decode step, with the kernels around it."""

    def __init__(self, call: PagedDecode, source: Tensor, scheduled: Any) -> None:
        import torch

        self.call = call
        self.source = source
        self.scheduled = scheduled
        tokens = call.q.shape[0]
        last = call.lengths.long() - 1
        rows = torch.arange(tokens, device="cuda")
        self.blocks, self.places = call.block_table[rows, last // BLOCK].long(), last % BLOCK
        self.new_keys, self.new_values = (
            each.contiguous() for each in call.cache[self.blocks, :, self.places].chunk(2, dim=-1)
        )
        self.slots = self.blocks * BLOCK + self.places
        self.starts = torch.arange(tokens + 1, dtype=torch.int32, device="cuda")
        self.result = torch.empty_like(call.out)
        self.scale = torch.ones((), device="cuda")  # of an FP8 cache

    def queries(self) -> Tensor:
        """Make the queries, by a kernel: a launch after a copy (a memcpy node of the graph) cannot start early."""
        import torch

        return torch.mul(self.source, 1, out=self.call.q)

    def ours(self, what: str) -> Tensor:
        """Ours."""
        from moe_optimizer.ops.paged_decode import run_kernel

        new = (self.new_keys, self.new_values, self.slots) if what == "layer" else (None, None, None)
        run_kernel(self.call._replace(new_keys=new[0], new_values=new[1], slots=new[2]))
        return self.call.out

    def store(self) -> None:
        """Write the new keys and values, as vLLM's launch before attention does."""
        import torch

        call, size = self.call, self.call.q.shape[2]
        if flash_attention() is None:
            call.cache[self.blocks, :, self.places] = torch.cat((self.new_keys, self.new_values), dim=-1)
            return
        from vllm import _custom_ops as ops

        keys, values = call.cache.transpose(1, 2).split(size, dim=-1)
        ops.reshape_and_cache_flash(
            self.new_keys, self.new_values, keys, values, self.slots, "auto", self.scale, self.scale
        )  # fmt: skip

    def theirs(self, what: str) -> Tensor:
        """FlashAttention as vLLM calls it, or torch's."""
        import torch

        call, module = self.call, flash_attention()
        if what == "layer":
            self.store()
        size = call.q.shape[2]
        if module is None:
            keys, values = self.scheduled
            torch.nn.functional.scaled_dot_product_attention(
                call.q.unsqueeze(2), keys, values, scale=call.scale, enable_gqa=True
            )
            return call.out
        keys, values = call.cache.transpose(1, 2).split(size, dim=-1)
        module.flash_attn_varlen_func(
            q=call.q, k=keys, v=values, out=call.out, cu_seqlens_q=self.starts, max_seqlen_q=1, seqused_k=call.lengths,
            max_seqlen_k=BOUND, softmax_scale=call.scale, causal=True, window_size=[-1, -1],
            block_table=call.block_table, softcap=0, scheduler_metadata=self.scheduled, fa_version=3,
            num_splits=MAX_SPLITS,
        )  # fmt: skip
        return call.out


def made_steps(shape: Heads, tokens: int, length: int) -> list[Step]:
    """Steps on blocks of their own, as many as read more than L2 holds."""
    import torch

    from moe_optimizer.ops.kernel_arguments import PagedDecode

    width = -(-length // BLOCK)
    of_step = tokens * width
    step_bytes = of_step * BLOCK * shape.key_bytes
    # Long contexts share blocks: each is read again after more bytes than L2 holds.
    blocks = max(-(-COLD_BYTES // (BLOCK * shape.key_bytes)), of_step)
    count = min(max(-(-COLD_BYTES // step_bytes), MIN_CALLS), MAX_CALLS)
    stored = torch.empty((blocks, BLOCK, shape.kv_heads, 2 * shape.size), dtype=torch.bfloat16, device="cuda")
    cache = stored.normal_().transpose(1, 2)
    lengths = torch.full((tokens,), length, dtype=torch.int32, device="cuda")
    order = torch.randperm(blocks, device="cuda", dtype=torch.int32)
    at = torch.arange(of_step, device="cuda")
    steps = []
    for n in range(count):
        table = order[(at + n * of_step) % blocks].view(tokens, width)
        source = torch.randn((tokens, shape.heads, shape.size), device="cuda").bfloat16()
        call = PagedDecode(
            torch.empty_like(source), cache, table, lengths, shape.size**-0.5, torch.empty_like(source)
        )  # fmt: skip
        steps.append(Step(call, source, scheduled(call)))
    return steps


def scheduled(call: PagedDecode) -> Any:
    """Return what FlashAttention is given beside the call; for torch's attention the gathered keys and values."""
    import torch

    module = flash_attention()
    tokens, heads, size = call.q.shape
    if module is not None:
        starts = torch.arange(tokens + 1, dtype=torch.int32, device="cuda")
        return module.get_scheduler_metadata(
            batch_size=tokens, max_seqlen_q=1, max_seqlen_k=int(call.lengths[0]), num_heads_q=heads,
            num_heads_kv=call.cache.shape[1], headdim=size, cache_seqlens=call.lengths, qkv_dtype=torch.bfloat16,
            cu_seqlens_q=starts, page_size=BLOCK, causal=True, window_size=(-1, -1), num_splits=MAX_SPLITS,
        )  # fmt: skip
    gathered = call.cache[call.block_table.long()].transpose(1, 2).flatten(2, 3)[:, :, : int(call.lengths[0])]
    return tuple(each.contiguous() for each in gathered.split(size, dim=-1))


def measure(shape: Heads, tokens: int, length: int, repetitions: int, facts: dict[str, Any]) -> None:
    """Time one shape for so many requests of one length."""
    import torch
    from bench_cuda_timing import time_interleaved

    steps = made_steps(shape, tokens, length)
    name = f"{shape.name} T={tokens} keys={length}"
    wrong = why_wrong(steps[0])
    if wrong:
        facts["wrong"].append(f"{name}: {wrong}")
    else:
        for what in ("alone", "layer"):
            sides: dict[str, list[Call]] = {
                side: [functools.partial(run, step, side, what) for step in steps]
                for side in ("rest", "theirs", "ours")
            }
            samples = time_interleaved(sides, repetitions=repetitions)
            facts["cases"].append(
                {"what": what, **vars(shape), "tokens": tokens, "length": length, "calls": len(steps),
                 "samples_us": samples}
            )  # fmt: skip
            read = len(steps) * tokens * length * shape.key_bytes
            show(shape, tokens, length, f"{what} L2" if read < L2_BYTES else what, samples)
    del steps
    torch.cuda.empty_cache()


def run(step: Step, side: str, what: str) -> Tensor:
    """Run what stands around attention, and attention of `side`; "rest": none."""
    import torch

    step.queries()
    out = step.call.out if side == "rest" else step.ours(what) if side == "ours" else step.theirs(what)
    return torch.mul(out, 1, out=step.result) if what == "layer" else out


def why_wrong(step: Step) -> str:
    """Return what is wrong with the kernel's result, "" for nothing."""
    import torch

    from moe_optimizer.ops.paged_decode import plain

    step.queries()
    step.call.out.fill_(float("nan"))
    try:
        first = step.ours("alone").clone()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    if not torch.equal(first, step.ours("layer")):
        return "not the same bits with the new keys beside the cache"
    want = plain(step.call).float()
    off = (first.float() - want).abs().max().item()
    return "" if off <= 2.0**-6 * want.abs().max().item() else f"{off:.2e} from plain torch"


def show(shape: Heads, tokens: int, length: int, what: str, samples: dict[str, list[float]]) -> None:
    """Print a case's medians less the rest."""
    import statistics

    medians = {side: statistics.median(each) for side, each in samples.items()}
    theirs, ours = (medians[side] - medians["rest"] for side in ("theirs", "ours"))
    floor = 1e6 * tokens * length * shape.key_bytes / BANDWIDTH
    print(f"{shape.name:16} {tokens:2} {length:6} {what:>8} {floor:7.2f} {theirs:8.2f} {ours:8.2f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
