from __future__ import annotations

import re
from pathlib import Path

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.hardware_catalog import catalog, hardware_names, load_catalog_entry, read_hardware_file
from moe_optimizer.inspection.hardware_probe import load_hardware
from moe_optimizer.resources import config_dir
from moe_optimizer.specs.quantity import Source

NAMES = {
    "h100_sxm", "h100_pcie", "h100_nvl", "h200", "a100_40gb", "a100_80gb", "l40s", "l4", "b200", "gh200",
}  # fmt: skip
L4 = (config_dir() / "hardware" / "l4.yaml").read_text()


def test_catalog_has_the_promised_gpus_and_the_cpu():
    assert set(hardware_names()) == NAMES | {"cpu"}
    assert hardware_names()[-1] == "cpu"


def test_named_machine_is_a_full_node_without_a_host():
    machine = load_hardware("h100_sxm")
    assert (machine.origin, machine.num_gpus, machine.cpu, machine.warnings) == ("named", 8, None, ())
    assert load_hardware("h100_sxm", 2).num_gpus == 2


def test_cpu_is_this_machine_without_its_gpus():
    machine = load_hardware("cpu")
    assert (machine.origin, machine.gpu, machine.num_gpus) == ("probed", None, 0)
    assert machine.cpu is not None


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("h100-sxm", " h100_sxm?"),
        ("H200", " h200?"),
        ("h100", " h100_nvl or h100_pcie or h100_sxm?"),
        ("mi300x", "configs/hardware/<name>.yaml"),
        ("../hardware/h200", "configs/hardware/<name>.yaml"),
        ("", "configs/hardware/<name>.yaml"),
    ],
)
def test_unknown_name_gets_the_list_and_a_hint(name, hint):
    with pytest.raises(InputError, match="unknown hardware") as caught:
        load_hardware(name)
    assert "h100_sxm" in str(caught.value)
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(("name", "count"), [("h200", 0), ("h200", -1), ("cpu", 1)])
def test_impossible_gpu_count_is_an_error(name, count):
    with pytest.raises(InputError, match=f"hardware {name}: got {count} GPUs"):
        load_hardware(name, count)


def test_no_two_files_claim_the_same_card():
    names = [name for entry in catalog() for name in entry.nvml_names]
    ids = [device for entry in catalog() for device in entry.pci_device_ids]
    assert len(names) == len(set(names))
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"0x[0-9a-f]{4}", device) for device in ids)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_facts_are_of_a_plausible_size(name):
    gpu = load_catalog_entry(name).gpu
    # The driver counts in MiB what the vendor sells in GB: a little more, or less where ECC takes its share.
    assert gpu.nominal_memory is not None
    assert 0.95 < gpu.memory.value / gpu.nominal_memory.value < 1.10
    assert 0.25e12 < gpu.memory_bandwidth.value < 9e12
    # Dense rates: FP8 is twice BF16, and no part reaches the rate that needs sparsity.
    assert gpu.supports("fp8") == (gpu.compute_capability >= (8, 9))
    if gpu.supports("fp8"):
        assert gpu.dense_flops["fp8"].value / gpu.dense_flops["bf16"].value == pytest.approx(2, rel=0.02)
    assert 1000 < gpu.dense_flops["bf16"].value / gpu.sm_count / 1.6e9 < 10_000
    assert gpu.gpu_link_bandwidth.value < (1e12 if gpu.gpu_link == "nvlink" else 1e11)


def test_measured_rates_of_the_h200_stand_beside_the_datasheets():
    gpu = load_catalog_entry("h200").gpu
    assert gpu.memory_bandwidth.value == 4.8e12
    assert gpu.memory_bandwidth.source is Source.DATASHEET
    assert gpu.measured["copy_bandwidth"].value == 4.3e12
    assert gpu.measured["bf16_flops"].value == 790e12
    assert {quantity.source for quantity in gpu.measured.values()} == {Source.MEASURED}


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "card.yaml"
    path.write_text(text)
    return path


def test_file_stem_becomes_the_key(tmp_path):
    assert read_hardware_file(write(tmp_path, L4)).gpu.key == "card"


def line_of(text: str, start: str) -> int:
    return next(i for i, line in enumerate(text.splitlines(), 1) if line.lstrip().startswith(start))


