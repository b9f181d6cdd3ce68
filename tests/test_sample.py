"""The sampling command: fixed seeds, adapters by file, errors in one line."""

import dataclasses
import shutil

import imageio.v3 as iio
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert.lora import adapter, write
from tests import tiny
from wanjax import sample, sampling, setup, trees
from wanjax.data import video
from wanjax.models import lora, wan


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


def _command(model, out, *more):
    sizes = ["--height", "16", "--width", "16", "--frames", "5", "--steps", "3", "--seed", "1"]
    sizes += ["--mesh", "data=1"]  # the last --mesh of a command counts
    return ["--model", model, "--prompt", "red circle", "--out", str(out), *sizes, *more]


def _frames(monkeypatch, *command) -> np.ndarray:
    """The videos [P, frames, H, W, 3] of a command, before they are compressed."""
    shown = []
    monkeypatch.setattr(video, "write_mp4", lambda path, frames, fps: shown.append(frames))
    sample.main(_command(*command))
    return np.stack(shown).astype(int)


def _adapters(params: dict, **changes) -> dict:
    """Adapters of both experts whose products are not zero."""
    stir = lambda path, x: x if path.endswith("scale") else x + 0.3
    fresh = lambda expert: lora.init(
        jax.random.key(0), params[expert], **{"rank": 2, "alpha": 2.0, **changes}
    )
    return {expert: trees.map_paths(stir, fresh(expert)) for expert in ("high", "low")}


def _files(adapters: dict, folder) -> list[str]:
    return [str(f) for f in write.write(adapter.of_trees(adapters), folder, "diffusers")]


def test_adapters_from_files_change_the_video_and_strength_zero_does_not(model, tmp_path):
    sample.main(_command(model, tmp_path / "plain"))
    files = _files(_adapters(tiny.parameters()), tmp_path / "lora")
    both = [flag for file in files for flag in ("--lora", file)]
    sample.main(_command(model, tmp_path / "both", *both))
    none = [flag for file in files for flag in ("--lora", f"{file}@0")]
    sample.main(_command(model, tmp_path / "none", *none))
    read = lambda name: (tmp_path / name / "000.mp4").read_bytes()
    assert read("plain") == read("none") != read("both")
    assert (tmp_path / "plain" / "000.txt").read_text() == "red circle\n"


def _small_change(params: dict, **changes) -> dict:
    """Adapters with |ΔW| = |W|/1000 in every matrix, drawn at random."""
    out, rng = {}, np.random.default_rng(0)
    for expert, tree in _adapters(params, **changes).items():
        flat, base = trees.flatten(tree), trees.flatten(params[expert])
        for path in [p.removesuffix("/a") for p in flat if p.endswith("/a")]:
            a, b = (rng.normal(size=flat[f"{path}/{x}"].shape).astype(np.float32) for x in "ab")
            size = np.linalg.norm(base[f"{path}/kernel"]) / np.linalg.norm(a @ b)
            flat |= {f"{path}/a": a, f"{path}/b": b * np.float32(1e-3 * size)}
        out[expert] = trees.unflatten(flat)
    return out


def test_adapters_are_applied_in_full_and_merging_warns_of_what_it_rounds_away(
    model, tmp_path, monkeypatch, capsys
):
    """bfloat16 weights and changes of |W|/1000: velocities of the policy that is sampled, relative
    to the effect of the change, against weights summed in float64."""
    base = {e: wan.store(tree, "bfloat16") for e, tree in tiny.parameters().items() if e != "vae"}
    base = trees.cast({e: base[e] for e in ("high", "low")}, jnp.float32)
    whole = _small_change(base)
    more = _small_change(base, targets=(r"blocks/attn1/.*", "proj_out"))  # a second adapter
    files = [*_files(whole, tmp_path / "one"), *_files({"low": more["low"]}, tmp_path / "two")]
    flags = [f for file in files[:2] for f in ("--lora", file)]
    flags += ["--lora", f"{files[2]}@-0.5", "--param_dtype", "bfloat16"]
    policies = []

    def clips(policy, *args, **settings):
        policies.append(policy)
        return [(np.zeros((1, 5, 16, 16, 3), np.uint8), 1)]

    monkeypatch.setattr(sampling, "clips", clips)
    sample.main(_command(model, tmp_path / "applied", *flags))
    assert "warning" not in capsys.readouterr().out
    sample.main(_command(model, tmp_path / "merged", *flags, "--merge"))
    shown = capsys.readouterr().out
    assert shown.count("merged   ") == shown.count("warning: expert ") == 2
    assert "leave out --merge" in shown and "touched weights moved" in shown

    x, t, ctx = jax.random.normal(jax.random.key(1), (1, 2, 2, 2, 4)), 500.0, tiny.contexts()[1]
    run = lambda own: np.asarray(
        wan.denoise(own[0], own[1], x, jnp.array([t]), ctx, config=tiny.WAN)
    )
    flat = {path: np.asarray(x, np.float64) for path, x in trees.flatten(base["low"]).items()}
    for tree, strength in ((whole, 1.0), (more, -0.5)):
        part = {p: np.asarray(x, np.float64) for p, x in trees.flatten(tree["low"]).items()}
        for path in [p.removesuffix("/a") for p in part if p.endswith("/a")]:
            scale = strength * part[f"{path}/scale"][..., None, None]
            flat[f"{path}/kernel"] += scale * (part[f"{path}/a"] @ part[f"{path}/b"])
    exact = trees.cast(trees.unflatten(jax.tree.map(jnp.asarray, flat)), jnp.float32)
    want, plain = run((exact, {})), run((base["low"], {}))
    size = np.linalg.norm(want - plain)
    applied, merged = (np.linalg.norm(run(policy["low"]) - want) / size for policy in policies)
    assert applied < 0.01 and merged > 0.3
    assert policies[0]["low"][1] and policies[1]["low"] == (policies[1]["low"][0], {})


