"""Compares the CUDA kernels of commits by their PTX, and records which sources compile to the same kernels.

    python scripts/compare_kernels.py COMMIT [COMMIT...]

Each commit is compared with the working tree, which must have all its kernels and may have more. Measured tables are
filed under the hash of the sources. A comment, a name or a further kernel changes that hash but not the kernels that
were measured, so write_kernel_speeds.py takes the tables of every commit that this script found to be the same. Names,
labels and where in its struct a parameter lies do not count; every instruction and its order does.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from write_kernel_speeds import RECORDS, build_info  # noqa: E402

from benchmarks.record import checkout  # noqa: E402

_NAME = re.compile(r"\b_Z\w+|\$str\w*")
_PARAMETER = re.compile(r"^(\s*ld\.param\S*\s.*)\[([^\]]+)\]", re.MULTILINE)
_PARAMETER_BYTES = re.compile(r"(\.param .*_param_\d+)\[\d+\]")
_OFFSET = re.compile(r"(add\.s64\s+(%rd\d+), %rd\d+, )-?\d+;")
_LABEL = re.compile(r"\$L__BB\d+_")
_DIRECTIVE = re.compile(r"^\s*(?:\.(?:loc|file|section|version|target)\b.*|//.*|)$")


def main() -> int:
    """Write the record; 1 where a kernel differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", metavar="COMMIT", nargs="+")
    options = parser.parse_args()
    here = kernels_of(ROOT / "csrc")
    trees = [{"commit": None, "cuda_sources": build_info().device_sources("cuda", ROOT / "csrc")}]
    for commit in options.commits:
        with tempfile.TemporaryDirectory() as name:
            folder = extracted(commit, Path(name))
            there = kernels_of(folder)
            gone, new = there - here, here - there
            if gone:
                print(
                    f"{commit}: {sum(gone.values())} kernels are not those of the working tree, {sum(new.values())} new"
                )
                return 1
            trees.append({"commit": commit, "cuda_sources": build_info().device_sources("cuda", folder)})
            print(f"{commit}: the same {sum(there.values())} kernels, {sum(new.values())} more in the working tree")
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    record = {
        "what": "sources of the CUDA kernels that compile to the same PTX but for names and places of parameters; the "
        "first is the tree itself, which may have more kernels",
        "date": date,
        "command": ["python", "scripts/compare_kernels.py", *options.commits],
        **checkout(),
        "environment": {"device": "none: only compiled", "nvcc": build_info().nvcc_version()},
        "trees": trees,
        "ptx_sha256": sorted(here.elements()),
    }
    path = RECORDS / f"{date}_same_kernels.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}")
    return 0


def extracted(commit: str, folder: Path) -> Path:
    """Unpack csrc of a commit and return its folder."""
    archive = subprocess.run(["git", "archive", commit, "csrc"], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder / "csrc"


def kernels_of(csrc: Path) -> Counter[str]:
    """Return the digests of all kernels' PTX."""
    found: Counter[str] = Counter()
    for source in sorted((csrc / "launch").glob("*.cu")):
        found.update(digests(ptx_of(source, csrc)))
    return found


def ptx_of(source: Path, csrc: Path) -> str:
    """Compile one source to PTX for sm_90a, as csrc/compile_cuda.py does to machine code."""
    nvcc = build_info().find_nvcc()
    if nvcc is None:
        raise SystemExit("compare_kernels: nvcc not found; set CUDA_HOME")
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "kernels.ptx"
        command = [
            nvcc, "-std=c++17", "-O3", "-arch=sm_90a", f"-I{csrc}", f"-I{csrc / 'include'}", "-ptx", str(source),
            "-o", str(output),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)
        return output.read_text(encoding="utf-8")


def digests(ptx: str) -> list[str]:
    """Return one digest per kernel in a PTX text."""
    entries = re.split(r"^(?=(?:\.visible |\.weak )?\.entry )", ptx, flags=re.MULTILINE)[1:]
    return [hashlib.sha256(plain(entry).encode()).hexdigest() for entry in entries]


def plain(entry: str) -> str:
    """Return a kernel's PTX without names, label numbers, comments, debug directives and places of parameters.

    A parameter is named by when it is read first: a field that other kernels need moves those behind it.
    """
    text = _PARAMETER_BYTES.sub(r"\1[]", entry)
    bases = {found[2].partition("+")[0] for found in _PARAMETER.finditer(text)}
    text = _OFFSET.sub(lambda found: f"{found[1]}OFFSET;" if found[2] in bases else found[0], text)
    places: dict[str, int] = {}
    text = _PARAMETER.sub(lambda found: f"{found[1]}[PARAMETER{places.setdefault(found[2], len(places))}]", text)
    text = _LABEL.sub("$L_", _NAME.sub("NAME", text))
    return "\n".join(line.strip() for line in text.splitlines() if not _DIRECTIVE.match(line))


if __name__ == "__main__":
    sys.exit(main())
