"""Adapters in and out: every naming of Wan LoRA files <-> adapter trees by expert.

A file is read into an `Adapter`: per expert, low-rank pairs by diffusers module name,
W + alpha/rank · B A (arXiv 2106.09685), and dense changes by parameter name. LoHa and LoKr are
rewritten as exact pairs, so everything can be exported to any dialect and trained further:
  LoHa  (W1a W1b) ∘ (W2a W2b) = [W1a ⊙rows W2a] [W1b ⊙cols W2b], rank r1·r2 (arXiv 2108.06098)
  LoKr  (A1 B1) ⊗ (A2 B2) = (A1 ⊗ A2)(B1 ⊗ B2)                    (arXiv 2309.14859)

    python -m convert.lora SRC --to diffusers|comfyui|kohya|diffsynth --out DST

Dimension legend: R rank, I inputs, O outputs, L layers.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import pathlib
import re
import sys
import typing
import warnings
from dataclasses import dataclass, field
from functools import cache

import jax
import numpy as np

from convert import disk, files, names, weights
from wanjax import __version__, trees
from wanjax.models import presets, wan

EXPERTS = ("high", "low")


@dataclass(frozen=True)
class LowRank:
    """One pair in torch layout, as stored: W + scale · b a, scale = alpha / rank."""

    a: np.ndarray  # [R,I]
    b: np.ndarray  # [O,R]
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def delta(self) -> np.ndarray:
        """The change of the weight [O,I], float32."""
        return self.scale * (self.b.astype(np.float32) @ self.a.astype(np.float32))


@dataclass
class Adapter:
    """The content of adapter files; expert None: the file does not say which expert it is for."""

    modules: dict[str | None, dict[str, LowRank]] = field(default_factory=dict)
    dense: dict[str | None, dict[str, np.ndarray]] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def experts(self) -> list[str | None]:
        return sorted({*self.modules, *self.dense}, key=str)

    def deltas(self, expert: str | None) -> dict[str, np.ndarray]:
        """Dense change of every touched parameter, float32, by diffusers parameter name."""
        out = {f"{m}.weight": pair.delta() for m, pair in self.modules.get(expert, {}).items()}
        for name, change in self.dense.get(expert, {}).items():
            change = change.astype(np.float32)
            out[name] = out[name].reshape(change.shape) + change if name in out else change
        return out


def load(
    path, config: presets.ModelConfig, *, expert: str | None = None, strength: float = 1.0,
    dense_merged: bool = False,
):  # fmt: skip
    """Load adapter trees by expert, {"high": tree, "low": tree}, to train or sample with.

    Args:
      path: adapter file, PEFT folder, folder or list of a high-noise and a low-noise file.
      expert: "high", "low" or "both" for files that do not say; checked against files that do.
      strength: factor on every scale.
      dense_merged: the base was loaded with the `dense_changes` of the file.
    Raises ValueError on unknown keys, unclear experts, modules the model lacks, and on dense parts
    (bias, norm, modulation changes) unless dense_merged.
    """
    adapter, skipped = fit(route(read(path), config.experts, expert), config)
    dense = {name for part in adapter.dense.values() for name in part}
    if dense and not dense_merged:
        raise ValueError(
            f"{path}: {len(dense)} changes are not low-rank ({files.some(sorted(dense))}); load "
            "the base with them (lora.dense_changes), or merge the file with convert.weights --lora"
        )
    if skipped:
        warnings.warn(f"{path}: {skipped}", stacklevel=2)
    if probe(adapter) == 0:
        warnings.warn(f"{path}: all its updates are zero, it changes nothing", stacklevel=2)
    return to_trees(adapter, config, strength)


def dense_changes(model_path, sources) -> dict[str, dict[str, np.ndarray]]:
    """What adapters change beside low-rank pairs, for `weights.load(dense=)`: {expert: {parameter
    name: float32 change}}, {} where there is none.

    sources: [(path, expert or None, strength)], as `load` takes them.
    """
    out: dict[str, dict[str, np.ndarray]] = {}
    for path, expert, strength in sources:
        adapter = read(path)
        if not adapter.dense:
            continue
        config = disk.model_config(disk.read(model_path))
        for side, part in fit(route(adapter, config.experts, expert), config)[0].dense.items():
            changes = out.setdefault(str(side), {})
            for name, change in part.items():
                change = strength * change.astype(np.float32)
                changes[name] = changes[name] + change if name in changes else change
    return out


def with_start(adapter: Adapter, paths) -> Adapter:
    """A trained adapter with what the files it started from have beside it: the pairs of experts
    that were not trained, and dense changes."""
    if paths:
        start = read(list(paths))
        for expert, pairs in start.modules.items():
            adapter.modules.setdefault(expert, pairs)
        adapter.dense = start.dense
    return adapter


# ---- keys ----

_KINDS: dict[str, str] = {
    **dict.fromkeys(("lora_A", "lora_down", "lora.down"), "a"),
    **dict.fromkeys(("lora_B", "lora_up", "lora.up"), "b"),
}
_KEY = re.compile(
    r"(?P<module>.+?)\.(?P<kind>lora_A|lora_B|lora_down|lora_up|lora\.down|lora\.up|alpha|diff"
    r"|diff_b|diff_m|hada_w[12]_[ab]|hada_t[12]|lokr_w[12]|lokr_w[12]_[ab]|lokr_t2|dora_scale"
    r"|lora_magnitude_vector)(?:\.(?!weight$|bias$)[^.]+)?(?:\.(?P<leaf>weight|bias))?"
)
_PREFIXES: dict[str, str | None] = {
    **dict.fromkeys(("transformer_1.", "high_noise."), "high"),
    **dict.fromkeys(("transformer_2.", "low_noise.", "pipe.dit2."), "low"),
    **dict.fromkeys(("base_model.model.", "model.diffusion_model.", "diffusion_model."), None),
    **dict.fromkeys(("transformer.", "pipe.dit.", "module.", "_orig_mod."), None),
    **dict.fromkeys(("lora_unet_", "lora_transformer_", "lycoris_"), None),
}
_REFUSED: dict[str, str] = {
    **dict.fromkeys(("dora_scale", "lora_magnitude_vector"), "DoRA"),
    **dict.fromkeys(("hada_t1", "hada_t2", "lokr_t2"), "a Tucker factor"),
}
_MAX_BLOCKS = 64


@cache
def _parameters() -> dict[str, str]:
    """{parameter name without .weight, dots as underscores: diffusers name}, both namings."""
    out = {}
    for rule in names.rules("transformer", ()):
        if len(rule.diffusers) != 1 or "{rest}" in rule.original:
            continue
        used = set(re.findall(r"\{(\w)\}", rule.diffusers[0] + rule.original))
        values: dict[str, list] = {"p": ["weight"]}
        values["i"] = list(range(_MAX_BLOCKS)) if used & set("ij") else [0]
        for key in used - set("pij"):
            values[key] = names.ALTERNATIVES[key].split("|")
        for combination in itertools.product(*values.values()):
            groups = dict(zip(values, combination, strict=True))
            groups["j"] = int(groups["i"]) + 1
            new = rule.diffusers[0].format(**groups)
            for name in (new, rule.original.format(**groups)):
                out[name.removesuffix(".weight").replace(".", "_")] = new
    return out


def _find(module: str) -> str | None:
    return _parameters().get(module.replace(".", "_"))


def _parse(key: str) -> tuple[str | None, str, str, str | None] | None:
    """Split a key into (expert, module as written, kind, leaf); None if it is no adapter key."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    module, expert, again = match["module"], None, True
    while again:
        again = False
        for prefix, side in _PREFIXES.items():
            if module.startswith(prefix):
                module, expert, again = module[len(prefix) :], side or expert, True
    kind = _KINDS.get(match["kind"], match["kind"])
    return expert, module, kind, match["leaf"]


