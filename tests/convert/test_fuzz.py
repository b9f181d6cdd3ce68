"""Damaged and hostile files: always a one-line ValueError or a full read, never anything else."""

import json
import random
import resource
import shutil
import struct
import warnings
import zipfile

import gguf
import numpy as np
import pytest
import torch

from convert import disk, files, layouts, load, save, weights
from convert.lora import read
from tests.convert import published, tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    config = tiny.dataclasses.replace(tiny.CONFIG, experts=("high",), boundary=None)
    save.save_diffusers(tiny.params(config), config, folder)
    return folder


def outcome(action, path):
    """Run action; return True if it worked, False if it refused properly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            action()
        except ValueError as error:
            text = str(error)
            assert "\n" not in text and 10 < len(text) < 3000, text
            return False
    return True


def flip(data: bytes, rng, span: int | None = None) -> bytes:
    """Flip one to three bits, within the first `span` bytes."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        out[rng.randrange(min(span or len(out), len(out)))] ^= 1 << rng.randrange(8)
    return bytes(out)


def header(data: bytes) -> tuple[dict, bytes]:
    n = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + n]), data[8 + n :]


def pack(head, body: bytes) -> bytes:
    raw = head if isinstance(head, bytes) else json.dumps(head).encode()
    return len(raw).to_bytes(8, "little") + raw + body


ABSURD = (-1, 0, 1, 2**31, 2**62, 2**63, 2**200, 1.5, "8", None, True, [], {}, [2**40, 2**40])


def mutate_safetensors(data: bytes, rng) -> bytes:
    """One damage of a random kind."""
    head, body = header(data)
    name = rng.choice([k for k in head if k != "__metadata__"])
    entry = head[name]
    kind = rng.randrange(10)
    if kind == 0:
        return data[: rng.randrange(len(data))]
    if kind == 1:
        return flip(data, rng, 8 + len(data) - len(body))
    if kind == 2:
        return struct.pack("<Q", rng.choice([0, 1, len(data), 2**31, 2**63, 2**64 - 1])) + data[8:]
    if kind == 3:
        entry["shape"] = rng.choice([*ABSURD, [rng.choice(ABSURD)], entry["shape"] + [1]])
    if kind == 4:
        entry["data_offsets"] = rng.choice([*ABSURD, [rng.choice(ABSURD), rng.choice(ABSURD)]])
    if kind == 5:
        entry["dtype"] = rng.choice(["F32", "F64", "BF16", "I8", "F8_E4M3", "X", None, 3, [1], {}])
    if kind == 6:
        head[rng.choice(["", "x" * 5000, "a\nb", name + ".weight", "\0"])] = head.pop(name)
    if kind == 7:
        head["__metadata__"] = rng.choice([*ABSURD, {"a": 1}, {"lora_adapter_metadata": "{"}])
    if kind == 8:
        raw = json.dumps(head)
        twice = f"{json.dumps(name)}: {json.dumps(entry)}"
        return pack((raw[:-1] + ", " + twice + "}").encode(), body)
    if kind == 9:
        return pack(rng.choice([b"[" * 100_000, b"{}", b"[]", b"\xff\xfe", b"", b'"x"']), body)
    return pack(head, body + rng.choice([b"", b"", b"\0" * 7]))


def test_damaged_checkpoint_files_are_refused_or_read(model, tmp_path):
    """1,500 mutations of a transformer file inside its folder."""
    rng, refused = random.Random(0), 0
    folder = shutil.copytree(model, tmp_path / "m")
    path = folder / "transformer/diffusion_pytorch_model.safetensors"
    data = path.read_bytes()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(1500):
        path.write_bytes(mutate_safetensors(data, rng))
        action = lambda: load.plan(disk.read(folder), "transformer")
        refused += not outcome(action, path)
    assert refused > 1200
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_damaged_adapters_are_refused_or_read(tmp_path):
    """1,000 mutations over all golden adapters, all tensors read."""
    rng, refused = random.Random(1), 0
    sources = [p.read_bytes() for p in sorted(published.ADAPTERS.glob("*.safetensors"))]
    path = tmp_path / "x.safetensors"
    for k in range(1000):
        path.write_bytes(mutate_safetensors(sources[k % len(sources)], rng))
        refused += not outcome(lambda: read.read(path), path)
    assert refused > 700


def full_check(folder):
    checkpoint = disk.read(folder)
    for component in ("transformer", "vae"):
        load.plan(checkpoint, component)
    disk.model_config(checkpoint)


