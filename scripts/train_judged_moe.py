"""Trains a Mixture-of-Experts model of 165 million parameters on one GPU, to judge formats of weights on it.

    python scripts/train_judged_moe.py DIR [--seconds 300] [--root FOLDER ...]

The text is the Python sources that lie on this machine: the standard library and the installed packages, or the folders
of --root, without copies. One file in sixteen, by the hash of its path, is never trained on; DIR/heldout.txt is made of
such files. Nothing of it is shipped, and no run repeats another's weights: the sources differ from machine to machine,
and time ends the training. DIR/metrics.json says what it was; `benchmarks/ops/e4m3_tokens_quality.py` judges.

The network is the bundled model's (`scripts/tiny_moe`), larger, computed in BF16 with weights kept in FP32.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny_moe import checkpoint, corpus, tokenizer, training
from tiny_moe.network import Shape, TinyMoe
from torch import Tensor
from torch.nn import functional

VOCAB_SIZE = 8192
TEXT_BYTES = 160_000_000
TOKENIZER_BYTES = 20_000_000
"""Of the text, from which the tokenizer is trained."""
SEQUENCE_LENGTH = 1024
SEQUENCES = 64
"""In a step."""
HELD_OUT_BYTES = 600_000
LARGEST_FILE = 200_000
"""Larger ones are tables, not text."""
PACKAGES = ("torch", "transformers", "vllm", "triton", "numpy")
"""Those beside them are read too."""
SIZES = {
    "hidden_size": 512,
    "num_layers": 12,
    "num_heads": 8,
    "num_kv_heads": 4,
    "expert_width": 512,
    "max_position": SEQUENCE_LENGTH,
}


def main() -> int:
    """Read, train, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0, help="of training (default: 300)")
    parser.add_argument("--root", type=Path, action="append", help="of the text; may be given again")
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help=f"in a step (default: {SEQUENCES})")
    parser.add_argument("--set", action="append", default=[], metavar="SIZE=N", help=f"one of {', '.join(SIZES)}")
    options = parser.parse_args()
    begin = time.perf_counter()
    files = read_files(options.root or roots_here())
    trained_on = up_to(TEXT_BYTES, corpus.shuffled([file.text for file in files if not file.held_out], 0))
    vocabulary = tokenizer.train_tokenizer(up_to(TOKENIZER_BYTES, trained_on), VOCAB_SIZE)
    stream = tokens_of(trained_on, vocabulary)
    read_s = time.perf_counter() - begin
    print(f"{len(files)} files, {stream.numel():,} tokens, {read_s:.0f} s", file=sys.stderr, flush=True)

    sizes = SIZES | {name: int(number) for name, _, number in (each.partition("=") for each in options.set)}
    network = TinyMoe(Shape(vocab_size=vocabulary.get_vocab_size(), **sizes))
    facts = train(network, stream, seconds=options.seconds, sequences=options.sequences)

    options.folder.mkdir(parents=True, exist_ok=True)
    checkpoint.save_checkpoint(network, options.folder)
    tokenizer.save_tokenizer(vocabulary, options.folder, max_length=SEQUENCE_LENGTH)
    held_out = corpus.shuffled([file.text for file in files if file.held_out], 0)
    (options.folder / "heldout.txt").write_bytes("".join(up_to(HELD_OUT_BYTES, held_out)).encode())
    parameters = sum(each.numel() for each in network.parameters())
    metrics = {
        "parameters": parameters,
        "config": checkpoint.hub_config(network.shape),
        "corpus": {
            "files": len(trained_on),
            "bytes": sum(len(text.encode()) for text in trained_on),
            "held_out_files": len(held_out),
            "tokens": stream.numel(),
            "read_s": round(read_s, 1),
        },
        "training": facts,
        "max_logit_difference": checkpoint.difference_to_transformers(
            network, options.folder, stream[:512].view(2, 256)
        ),
    }
    (options.folder / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: metrics[name] for name in ("parameters", "corpus", "training", "max_logit_difference")}))
    return 0


def roots_here() -> list[Path]:
    """Return the folders of the standard library and of what is installed."""
    specs = [spec for name in PACKAGES if (spec := importlib.util.find_spec(name)) and spec.origin]
    return [Path(sysconfig.get_path("stdlib")), *sorted({Path(str(spec.origin)).parents[1] for spec in specs})]


def read_files(roots: list[Path]) -> list[corpus.SourceFile]:
    """Return the files below the folders, each text once."""
    found = {
        file.text: file for root in roots for file in corpus.read_source_files(root) if len(file.text) <= LARGEST_FILE
    }
    return sorted(found.values(), key=lambda file: file.digest)


def up_to(num_bytes: int, texts: list[str]) -> list[str]:
    """Return the first texts, so many that they have about `num_bytes`."""
    taken = 0
    for count, text in enumerate(texts):
        if taken >= num_bytes:
            return texts[:count]
        taken += len(text)
    return texts


def tokens_of(texts: list[str], vocabulary: Any) -> Tensor:
    """Return all texts, each with its end."""
    (end,) = vocabulary.encode(tokenizer.END_OF_TEXT).ids
    pieces = [torch.tensor([*each.ids, end], dtype=torch.int32) for each in vocabulary.encode_batch_fast(texts)]
    return torch.cat(pieces).long()


def train(network: TinyMoe, stream: Tensor, *, seconds: float, sequences: int) -> dict[str, Any]:
    """Train for `seconds`, the rates falling over the last of them, and return what it was."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    network.to(device)
    optimizers = training.make_optimizers(network)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    # What is computed with; the optimizers have the weights in FP32.
    half = copy.deepcopy(network).bfloat16()
    kept, used = list(network.parameters()), list(half.parameters())
    batch = batches(stream.to(device), sequences)
    begin, step, losses = time.perf_counter(), 0, []
    while (passed := (time.perf_counter() - begin) / seconds) < 1.0:
        share = min(1.0, (step + 1) / training.WARMUP_STEPS, (1.0 - passed) / training.DECAY_SHARE)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * share
        tokens = batch()
        logits, balance = half(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        (loss + checkpoint.BALANCE_COEFFICIENT * balance).backward()
        for weight, computed in zip(kept, used, strict=True):
            assert computed.grad is not None
            weight.grad, computed.grad = computed.grad.float(), None
        torch.nn.utils.clip_grad_norm_(kept, training.GRADIENT_NORM)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for weight, computed in zip(kept, used, strict=True):
            computed.data.copy_(weight.data)
        step += 1
        if step % 20 == 0:
            losses.append(loss.item())
            rate = step * sequences * SEQUENCE_LENGTH / (time.perf_counter() - begin)
            print(f"step {step}  loss {losses[-1]:.3f}  {rate:,.0f} tokens/s", file=sys.stderr, flush=True)
    network.eval()
    return {
        "steps": step,
        "tokens": step * sequences * SEQUENCE_LENGTH,
        "seconds": round(time.perf_counter() - begin, 1),
        "losses": [round(each, 4) for each in losses],
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
    }


def batches(stream: Tensor, sequences: int) -> Callable[[], Tensor]:
    """Return what takes pieces of the text at random places [sequences, SEQUENCE_LENGTH + 1]."""
    steps = torch.arange(SEQUENCE_LENGTH + 1, device=stream.device)

    def next_batch() -> Tensor:
        starts = torch.randint(stream.numel() - SEQUENCE_LENGTH, (sequences, 1), device=stream.device)
        return stream[starts + steps]

    return next_batch


if __name__ == "__main__":
    sys.exit(main())
