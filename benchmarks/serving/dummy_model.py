"""Writes a model without weights: vLLM makes them up (--load-format dummy).

    python benchmarks/serving/dummy_model.py FOLDER --shape qwen3_moe [--int4-group 128] [--set num_experts=32 ...]
    python benchmarks/serving/dummy_model.py FOLDER --draft-of MODEL

With --int4-group the configuration is that of a GPTQ checkpoint: all linears but gates and head in INT4, symmetric, in
groups of so many columns, without act-order. With --draft-of it is a model of one small layer that drafts for MODEL.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT))

from benchmarks.record import parser_of  # noqa: E402

_TINY_MOE = _ROOT / "examples" / "tiny-moe"
_PUBLISHED = _ROOT / "tests" / "data" / "model_configs"


def main() -> int:
    """Write the folder."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", choices=published_shapes(), metavar="NAME")
    what.add_argument("--draft-of", type=Path, metavar="MODEL")
    parser.add_argument("--int4-group", type=int, metavar="COLUMNS")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=NUMBER", help="in place of the published")
    options = parser.parse_args()
    if options.draft_of:
        print(write_draft_model(options.folder, options.draft_of))
        return 0
    changes: dict[str, Any] = {name: int(number) for name, _, number in (each.partition("=") for each in options.set)}
    if options.int4_group:
        changes["quantization_config"] = gptq(options.int4_group)
    print(write_published_shape(options.folder, options.shape, **changes))
    return 0


def gptq(group: int) -> dict[str, Any]:
    """Return what config.json of a GPTQ checkpoint says of its quantisation."""
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "dynamic": {r"-:.*mlp\.gate$": {}},
    }


def write_dummy_model(folder: Path, shape: Mapping[str, int]) -> Path:
    """Write the bundled model's configuration and tokenizer, with the fields `shape` in place of its own, to `folder`.

    Returns:
        `folder`, which is made.
    """
    folder.mkdir(parents=True)
    config = json.loads((_TINY_MOE / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **shape}), encoding="utf-8")
    for path in _TINY_MOE.glob("*token*"):
        shutil.copy(path, folder)
    return folder


def published_shapes() -> tuple[str, ...]:
    """Return the names that `write_published_shape` takes."""
    return tuple(sorted(path.stem for path in _PUBLISHED.glob("*.json")))


def write_published_shape(folder: Path, name: str, **changes: Any) -> Path:
    """Write the published configuration `name`, and a stand-in tokenizer with one word for each of its tokens.

    Args:
        folder: is made.
        name: of `published_shapes`.
        changes: fields in place of the configuration's own.

    Returns:
        `folder`, which is made.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True)
    config = json.loads((_PUBLISHED / f"{name}.json").read_text(encoding="utf-8")) | changes
    # The code that such a field names is not here; vLLM and transformers have their own.
    config.pop("auto_map", None)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = Tokenizer(models.WordLevel({f"t{token}": token for token in range(config["vocab_size"])}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    end = f"t{config.get('eos_token_id') or 0}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def write_draft_model(folder: Path, target: Path) -> Path:
    """Write the configuration of a model that drafts in no time for the one in `target`, and its tokenizer.

    Its vocabulary and the shape of its cache are the target's, so that both share vLLM's blocks.

    Returns:
        `folder`, which is made.
    """
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    heads = config["num_key_value_heads"]
    folder.mkdir(parents=True)
    draft = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
        "rope_theta": config.get("rope_theta", 1e6),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(draft, indent=1), encoding="utf-8")
    for path in target.glob("*token*"):
        shutil.copy(path, folder)
    return folder


if __name__ == "__main__":
    sys.exit(main())
