"""What is published: name lists of all variants (golden/wan) and adapter files (golden/lora)."""

import json
import pathlib

import ml_dtypes
import numpy as np

from convert import files, names

ROOT = pathlib.Path(__file__).parents[1] / "golden"
VARIANTS = ROOT / "wan"
PATTERNS = json.loads((VARIANTS / "key_patterns.json").read_text())
LISTS = sorted(p.stem for p in VARIANTS.glob("keys_*.json"))
ADAPTERS = ROOT / "lora"
FILES = json.loads((ADAPTERS / "manifest.json").read_text())["files"]
DTYPES = {1: np.float32, 2: ml_dtypes.bfloat16}


def component(stem):
    """The component that a name list is of."""
    kinds = {"keys_vae": "vae", "keys_text": "text_encoder", "keys_image": "image_encoder"}
    return next((c for k, c in kinds.items() if stem.startswith(k)), "transformer")


def key_list(stem):
    """(naming, {name: shape}) of a published list."""
    data = json.loads((VARIANTS / f"{stem}.json").read_text())
    naming = "original" if data.get("naming", "diffusers").startswith("original") else "diffusers"
    keys = {k: tuple(v["shape"]) for k, v in data["keys"].items()}
    keys.pop("encoder.embed_tokens.weight", None)  # tied to shared.weight
    return naming, keys


def small(keys, config):
    """The key list with every large axis shrunk, ratios to the model width kept."""
    heads, head = config.get("num_attention_heads", 0), config.get("attention_head_dim", 0)
    dim = config.get("dim") or heads * head

    def size(n):
        if dim and n % dim == 0:
            return 8 * (n // dim)
        return n if n <= 96 else 4 + 4 * (n % 3)

    return {k: tuple(map(size, shape)) for k, shape in keys.items()}


def random_tensors(shapes):
    """Random tensors: vectors float32, matrices bfloat16, the rest float16."""
    rng = np.random.default_rng(0)
    draw = lambda s: rng.standard_normal(s).astype(DTYPES.get(len(s), np.float16))
    return {n: files.of_array(draw(s)) for n, s in shapes.items()}


def expected(name):
    """{expert: {diffusers parameter name: dense change}}"""
    out = {}
    for key, value in np.load(ADAPTERS / f"expected_{name}.npz").items():
        expert = FILES[name].get("expert", "").removesuffix("_noise") or None
        for side in ("high", "low"):
            if key.startswith(f"{side}_noise."):
                expert, key = side, key.removeprefix(f"{side}_noise.")
        (new,), _ = names.to_diffusers(key, names.rules("transformer", ()))
        out.setdefault(expert, {})[new] = value
    return out


def check(adapter, want, tolerance):
    """Assert that an adapter makes exactly the dense changes of `expected`."""
    assert set(adapter.experts) == set(want)
    for expert, changes in want.items():
        got = adapter.deltas(expert)
        assert set(got) == set(changes)
        for name, value in changes.items():
            np.testing.assert_allclose(
                got[name].reshape(value.shape), value, atol=tolerance, rtol=0, err_msg=name
            )
