"""Read adapter files of any dialect.

Keys are split into prefix (which may name the expert), module in any spelling, and kind of tensor;
the tensors of a module become one low-rank pair, a dense change, or both.

Dimension legend: R rank, I inputs, O outputs.
"""

import itertools
import json
import math
import re
import typing
from functools import cache

import numpy as np

from convert import disk, files, names
from convert.lora import adapter
from wanjax import paths


def read(path) -> adapter.Adapter:
    """Read an adapter file, a PEFT folder, or several files, in any dialect, local or remote.

    Raises ValueError naming keys that are unknown, incomplete or of kinds not supported (DoRA).
    """
    if isinstance(path, list | tuple):
        return _join([read(p) for p in path], str(path))
    path = paths.resolve(path)
    if path.is_dir():
        if not (found := sorted(path.glob("*.safetensors"))):
            raise ValueError(f"{path}: no .safetensors file in this folder; give the adapter file")
        return read(found[0]) if len(found) == 1 else read(found)
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give the path of an adapter")
    tensors, metadata = files.open_any(path)
    found = parse(tensors, metadata, _side_config(path, metadata), str(path))
    hint = _expert_of(path, metadata)
    if hint and found.experts == [None]:
        return adapter.move(found, None, (hint,))
    if hint and hint not in found.experts:
        raise ValueError(f"{path}: the name says {hint} noise, the keys {found.experts[0]} noise")
    return found


def _join(adapters: list[adapter.Adapter], where: str) -> adapter.Adapter:
    """One adapter of the content of several files."""
    out = adapter.Adapter()
    for one in adapters:
        both: list[tuple[dict, dict]] = [(one.modules, out.modules), (one.dense, out.dense)]
        for part, into in both:
            for expert, content in part.items():
                if expert is None or set(content) & set(into.get(expert, {})):
                    side = "no expert" if expert is None else f"{expert} noise twice"
                    raise ValueError(
                        f"{where}: the files say {side}; name one _high_noise, the other _low_noise"
                    )
                into.setdefault(expert, {}).update(content)
        out.metadata |= one.metadata
        out.notes += one.notes
    return out


def _side_config(path: paths.Path, metadata: dict[str, str]) -> dict:
    """PEFT settings from the header (diffusers) or the file beside (PEFT, diffusion-pipe)."""
    if raw := metadata.get("lora_adapter_metadata"):
        try:
            settings = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: lora_adapter_metadata is not JSON: {error}") from None
        if not isinstance(settings, dict):
            raise ValueError(f"{path}: lora_adapter_metadata is not a JSON object")
        return settings
    peft = path.stem == "adapter_model"
    beside = path.parent / ("adapter_config.json" if peft else f"{path.stem}.adapter_config.json")
    return disk.read_json(beside) if beside.is_file() else {}


def _expert_of(path: paths.Path, metadata: dict[str, str]) -> str | None:
    """Which expert the header, else the file name, else the folder name says."""
    found = disk.expert_in_name(path.stem) or disk.expert_in_name(path.parent.name)
    header = metadata.get("wanjax.expert")
    if header in adapter.EXPERTS:
        if found not in (None, header):
            raise ValueError(
                f"{path}: the header says {header} noise, the name {found} noise; the pair looks "
                "swapped, rename the files"
            )
        return header
    return found


def _setting(settings: dict, expert: str | None, key: str, default):
    """A PEFT setting, which diffusers spells with a prefix for each transformer."""
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
            raise ValueError(
                f"alpha_pattern {pattern[:80]!r} is an expression; only module names are read"
            )
        if module == name or (pattern == name and module.endswith("." + name)):
            alpha = value
            break
    if alpha is None:
        return None
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValueError(f"lora_alpha of {module} is {alpha!r}, expected a number")
    return alpha / (math.sqrt(rank) if _setting(settings, expert, "use_rslora", False) else rank)


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