def test_damaged_json_files_are_refused_or_read(model, tmp_path):
    """300 mutations of model_index.json, configs and an index."""
    rng, refused = random.Random(2), 0
    folder = shutil.copytree(model, tmp_path / "m")
    shard = "diffusion_pytorch_model.safetensors"
    tensors = files.open_folder(folder / "transformer")[0]
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, shard)}
    (folder / "transformer" / f"{shard}.index.json").write_text(json.dumps(index))
    assert outcome(lambda: load.plan(disk.read(folder), "transformer"), folder)
    paths = sorted(p for p in folder.rglob("*.json") if "tokenizer" not in p.parts)
    for k in range(300):
        path = paths[k % len(paths)]
        data = path.read_bytes()
        if k % 3 == 0:
            new = flip(data, rng)
        elif k % 3 == 1:
            new = data[: rng.randrange(len(data))]
        else:
            value = json.loads(data)
            inner = value.get("weight_map", value)
            evil = ("../../etc/passwd", "/etc/passwd", "..", "a/b.safetensors", "x\0.safetensors")
            inner[rng.choice(list(inner))] = rng.choice([*ABSURD, *evil])
            new = json.dumps(value).encode()
        path.write_bytes(new)
        refused += not outcome(lambda: full_check(folder), path)
        path.write_bytes(data)
    assert refused > 150


def test_damaged_torch_and_gguf_files_are_refused_or_read(model, tmp_path):
    """300 mutations each; zip entries that unpack to more than they hold are refused."""
    rng = random.Random(3)
    tensors = disk.read(model).tensors["transformer"]
    named = layouts.original_names("transformer", tensors)
    torch.save({n: torch.tensor(t.all()) for n, t in named.items()}, tmp_path / "a.pth")
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "wan")
    for name, tensor in named.items():
        array = tensor.all()
        if array.ndim < 5:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for name, span in (("a.pth", None), ("a.gguf", 6000)):
        data = (tmp_path / name).read_bytes()
        path = tmp_path / f"broken_{name}"
        refused = 0
        for k in range(300):
            new = flip(data, rng, span) if k % 2 else data[: rng.randrange(len(data))]
            path.write_bytes(new)
            refused += not outcome(lambda path=path: files.open_any(path), path)
        assert refused > 150
    with zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\0" * 10_000_000)
    with pytest.raises(ValueError, match="compressed entries"):
        files.open_any(tmp_path / "bomb.pth")
    view = torch.zeros(1).expand(2**40)
    torch.save({"w": view}, tmp_path / "view.pth")
    with pytest.raises(ValueError, match="larger than its storage"):
        files.open_any(tmp_path / "view.pth")


@pytest.mark.parametrize("kind", ["lokr_w{}", "hada_w{}_a"])
def test_small_factors_of_an_enormous_matrix_are_refused(tmp_path, kind):
    """4 MB of factors that would make a matrix of 10^12 numbers."""
    module, long = "lora_unet_blocks_0_self_attn_q", np.zeros((10**6, 1), np.float32)
    tensors = {f"{module}.{kind.format(k)}": long[: 10**6 if k == 1 else 10**5] for k in (1, 2)}
    if "hada" in kind:
        wide = np.zeros((1, 20_000), np.float32)
        tensors = {f"{module}.hada_w{k}_a": wide for k in (1, 2)}
        tensors |= {f"{module}.hada_w{k}_b": wide.T for k in (1, 2)}
    lazy = {n: files.of_array(a) for n, a in tensors.items()}
    files.write_safetensors(tmp_path / "x.safetensors", lazy)
    with pytest.raises(ValueError, match="larger than any in Wan"):
        read.read(tmp_path / "x.safetensors")


def test_a_failing_conversion_leaves_nothing_behind(model, tmp_path, capsys):
    folder = shutil.copytree(model, tmp_path / "m")
    path = folder / "vae/diffusion_pytorch_model.safetensors"
    data = path.read_bytes()
    for layout in layouts.LAYOUTS:
        path.write_bytes(data[:-3])
        assert weights.main([str(folder), "--to", layout, "--out", str(tmp_path / "o")]) == 1
        path.write_bytes(data)
        checkpoint = disk.read(folder)
        path.write_bytes(data[:-3])  # cut after its header was checked, found when it is read
        with pytest.raises(ValueError, match="cut short"):
            layouts.write(checkpoint, tmp_path / "o", layout)
        assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert np.all(["error:" in line for line in capsys.readouterr().err.splitlines()])
