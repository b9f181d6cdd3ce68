"""Write adapters in any dialect, tagged in name and header."""

import json
import os
import pathlib

import jax
import numpy as np

from convert import files, names, save
from convert.lora import adapter
from wanjax import __version__, paths
from wanjax.models import presets

DIALECTS = {
    "diffusers": ("transformer.", ".lora_A.weight", ".lora_B.weight"),
    "comfyui": ("diffusion_model.", ".lora_down.weight", ".lora_up.weight"),
    "kohya": ("lora_unet_", ".lora_down.weight", ".lora_up.weight"),
    "diffsynth": ("", ".lora_A.default.weight", ".lora_B.default.weight"),
}
_COMBINED = {  # prefixes of both experts in one file
    ("diffusers", "high"): "transformer.",
    ("diffusers", "low"): "transformer_2.",
    ("comfyui", "high"): "diffusion_model.transformer_1.",
    ("comfyui", "low"): "diffusion_model.transformer_2.",
}
_KERNEL = presets.MODELS["wan2.2_t2v_a14b"].wan.patch_size  # of all Wan models
_OWN = ("lora_adapter_metadata", "wanjax.expert", "ss_network_dim", "ss_network_alpha", "format")


def write(
    content: adapter.Adapter, out_dir, dialect="", *, stem="lora", dtype=None, combined=False
) -> list[pathlib.Path]:
    """Write an adapter in a dialect of DIALECTS, one file per expert (tagged) or one combined file.

    No dialect: that of diffusers, or comfyui's where there are dense changes, which diffusers
    itself does not load (read.py does).
    An adapter whose expert is unknown becomes STEM.safetensors. Every file's header gives version,
    expert, rank and alpha besides the metadata of the adapter. Returns the paths.
    """
    dialect = dialect or ("comfyui" if any(content.dense.values()) else "diffusers")
    if dialect not in DIALECTS:
        raise ValueError(f"dialect is {dialect!r}, expected one of {', '.join(DIALECTS)}")
    if combined and dialect not in ("diffusers", "comfyui"):
        raise ValueError(f"only diffusers and comfyui can be combined in one file, not {dialect}")
    jobs = {}
    for expert in content.experts:
        name = stem if expert is None or combined else f"{stem}_{expert}_noise"
        prefix = _COMBINED[dialect, expert or "high"] if combined else DIALECTS[dialect][0]
        tensors = _tensors(content, expert, dialect, prefix)
        metadata = _header(content, expert, dialect, prefix, combined)
        old, header = jobs.get(name, ({}, {}))
        both = "lora_adapter_metadata"
        if both in header and both in metadata:
            metadata[both] = json.dumps(json.loads(header[both]) | json.loads(metadata[both]))
        jobs[name] = (old | tensors, header | metadata)
    if jax.process_index() != 0:
        return []
    return _write_files(paths.local(out_dir), jobs, dtype)


def _write_files(folder: pathlib.Path, jobs: dict, dtype) -> list[pathlib.Path]:
    """Write {name: (tensors, metadata)}; the files appear whole, and only when all are written."""
    folder.mkdir(parents=True, exist_ok=True)
    moves = {folder / f".{name}.partial": folder / f"{name}.safetensors" for name in jobs}
    try:
        for partial, (tensors, metadata) in zip(moves, jobs.values(), strict=True):
            lazy = {k: save.stored("", k, files.of_array(v), dtype) for k, v in tensors.items()}
            files.write_safetensors(partial, lazy, metadata)
        for partial, path in moves.items():
            os.replace(partial, path)
    finally:
        for partial in moves:
            partial.unlink(missing_ok=True)
    return list(moves.values())


def _tensors(content: adapter.Adapter, expert, dialect: str, prefix: str) -> dict[str, np.ndarray]:
    """{key: array} of one expert in a dialect."""
    _, down, up = DIALECTS[dialect]
    table = names.rules("transformer", ())

    def spell(name: str) -> str:
        if dialect != "diffusers":
            hit = names.to_original(name, table)
            assert hit is not None, name  # every name came from this table
            name = hit[0]
        for leaf in (".weight", ".bias", ".modulation", ".scale_shift_table"):
            name = name.removesuffix(leaf)
        return prefix + (name.replace(".", "_") if dialect == "kohya" else name)

    out = {}
    for module, pair in content.modules.get(expert, {}).items():
        key = spell(f"{module}.weight")
        out[key + down], out[key + up] = _factors(module, pair, dialect)
        alpha = pair.scale * pair.rank
        if dialect in ("comfyui", "kohya") or (dialect == "diffsynth" and alpha != pair.rank):
            out[f"{key}.alpha"] = np.asarray(alpha, np.float32)
    for name, change in content.dense.get(expert, {}).items():
        kind = {"bias": "diff_b", "scale_shift_table": "diff_m", "weight": "diff"}
        out[f"{spell(name)}.{kind[name.rsplit('.', 1)[-1]]}"] = change
    return out


def _factors(module: str, pair: adapter.LowRank, dialect: str) -> tuple[np.ndarray, np.ndarray]:
    """(a, b) in the shapes that the reader of the dialect takes: those of peft have the kernel of a
    convolution, the others are matrices."""
    if dialect != "diffusers" or not module.endswith("patch_embedding"):
        return pair.a, pair.b
    kernel = pair.kernel or _KERNEL
    return pair.a.reshape(pair.rank, -1, *kernel), pair.b.reshape(*pair.b.shape, 1, 1, 1)


def _header(content: adapter.Adapter, expert, dialect: str, prefix: str, combined: bool) -> dict:
    """Metadata of the file of one expert."""
    pairs = content.modules.get(expert, {})
    ranks = sorted({p.rank for p in pairs.values()})
    alphas = sorted({round(p.scale * p.rank, 6) for p in pairs.values()})
    metadata = {k: str(v) for k, v in content.metadata.items() if k not in _OWN}
    metadata |= {"wanjax.version": __version__, "wanjax.rank": json.dumps(ranks)}
    metadata["wanjax.alpha"] = json.dumps(alphas)
    if expert is not None and not combined:
        metadata["wanjax.expert"] = expert
    if dialect == "diffusers" and pairs:
        settings = _peft_settings(pairs, prefix)
        metadata["lora_adapter_metadata"] = json.dumps(settings, sort_keys=True)
    if dialect == "kohya" and pairs:
        metadata |= {"ss_network_dim": str(ranks[-1]), "ss_network_alpha": str(alphas[-1])}
    return metadata


def _peft_settings(pairs: dict[str, adapter.LowRank], prefix: str) -> dict:
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