def _parse(key: str) -> tuple[str | None, str, str, str | None] | None:
    """Split a key into (expert, module as written, kind, leaf); None for any other key."""
    if (match := _KEY.fullmatch(key)) is None:
        return None
    module, expert = match["module"], None
    while prefix := next(filter(module.startswith, _PREFIXES), None):
        module, expert = module.removeprefix(prefix), _PREFIXES[prefix] or expert
    return expert, module, _KINDS.get(match["kind"], match["kind"]), match["leaf"]


def parse(tensors: files.Tensors, metadata: dict, settings: dict, where: str) -> adapter.Adapter:
    """Build an Adapter from named tensors."""
    out = adapter.Adapter(metadata=dict(metadata))
    bare = 0
    for (expert, target), group in _groups(tensors, where).items():
        module = target.removesuffix(".weight")
        dense = out.dense.setdefault(expert, {})
        kinds = set(group) - {"module"}
        for kind, name in (("diff", target), ("diff_m", target), ("diff_b", f"{module}.bias")):
            if kind in group:
                dense[name] = group[kind]
                kinds.discard(kind)
        if not kinds:
            continue
        try:
            a, b, scale = _factors(group, kinds)
            if scale is None:
                scale = _peft_scale(settings, expert, group["module"], len(a))
        except ValueError as error:
            raise ValueError(f"{where}: {group['module']}: {error}") from None
        bare += scale is None
        kernel = group["a"].shape[2:] if "a" in group else ()
        pair = adapter.LowRank(a, b, 1.0 if scale is None else scale, kernel)
        out.modules.setdefault(expert, {})[module] = pair
        if "b_bias" in group:
            dense[f"{module}.bias"] = pair.scale * group["b_bias"].astype(np.float32)
    out.dense = {e: d for e, d in out.dense.items() if d}
    if bare:
        out.notes.append(f"{bare} modules store no alpha: scale 1")
    return out


def _groups(tensors: files.Tensors, where: str) -> dict[tuple, dict[str, typing.Any]]:
    """{(expert, diffusers parameter name): {kind: array, "module": name as written}}"""
    groups: dict[tuple, dict[str, typing.Any]] = {}
    unknown = []
    for key, tensor in tensors.items():
        expert, module, kind, leaf = _parse(key) or (None, "", "", None)
        if kind in _REFUSED:
            raise ValueError(f"{where}: {_REFUSED[kind]} at {key} is not supported; merge it first")
        spelled = module + (".modulation" if kind == "diff_m" else "")
        if (target := _parameters().get(spelled.replace(".", "_"))) is None:
            unknown.append(key)
            continue
        kind += "_bias" if leaf == "bias" else ""
        group = groups.setdefault((expert, target), {"module": module})
        if kind in group:
            raise ValueError(f"{where}: {module} has two tensors of kind {kind} ({key})")
        group[kind] = _finite(tensor.all(), key, where)
    if unknown:
        raise ValueError(
            f"{where}: {len(unknown)} of {len(tensors)} keys are not Wan adapter keys: "
            f"{files.some(unknown)}"
        )
    if not groups:
        raise ValueError(f"{where}: no adapter tensors")
    if any(expert for expert, _ in groups):  # then plain transformer.* is the first expert
        groups = {(e or "high", m): g for (e, m), g in groups.items()}
    return groups


def _finite(array: np.ndarray, key: str, where: str) -> np.ndarray:
    """The array; ValueError for a value that is no finite number."""
    bad = np.size(array) - np.count_nonzero(np.isfinite(array.astype(np.float32)))
    if bad:
        raise ValueError(
            f"{where}: {bad} of {array.size} values of {key} are NaN or infinite; its training "
            "diverged or a cast overflowed: use an earlier checkpoint of it, or one of higher "
            "precision"
        )
    return array


