"""Compares the CUDA kernels of commits by their PTX, and records which sources compile to the same kernels.

    python scripts/compare_kernels.py COMMIT [COMMIT...] [--cuobjdump FILE]

Each commit is compared with the working tree, which may have more kernels; the gate's, those of skinny_gemm and of an
attention that is gone count in neither, as no table holds their times. Where the working tree lacks grouped kernels of
some weights, tables of those weights do not hold for it, and the record says so (`without`); where it lacks others,
none do. Measured tables are filed under the hash of the sources. A comment, a name or a further kernel changes that
hash but not the kernels that were measured, so write_kernel_speeds.py takes the tables of every commit that this script
found to be the same. Names, labels, numbers of registers and where in its struct a parameter lies do not count; every
instruction and its order does.

nvcc may order what it takes out of a loop by where parameters lie. With cuobjdump of the CUDA toolkit the machine code
is compared instead: every instruction and its order, without which register holds what. That says how fast a kernel is;
what it computes its tests say.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from write_kernel_speeds import MXFP4_IN_E4M3, RECORDS, TABLES, build_info  # noqa: E402

from benchmarks.record import checkout  # noqa: E402

_WITHOUT_TABLES = ("gate_topk.cu", "skinny_gemm.cu", "paged_decode.cu")
_WEIGHTS_OF = {
    "grouped_gemm_sm90_bf16.cu": ("bf16",),
    "grouped_gemm_sm90_fp8.cu": ("fp8_block",),
    "grouped_gemm_sm90_fp8_weights.cu": ("fp8_block",),
    "grouped_gemm_sm90_mxfp4.cu": (MXFP4_IN_E4M3,),
    "grouped_gemm_sm90_mxfp4_weights.cu": ("mxfp4",),
    "grouped_gemm_sm90_int4_weights.cu": ("int4_g32", "int4_g128"),
}
"""Source -> the weights, as tables name them, that its kernels are for; those of other sources are for all."""
_NAME = re.compile(r"\b_Z\w+|\$str\w*")
_PARAMETER = re.compile(r"^(\s*ld\.param\S*\s.*)\[([^\]]+)\]", re.MULTILINE)
_PARAMETER_BYTES = re.compile(r"(\.param .*_param_\d+)\[\d+\]")
_OFFSET = re.compile(r"(add\.s64\s+(%rd\d+), %rd\d+, )-?\d+;")
_LABEL = re.compile(r"\$L__BB\d+_")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", re.MULTILINE)
_CONSTANT = re.compile(r"c\[0x0\]\s*\[0x[0-9a-f]+\]")
_PTX_REGISTER = re.compile(r"(%[a-z]+)(\d+)\b")
_REGISTER = re.compile(r"\b(UR|UP|R|P|B|SB)\d+\b")
_DIRECTIVE = re.compile(r"^\s*(?:\.(?:loc|file|section|version|target|reg)\b.*|//.*|)$")


def main() -> int:
    """Write the record; 1 where a kernel differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", metavar="COMMIT", nargs="+")
    parser.add_argument("--cuobjdump", type=Path, help="compare the machine code")
    options = parser.parse_args()
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    path = RECORDS / f"{date}_same_kernels.json"
    if lost := named_in(path).difference(options.commits):
        # Tables of the sources that it alone names would hold for none any more.
        parser.error(f"{path.name} is written anew, without {', '.join(sorted(lost))}\n\nhint: name them too")
    here = kernels_of(ROOT / "csrc", options.cuobjdump)
    trees = [{"commit": None, "cuda_sources": build_info().device_sources("cuda", ROOT / "csrc")}]
    for commit in options.commits:
        with tempfile.TemporaryDirectory() as name:
            folder = extracted(commit, Path(name))
            there = kernels_of(folder, options.cuobjdump)
            gone = {source: lost for source, each in there.items() if (lost := each - everything(here))}
            without = sorted({weights for source in gone for weights in _WEIGHTS_OF.get(source, TABLES)})
            count = sum(map(Counter.total, gone.values()))
            if {*TABLES} <= {*without}:
                print(f"{commit}: {count} kernels are not those of the working tree, in {', '.join(gone)}")
                return 1
            tree = {"commit": commit, "cuda_sources": build_info().device_sources("cuda", folder)}
            trees.append(tree | ({"without": without} if without else {}))
            same = everything(there).total() - count
            print(f"{commit}: the same {same} kernels" + (f", {count} others: {', '.join(without)}" if without else ""))
    code = "PTX" if options.cuobjdump is None else "machine code"
    record = {
        "what": f"sources of the CUDA kernels that compile to the same {code} but for names and places of parameters; "
        "the first is the tree itself, which may have more kernels",
        "date": date,
        "command": ["python", "scripts/compare_kernels.py", *options.commits],
        **checkout(),
        "environment": {"device": "none: only compiled", "nvcc": build_info().nvcc_version()},
        "trees": trees,
        f"{code.replace(' ', '_').lower()}_sha256": sorted(everything(here).elements()),
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}")
    return 0