# ---- in ----


def read(path) -> Adapter:
    """Read an adapter file, a PEFT folder, or several files, in any dialect.

    Raises ValueError naming keys that are unknown, incomplete or of kinds not supported (DoRA).
    """
    if isinstance(path, list | tuple):
        return _join([read(p) for p in path], str(path))
    path = pathlib.Path(path)
    if path.is_dir():
        found = sorted(path.glob("*.safetensors"))
        if not found:
            raise ValueError(f"{path}: no .safetensors file; point to the adapter file")
        return read(found[0]) if len(found) == 1 else read(found)
    if not path.is_file():
        raise ValueError(f"{path}: no such file; set the path of the adapter")
    tensors, metadata = files.open_any(path)
    adapter = parse(tensors, metadata, _side_config(path, metadata), str(path))
    hint = _expert_of(path, metadata)
    if hint and adapter.experts == [None]:
        return _move(adapter, None, (hint,))
    if hint and hint not in adapter.experts:
        raise ValueError(f"{path}: the name says {hint} noise, the keys {adapter.experts[0]} noise")
    return adapter


def _move(adapter: Adapter, source: str | None, sides) -> Adapter:
    """Give the part of one expert to the experts `sides`."""
    pick = lambda part: {e: part[source] for e in sides} if source in part else {}
    return dataclasses.replace(adapter, modules=pick(adapter.modules), dense=pick(adapter.dense))