def _factors(group: dict, kinds: set[str]) -> tuple[np.ndarray, np.ndarray, float | None]:
    """Return (a [R,I], b [O,R], scale or None if nothing says) of one module."""
    alpha = None
    if "alpha" in kinds:
        if group["alpha"].size != 1 or not np.isfinite(alpha := float(group["alpha"].reshape(()))):
            raise ValueError(f"alpha of shape {group['alpha'].shape} is not one finite number")
    kinds = kinds - {"alpha", "b_bias"}
    if kinds == {"a", "b"}:
        return _pair(group["a"], group["b"], alpha)
    if kinds == {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}:
        return _loha(group, alpha)
    if kinds and all(k.startswith("lokr_w") for k in kinds):
        return _lokr(group, kinds, alpha)
    raise ValueError(f"tensors {sorted(kinds)} do not make a complete adapter")


def _pair(a: np.ndarray, b: np.ndarray, alpha: float | None):
    shapes = f"pair of shapes {a.shape} and {b.shape}"
    a = a.reshape(len(a), -1) if a.ndim > 1 else a
    b = b.reshape(b.shape[:2] if b.ndim > 1 else -1)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or not a.size or not b.size:
        raise ValueError(f"{shapes}, expected [R,I] and [O,R]")
    return a, b, None if alpha is None else alpha / len(a)


def _loha(group: dict, alpha: float | None):
    w1a, w1b, w2a, w2b = (_matrix(group, f"hada_w{k}") for k in ("1_a", "1_b", "2_a", "2_b"))
    if w1a.shape[1] != len(w1b) or w2a.shape[1] != len(w2b):
        raise ValueError("the ranks of its LoHa factors do not match")
    if len(w1a) != len(w2a) or w1b.shape[1] != w2b.shape[1]:
        raise ValueError("its LoHa products differ in shape")
    _bounded(max(len(w1a), w1b.shape[1]), len(w1b) * len(w2b))
    b = np.einsum("or,os->ors", w1a, w2a).reshape(len(w1a), -1)
    a = np.einsum("ri,si->rsi", w1b, w2b).reshape(-1, w1b.shape[1])
    return a, b, 1.0 if alpha is None else alpha / len(w1b)


def _lokr(group: dict, kinds: set[str], alpha: float | None):
    (b1, a1, r1), (b2, a2, r2) = (_kronecker(group, kinds, k) for k in "12")
    for one, two in ((b1, b2), (a1, a2)):
        _bounded(len(one) * len(two), one.shape[1] * two.shape[1])
    rank = r2 or r1
    scale = alpha / rank if alpha is not None and rank else 1.0
    return np.kron(a1, a2), np.kron(b1, b2), scale


def _bounded(*shape: int) -> None:
    if math.prod(shape) > 1 << 28:
        raise ValueError(
            f"factors make a matrix of {' x '.join(map(str, shape))}, larger than any in Wan"
        )


def _matrix(group: dict, key: str) -> np.ndarray:
    array = group[key].astype(np.float32)
    if array.ndim != 2 or not array.size:
        raise ValueError(f"{key} has shape {array.shape}, expected a matrix")
    return array


def _kronecker(group: dict, kinds: set[str], k: str) -> tuple[np.ndarray, np.ndarray, int | None]:
    """Return (left, right, rank) of a Kronecker factor; rank None if it is stored whole."""
    whole, pair = f"lokr_w{k}", (f"lokr_w{k}_a", f"lokr_w{k}_b")
    if whole in kinds and not kinds & set(pair):
        w = _matrix(group, whole)
        eye = np.eye(min(w.shape), dtype=w.dtype)
        return (eye, w, None) if w.shape[0] < w.shape[1] else (w, eye, None)
    if whole not in kinds and kinds >= set(pair):
        left, right = (_matrix(group, p) for p in pair)
        if left.shape[1] != len(right):
            raise ValueError(f"the ranks of the factors of {whole} do not match")
        return left, right, len(right)
    raise ValueError(f"{whole} must be stored either whole or as _a and _b")