@pytest.mark.parametrize(
    ("before", "after", "message", "hint"),
    [
        ("\nmemory_bandwidth:", "\nmemory_bandwith:", r"unknown key .*`memory_bandwith`", "memory_bandwidth"),
        ("\n  fp8:", "\n  fp9:", r"unknown key .*\(dense_flops\): .*`fp9`", "fp8"),
        ("unit: SMs,", "units: SMs,", r"unknown key .*\(sm_count\): .*`units`", "unit"),
        ("{value: 121.0e+12, unit:", "{value: 121.0e+12, units:", r" \(dense_flops.bf16\): got `units`", "unit"),
        ("value: 58,", "value: 58.5,", r"\(sm_count.value\): .* 58.5, .*integer", None),
        ("value: 58,", "value: -58,", r"\(sm_count.value\): .* -58, .* 0", None),
        ("value: 58,", "value: true,", r"\(sm_count.value\): .* true, .*integer", None),
        ("value: 300.0e+9,", "value: .nan,", r"\(memory_bandwidth.value\): .* NaN, .*finite", None),
        (
            "value: 300.0e+9,",
            "value: .inf,",
            r"\(memory_bandwidth.value\): .* Infinity, .*finite",
            None,
        ),
        ("value: 300.0e+9,", "value: 300.0e9,", r'value\): .*"300.0e9", .*number', "4.8e+12"),
        ("unit: SMs", "unit: cores", r'\(sm_count.unit\): got "cores", .*SMs', None),
        ("source: datasheet", "source: hearsay", r'source\): got "hearsay", .*measured', None),
        (
            "gpu_link: pcie",
            "gpu_link: string",
            r'\(gpu_link\): got "string", .*nvlink',
            None,
        ),
        ("name: NVIDIA L4", "name: ''", r'\(name\): got "", .* 1', None),
        ("name: NVIDIA L4", "name: NVIDIA L4\nname: L4", r"key `name` .*twice", None),
        ("value: [8, 9]", "value: 8.9", r"\(compute_capability.value\): .* 8.9, .*array", None),
        (
            "value: [8, 9]",
            "value: [8]",
            r"\(compute_capability.value.1\)|`compute_capability.value.1` is missing",
            None,
        ),
        ("value: [8, 9]", "value: [8, 9, 0]", r"\(compute_capability.value\): got \[8, 9, 0\]", None),
        (
            "value: [8, 9]",
            "value: [8, true]",
            r"\(compute_capability.value.1\): .* true, .*integer",
            None,
        ),
        (
            'pci_device_ids: ["0x27b8"]',
            "pci_device_ids: [0x27b8]",
            r"\(pci_device_ids.0\): got 10168,",
            None,
        ),
        ("gpu_link: pcie\n", "", r"key `gpu_link` .*missing", None),
        ("sm_count: {", "sm_count: 58 #{", r"\(sm_count\): .* 58, .*object", None),
    ],
)
def test_broken_file_is_an_error_with_file_and_line(tmp_path, before, after, message, hint):
    assert before in L4
    path = write(tmp_path, L4.replace(before, after, 1))
    with pytest.raises(InputError, match=message) as caught:
        read_hardware_file(path)
    if "missing" not in message:
        assert re.search(re.escape(str(path)) + r":\d+[: ]", str(caught.value))
    assert str(path) in str(caught.value)
    assert hint is None or hint in (caught.value.hint or "")


def test_line_is_the_keys_own(tmp_path):
    text = L4.replace("\nsm_count:", "\nsn_count:")
    with pytest.raises(InputError, match=f":{line_of(text, 'sn_count')} "):
        read_hardware_file(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a YAML mapping"),
        ("- a\n- b\n", "expected an object"),
        ("a: [1", "not YAML"),
        ("a: !!python/object/apply:os.system ['true']\n", "tags are"),
        ("[" * 20000, " 16 deep"),
        ("\x00", "not YAML"),
        ("name: &x {name: *x}", "anchors and aliases"),
        ("a: {b: 1}\n---\nc: 2\n", "not YAML"),
    ],
)
def test_what_is_no_mapping_of_facts_is_an_error(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        read_hardware_file(write(tmp_path, text))


def test_unreadable_and_oversized_files_are_errors(tmp_path):
    with pytest.raises(InputError, match=r"absent\.yaml: .*No such"):
        read_hardware_file(tmp_path / "absent.yaml")
    with pytest.raises(InputError, match="expected at most 65536"):
        read_hardware_file(write(tmp_path, "#" * 65_537))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"binary\.yaml: byte 0.*UTF-8"):
        read_hardware_file(tmp_path / "binary.yaml")
