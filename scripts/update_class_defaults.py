"""Writes moe_optimizer/inspection/families/class_defaults.json: the defaults of config classes for absent fields.

Run it after moving to another transformers, and when a family lists another model_type:
`.venv/bin/python scripts/update_class_defaults.py`. Expert counts are
under the key "(experts)": a config.json without a count describes a dense model, and the inspector warns if the class
has a default count.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from moe_optimizer.inspection.families import find_family

TARGET = Path(__file__).parent.parent / "moe_optimizer" / "inspection" / "families" / "class_defaults.json"
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers_block_type")
TEXT_FIELDS = ("time_step_rank", "mamba_dt_rank", "hidden_act", "hidden_activation", "activation_function")
# Fields that no parameter count depends on.
IRRELEVANT = re.compile(
    r"token|dropout|range|eps$|factor|coef|use_cache|_id$|chunk_size_feed|return_dict|output_|is_encoder_decoder|theta"
    r"|scal|pretraining|initializer|loss|std|audio|vision|image|video|patch|mask|interleave|jitter|beam|problem|label"
    r"|alpha|beta|momentum|gamma|softcap|topk_group|n_group$|norm_topk|_min|_max$|^max_v|summary|mambapy|is_decoder"
    r"|kernels|torch|fused|backend|zero_expert_type"
)


def class_defaults() -> dict[str, dict[str, object]]:
    """Return the defaults of the config classes in the installed transformers that a family lists, by model_type."""
    import transformers
    from transformers import CONFIG_MAPPING

    table: dict[str, dict[str, object]] = {"(transformers)": {"version": transformers.__version__}}
    for model_type in sorted(CONFIG_MAPPING):
        config_class = CONFIG_MAPPING[model_type]
        fields = {field.name: field.default for field in dataclasses.fields(config_class)}
        if find_family(model_type) and "vocab_size" in fields and any(name in fields for name in LAYER_COUNTS):
            table[model_type] = _row(fields)
    return table


def _row(fields: Mapping[str, object]) -> dict[str, object]:
    row: dict[str, object] = {}
    for name, value in sorted(fields.items()):
        number = isinstance(value, (bool, int)) and not IRRELEVANT.search(name)
        if name in EXPERT_COUNTS:
            if isinstance(value, int) and value > 1:
                row["(experts)"] = value
        elif number or (isinstance(value, str) and name in TEXT_FIELDS):
            row[name] = value
    return row


def to_json(table: dict[str, dict[str, object]]) -> str:
    """Return the table as JSON, one model_type on a line."""
    lines = (f"{json.dumps(name)}: {json.dumps(row, sort_keys=True)}" for name, row in table.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> int:
    """Write the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    TARGET.write_text(to_json(class_defaults()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
