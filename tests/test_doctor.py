"""Doctor: lines of a healthy machine, faults that must be seen, and the exit code."""

import json

from wanjax import doctor


def test_healthy_machine_has_no_failure_and_exits_0(tmp_path, capsys):
    assert doctor.main(["--workdir", str(tmp_path), "--json"]) == 0
    lines = {line["check"]: line for line in json.loads(capsys.readouterr().out)}
    assert lines["collective"]["finding"] == "sum over 8 devices 28"
    assert lines["matmul"]["status"] == "OK"


def test_missing_model_fails_with_exit_code_1(tmp_path, capsys):
    assert doctor.main(["--model", str(tmp_path / "none"), "--workdir", str(tmp_path)]) == 1
    assert "FAIL" in capsys.readouterr().out