def _side_config(path: pathlib.Path, metadata: dict[str, str]) -> dict:
    """PEFT settings from the header (diffusers) or the file beside (PEFT, diffusion-pipe)."""
    if raw := metadata.get("lora_adapter_metadata"):
        try:
            settings = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: lora_adapter_metadata is not JSON: {error}") from None
        if not isinstance(settings, dict):
            raise ValueError(f"{path}: lora_adapter_metadata is not a JSON object")
        return settings
    beside = path.parent / (
        "adapter_config.json"
        if path.stem == "adapter_model"
        else f"{path.stem}.adapter_config.json"
    )
    return disk.read_json(beside) if beside.is_file() else {}


def _expert_of(path: pathlib.Path, metadata: dict[str, str]) -> str | None:
    """Which expert the header, else the file name, else the folder name says."""
    found = disk.expert_in_name(path.stem) or disk.expert_in_name(path.parent.name)
    header = metadata.get("wanjax.expert")
    if header in EXPERTS:
        if found not in (None, header):
            raise ValueError(
                f"{path}: the header says {header} noise, the name {found} noise; the pair looks "
                "swapped, rename the files"
            )
        return header
    return found


def _setting(settings: dict, expert: str | None, key: str, default):
    for prefix in (*(("transformer_2.",) if expert == "low" else ()), "transformer.", ""):
        if prefix + key in settings:
            return settings[prefix + key]
    return default


def _peft_scale(settings: dict, expert, module: str, rank: int) -> float | None:
    """alpha/rank (or alpha/sqrt(rank)) from PEFT settings."""
    alpha = _setting(settings, expert, "lora_alpha", None)
    patterns = _setting(settings, expert, "alpha_pattern", None) or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"alpha_pattern is {type(patterns).__name__}, expected an object")
    for pattern, value in patterns.items():  # names, whole or as a suffix; "^" pins the start
        name = pattern.removeprefix("^").replace("\\.", ".")
        if not re.fullmatch(r"[\w.]+", name):
            raise ValueError(f"alpha_pattern {pattern[:80]!r} is an expression, read are names")
        if module == name or (pattern == name and module.endswith("." + name)):
            alpha = value
            break
    if alpha is None:
        return None
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValueError(f"lora_alpha of {module} is {alpha!r}, expected a number")
    return alpha / (math.sqrt(rank) if _setting(settings, expert, "use_rslora", False) else rank)


def parse(tensors: files.Tensors, metadata: dict, settings: dict, where: str) -> Adapter:
    """Build an Adapter from named tensors."""
    groups: dict[tuple, dict[str, typing.Any]] = {}
    unknown = []
    for key, tensor in tensors.items():
        parsed = _parse(key)
        if parsed is None:
            unknown.append(key)
            continue
        expert, module, kind, leaf = parsed
        if kind in _REFUSED:
            raise ValueError(f"{where}: {_REFUSED[kind]} at {key} is not supported; merge it first")
        target = _find(module + (".modulation" if kind == "diff_m" else ""))
        if target is None:
            unknown.append(key)
            continue
        kind += "_bias" if leaf == "bias" else ""
        group = groups.setdefault((expert, target), {"module": module})
        if kind in group:
            raise ValueError(f"{where}: {module} has two tensors of kind {kind} ({key})")
        group[kind] = tensor.all()
    if unknown:
        raise ValueError(
            f"{where}: {len(unknown)} of {len(tensors)} keys are not Wan adapter keys: "
            f"{files.some(unknown)}"
        )
    if not groups:
        raise ValueError(f"{where}: no adapter tensors")
    if any(expert for expert, _ in groups):  # then plain transformer.* is the first expert
        groups = {(e or "high", m): g for (e, m), g in groups.items()}
    adapter = Adapter(metadata=dict(metadata))
    bare = 0
    for (expert, target), group in groups.items():
        module = target.removesuffix(".weight")
        dense = adapter.dense.setdefault(expert, {})
        kinds = set(group) - {"module"}
        try:
            for kind, name in (("diff", target), ("diff_m", target), ("diff_b", f"{module}.bias")):
                if kind in group:
                    dense[name] = group[kind]
                    kinds.discard(kind)
            if not kinds:
                continue
            a, b, scale = _factors(group, kinds)
            if scale is None:
                scale = _peft_scale(settings, expert, group["module"], len(a))
            bare += scale is None
            pair = LowRank(a, b, 1.0 if scale is None else scale)
        except ValueError as error:
            raise ValueError(f"{where}: {group['module']}: {error}") from None
        adapter.modules.setdefault(expert, {})[module] = pair
        if "b_bias" in group:
            dense[f"{module}.bias"] = pair.scale * group["b_bias"].astype(np.float32)
    adapter.dense = {e: d for e, d in adapter.dense.items() if d}
    if bare:
        adapter.notes.append(f"{bare} modules store no alpha: scale 1")
    return adapter


