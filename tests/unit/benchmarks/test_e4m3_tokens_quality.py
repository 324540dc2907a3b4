"""What the benchmark of formats refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ops import e4m3_tokens_quality


def test_the_record_of_the_bundled_model_is_not_written_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["e4m3_tokens_quality.py", "--model", str(tmp_path), "--write"])
    with pytest.raises(SystemExit):
        e4m3_tokens_quality.main()
    assert "--out" in capsys.readouterr().err
