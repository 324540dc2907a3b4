"""Trains the model in examples/tiny-moe, or measures it again.

    python scripts/train_tiny_moe.py                  train, measure, write the folder
    python scripts/train_tiny_moe.py --minutes 2      as many steps as fit
    python scripts/train_tiny_moe.py --evaluate       compute the numbers again and compare them with the card
    python scripts/train_tiny_moe.py --hidden-size 1024 --expert-width 512 --output DIR
                                                      a larger one for measurements, without card and size limit

Needs torch, transformers, tokenizers and safetensors. Uses a GPU if there is one. Exit code 1: --evaluate computed
other numbers than those of metrics.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiny_moe.corpus import SourceFile
    from tiny_moe.network import Shape
    from tiny_moe.training import TrainingResult

MODEL_FOLDER = Path(__file__).resolve().parent.parent / "examples" / "tiny-moe"
DEFAULT_STEPS = 1300
THREADS = 2
"""Fixed: with another number of threads sums round differently, and training gives other weights."""
MAX_FOLDER_BYTES = 8_000_000
TOLERANCE = 1e-3
"""Relative difference that --evaluate accepts: versions of torch round differently."""


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description="Train or measure examples/tiny-moe.")
    parser.add_argument("--output", type=Path, default=MODEL_FOLDER, metavar="DIR", help="model folder")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order of the text (default 0)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=DEFAULT_STEPS, help=f"default {DEFAULT_STEPS}")
    length.add_argument("--minutes", type=float, help="train as many steps as fit into this time")
    length.add_argument("--evaluate", action="store_true", help="measure the folder, train nothing")
    parser.add_argument("--hidden-size", type=int, metavar="N", help="other than the bundled model's; needs --output")
    parser.add_argument("--expert-width", type=int, metavar="N", help="other than the bundled model's; needs --output")
    arguments = parser.parse_args()
    sizes = {"hidden_size": arguments.hidden_size, "expert_width": arguments.expert_width}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    if sizes and arguments.output.resolve() == MODEL_FOLDER:
        parser.error("--hidden-size and --expert-width need --output: the bundled model keeps its sizes")
    # Read when torch and tokenizers start, so set before the first import of either.
    os.environ["OMP_NUM_THREADS"] = str(THREADS)
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    if arguments.evaluate:
        return evaluate_folder(arguments.output)
    return train_folder(arguments.output, sizes, seed=arguments.seed, steps=arguments.steps, minutes=arguments.minutes)


def train_folder(output: Path, sizes: dict[str, int], *, seed: int, steps: int, minutes: float | None) -> int:
    """Train into a temporary folder and move its files to `output` at the end: an aborted run changes nothing."""
    import torch
    from tiny_moe import card, checkpoint, corpus, tokenizer, training
    from tiny_moe.network import Shape

    files = corpus.read_source_files()
    train_files = tuple(file for file in files if not file.held_out)
    evaluation_files = corpus.evaluation_files(files)
    chats = [tokenizer.chat_text(*pair) for pair in corpus.chat_pairs(train_files)]
    documents = corpus.shuffled([file.text for file in train_files] + chats, seed)

    vocabulary = tokenizer.train_tokenizer(file.text for file in train_files)
    end_of_text = vocabulary.token_to_id(tokenizer.END_OF_TEXT)
    assert end_of_text is not None, "the tokenizer has no end of text"
    stream: list[int] = []
    for encoding in vocabulary.encode_batch(documents):
        stream += [*encoding.ids, end_of_text]
    print(f"{len(train_files)} files, {len(chats)} chats, {len(stream):,} tokens", file=sys.stderr)

    shape = Shape(vocab_size=vocabulary.get_vocab_size(), **sizes)
    result = training.train(torch.tensor(stream), shape, seed=seed, steps=steps, minutes=minutes)

    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as temporary:
        folder = Path(temporary)
        checkpoint.save_checkpoint(result.network, folder)
        tokenizer.save_tokenizer(vocabulary, folder, max_length=shape.max_position)
        (folder / "heldout.txt").write_bytes("".join(file.text for file in evaluation_files).encode())
        (folder / "corpus.txt").write_text(_corpus_list(files), encoding="utf-8")
        shutil.copyfile(Path(sysconfig.get_path("stdlib")) / "LICENSE.txt", folder / "LICENSE-PYTHON.txt")
        probe = torch.tensor([stream[:256], stream[256:512]])
        difference = checkpoint.difference_to_transformers(result.network, folder, probe)
        assert difference < 1e-3, f"saved folder and training network disagree: logits differ by {difference}"
        metrics = {
            **_measure(folder, _training_byte_counts(train_files)),
            "max_logit_difference": difference,
            "model": _model_facts(result),
            "corpus": _corpus_facts(files, train_files, evaluation_files, len(chats)),
            "training": _training_facts(result, seed),
            "versions": _versions(),
            "sha256": {
                name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
                for name in ("model.safetensors", "tokenizer.json", "heldout.txt")
            },
        }
        (folder / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
        if not sizes:
            card.write_card(folder)
            size = sum(path.stat().st_size for path in folder.iterdir())
            assert size <= MAX_FOLDER_BYTES, f"model folder has {size} bytes, limit {MAX_FOLDER_BYTES}"
        for path in sorted(folder.iterdir()):
            path.chmod(0o644)
            path.replace(output / path.name)
    print((output / ("metrics.json" if sizes else "README.md")).read_text(encoding="utf-8"))
    return 0


def evaluate_folder(folder: Path) -> int:
    """Measure the folder and print each number beside the recorded one; 1 if one differs by more than TOLERANCE."""
    recorded = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    measured = _measure(folder, recorded["baselines"]["training_byte_counts"])
    agree = True
    print(f"{'':42}{'recorded':>12}{'measured':>12}")
    for part in ("heldout", "heldout_slice", "heldout_long", "baselines"):
        for name, value in measured[part].items():
            if isinstance(value, list):
                continue
            expected = recorded[part][name]
            same = math.isclose(value, expected, rel_tol=TOLERANCE)
            agree &= same
            print(f"{part + '.' + name:42}{expected:>12}{value:>12}{'' if same else '   differs'}")
    for layer_idx, shares in enumerate(measured["heldout"]["expert_load"]):
        print(f"layer {layer_idx}: expert load {min(shares):.2%} to {max(shares):.2%}")
    return 0 if agree else 1


def _measure(folder: Path, training_byte_counts: list[int]) -> dict[str, Any]:
    """Return what can be computed from the folder and the byte counts of the training text."""
    from tiny_moe import evaluate

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    unigram = evaluate.unigram_perplexity(training_byte_counts, (folder / "heldout.txt").read_bytes())
    return {
        "heldout": evaluate.evaluate(folder),
        "heldout_slice": evaluate.evaluate(folder, max_windows=evaluate.SLICE_WINDOWS),
        "heldout_long": evaluate.evaluate(folder, context_length=config["max_position_embeddings"]),
        "baselines": {
            "unigram_perplexity_per_byte": unigram,
            "unigram_bits_per_byte": round(math.log2(unigram), 5),
            "uniform_perplexity_per_byte": 256,
            "uniform_bits_per_byte": 8,
            "training_byte_counts": training_byte_counts,
        },
    }


def _training_byte_counts(train_files: tuple[SourceFile, ...]) -> list[int]:
    from tiny_moe import evaluate

    return evaluate.byte_counts(b"".join(file.text.encode() for file in train_files))


def _corpus_list(files: tuple[SourceFile, ...]) -> str:
    head = f"# standard library of {_interpreter()}; one file per line: on which side it is, and its path\n"
    return head + "".join(f"{'heldout' if file.held_out else 'train'} {file.path}\n" for file in files)


def _corpus_facts(
    files: tuple[SourceFile, ...],
    train_files: tuple[SourceFile, ...],
    evaluation_files: tuple[SourceFile, ...],
    chat_samples: int,
) -> dict[str, Any]:
    from tiny_moe import corpus

    return {
        "source": _interpreter(),
        "train_files": len(train_files),
        "train_bytes": sum(len(file.text.encode()) for file in train_files),
        "heldout_files": len(files) - len(train_files),
        "held_out_share": corpus.HELD_OUT_SHARE,
        "evaluation_files": [file.path for file in evaluation_files],
        "chat_samples": chat_samples,
        "sha256": corpus.corpus_digest(files),
    }


def _model_facts(result: TrainingResult) -> dict[str, Any]:
    shape = result.network.shape
    total = sum(parameter.numel() for parameter in result.network.parameters())
    idle_experts = shape.num_experts - shape.experts_per_token
    idle = shape.num_layers * idle_experts * 3 * shape.hidden_size * shape.expert_width
    names = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    names += ("num_experts", "experts_per_token", "expert_width", "max_position")
    return {"total_params": total, "active_params": total - idle} | {name: getattr(shape, name) for name in names}


def _sizes(shape: Shape) -> str:
    """Return the options for the sizes in which the network differs from the bundled one."""
    from tiny_moe.network import Shape

    usual = Shape(vocab_size=shape.vocab_size)
    options = {"hidden-size": (shape.hidden_size, usual.hidden_size)}
    options["expert-width"] = (shape.expert_width, usual.expert_width)
    return "".join(f" --{name} {size}" for name, (size, bundled) in options.items() if size != bundled)


def _training_facts(result: TrainingResult, seed: int) -> dict[str, Any]:
    from tiny_moe import checkpoint, training

    return {
        "command": f"python scripts/train_tiny_moe.py --seed {seed} --steps {result.steps}"
        + _sizes(result.network.shape),
        "seed": seed,
        "steps": result.steps,
        "tokens_per_step": training.TOKENS_PER_STEP,
        "tokens": result.tokens,
        "sequence_length": training.SEQUENCE_LENGTH,
        "long_sequence_length": training.LONG_SEQUENCE_LENGTH,
        "long_share": training.LONG_SHARE,
        "muon_learning_rate": training.MUON_LEARNING_RATE,
        "adam_learning_rate": training.ADAM_LEARNING_RATE,
        "decay_share": training.DECAY_SHARE,
        "balance_coefficient": checkpoint.BALANCE_COEFFICIENT,
        "minutes": round(result.seconds / 60, 2),
        "final_training_loss_per_token": round(result.final_loss, 4),
        "device": result.device,
        "threads": THREADS,
    }


def _interpreter() -> str:
    return f"{platform.python_implementation()} {platform.python_version()}"


def _versions() -> dict[str, str]:
    import tokenizers
    import torch
    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