def _factors(group: dict, kinds: set[str]) -> tuple[np.ndarray, np.ndarray, float | None]:
    """Return (a [R,I], b [O,R], scale or None if nothing says) of one module."""
    alpha = None
    if "alpha" in kinds:
        if group["alpha"].size != 1 or not np.isfinite(alpha := float(group["alpha"].reshape(()))):
            raise ValueError(f"alpha of shape {group['alpha'].shape} is not one finite number")
    kinds = kinds - {"alpha", "b_bias"}
    if kinds == {"a", "b"}:
        a, b = group["a"], group["b"]
        a, b = (
            a.reshape(len(a), -1) if a.ndim > 1 else a,
            b.reshape(b.shape[:2] if b.ndim > 1 else -1),
        )
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or not a.size or not b.size:
            raise ValueError(f"pair of shapes {group['a'].shape} and {group['b'].shape}")
        return a, b, None if alpha is None else alpha / len(a)
    if kinds == {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}:
        w1a, w1b, w2a, w2b = (_matrix(group, f"hada_w{k}") for k in ("1_a", "1_b", "2_a", "2_b"))
        if w1a.shape[1] != len(w1b) or w2a.shape[1] != len(w2b):
            raise ValueError("LoHa factors do not multiply")
        if len(w1a) != len(w2a) or w1b.shape[1] != w2b.shape[1]:
            raise ValueError("LoHa factors have different products")
        _bounded(max(len(w1a), w1b.shape[1]), len(w1b) * len(w2b))
        b = np.einsum("or,os->ors", w1a, w2a).reshape(len(w1a), -1)
        a = np.einsum("ri,si->rsi", w1b, w2b).reshape(-1, w1b.shape[1])
        return a, b, 1.0 if alpha is None else alpha / len(w1b)
    if kinds and all(k.startswith("lokr_w") for k in kinds):
        (a1, b1, r1), (a2, b2, r2) = (_lokr(group, kinds, k) for k in "12")
        for one, two in ((a1, a2), (b1, b2)):
            _bounded(len(one) * len(two), one.shape[1] * two.shape[1])
        rank = r2 or r1
        scale = alpha / rank if alpha is not None and rank else 1.0
        return np.kron(b1, b2), np.kron(a1, a2), scale
    raise ValueError(f"tensors {sorted(kinds)} make no complete adapter")


def _bounded(*shape: int) -> None:
    if math.prod(shape) > 1 << 28:
        raise ValueError(
            f"factors make a matrix of {' x '.join(map(str, shape))}, more than Wan has"
        )


def _matrix(group: dict, key: str) -> np.ndarray:
    array = group[key].astype(np.float32)
    if array.ndim != 2 or not array.size:
        raise ValueError(f"{key} has shape {array.shape}, expected a matrix")
    return array


def _lokr(group: dict, kinds: set[str], k: str) -> tuple[np.ndarray, np.ndarray, int | None]:
    """Return (left, right, rank) of a Kronecker factor; rank None if it is stored whole."""
    whole, pair = f"lokr_w{k}", (f"lokr_w{k}_a", f"lokr_w{k}_b")
    if whole in kinds and not kinds & set(pair):
        w = _matrix(group, whole)
        wide = w.shape[0] < w.shape[1]
        return (
            (np.eye(len(w), dtype=w.dtype), w, None)
            if wide
            else (w, np.eye(w.shape[1], dtype=w.dtype), None)
        )
    if whole not in kinds and kinds >= set(pair):
        left, right = (_matrix(group, p) for p in pair)
        if left.shape[1] != len(right):
            raise ValueError(f"factors of {whole} do not multiply")
        return left, right, len(right)
    raise ValueError(f"{whole} needs either itself or its _a and _b")


def _join(adapters: list[Adapter], where: str) -> Adapter:
    out = Adapter()
    for adapter in adapters:
        both: list[tuple[dict, dict]] = [(adapter.modules, out.modules), (adapter.dense, out.dense)]
        for part, into in both:
            for expert, content in part.items():
                if expert is None or set(content) & set(into.get(expert, {})):
                    side = "no expert" if expert is None else f"{expert} noise twice"
                    raise ValueError(
                        f"{where}: the files say {side}; name one _high_noise, one _low_noise"
                    )
                into.setdefault(expert, {}).update(content)
        out.metadata |= adapter.metadata
        out.notes += adapter.notes
    return out