def test_a_mesh_and_offloaded_experts_make_the_same_videos(model, tmp_path, monkeypatch):
    """Three prompts in batches of two with an adapter, against one device."""
    files = _files(_adapters(tiny.parameters()), tmp_path / "lora")
    more = ["--prompt", "blue", "--prompt", "red", *(f for file in files for f in ("--lora", file))]
    one = _frames(monkeypatch, model, tmp_path / "one", *more)
    mesh = ["--mesh", "fsdp=2,context=2", "--offload"]
    four = _frames(monkeypatch, model, tmp_path / "four", *more, *mesh)
    assert one.shape == four.shape == (3, 5, 16, 16, 3)
    assert np.abs(one - four).max() <= 1 and (one == four).mean() > 0.99
    assert one.std() > 10 and not np.array_equal(one[0], one[2])


def test_one_byte_weights_are_sampled_with_adapters_beside_them(model, tmp_path, monkeypatch):
    files = _files(_adapters(tiny.parameters()), tmp_path / "lora")
    flags = [f for file in files for f in ("--lora", file)]
    full = _frames(monkeypatch, model, tmp_path / "full", *flags)
    loaded = []
    load = setup.load_model
    monkeypatch.setattr(
        setup, "load_model", lambda *a, **k: loaded.append(load(*a, **k)) or loaded[-1]
    )
    byte = _frames(monkeypatch, model, tmp_path / "byte", *flags, "--param_dtype", "int8")
    found = [set(params) for params, _ in loaded]
    assert found == [{"text_encoder"}, {"vae"}, {"high"}, {"low"}]  # one after the other
    assert loaded[2][0]["high"]["blocks"]["attn1"]["to_q"]["kernel"].dtype == jnp.int8
    assert 0 < np.abs(full - byte).mean() < 8


def test_a_video_starts_from_its_image(tmp_path, monkeypatch):
    """--image of a random I2V model: the image decides the video, and each prompt may have one."""
    wan = dataclasses.replace(tiny.WAN, in_channels=12)
    model = tiny.save_model(tmp_path, dataclasses.replace(tiny.MODEL, name="i2v", wan=wan))
    for name, level in (("dark", 20), ("bright", 230)):
        iio.imwrite(tmp_path / f"{name}.png", np.full((40, 30, 3), level, np.uint8))
    image = lambda *names: [f for n in names for f in ("--image", str(tmp_path / f"{n}.png"))]
    prompts = ["--prompt", "red circle"]  # two in all
    sample.main(_command(model, tmp_path / "each", *prompts, *image("dark", "bright")))
    sample.main(_command(model, tmp_path / "one", *prompts, *image("dark")))
    read = lambda folder, n: (tmp_path / folder / f"{n:03d}.mp4").read_bytes()
    assert read("each", 0) == read("one", 0) and read("each", 1) != read("one", 1)
    for more, line in (([], "model i2v starts from an image"),
                       ([*prompts, *prompts, *image("dark", "dark")], "2 --image for 3 --prompt"),
                       (image("none"), "none.png is not readable as an image")):  # fmt: skip
        with pytest.raises(SystemExit, match=line):
            sample.main(_command(model, tmp_path / "out", *more))


def test_a_model_without_its_text_encoder_is_refused(model, tmp_path):
    shutil.copytree(model, tmp_path / "part", ignore=shutil.ignore_patterns("text_encoder"))
    with pytest.raises(SystemExit, match="part has no text_encoder; give a whole model folder"):
        sample.main(_command(str(tmp_path / "part"), tmp_path / "out"))


@pytest.mark.parametrize("more, text", [
    (("--lora", "none.safetensors"), "none.safetensors"),
    (("--lora", "none.safetensors@much"), "strength 'much' is not a number"),
    (("--height", "20"), "height"),
    (("--image", "a.png"), "makes videos from text only; leave out --image"),
    (("--frames", "6"), "frames"),
    (("--vae_tile", "20"), "vae_tile is 20"),
    (("--batch", "0"), "--batch is 0"),
    (("--mesh", "context"), "--mesh is 'context'; expected axis=size"),
    (("--mesh", "rows=2"), "mesh axis 'rows' is unknown; set --mesh to some of"),
    (("--mesh", "context=16"), "has 16 places but 8 devices are present; change --mesh"),
    (("--mesh", "data=2", "--batch", "3"), "a batch of 3 samples does not divide"),
    (("--merge", "--param_dtype", "int8"), "--merge into int8 would round"),
    (("--guidance_low", "nan"), "--guidance_low is nan"),
])  # fmt: skip
def test_wrong_arguments_end_with_one_line(model, tmp_path, monkeypatch, more, text):
    monkeypatch.setattr(setup, "load_model", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(SystemExit) as stop:
        sample.main(_command(model, tmp_path / "out", *more))
    assert str(stop.value).startswith("wanjax.sample: ") and text in str(stop.value)
    assert "\n" not in str(stop.value) and not (tmp_path / "out").exists()
