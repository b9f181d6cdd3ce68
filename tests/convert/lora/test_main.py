"""The command python -m convert.lora."""

from convert.lora import __main__ as command
from convert.lora import read
from tests.convert import published


def test_command_converts_a_dual_file_and_prints_what_it_did(tmp_path, capsys):
    source = published.ADAPTERS / "dual_aitoolkit_combined.safetensors"
    assert command.main([str(source), "--to", "kohya", "--out", str(tmp_path), "--name", "x"]) == 0
    text = capsys.readouterr().out
    assert "40 low-rank" in text or "20 low-rank" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "x_high_noise.safetensors",
        "x_low_noise.safetensors",
    ]
    published.check(read.read(tmp_path), published.expected("dual_aitoolkit_combined"), 1e-6)
    assert command.main([str(tmp_path / "none"), "--to", "kohya", "--out", str(tmp_path)]) == 1
    assert "no such file" in capsys.readouterr().err