def route(adapter: Adapter, experts: tuple[str, ...], expert: str | None = None) -> Adapter:
    """Assign an adapter that does not say its expert; check one that does.

    expert: "high", "low" or "both". A single-expert model takes everything on "high".
    """
    said = [e for e in adapter.experts if e is not None]
    if expert not in (None, "both", *EXPERTS):
        raise ValueError(f"expert is {expert!r}, expected high, low or both")
    if expert == "low" and "low" not in experts:
        raise ValueError("the model has one expert only; load the adapter without :low")
    if said:
        if expert in EXPERTS and said != [expert]:
            raise ValueError(
                f"adapter is for {' and '.join(said)} noise, asked for {expert}; swap them"
            )
        if expert == "both" and len(said) == 1:
            return _move(adapter, said[0], EXPERTS)
        if set(said) - set(experts):
            raise ValueError(f"adapter has a {said[-1]}-noise part, the model has {experts} only")
        return adapter
    if expert is None and len(experts) == 2:
        raise ValueError(
            "the adapter does not say its expert; pass high, low or both (FILE:high), or name it "
            "*_high_noise / *_low_noise"
        )
    sides = EXPERTS if expert == "both" else (expert or "high",)
    return _move(adapter, None, sides)


# ---- against a model ----

_IMAGE = re.compile(
    r"blocks\.\d+\.attn2\.(add_k_proj|add_v_proj|norm_added_k)\..*|condition_embedder\.image_embedder\..*"
)


def _shapes(config: presets.ModelConfig) -> dict[str, tuple[str, int | None, tuple]]:
    """{diffusers name: (path, layer, torch shape)} of the transformer."""
    tree = jax.eval_shape(lambda: wan.init(jax.random.key(0), config.wan))
    out = {}
    for path, leaf in trees.flatten(tree).items():
        stacked = names.stack_root(path) is not None
        for layer, (name, shape) in enumerate(names.torch_names(path, leaf.shape)):
            out[name] = (path, layer if stacked else None, shape)
    return out


def fit(adapter: Adapter, config: presets.ModelConfig) -> tuple[Adapter, str]:
    """Return the adapter without what the model cannot have, and one line saying what that was.

    Left out: image-attention modules of an I2V adapter on a model without them, and changes of the
    patch embedding when the channel count differs. Anything else that does not fit is a ValueError.
    """
    shapes = _shapes(config)
    skipped: dict[str, int] = {}
    wrong = []

    def fits(name: str, shape: tuple, pair: bool) -> bool:
        want = shapes[name][2] if name in shapes else None
        got = shape
        if want and pair:
            want = (want[0], math.prod(want[1:]))
        if want == got or (want and math.prod(want) == math.prod(got) and not pair):
            return True
        if want is None and _IMAGE.fullmatch(name):
            reason = "image attention, which the model does not have"
        elif want and name.startswith("patch_embedding."):
            reason = f"patch embedding of {got}, the model has {want}"
        else:
            wrong.append(f"{name} {got}, the model has {want or 'no such module'}")
            return False
        skipped[reason] = skipped.get(reason, 0) + 1
        return False

    modules = {
        e: {m: p for m, p in part.items() if fits(f"{m}.weight", (len(p.b), p.a.shape[1]), True)}
        for e, part in adapter.modules.items()
    }
    dense = {
        e: {n: d for n, d in part.items() if fits(n, d.shape, False)}
        for e, part in adapter.dense.items()
    }
    if wrong:
        raise ValueError(
            f"adapter does not fit {config.name}: {len(wrong)} misfits: {files.some(wrong)}"
        )
    kept = sum(map(len, modules.values())) + sum(map(len, dense.values()))
    if not kept:
        raise ValueError(f"adapter has no module that {config.name} has")
    text = "; ".join(f"{count} left out: {reason}" for reason, count in skipped.items())
    dense = {e: d for e, d in dense.items() if d}
    return dataclasses.replace(
        adapter, modules=modules, dense=dense
    ), text and f"{kept} applied; {text}"