def named_in(path: Path) -> set[str]:
    """Return the commits that a record names, none where there is no such record."""
    if not path.exists():
        return set()
    return {tree["commit"] for tree in json.loads(path.read_text(encoding="utf-8"))["trees"] if tree["commit"]}


def extracted(commit: str, folder: Path) -> Path:
    """Unpack csrc of a commit and return its folder."""
    archive = subprocess.run(["git", "archive", commit, "csrc"], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder / "csrc"


def everything(kernels: Mapping[str, Counter[str]]) -> Counter[str]:
    """Return the digests of all sources together."""
    return sum(kernels.values(), Counter())


def kernels_of(csrc: Path, cuobjdump: Path | None = None) -> dict[str, Counter[str]]:
    """Return the digests of the kernels' PTX, or of their machine code, by source."""

    def digests_of(source: Path) -> list[str]:
        if cuobjdump is None:
            return digests(compiled(source, csrc, "-ptx").decode())
        return machine_digests(disassembled(compiled(source, csrc, "-cubin"), cuobjdump))

    sources = [each for each in sorted((csrc / "launch").glob("*.cu")) if each.name not in _WITHOUT_TABLES]
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        found = compilers.map(digests_of, sources)
        return {source.name: Counter(each) for source, each in zip(sources, found, strict=True)}


def compiled(source: Path, csrc: Path, form: str) -> bytes:
    """Compile one source for sm_90a, as csrc/compile_cuda.py does; `form` is nvcc's -ptx or -cubin.

    At the same addresses each time: of where its data lie nvcc makes an order of instructions, so that a kernel's PTX
    was not that of the same source a minute ago.
    """
    nvcc = build_info().find_nvcc()
    if nvcc is None:
        raise SystemExit("compare_kernels: nvcc not found; set CUDA_HOME")
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "kernels"
        command = [
            "setarch", "--addr-no-randomize",
            nvcc, "-std=c++17", "-O3", "-arch=sm_90a", f"-I{csrc}", f"-I{csrc / 'include'}", form, str(source),
            "-o", str(output),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)
        return output.read_bytes()


def disassembled(cubin: bytes, cuobjdump: Path) -> str:
    """Return the listing of a cubin's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([cuobjdump, "-sass", file.name], check=True, capture_output=True, text=True).stdout


def machine_digests(listing: str) -> list[str]:
    """Return one digest per kernel in a listing of machine code."""
    kernels = re.split(r"^\s*Function : .*$", listing, flags=re.MULTILINE)[1:]
    return [hashlib.sha256(plain_machine_code(kernel).encode()).hexdigest() for kernel in kernels]


def plain_machine_code(kernel: str) -> str:
    """Return a kernel's instructions in their order, without where parameters lie and which register holds what."""
    lines = _INSTRUCTION.findall(kernel)
    return "\n".join(_REGISTER.sub(r"\1", _CONSTANT.sub("PARAMETER", line)) for line in lines)


def digests(ptx: str) -> list[str]:
    """Return one digest per kernel in a PTX text."""
    entries = re.split(r"^(?=(?:\.visible |\.weak )?\.entry )", ptx, flags=re.MULTILINE)[1:]
    return [hashlib.sha256(plain(entry).encode()).hexdigest() for entry in entries]


def plain(entry: str) -> str:
    """Return a kernel's PTX without names, label numbers, comments, debug directives and places of parameters.

    A parameter is named by when it is read first: a field that other kernels need moves those behind it. A register is
    numbered by when it is named first.
    """
    text = _PARAMETER_BYTES.sub(r"\1[]", entry)
    bases = {found[2].partition("+")[0] for found in _PARAMETER.finditer(text)}
    text = _OFFSET.sub(lambda found: f"{found[1]}OFFSET;" if found[2] in bases else found[0], text)
    places: dict[str, int] = {}
    text = _PARAMETER.sub(lambda found: f"{found[1]}[PARAMETER{places.setdefault(found[2], len(places))}]", text)
    text = _LABEL.sub("$L_", _NAME.sub("NAME", text))
    numbers: dict[str, int] = {}
    text = _PTX_REGISTER.sub(lambda found: f"{found[1]}{numbers.setdefault(found[0], len(numbers))}", text)
    return "\n".join(line.strip() for line in text.splitlines() if not _DIRECTIVE.match(line))


if __name__ == "__main__":
    sys.exit(main())
