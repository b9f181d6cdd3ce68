"""Write a checkpoint in another layout: diffusers, original, ComfyUI or Orbax.

fp8 scaled: W8 = e4m3(W / s), s = max|W| / 448, stored as NAME.scale_weight
"""

import json
import pathlib
from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

from convert import disk, files, load, names, save
from wanjax import paths

LAYOUTS = ("diffusers", "original", "comfyui", "orbax")
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "fp8_scaled")
_F8 = np.dtype(ml_dtypes.float8_e4m3fn)


def write(checkpoint: disk.Checkpoint, out, layout: str, dtype: str | None = None) -> None:
    """Write a checkpoint in a layout of LAYOUTS; the output appears whole or not at all.

    dtype: one of DTYPES, for floating tensors that need not stay float32; None keeps what is stored
    (dequantised fp8 and GGUF data becomes bfloat16). fp8_scaled is for comfyui.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, expected one of {', '.join(LAYOUTS)}")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    if dtype == "fp8_scaled" and layout != "comfyui":
        raise ValueError(f"fp8_scaled is a ComfyUI format; use --to comfyui, not {layout}")
    number = plain_dtype(dtype)
    tensors = {
        c: {n: save.stored(c, n, t, number) for n, t in part.items()}
        for c, part in checkpoint.tensors.items()
    }
    with save.fresh_folder(out) as folder:
        assert folder is not None, "one process converts"
        if layout == "diffusers":
            _write_diffusers(checkpoint, tensors, folder)
        else:
            if layout == "original":
                _write_original(checkpoint, tensors, folder)
            elif layout == "comfyui":
                _write_comfyui(checkpoint, tensors, folder, dtype)
            else:
                _write_orbax(checkpoint, tensors, folder)
            save.dump_json(folder / "wanjax.json", _configs(checkpoint))
            _write_tokenizer(checkpoint, folder / "google/umt5-xxl")
        said = {k: checkpoint.extra[k] for k in ("sampler", "few_step") if k in checkpoint.extra}
        save.write_sampler(folder, said)


def plain_dtype(dtype: str | None):
    """The numpy dtype that a name of DTYPES casts tensors to; None keeps what is stored."""
    return None if dtype in (None, "fp8_scaled") else jnp.dtype(dtype)


def original_names(component: str, tensors: files.Tensors) -> files.Tensors:
    """Rename diffusers names to original ones, joining what the original keeps in one tensor.

    Raises ValueError naming tensors without an original name, or with a part missing.
    """
    table = names.rules(component, tensors)
    parts: dict[str, dict[int, files.Tensor]] = {}
    count, unknown = {}, []
    for name, tensor in tensors.items():
        if (hit := names.to_original(name, table)) is None:
            unknown.append(name)
            continue
        original, part, rule = hit
        parts.setdefault(original, {})[part] = files.unsqueeze(tensor, rule.drop)
        count[original] = len(rule.diffusers)
    partial = [n for n, p in parts.items() if len(p) != count[n]]
    if unknown or partial:
        raise ValueError(
            f"{component}: {len(unknown)} tensors have no original name ({files.some(unknown)}), "
            f"{len(partial)} are incomplete ({files.some(partial)})"
        )
    out = {n: files.join([p[k] for k in sorted(p)]) for n, p in parts.items()}
    if "motion_encoder.enc.net_app.convs.0.0.weight" in out:  # Animate stores its constant blur
        taps = np.outer([1, 3, 3, 1], [1, 3, 3, 1]).astype(np.float32) / 64
        for k in range(1, 8):
            for conv in ("conv2", "skip"):
                out[f"motion_encoder.enc.net_app.convs.{k}.{conv}.0.kernel"] = files.of_array(taps)
    return out


def fp8_scaled(tensors: files.Tensors) -> files.Tensors:
    """Quantise the matrices of the blocks to e4m3 with one scale each, and add ComfyUI's marker."""
    out: files.Tensors = {"scaled_fp8": files.of_array(np.zeros(0, _F8))}
    for name, tensor in tensors.items():
        if len(tensor.shape) != 2 or "blocks." not in name or not name.endswith(".weight"):
            out[name] = tensor
            continue
        out[name], scale = _scaled(tensor)
        out[name.removesuffix("weight") + "scale_weight"] = scale
    return out


def _scaled(tensor: files.Tensor) -> tuple[files.Tensor, files.Tensor]:
    """A matrix in e4m3 and its scale, computed once for both when the first is read."""
    memo: list[np.ndarray] = []

    def both() -> list[np.ndarray]:
        if not memo:
            w = tensor.all().astype(np.float32)
            factor = np.float32(max(float(np.abs(w).max()) / 448, 1e-12))
            memo[:] = [(w / factor).astype(_F8), np.asarray(factor)]
        return memo

    def weight(index):
        return both()[0][index]

    def scale(index):
        value = both()[1]
        memo.clear()  # written right after its weight: the last reader
        return value

    quantised = files.Tensor(tensor.shape, _F8, weight, tensor.where)
    return quantised, files.Tensor((), np.dtype(np.float32), scale, tensor.where)


def _write_diffusers(checkpoint, tensors, folder: pathlib.Path) -> None:
    special = names.special_variant(tensors.get("transformer", ()))
    if special in ("Wan-Dancer", "Wan2.2 S2V", "Fun camera control", "Fun control"):
        raise ValueError(
            f"{checkpoint.where}: diffusers has no class for {special}; use --to original"
        )
    for component, part in tensors.items():
        config = _component_json(checkpoint, component, special)
        save.write_component(folder, component, part, config)
    pipeline = "transformer" in tensors and special is None
    if pipeline:
        save.write_pipeline(disk.model_config(checkpoint), tensors, folder)
    if not (pipeline and checkpoint.tokenizer):  # write_pipeline copied it
        _write_tokenizer(checkpoint, folder / "tokenizer")