def to_trees(adapter: Adapter, config: presets.ModelConfig, strength: float = 1.0):
    """Stack the pairs into {"high": tree, "low": tree} of {"a", "b", "scale"} leaves, float32.

    Layers of smaller rank, and layers without the module, are padded with zeros in both factors:
    their gradient is zero, so they stay zero, and export leaves them out.
    """
    shapes = _shapes(config)
    out = {}
    for expert, pairs in adapter.modules.items():
        found: dict[str, dict] = {}
        for module, pair in pairs.items():
            path, layer, shape = shapes[f"{module}.weight"]
            if len(shape) != 2:
                raise ValueError(f"{module} is no matrix; merge this adapter into the checkpoint")
            found.setdefault(path.removesuffix("/kernel"), {})[layer] = pair
        flat = {}
        for path, layers in found.items():
            rank = max(p.rank for p in layers.values())
            first = next(iter(layers.values()))
            count = config.wan.num_layers if None not in layers else 1
            a = np.zeros((count, first.a.shape[1], rank), np.float32)
            b = np.zeros((count, rank, len(first.b)), np.float32)
            scale = np.ones((count,), np.float32)
            for layer, pair in layers.items():
                i = layer or 0
                a[i, :, : pair.rank], b[i, : pair.rank] = pair.a.T, pair.b.T
                scale[i] = pair.scale * strength
            parts = {"a": a, "b": b, "scale": scale}
            for leaf, array in parts.items():
                flat[f"{path}/{leaf}"] = jax.numpy.asarray(array[0] if None in layers else array)
        out[expert] = trees.unflatten(flat)
    return out


def of_trees(adapters, metadata: dict[str, str] | None = None) -> Adapter:
    """Turn adapter trees by expert into an Adapter; layers zero in both factors are left out."""
    out = Adapter(metadata=dict(metadata or {}))
    for expert, tree in adapters.items():
        flat = {path: weights.to_host(leaf) for path, leaf in trees.flatten(tree).items()}
        pairs = out.modules.setdefault(expert, {})
        for path in (p.removesuffix("/a") for p in flat if p.endswith("/a")):
            a, b, scale = (flat[f"{path}/{leaf}"] for leaf in ("a", "b", "scale"))
            stacked = names.stack_root(path + "/kernel") is not None
            if not stacked:
                a, b, scale = a[None], b[None], scale[None]
            for layer in range(len(a)):
                if a[layer].any() or b[layer].any():
                    name = names.torch_name(f"{path}/kernel", layer if stacked else None)
                    pair = LowRank(a[layer].T, b[layer].T, float(scale[layer]))
                    pairs[name.removesuffix(".weight")] = pair
    return out


def summary(adapter: Adapter, strength: float = 1.0) -> str:
    """One line: modules, effective scale, and the relative size of the change on a probe input."""
    pairs = [p for part in adapter.modules.values() for p in part.values()]
    dense = sum(map(len, adapter.dense.values()))
    scales = np.asarray([p.scale * strength for p in pairs] or [strength])
    size = probe(adapter) * abs(strength)
    if size == 0:
        raise ValueError("the adapter changes nothing: all its updates are zero")
    text = f"{len(pairs)} low-rank and {dense} dense changes, scale min {scales.min():g} "
    text += f"median {np.median(scales):g} max {scales.max():g}, probe change {size:.2e}"
    return "; ".join([text, *adapter.notes])


def probe(adapter: Adapter) -> float:
    """Largest root-mean-square response of any update to a standard normal input."""
    rng, worst = np.random.default_rng(0), 0.0
    for part in adapter.modules.values():
        for pair in part.values():
            x = rng.standard_normal(pair.a.shape[1]).astype(np.float32)
            y = pair.b.astype(np.float32) @ (pair.a.astype(np.float32) @ x) * pair.scale
            worst = max(worst, float(np.sqrt(np.mean(np.square(y)))))
    sizes = (np.abs(d.astype(np.float32)).max() for p in adapter.dense.values() for d in p.values())
    return max([worst, *map(float, sizes)])


# ---- out ----


DIALECTS = {
    "diffusers": ("transformer.", ".lora_A.weight", ".lora_B.weight"),
    "comfyui": ("diffusion_model.", ".lora_down.weight", ".lora_up.weight"),
    "kohya": ("lora_unet_", ".lora_down.weight", ".lora_up.weight"),
    "diffsynth": ("", ".lora_A.default.weight", ".lora_B.default.weight"),
}


