"""convert/verify.py against an exact and a damaged conversion."""

from convert import disk, layouts, verify


def test_verify_compares_block_by_block_and_sees_a_swapped_norm(saved, tmp_path):
    source = disk.read(saved[0])
    layouts.write(source, tmp_path / "out", "original")
    errors = verify.verify(source, disk.read(tmp_path / "out"))
    assert len(errors) == 6 and max(e for _, e in errors) < 1e-5
    broken = disk.read(tmp_path / "out")
    t = broken.tensors["transformer_2"]
    a, b = "blocks.1.attn1.norm_q.weight", "blocks.1.attn1.norm_k.weight"
    t[a], t[b] = t[b], t[a]
    worst = max(verify.verify(source, broken), key=lambda e: e[1])
    assert worst[0] == "transformer_2 block 1" and worst[1] > 1e-3
