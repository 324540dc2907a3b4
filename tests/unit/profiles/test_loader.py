from __future__ import annotations

import os
import re

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.profiles import DEFAULT_PROFILE, load_profile, profile_names
from moe_optimizer.profiles.schema import Profile


def write(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return str(path)


def refusal(tmp_path, text) -> InputError:
    with pytest.raises(InputError) as caught:
        load_profile(write(tmp_path, text))
    return caught.value


@pytest.mark.parametrize("name", ["aggressive", "balanced", "conservative", "single_h100", "throughput"])
def test_a_shipped_profile_loads_and_bears_its_file_name(name):
    assert load_profile(name).name == name


def test_the_shipped_profiles_are_listed_and_the_default_is_one_of_them():
    assert profile_names() == ("aggressive", "balanced", "conservative", "single_h100", "throughput")
    assert DEFAULT_PROFILE in profile_names()


def test_memory_shares_are_ninety_percent_and_ninety_five_for_aggressive():
    assert load_profile("conservative").gpu_memory_utilization == 0.90
    assert load_profile("balanced").gpu_memory_utilization == 0.90
    assert load_profile("aggressive").gpu_memory_utilization == 0.95


def test_a_profile_that_names_no_pass_changes_no_weights(tmp_path):
    passes = load_profile(write(tmp_path, "name: mine\n")).passes
    assert (passes.fp8.mode, passes.sparsity_24.mode) == ("off", "off")


def test_sparsity_is_off_in_every_shipped_profile_and_four_bits_wait_for_a_judgement_in_one():
    passes = {name: load_profile(name).passes for name in profile_names()}
    assert {each.sparsity_24.mode for each in passes.values()} == {"off"}
    modes = {name: each.four_bit.mode for name, each in passes.items()}
    assert modes.pop("throughput") == "auto"
    assert set(modes.values()) == {"off"}


def test_off_in_yaml_stays_a_word_and_does_not_become_false():
    assert load_profile("conservative").passes.flash_dmoe.mode == "off"


def test_a_file_needs_only_a_name(tmp_path):
    assert load_profile(write(tmp_path, "name: mine")) == Profile(name="mine")


def test_an_unknown_name_gets_a_near_match():
    with pytest.raises(InputError, match=r"'balnced', .*aggressive, balanced") as caught:
        load_profile("balnced")
    assert str(caught.value.hint).endswith(" balanced?")


def test_an_unknown_key_names_file_line_section_and_near_match(tmp_path):
    error = refusal(tmp_path, "name: mine\npasses:\n  fp8:\n    mode: auto\n    granularty: block\n")
    assert str(error).startswith("unknown key in ")
    assert re.search(r"mine\.yaml:5 \(passes\.fp8\):.*`granularty`,.*`mode`,", str(error))
    assert " granularity?" in str(error.hint)


def test_an_unknown_section_lists_the_passes(tmp_path):
    error = refusal(tmp_path, "name: mine\npasses: {fp9: {}}\n")
    assert re.search(r"mine\.yaml:2 \(passes\): .*`fp9`", str(error))
    assert "`dual_batch_overlap`" in str(error)


@pytest.mark.parametrize(
    ("text", "got", "expected"),
    [
        ("name: 5", ":1 (name): got 5", "string"),
        ("name: m\npasses: {fp8: {mode: maybe}}", ':2 (passes.fp8.mode): got "maybe"', "'auto', 'on'"),
        ("name: m\n\nworkload:\n  batch_size: 1.5", ":4 (workload.batch_size): got 1.5", "integer"),
        ("name: m\nworkload: {batch_size: true}", ":2 (workload.batch_size): got true", "integer"),
        ("name: m\nworkload: {batch_size: 0}", ":2 (workload.batch_size): got 0", " 1"),
        ("name: m\nworkload: 3", ":2 (workload): got 3", "object"),
        ("name: m\ngpu_memory_utilization: .nan", ":2 (gpu_memory_utilization): got NaN", "finite"),
        ("name: m\ngpu_memory_utilization: 90", ":2 (gpu_memory_utilization): got 90", " 0.99"),
        ("name: m\npasses: {fp8: {required: on}}", ':2 (passes.fp8.required): got "on"', "boolean"),
        (
            "name: m\npasses: {fp8: {keep_bf16_layers: [router, 1]}}",
            "(passes.fp8.keep_bf16_layers.1): got 1",
            "string",
        ),
        (
            "name: m\npasses: {fp8: {keep_bf16_layers: [rooter]}}",
            '(passes.fp8.keep_bf16_layers.0): got "rooter"',
            "`layers.3`",
        ),
        ("name: m\npasses: {fp8: null}", ":2 (passes.fp8): got null", "object"),
        ("[1]", ":1: got [1]", "object"),
        ("just words", ':1: got "just words"', "object"),
    ],
)
def test_a_wrong_value_names_line_field_what_was_got_and_expected(tmp_path, text, got, expected):
    before, _, after = str(refusal(tmp_path, text)).partition(", expected ")
    assert before.endswith(got)
    assert expected in f" {after}"


def test_a_missing_key_is_named(tmp_path):
    assert "`name`" in str(refusal(tmp_path, "{}"))


def test_the_first_of_several_mistakes_in_the_file_is_reported(tmp_path):
    error = refusal(tmp_path, "name: m\nperformance: fast\nworkload: {batch_size: x}\nbad: 1")
    assert ":2 (performance)" in str(error)


def test_a_missing_file_is_named():
    with pytest.raises(InputError, match=r"profile /nowhere/x\.yaml: "):
        load_profile("/nowhere/x.yaml")


def test_a_pipe_is_refused_rather_than_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(InputError, match="regular file"):
        load_profile(str(tmp_path / "pipe.yaml"))


def test_bytes_that_are_not_text_are_refused(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(InputError, match="not UTF-8"):
        load_profile(str(tmp_path / "binary.yaml"))


def test_a_huge_file_is_refused_without_being_read_whole(tmp_path):
    path = tmp_path / "huge.yaml"
    with path.open("wb") as stream:
        stream.truncate(10 * 2**30)  # sparse: 10 GiB of zeros that take no space
    with pytest.raises(InputError, match="expected at most"):
        load_profile(str(path))


def test_terminal_escapes_in_a_key_do_not_reach_the_message(tmp_path):
    assert "\x1b" not in str(refusal(tmp_path, 'name: m\n"\\e[31mred": 1'))


def test_a_profile_cannot_be_changed_after_loading():
    with pytest.raises(ValueError, match="frozen"):
        load_profile("balanced").name = "other"  # pyrefly: ignore[read-only]