def write(
    adapter: Adapter,
    out_dir,
    dialect: str = "",
    *,
    stem: str = "lora",
    dtype=None,
    combined: bool = False,
) -> list[pathlib.Path]:
    """Write an adapter in a dialect of DIALECTS, one file per expert (tagged) or one combined file.

    No dialect: that of diffusers, or comfyui's where there are dense changes, which diffusers
    itself does not load (this module does).
    An adapter whose expert is unknown becomes STEM.safetensors. Every file's header says version,
    expert, rank and alpha beside the given metadata. Returns the paths.
    """
    dialect = dialect or ("comfyui" if any(adapter.dense.values()) else "diffusers")
    if dialect not in DIALECTS:
        raise ValueError(f"dialect is {dialect!r}, expected one of {', '.join(DIALECTS)}")
    if combined and dialect not in ("diffusers", "comfyui"):
        raise ValueError(f"a combined file exists for diffusers and comfyui, not for {dialect}")
    out_dir = pathlib.Path(out_dir)
    jobs = {}
    for expert in adapter.experts:
        name = stem if expert is None or combined else f"{stem}_{expert}_noise"
        tensors, metadata = _render(adapter, expert, dialect, combined)
        old, header = jobs.get(name, ({}, {}))
        if combined and dialect == "diffusers" and header:
            both = "lora_adapter_metadata"
            metadata[both] = json.dumps(json.loads(header[both]) | json.loads(metadata[both]))
        jobs[name] = (old | tensors, header | metadata)
    if jax.process_index() != 0:
        return []
    out_dir.mkdir(parents=True, exist_ok=True)
    moves = {out_dir / f".{name}.partial": out_dir / f"{name}.safetensors" for name in jobs}
    try:
        for partial, (tensors, metadata) in zip(moves, jobs.values(), strict=True):
            lazy = {k: weights.stored("", k, files.of_array(v), dtype) for k, v in tensors.items()}
            files.write_safetensors(partial, lazy, metadata)
        for partial, path in moves.items():
            os.replace(partial, path)
    finally:
        for partial in moves:
            partial.unlink(missing_ok=True)
    return list(moves.values())


def _render(adapter: Adapter, expert, dialect: str, combined: bool):
    prefix, down, up = DIALECTS[dialect]
    if combined and expert == "low":
        prefix = {"diffusers": "transformer_2.", "comfyui": "diffusion_model.transformer_2."}[
            dialect
        ]
    elif combined and dialect == "comfyui":
        prefix = "diffusion_model.transformer_1."
    pairs, dense = adapter.modules.get(expert, {}), adapter.dense.get(expert, {})
    table = names.rules("transformer", ())

    def spell(name: str) -> str:
        if dialect != "diffusers":
            hit = names.to_original(name, table)
            assert hit is not None, name  # every name came from this table
            name = hit[0]
        name = name.removesuffix(".weight").removesuffix(".bias").removesuffix(".modulation")
        name = name.removesuffix(".scale_shift_table")
        return prefix + (name.replace(".", "_") if dialect == "kohya" else name)

    out = {}
    for module, pair in pairs.items():
        key = spell(f"{module}.weight")
        out[key + down], out[key + up] = pair.a, pair.b
        alpha = pair.scale * pair.rank
        if dialect in ("comfyui", "kohya") or (dialect == "diffsynth" and alpha != pair.rank):
            out[f"{key}.alpha"] = np.asarray(alpha, np.float32)
    for name, change in dense.items():
        kind = {"bias": "diff_b", "scale_shift_table": "diff_m", "weight": "diff"}
        out[f"{spell(name)}.{kind[name.rsplit('.', 1)[-1]]}"] = change
    ranks = sorted({p.rank for p in pairs.values()})
    alphas = sorted({round(p.scale * p.rank, 6) for p in pairs.values()})
    metadata = {k: str(v) for k, v in adapter.metadata.items() if k not in _OWN}
    metadata |= {
        "wanjax.version": __version__,
        "wanjax.rank": json.dumps(ranks),
        "wanjax.alpha": json.dumps(alphas),
    }
    if expert is not None and not combined:
        metadata["wanjax.expert"] = expert
    if dialect == "diffusers" and pairs:
        metadata["lora_adapter_metadata"] = json.dumps(
            _peft_settings(pairs, prefix), sort_keys=True
        )
    if dialect == "kohya" and pairs:
        metadata |= {"ss_network_dim": str(ranks[-1]), "ss_network_alpha": str(alphas[-1])}
    return out, metadata


_OWN = ("lora_adapter_metadata", "wanjax.expert", "ss_network_dim", "ss_network_alpha", "format")


def _peft_settings(pairs: dict[str, LowRank], prefix: str) -> dict:
    """The LoraConfig that diffusers rebuilds from the header."""
    usual = next(iter(pairs.values()))
    rank, alpha = usual.rank, usual.scale * usual.rank
    alphas = {f"^{m}": p.scale * p.rank for m, p in pairs.items() if p.scale * p.rank != alpha}
    settings = {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {f"^{m}": p.rank for m, p in pairs.items() if p.rank != rank},
        "alpha_pattern": alphas,
        "target_modules": sorted(pairs),
    }
    return {prefix + key: value for key, value in settings.items()}


# ---- extraction ----


