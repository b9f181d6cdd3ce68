"""Adapters and files of weights: diverged, cast, partial, or no weights at all."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch

from convert import files, save
from convert import weights as convert_weights
from convert.lora import __main__ as command
from convert.lora import adapter, read, write
from tests.convert import tiny
from tests.field.table import Case, cases

PLAIN = {k: v.astype(np.float32) for k, v in tiny.pair(tiny.Q).items()}
A, B = sorted(PLAIN)
ONE = dataclasses.replace(tiny.CONFIG, experts=("high",), boundary=None)


def planted(key: str, value: float, dtype=np.float32):
    array = PLAIN[key].copy()
    array.flat[3] = value
    return PLAIN | {key: array.astype(dtype)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save.save_diffusers(tiny.params(ONE), ONE, folder)
    return folder


def end(main, arguments, capsys) -> tuple[int, str]:
    """(exit code, what was printed) of a command."""
    code = main([*map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out + said.err


@cases(
    Case(
        "NaN in a factor of an adapter",
        "refused",
        "1 of … values of …" + A + " are NaN or infinite; …",
        planted(A, np.nan),
    ),
    Case(
        "infinity in the other factor",
        "refused",
        "1 of … values of …" + B + " are NaN or infinite; …",
        planted(B, -np.inf),
    ),
    Case(
        "bfloat16 with infinity",
        "refused",
        "1 of … values of …" + A + " are NaN or infinite; …",
        planted(A, np.inf, jnp.bfloat16),
    ),
    Case(
        "NaN as alpha",
        "refused",
        "1 of 1 values of …alpha are NaN or infinite; …",
        PLAIN | {f"{tiny.Q}.alpha": np.asarray(np.nan, np.float32)},
    ),
    Case(
        "NaN in a dense change",
        "refused",
        "1 of 32 values of …diff_b are NaN or infinite; …",
        {f"{tiny.Q}.diff_b": np.where(np.arange(32) == 5, np.nan, 1).astype(np.float32)},
    ),
)
def test_diverged_adapters_are_refused(case, model, tmp_path, capsys):
    """By the converter of adapters and by merging alike."""
    file = tiny.save_adapter(tmp_path / "x.safetensors", case.given)
    out = tmp_path / "out"
    for main, arguments in (
        (command.main, [file, "--to", "kohya", "--out", out]),
        (
            convert_weights.main,
            [model, "--to", "diffusers", "--out", out, "--lora", f"{file}:high"],
        ),
    ):
        code, said = end(main, arguments, capsys)
        assert code == 1 and not list(tmp_path.rglob("out/**/*.safetensors"))
        case.check(said)


@cases(
    Case(
        "--dtype float16 of values up to 1e6",
        "refused",
        "1 of … values, up to 1e+06, are beyond the range of float16; pass --dtype bfloat16 or "
        "float32",
        (1e6, "float16"),
    ),
    Case(
        "--dtype float16 of a value of 1e-12",
        "written, and said",
        "note: 1 of … values (…%) became zero in float16",
        (1e-12, "float16"),
    ),
    Case(
        "--dtype bfloat16 of a value of 1e-42",
        "written, and said",
        "note: 1 of … values (…%) became zero in bfloat16",
        (1e-42, "bfloat16"),
    ),
)
def test_casts_lose_nothing_silently(case, tmp_path, capsys):
    value, dtype = case.given
    file = tiny.save_adapter(tmp_path / "x.safetensors", planted(A, value))
    out = tmp_path / "out"
    code, said = end(
        command.main, [file, "--to", "comfyui", "--out", out, "--dtype", dtype], capsys
    )
    case.check(said)
    assert code == (1 if "refused" in case.outcome else 0)
    if code == 0:
        (written,) = out.iterdir()
        for key, array in safetensors.numpy.load_file(written).items():
            assert np.isfinite(array.astype(np.float32)).all(), key
    else:
        assert not out.exists()


@cases(
    Case("an adapter of the patch embedding, as matrices", "loads in diffusers", "", False),
    Case("an adapter of the patch embedding, as a convolution", "loads in diffusers", "", True),
)
def test_a_pair_on_a_convolution_loads_in_diffusers(case, tmp_path):
    """Its change of the weight is that of the file."""
    network = tiny.torch_transformer()
    weight = network.patch_embedding.weight
    rng, rank = np.random.default_rng(0), 2
    a = rng.standard_normal((rank, weight[0].numel())).astype(np.float32)
    b = rng.standard_normal((len(weight), rank)).astype(np.float32)
    pair = {"a": a, "b": b}
    if case.given:
        pair = {"a": a.reshape(rank, *weight.shape[1:]), "b": b.reshape(*b.shape, 1, 1, 1)}
    key = "diffusion_model.patch_embedding"
    tensors = {f"{key}.lora_down.weight": pair["a"], f"{key}.lora_up.weight": pair["b"]}
    file = tiny.save_adapter(tmp_path / "x.safetensors", tensors)
    (out,) = write.write(read.read(file), tmp_path / "out", "diffusers")
    again = read.read(out)
    for name, change in again.deltas(None).items():
        np.testing.assert_allclose(change, (b @ a), rtol=1e-5, err_msg=name)
    before = weight.detach().clone()
    network.load_lora_adapter(safetensors.torch.load_file(out), prefix="transformer")
    network.fuse_lora()
    changed = dict(network.named_parameters())
    after = next(
        v for k, v in changed.items() if "patch_embedding" in k and v.shape == before.shape
    )
    moved = (after - before).detach().numpy().reshape(len(b), -1)
    np.testing.assert_allclose(moved, b @ a, rtol=1e-4, atol=1e-5)


@cases(
    Case(
        "an adapter of one module",
        "the whole is said too",
        "1 of … modules low-rank and 0 dense",
        1,
    ),
    Case(
        "an adapter of two modules",
        "the whole is said too",
        "2 of … modules low-rank and 0 dense",
        2,
    ),
)
def test_partial_adapters_say_so(case, model, tmp_path, capsys):
    """And the probe number depends on no order."""
    tensors = dict(PLAIN)
    if case.given == 2:
        tensors |= {k.replace("blocks.1", "blocks.0"): 2 * v for k, v in PLAIN.items()}
    file = tiny.save_adapter(tmp_path / "x.safetensors", tensors)
    code, said = end(
        command.main, [file, "--to", "kohya", "--out", tmp_path / "o", "--model", model], capsys
    )
    assert code == 0
    case.check(said)
    found = read.read(file)
    pairs = found.modules[None]
    turned = dataclasses.replace(found, modules={None: dict(reversed(pairs.items()))})
    assert adapter.probe(turned) == adapter.probe(found)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 28578000000\n"


def cut(data: bytes) -> bytes:
    return data[:-100]


@cases(
    Case(
        "a Git LFS pointer",
        "refused",
        "…: a Git LFS pointer, not the weights; run `git lfs install && "
        "git lfs pull` in its folder, or download it with `hf download`",
        lambda data: POINTER,
    ),
    Case(
        "a web page",
        "refused",
        "…: a web page, not weights; download the file itself",
        lambda data: b"<!DOCTYPE html>\n<html><body>Sign in</body></html>" * 20,
    ),
    Case(
        "an error message",
        "refused",
        "…: a text file ('Entry not found'), not weights; download it again",
        lambda data: b"Entry not found",
    ),
    Case("an empty file", "refused", "…: empty file; download it again", lambda data: b""),
    Case("missing bytes", "refused", "…the file is truncated…", cut),
    Case(
        "bytes too many",
        "refused",
        "…100 bytes after the last tensor…",
        lambda data: data + b"\0" * 100,
    ),
)
@pytest.mark.parametrize("kind", ["safetensors", "pt", "adapter"])
def test_files_that_are_no_weights(case, kind, model, tmp_path, capsys):
    source = next((model / "transformer").glob("*.safetensors"))
    name = "x.pt" if kind == "pt" else "x.safetensors"
    data = source.read_bytes()
    if kind == "adapter":
        data = tiny.save_adapter(tmp_path / "y.safetensors", PLAIN).read_bytes()
    if kind == "pt":
        if "bytes" in case.brought:
            pytest.skip("a .pt is a zip, with checks of its own")
        torch.save({"a": torch.zeros(3)}, tmp_path / "y.pt")
        data = (tmp_path / "y.pt").read_bytes()
    (tmp_path / name).write_bytes(case.given(data))
    main = command.main if kind == "adapter" else convert_weights.main
    to = "kohya" if kind == "adapter" else "diffusers"
    code, said = end(main, [tmp_path / name, "--to", to, "--out", tmp_path / "o"], capsys)
    assert code == 1 and len(said.strip().splitlines()) == 1, said
    case.check(said)
    with pytest.raises(ValueError):
        files.open_any(tmp_path / name)


def test_the_header_of_a_diffusers_file_fits_its_tensors(tmp_path):
    """peft rebuilds its settings from it."""
    file = tiny.save_adapter(tmp_path / "x.safetensors", PLAIN)
    (out,) = write.write(read.read(file), tmp_path / "out", "diffusers")
    with safetensors.safe_open(out, framework="numpy") as opened:
        settings = json.loads(opened.metadata()["lora_adapter_metadata"])
    assert settings["transformer.r"] == 2