def _write_tokenizer(checkpoint, at: pathlib.Path) -> None:
    """Copy the tokenizer folder, or write the sentencepiece model that a ComfyUI file held."""
    if checkpoint.tokenizer:
        paths.copy_folder(checkpoint.tokenizer, at)
    elif checkpoint.spiece:
        at.mkdir(parents=True)
        checkpoint.spiece.all().tofile(at / "spiece.model")
        save.dump_json(at / "tokenizer_config.json", {"tokenizer_class": "T5Tokenizer"})


def _component_json(checkpoint, component: str, special: str | None) -> dict:
    """config.json of a component folder of diffusers, variants included."""
    if component.startswith("transformer") and special:
        classes = {"VACE": "WanVACETransformer3DModel"}
        data = {"_class_name": classes.get(special, "WanAnimateTransformer3DModel")}
        return data | dict(checkpoint.configs[component])
    return save.component_json(disk.component_config(checkpoint, component), component)


def _configs(checkpoint) -> dict:
    """wanjax.json of layouts whose files carry no config of their own."""
    extra = {"configs": checkpoint.configs}
    transformer = checkpoint.tensors.get("transformer")
    if transformer is not None and not names.special_variant(transformer):
        extra |= save.extra_json(disk.model_config(checkpoint))
    return extra


def _write_original(checkpoint, tensors, folder: pathlib.Path) -> None:
    two = "transformer_2" in tensors
    residual = checkpoint.configs.get("vae", {}).get("is_residual")
    pth = {
        "vae": "Wan2.2_VAE.pth" if residual else "Wan2.1_VAE.pth",
        "text_encoder": "models_t5_umt5-xxl-enc-bf16.pth",
        "image_encoder": "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth",
    }
    for component, part in tensors.items():
        renamed = original_names(component, part)
        if component in pth:
            _save_torch(renamed, folder / pth[component])
            continue
        name = "low_noise_model" if component == "transformer_2" else "high_noise_model"
        at = folder / name if two else folder
        at.mkdir(exist_ok=True)
        files.write_sharded(at, "diffusion_pytorch_model", renamed)
        save.dump_json(at / "config.json", _original_json(checkpoint.configs[component]))


def _original_json(config: dict) -> dict:
    """config.json of an original transformer folder (without what its code defaults to)."""
    image = config["in_channels"] != config["out_channels"]
    kind = "i2v" if image else "ti2v" if config["in_channels"] == 48 else "t2v"
    return {
        "_class_name": "WanModel",
        "model_type": kind,
        "dim": config["num_attention_heads"] * config["attention_head_dim"],
        "eps": config["eps"],
        "ffn_dim": config["ffn_dim"],
        "freq_dim": config["freq_dim"],
        "in_dim": config["in_channels"],
        "num_heads": config["num_attention_heads"],
        "num_layers": config["num_layers"],
        "out_dim": config["out_channels"],
        "text_len": 512,
    }


def _save_torch(tensors: files.Tensors, path: pathlib.Path) -> None:
    """Write a .pth; it is built in host memory (11 GB for UMT5-XXL)."""
    import torch

    out = {}
    for name, tensor in tensors.items():
        array = np.ascontiguousarray(tensor.all())
        raw = torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
        out[name] = raw.view(getattr(torch, array.dtype.name)).reshape(array.shape)
    torch.save(out, path)


def _write_comfyui(checkpoint, tensors, folder: pathlib.Path, dtype: str | None) -> None:
    places = {
        "transformer": ("diffusion_models", "wan"),
        "transformer_2": ("diffusion_models", "wan_low_noise"),
        "vae": ("vae", "wan_vae"),
        "text_encoder": ("text_encoders", "umt5_xxl"),
        "image_encoder": ("clip_vision", "clip_vision_h"),
    }
    if "transformer_2" in tensors:
        places["transformer"] = ("diffusion_models", "wan_high_noise")
    for component, part in tensors.items():
        if component == "text_encoder":
            spiece = _sentencepiece(checkpoint)
            part = part | ({"spiece_model": spiece} if spiece else {})
        elif component == "image_encoder":
            part = {f"vision_model.{n}": t for n, t in part.items()}
        else:
            part = original_names(component, part)
        if dtype == "fp8_scaled" and component.startswith("transformer"):
            part = fp8_scaled(part)
        kind, stem = places[component]
        (folder / kind).mkdir(exist_ok=True)
        config = json.dumps(checkpoint.configs[component])
        header = {f"wanjax.{component.removesuffix('_2')}": config}
        files.write_safetensors(folder / kind / f"{stem}.safetensors", part, header)


def _sentencepiece(checkpoint) -> files.Tensor | None:
    """The sentencepiece model as ComfyUI has it, a tensor of bytes; None if there is none."""
    if checkpoint.tokenizer and (checkpoint.tokenizer / "spiece.model").is_file():
        return files.of_array(
            np.frombuffer((checkpoint.tokenizer / "spiece.model").read_bytes(), np.uint8)
        )
    return checkpoint.spiece


def _write_orbax(checkpoint, tensors, folder: pathlib.Path) -> None:
    """Parameter trees as one Orbax checkpoint (the whole model passes through device memory)."""
    params = {}
    for component, part in tensors.items():
        shapes = load.plan(replace(checkpoint, tensors=tensors), component)
        params[component] = load.place(part, shapes, component)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save((folder / "arrays").absolute(), args=ocp.args.PyTreeSave(params))