def extract(base: files.Tensors, tuned: files.Tensors, rank: int) -> tuple[dict, dict, float]:
    """Approximate tuned − base of one transformer by pairs of one rank, and by dense vectors.

    Randomised SVD (arXiv 0909.4061, two power iterations): exact when the change has that rank.
    Returns ({module: LowRank}, {parameter: change}, lost fraction |Δ − approximation| / |Δ|).
    """
    if {n: t.shape for n, t in base.items()} != {n: t.shape for n, t in tuned.items()}:
        raise ValueError("base and tuned checkpoints have different tensors; use one variant")
    if rank < 1:
        raise ValueError(f"rank is {rank}, expected at least 1")
    pairs, dense, lost, size = {}, {}, 0.0, 0.0
    for name in base:
        change = tuned[name].all().astype(np.float32) - base[name].all().astype(np.float32)
        if not change.any():
            continue
        size += float(np.square(change, dtype=np.float64).sum())
        if change.ndim == 2 and name.endswith(".weight"):
            pair = _low_rank(change, min(rank, *change.shape))
            pairs[name.removesuffix(".weight")] = pair
            lost += float(np.square(change - pair.delta(), dtype=np.float64).sum())
        else:
            dense[name] = change
    if not size:
        raise ValueError("base and tuned checkpoints are equal; nothing to extract")
    return pairs, dense, math.sqrt(lost / size)


def _low_rank(change: np.ndarray, rank: int) -> LowRank:
    sketch = np.random.default_rng(0).standard_normal(
        (change.shape[1], min(rank + 8, *change.shape))
    )
    q = np.linalg.qr(change @ sketch.astype(np.float32))[0]
    for _ in range(2):
        q = np.linalg.qr(change @ np.linalg.qr(change.T @ q)[0])[0]
    u, s, vt = np.linalg.svd(q.T @ change, full_matrices=False)
    root = np.sqrt(s[:rank])
    return LowRank(root[:, None] * vt[:rank], (q @ u[:, :rank]) * root, 1.0)


# ---- command ----


def main(argv=None) -> int:
    """python -m convert.lora"""
    parser = argparse.ArgumentParser(prog="python -m convert.lora", description=main.__doc__)
    parser.add_argument("src", nargs="+", help="adapter file, folder, or a high and a low file")
    parser.add_argument("--to", required=True, choices=DIALECTS)
    parser.add_argument("--out", required=True, help="folder")
    parser.add_argument("--name", help="stem of the written files (default: of the source)")
    parser.add_argument("--expert", choices=(*EXPERTS, "both"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--combined", action="store_true", help="both experts in one file")
    parser.add_argument("--model", help="a preset name or checkpoint to check the adapter against")
    parser.add_argument("--strict", action=argparse.BooleanOptionalAction, default=True,
                        help="fail when an adapter does not fit whole")  # fmt: skip
    parser.add_argument("--base", help="extract: src is a tuned checkpoint, this its base")
    parser.add_argument("--rank", type=int, default=64, help="rank of an extracted adapter")
    args = parser.parse_args(argv)
    try:
        _convert(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _convert(args) -> None:
    source = args.src[0] if len(args.src) == 1 else args.src
    if args.base:
        adapter = _extract_all(args.base, source, args.rank)
    else:
        adapter = read(source)
    if args.expert:
        adapter = route(adapter, EXPERTS, args.expert)
    if args.model:
        config = presets.MODELS.get(args.model) or disk.model_config(disk.read(args.model))
        adapter, skipped = fit(route(adapter, config.experts), config)
        if skipped and args.strict:
            raise ValueError(f"{source}: {skipped}; pass --no-strict to convert the rest")
        print(skipped or f"fits {config.name}")
    print(summary(adapter))
    if adapter.dense and args.to in ("diffusers", "diffsynth"):
        print(f"note: {args.to} does not read its dense changes; ComfyUI and wanjax do")
    dtype = None if args.dtype is None else np.dtype(jax.numpy.dtype(args.dtype))
    stem = args.name or re.sub(r"(?i)[_-](high|low)(_?noise)?$", "", pathlib.Path(args.src[0]).stem)
    paths = write(adapter, args.out, args.to, stem=stem, dtype=dtype, combined=args.combined)
    print("\n".join(map(str, paths)))


def _extract_all(base, tuned, rank: int) -> Adapter:
    base, tuned = disk.read(base), disk.read(tuned)
    sides = [e for e, c in disk.EXPERTS.items() if c in base.tensors and c in tuned.tensors]
    if not sides:
        raise ValueError(f"{base.where} and {tuned.where} have no transformer in common")
    adapter = Adapter(metadata={"wanjax.base": disk.fingerprint(base)})
    for side in sides:
        component = disk.EXPERTS[side]
        key = side if len(sides) > 1 else None
        part = extract(base.tensors[component], tuned.tensors[component], rank)
        adapter.modules[key], adapter.dense[key], lost = part
        adapter.notes.append(f"{side}: rank {rank} leaves out {lost:.2e} of the change")
    return adapter


if __name__ == "__main__":
    raise SystemExit(main())
