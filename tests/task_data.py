"""Small data sets in the formats of MMLU and GSM8K, where lm-evaluation-harness finds them without a network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

STEM = (
    "abstract_algebra", "anatomy", "astronomy", "college_biology", "college_chemistry", "college_computer_science",
    "college_mathematics", "college_physics", "computer_security", "conceptual_physics", "electrical_engineering",
    "elementary_mathematics", "high_school_biology", "high_school_chemistry", "high_school_computer_science",
    "high_school_mathematics", "high_school_physics", "high_school_statistics", "machine_learning",
)  # fmt: skip
"""Subjects of the group mmlu_stem."""
QUESTIONS = 2
"""Of each subject, and of GSM8K."""


def write_task_data(folder: Path) -> Path:
    """Write both below a folder, by the names that the harness's tasks have; return the folder."""
    sums = [{"question": f"{each} + 1?", "answer": f"One more than {each}.\n#### {each + 1}"} for each in range(8)]
    _write(folder / "openai" / "gsm8k", {"main": {"train": sums[QUESTIONS:], "test": sums[:QUESTIONS]}})
    choices = [
        {"question": f"Which is {each}?", "subject": "", "choices": ["0", "1", "2", "3"], "answer": each}
        for each in range(QUESTIONS)
    ]
    _write(folder / "cais" / "mmlu", {subject: {"test": choices, "dev": choices} for subject in STEM})
    return folder


def _write(folder: Path, subsets: Mapping[str, Mapping[str, Iterable[Any]]]) -> None:
    folder.mkdir(parents=True)
    lines = ["---", "configs:"]
    for subset, splits in subsets.items():
        lines += [f"- config_name: {subset}", "  data_files:"]
        for split, rows in splits.items():
            lines += [f"  - split: {split}", f"    path: {subset}-{split}.jsonl"]
            (folder / f"{subset}-{split}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
