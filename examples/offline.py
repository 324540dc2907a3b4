"""Generates for a few prompts with the embedded engine, on CPU, MPS or CUDA.

python examples/offline.py --model examples/tiny-moe
python examples/offline.py --model Qwen/Qwen3-0.6B --chat --device cuda "What is a mixture of experts?"
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moe_optimizer.engine import LLM, SamplingParams
from moe_optimizer.errors import MoeOptimizerError

PROMPTS = ["def fibonacci(n):\n", "import os\n\n", "class Stack:\n"]


def main() -> None:
    """Generate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--model", default=str(Path(__file__).parent / "tiny-moe"), help="folder, or hub id")
    parser.add_argument("--device", default="auto", help="auto, cpu, mps, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--chat", action="store_true", help="send each prompt through the model's chat template")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, help="default: what the model recommends")
    args = parser.parse_args()

    llm = LLM(args.model, device=args.device, dtype=args.dtype)
    values = {} if args.temperature is None else {"temperature": args.temperature}
    recommended = llm.get_default_sampling_params().model_dump(exclude_unset=True)
    params = SamplingParams(**{**recommended, **values, "max_tokens": args.max_tokens})
    if args.chat:
        outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in args.prompts], params)
    else:
        outputs = llm.generate(args.prompts, params)
    for prompt, output in zip(args.prompts, outputs, strict=True):
        print(f"{prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    try:
        main()
    except MoeOptimizerError as error:
        sys.exit(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""))
