"""Asks the decode check about right and about wrong kernels: the bundled model and a deeper one with random weights.

    python benchmarks/soak/decode_check.py [--write] [--out FILE]

Each model is served once in each format on vLLM's CPU build; mistakes are switched in the running server
(`tests/vllm/wrong_kernels.py`). Those named "decode" are made in steps of up to 64 tokens, "noise" is 2 % of every
routing weight of every layer in every step, decoded or not.

On a Hopper GPU only right kernels are served, with vLLM's CUDA graphs and in more formats: a mistake that is switched
after the capture would not be in them (`tests/gpu/test_wrong_graphs.py` captures one). Several servers share the GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import cpu_name, cpu_slug, gpu_environment, head, host, parser_of, write_record  # noqa: E402
from moe_optimizer.files import write_atomically  # noqa: E402
from moe_optimizer.launcher.decode_check import check_decode, decode_question  # noqa: E402
from moe_optimizer.launcher.http_client import ServerClient  # noqa: E402
from moe_optimizer.launcher.launch import running  # noqa: E402
from moe_optimizer.passes.registry import resolve_wishes  # noqa: E402
from moe_optimizer.plan.plan import Plan  # noqa: E402
from moe_optimizer.specs.kernel_speeds import KernelSpeeds  # noqa: E402
from tests.builders import profile_with  # noqa: E402
from tests.gpu.plans import always_ours, always_ours_in_fp8, gpu_plan  # noqa: E402
from tests.vllm import wrong_kernels  # noqa: E402
from tests.vllm.conftest import FORKED, READY_TIMEOUT_S, TINY_MOE, plan_here  # noqa: E402

MISTAKES = ("noise", "decode: scale", "decode: half more", "decode: two swapped", "decode: other experts",
            "decode: nothing", "decode: no number")  # fmt: skip
"""From the smallest; the last one spoils the cache for those behind it."""
FORMATS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"dtype": "bfloat16", "wishes": ("fp8",)},
}
GPU_FORMATS: dict[str, tuple[str, ...]] = {
    "bfloat16": (), "fp8": ("fp8",), "four_bit": ("four_bit",), "fp8, fp8 cache": ("fp8", "kv_cache"),
}  # fmt: skip
"""Format -> passes that are wished."""
LAYERS, CLEAN = 16, 3
SEEDS = (0, 1)
"""Of the random weights of the deep models on a GPU."""
AT_ONCE = 4
"""Servers on one GPU."""
LIMIT_S = 120.0


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Serve, check and print; with --write store a record."""
    import torch

    parser = parser_of(__doc__, write=True, commit=True)
    parser.add_argument("--out", type=Path, help="write the record there")
    args = parser.parse_args(arguments)
    load_before = os.getloadavg()[0]
    on_gpu = torch.cuda.is_available()
    if on_gpu and args.write:
        parser.error("--write: names records after the processor; on a GPU give --out FILE")
    samples: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if on_gpu:
            deep_models = [write_deep_model(place / f"deep-{seed}", seed) for seed in SEEDS]
            starts = [(model, name) for model in (TINY_MOE, *deep_models) for name in GPU_FORMATS]
            with ThreadPoolExecutor(AT_ONCE) as pool:
                for found in pool.map(lambda start: served_on_gpu(place, *start), starts):
                    samples += found
        else:
            deep = write_deep_model(place / "deep", 0)
            for model, name in ((deep, "bfloat16"), *((TINY_MOE, each) for each in FORMATS)):
                samples += served(place / f"{model.name}-{name}", model, name)
    record = {
        **head("the decode check on right and on wrong kernels", args.commit),
        "environment": gpu_environment() if on_gpu else host(load_before),
        "samples": samples,
    }
    if args.out:
        write_atomically(args.out, json.dumps(record, indent=1) + "\n")
    if args.write:
        write_record(record, cpu_slug(cpu_name()), "decode_check")
    return record


def write_deep_model(folder: Path, seed: int) -> Path:
    """Write a model with many layers, random weights and the bundled model's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(TINY_MOE, folder, ignore=shutil.ignore_patterns("*.safetensors*", "config.json", "*.txt"))
    config = AutoConfig.for_model(**json.loads((TINY_MOE / "config.json").read_text()) | {"num_hidden_layers": LAYERS})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Every layer adds about as much as it is given, and the best tokens stand out.
            if parameter.dim() > 1:
                parameter.normal_(
                    std=(2.0 if "lm_head" in name or "embed" in name else 1.0) * parameter.shape[-1] ** -0.5
                )
    model.save_pretrained(folder)
    return folder


def served(folder: Path, model: Path, name: str) -> list[dict[str, Any]]:
    """Return what the check says of one server, without a mistake and with each."""
    site, switch = folder / "site", folder / "mistake"
    site.mkdir(parents=True)
    switch.write_text("")
    shutil.copy(wrong_kernels.__file__, site)
    shutil.copy(FORKED / "after_import.py", site)
    (site / "sitecustomize.py").write_text("import wrong_kernels\n")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), str(ROOT)])
    os.environ["MOE_TEST_FAULT_FILE"] = str(switch)
    fields = dict(FORMATS[name])
    wishes = resolve_wishes(("flash-dmoe", *fields.pop("wishes", ())), ())
    plan = plan_here("--enforce-eager", model=model, batch_size=64, wishes=wishes, **fields)
    return checked(plan, folder, name, ("",) * CLEAN + MISTAKES)


def served_on_gpu(place: Path, model: Path, name: str) -> list[dict[str, Any]]:
    """Return what the check says of one server with right kernels."""
    wanted = GPU_FORMATS[name]
    passes = {"kv_cache": {"dtype": "fp8"}} if "kv_cache" in wanted else {}

    def table(kernels: str, vllm: str) -> KernelSpeeds:
        return always_ours_in_fp8("block", kernels, vllm) if "fp8" in wanted else always_ours(kernels, vllm)

    plan = gpu_plan(
        speeds=None if "four_bit" in wanted else table,
        model=model,
        profile=profile_with("balanced", passes),
        wishes=resolve_wishes(tuple(each.replace("_", "-") for each in wanted), ()),
        max_model_len=1024,
        batch_size=64,
    )
    folder = place / f"{model.name}-{name}"
    folder.mkdir()
    return checked(plan, folder, name, ("",) * CLEAN)


def checked(plan: Plan, folder: Path, name: str, mistakes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Serve a plan, switch to each mistake in turn, and return what the check says."""
    found, switch = [], folder / "mistake"
    with running(plan, run_dir=folder / "run", ready_timeout_s=READY_TIMEOUT_S) as info:
        client = ServerClient(info.base_url)
        question = decode_question(plan, client.max_model_len())
        kernels = {each.pass_name: each.ran for each in info.rows if each.pass_name in ("flash_dmoe", "four_bit")}
        for mistake in mistakes:
            switch.write_text(mistake)
            result = check_decode(client, info.model, question, limit_s=LIMIT_S)
            switch.write_text("")
            finite = sorted(each for each in result.differences if each < float("inf"))
            found.append({
                "model": plan.model.name, "format": name, "mistake": mistake, "tolerance": question.tolerance,
                "compared": len(result.differences), "batches": list(result.batches),
                "off": sum(each > question.tolerance for each in result.differences),
                "largest": round(finite[-1], 4) if finite else None,
                "wrong": result.wrong, "why_not": result.why_not, "ran": kernels,
            })  # fmt: skip
            print(found[-1], flush=True)
    return found


if __name__ == "__main__":
    main()
