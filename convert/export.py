"""Write checkpoints: original and ComfyUI layouts, Orbax, merged adapters, fp8, and the checks.

merged = cast(float32(W) + strength · alpha/rank · B A)
rounding of a merge: |merged − (W + ΔW)| / |ΔW|, over all touched weights; large when ΔW is below
the resolution of the stored dtype
fp8 scaled: W8 = e4m3(W / s), s = max|W| / 448, stored as NAME.scale_weight
"""

import argparse
import dataclasses
import json
import math
import pathlib
import shutil
import sys
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

from convert import disk, files, lora, names, weights
from wanjax import trees
from wanjax.models import wan

LAYOUTS = ("diffusers", "original", "comfyui", "orbax")
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "fp8_scaled")
_F8 = np.dtype(ml_dtypes.float8_e4m3fn)
_F32 = np.dtype(np.float32)


# ---- names out ----


def original_names(component: str, tensors: files.Tensors) -> files.Tensors:
    """Rename diffusers names to original ones, joining what the original keeps in one tensor.

    Raises ValueError naming tensors without an original name, or with a part missing.
    """
    table = names.rules(component, tensors)
    parts: dict[str, dict[int, files.Tensor]] = {}
    rules = {}
    unknown = []
    for name, tensor in tensors.items():
        hit = names.to_original(name, table)
        if hit is None:
            unknown.append(name)
            continue
        original, part, rule = hit
        if rule.drop:
            tensor = files.unsqueeze(tensor, rule.drop)
        parts.setdefault(original, {})[part] = tensor
        rules[original] = rule
    partial = [n for n, p in parts.items() if len(p) != len(rules[n].diffusers)]
    if unknown or partial:
        raise ValueError(
            f"{component}: {len(unknown)} tensors have no original name ({files.some(unknown)}), "
            f"{len(partial)} are incomplete ({files.some(partial)})"
        )
    out = {
        n: p[0] if len(p) == 1 else files.join([p[k] for k in sorted(p)]) for n, p in parts.items()
    }
    for k in range(1, 8) if "motion_encoder.enc.net_app.convs.0.0.weight" in out else ():
        for conv in ("conv2", "skip"):  # Animate stores its constant blur filter
            taps = np.outer([1, 3, 3, 1], [1, 3, 3, 1]).astype(np.float32) / 64
            out[f"motion_encoder.enc.net_app.convs.{k}.{conv}.0.kernel"] = files.of_array(taps)
    return out


def fp8_scaled(tensors: files.Tensors) -> files.Tensors:
    """Quantise the matrices of the blocks to e4m3 with one scale each, and add ComfyUI's marker."""
    out: files.Tensors = {"scaled_fp8": files.of_array(np.zeros(0, _F8))}
    for name, tensor in tensors.items():
        if len(tensor.shape) != 2 or "blocks." not in name or not name.endswith(".weight"):
            out[name] = tensor
            continue
        memo: list = []

        def both(tensor=tensor, memo=memo):
            w = tensor.all().astype(np.float32)
            scale = np.float32(max(float(np.abs(w).max()) / 448, 1e-12))
            memo[:] = [(w / scale).astype(_F8), np.asarray(scale)]
            return memo

        def weight(index, both=both, memo=memo):
            return (memo or both())[0][index]

        def scale(index, both=both, memo=memo):
            value = (memo or both())[1]
            memo.clear()  # written right after its weight: the last reader
            return value

        out[name] = files.Tensor(tensor.shape, _F8, weight, tensor.where)
        key = name.removesuffix("weight") + "scale_weight"
        out[key] = files.Tensor((), _F32, scale, tensor.where)
    return out


# ---- merging ----


@dataclass
class Rounding:
    """What storing merged weights lost, filled while they are written."""

    error: float = 0.0  # sum of squares of stored − exact
    change: float = 0.0  # sum of squares of the exact change
    moved: int = 0
    total: int = 0

    def __str__(self):
        relative = math.sqrt(self.error / self.change) if self.change else 0.0
        return (
            f"{self.moved / max(self.total, 1):.1%} of {self.total:,} touched weights moved; "
            f"rounding is {relative:.2e} of the change"
        )


def merge(
    tensors: files.Tensors, adapter: lora.Adapter, expert, strength: float, dtype, component: str
):
    """Return (tensors with the adapter added in float32 when read, Rounding filled by reading)."""
    rounding = Rounding()
    out = dict(tensors)
    pairs, dense = adapter.modules.get(expert, {}), adapter.dense.get(expert, {})
    for name in {*(f"{m}.weight" for m in pairs), *dense}:
        base, pair = out[name], pairs.get(name.removesuffix(".weight"))
        final = weights.stored(component, name, base, dtype)
        extra = dense[name].astype(np.float32).reshape(base.shape) if name in dense else None

        def read(index, base=base, pair=pair, extra=extra, final=final):
            w = base.read(index).astype(np.float32)
            change = np.zeros_like(w)
            if pair is not None:
                b, a = pair.b[index[0]].astype(np.float32), pair.a.astype(np.float32)
                rows = (pair.scale * strength) * (b @ a)
                change += rows.reshape(len(b), *base.shape[1:])[:, *index[1:]]
            if extra is not None:
                change += strength * extra[index]
            exact = w + change
            result = exact.astype(final.dtype)
            kept = result.astype(np.float32)
            rounding.error += float(np.square(kept - exact, dtype=np.float64).sum())
            rounding.change += float(np.square(change, dtype=np.float64).sum())
            rounding.moved += int((kept != w.astype(final.dtype).astype(np.float32)).sum())
            rounding.total += w.size
            return result

        out[name] = replace(base, dtype=final.dtype, read=read, compact=None)
    return out, rounding


# ---- layouts out ----


def write(checkpoint: disk.Checkpoint, out, layout: str, dtype: str | None = None) -> None:
    """Write a checkpoint in a layout of LAYOUTS; the output appears whole or not at all.

    dtype: of DTYPES, for floating tensors that are not kept in float32; None keeps what is stored
    (dequantised fp8 and GGUF data becomes bfloat16). fp8_scaled is for comfyui.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, expected one of {', '.join(LAYOUTS)}")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    if dtype == "fp8_scaled" and layout != "comfyui":
        raise ValueError(f"fp8_scaled is a ComfyUI form; use --to comfyui, not {layout}")
    number = None if dtype in (None, "fp8_scaled") else jnp.dtype(dtype)
    tensors = {
        c: {n: weights.stored(c, n, t, number) for n, t in part.items()}
        for c, part in checkpoint.tensors.items()
    }
    with weights.fresh_folder(out) as folder:
        assert folder is not None, "one process converts"
        if layout == "diffusers":
            _write_diffusers(checkpoint, tensors, folder)
        elif layout == "original":
            _write_original(checkpoint, tensors, folder)
        elif layout == "comfyui":
            _write_comfyui(checkpoint, tensors, folder, dtype)
        else:
            _write_orbax(checkpoint, tensors, folder)
        said = {k: checkpoint.extra[k] for k in ("sampler", "few_step") if k in checkpoint.extra}
        weights.write_sampler(folder, said)


def _write_diffusers(checkpoint, tensors, folder: pathlib.Path) -> None:
    special = names.special_variant(tensors.get("transformer", ()))
    if special in ("Wan-Dancer", "Wan2.2 S2V", "Fun camera control", "Fun control"):
        raise ValueError(
            f"{checkpoint.where}: diffusers has no class for {special}; use --to original"
        )
    for component, part in tensors.items():
        weights.write_component(
            folder, component, part, _component_json(checkpoint, component, special)
        )
    pipeline = "transformer" in tensors and special is None
    if pipeline:
        weights.write_pipeline(disk.model_config(checkpoint), tensors, folder)
    if not (pipeline and checkpoint.tokenizer):  # write_pipeline copied it
        _write_tokenizer(checkpoint, folder / "tokenizer")


def _write_tokenizer(checkpoint, at: pathlib.Path) -> None:
    """Copy the tokenizer folder, or write the sentencepiece model that a ComfyUI file held."""
    if checkpoint.tokenizer:
        shutil.copytree(checkpoint.tokenizer, at)
    elif checkpoint.spiece:
        at.mkdir(parents=True)
        checkpoint.spiece.all().tofile(at / "spiece.model")
        weights.dump_json(at / "tokenizer_config.json", {"tokenizer_class": "T5Tokenizer"})


def _component_json(checkpoint, component: str, special: str | None) -> dict:
    if component.startswith("transformer") and special:
        classes = {"VACE": "WanVACETransformer3DModel"}
        data = {"_class_name": classes.get(special, "WanAnimateTransformer3DModel")}
        return data | dict(checkpoint.configs[component])
    return weights.component_json(disk.component_config(checkpoint, component), component)


def _configs(checkpoint) -> dict:
    """wanjax.json of layouts whose files carry no config of their own."""
    extra = {"configs": checkpoint.configs}
    if "transformer" in checkpoint.tensors and not names.special_variant(
        checkpoint.tensors["transformer"]
    ):
        extra |= weights.extra_json(disk.model_config(checkpoint))
    return extra


def _write_original(checkpoint, tensors, folder: pathlib.Path) -> None:
    two = "transformer_2" in tensors
    pth = {
        "vae": "Wan2.2_VAE.pth"
        if checkpoint.configs.get("vae", {}).get("is_residual")
        else "Wan2.1_VAE.pth",
        "text_encoder": "models_t5_umt5-xxl-enc-bf16.pth",
        "image_encoder": "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth",
    }
    for component, part in tensors.items():
        renamed = original_names(component, part)
        if component in pth:
            _save_torch(renamed, folder / pth[component])
            continue
        at = {"transformer": "high_noise_model", "transformer_2": "low_noise_model"}[component]
        at = folder / at if two else folder
        at.mkdir(exist_ok=True)
        files.write_sharded(at, "diffusion_pytorch_model", renamed)
        weights.dump_json(at / "config.json", _original_json(checkpoint.configs[component]))
    _write_tokenizer(checkpoint, folder / "google/umt5-xxl")
    weights.dump_json(folder / "wanjax.json", _configs(checkpoint))


def _original_json(config: dict) -> dict:
    """config.json of an original transformer folder (it leaves out what the code defaults)."""
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
    where = {
        "transformer": ("diffusion_models", "wan"),
        "transformer_2": ("diffusion_models", "wan_low_noise"),
        "vae": ("vae", "wan_vae"),
        "text_encoder": ("text_encoders", "umt5_xxl"),
        "image_encoder": ("clip_vision", "clip_vision_h"),
    }
    if "transformer_2" in tensors:
        where["transformer"] = ("diffusion_models", "wan_high_noise")
    for component, part in tensors.items():
        if component == "text_encoder":
            spiece = checkpoint.spiece
            if checkpoint.tokenizer and (checkpoint.tokenizer / "spiece.model").is_file():
                raw = np.fromfile(checkpoint.tokenizer / "spiece.model", np.uint8)
                spiece = files.of_array(raw)
            part = part | ({"spiece_model": spiece} if spiece else {})
        elif component == "image_encoder":
            part = {f"vision_model.{n}": t for n, t in part.items()}
        else:
            part = original_names(component, part)
        if dtype == "fp8_scaled" and component.startswith("transformer"):
            part = fp8_scaled(part)
        kind, stem = where[component]
        (folder / kind).mkdir(exist_ok=True)
        header = {
            f"wanjax.{component.removesuffix('_2')}": json.dumps(checkpoint.configs[component])
        }
        files.write_safetensors(folder / kind / f"{stem}.safetensors", part, header)
    weights.dump_json(folder / "wanjax.json", _configs(checkpoint))
    _write_tokenizer(checkpoint, folder / "google/umt5-xxl")


def _write_orbax(checkpoint, tensors, folder: pathlib.Path) -> None:
    """Parameter trees as one Orbax checkpoint (the whole model passes through device memory)."""
    params = {}
    for component, part in tensors.items():
        shapes = disk.plan(replace(checkpoint, tensors=tensors), component)
        params[component] = weights.place(part, shapes, component)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save((folder / "arrays").absolute(), args=ocp.args.PyTreeSave(params))
    weights.dump_json(folder / "wanjax.json", _configs(checkpoint))
    _write_tokenizer(checkpoint, folder / "google/umt5-xxl")


# ---- verification ----


def verify(source: disk.Checkpoint, converted: disk.Checkpoint) -> list[tuple[str, float]]:
    """Run source (diffusers, torch) and converted model (wanjax) on the same input, block by block.

    Block l runs in a one-layer model with the embeddings and head, so host memory holds one block.
    Returns [(expert block, relative error in float32)].
    """
    import torch
    from diffusers.models.transformers import transformer_wan

    out = []
    for component in [c for c in ("transformer", "transformer_2") if c in source.tensors]:
        config = disk.component_config(source, component)
        text = 512 if config.image_dim else config.text_len  # diffusers splits image and text there
        one = dataclasses.replace(
            config, num_layers=1, dtype="float32", remat="none", text_len=text
        )
        fields = {f.name for f in dataclasses.fields(one)} - set(disk.RUN_FIELDS)
        model = transformer_wan.WanTransformer3DModel(**{f: getattr(one, f) for f in fields}).eval()
        shapes = trees.flatten(jax.eval_shape(lambda one=one: wan.init(jax.random.key(0), one)))
        denoise = jax.jit(lambda p, *a, one=one: wan.denoise(p, None, *a, config=one))
        rng = np.random.default_rng(0)
        frame = [2 * p for p in config.patch_size]
        x = rng.standard_normal(
            (1, *frame[:2], 3 * config.patch_size[2], config.in_channels), np.float32
        )
        ctx = rng.standard_normal((1, text, config.text_dim), np.float32)
        t, cond, image = np.asarray([700.0], np.float32), None, None
        if config.image_dim:
            image = rng.standard_normal(
                (1, config.pos_embed_seq_len or 257, config.image_dim), np.float32
            )
            cond = {"image": image}
            half = 2 if config.pos_embed_seq_len else 1
            image = torch.tensor(image).reshape(half, -1, config.image_dim)
        for layer in range(config.num_layers):
            ours = _one_layer(converted.tensors[component], layer)
            theirs = _one_layer(source.tensors[component], layer)
            state = {n: torch.tensor(t.all().astype(np.float32)) for n, t in theirs.items()}
            model.load_state_dict(state)
            with torch.no_grad():
                want = (
                    model(
                        torch.tensor(x).permute(0, 4, 1, 2, 3),
                        torch.tensor(t),
                        torch.tensor(ctx),
                        image,
                    )
                    .sample.permute(0, 2, 3, 4, 1)
                    .numpy()
                )
            params = weights.place(ours, shapes, component, dtype=np.float32)
            got = np.asarray(denoise(params, x, t, ctx, cond))
            error = np.abs(got - want).max() / np.abs(want).max()
            out.append((f"{component} block {layer}", float(error)))
    return out


def _one_layer(tensors: files.Tensors, layer: int) -> files.Tensors:
    mine = f"blocks.{layer}."
    rest = {n: t for n, t in tensors.items() if not n.startswith("blocks.")}
    return rest | {
        "blocks.0." + n[len(mine) :]: t for n, t in tensors.items() if n.startswith(mine)
    }


# ---- command ----


def table(rows: list[tuple]) -> str:
    """Align rows of text."""
    widths = [max(len(str(r[k])) for r in rows) for k in range(len(rows[0]))]
    line = lambda r: "  ".join(str(c).ljust(w) for c, w in zip(r, widths, strict=True)).rstrip()
    return "\n".join(map(line, rows))


def parse_lora(text: str) -> tuple[str, str | None, float]:
    """Split FILE[:high|low|both][@strength]."""
    path, strength = text, 1.0
    head, at, tail = text.rpartition("@")
    if at and not pathlib.Path(text).exists():
        try:
            path, strength = head, float(tail)
        except ValueError:
            raise ValueError(f"--lora {text}: strength {tail!r} is not a number") from None
        if not math.isfinite(strength):
            raise ValueError(f"--lora {text}: strength {tail!r} is not finite")
    head, _, side = path.rpartition(":")
    return (head, side, strength) if side in ("high", "low", "both") else (path, None, strength)


def main(argv=None) -> int:
    """python -m convert.weights"""
    parser = argparse.ArgumentParser(prog="python -m convert.weights", description=main.__doc__)
    parser.add_argument("src", nargs="+", help="folder, file, or the files of one model")
    parser.add_argument("--to", required=True, choices=LAYOUTS)
    parser.add_argument("--out", required=True)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--lora", action="append", default=[], metavar="FILE[:high|low|both][@S]")
    parser.add_argument("--verify", action="store_true", help="compare the forward block by block")
    parser.add_argument("--strict", action=argparse.BooleanOptionalAction, default=True,
                        help="fail when an adapter does not fit whole")  # fmt: skip
    args = parser.parse_args(argv)
    try:
        convert(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def convert(args) -> None:
    """Read, check, merge, write, verify; nothing is written before every check has passed."""
    checkpoint = disk.read(args.src[0] if len(args.src) == 1 else args.src)
    special = names.special_variant(checkpoint.tensors.get("transformer", ()))
    for component in checkpoint.tensors:
        if not (special and component.startswith("transformer")):
            disk.plan(checkpoint, component)
    if args.verify and special:
        raise ValueError(f"{checkpoint.where}: wanjax cannot run this variant; drop --verify")
    merged, roundings = checkpoint, []
    for text in args.lora:
        merged, rounding = _merge_file(merged, text, args)
        roundings += [(text, r) for r in rounding]
    write(merged, args.out, args.to, args.dtype)
    rows: list[tuple] = [("component", "mapped", "missing", "unexpected", "not needed")]
    for component, part in checkpoint.tensors.items():
        skipped = checkpoint.skipped.get(component, [])
        why = f"{len(skipped)} ({files.some(skipped)})" if skipped else "0"
        rows.append((component, len(part), 0, 0, why))
    print(table(rows))
    for text, rounding in roundings:
        print(f"--lora {text}: {rounding}")
    if args.verify:
        errors = verify(merged, disk.read(args.out))
        worst = max(errors, key=lambda e: e[1])
        print(f"verify: {len(errors)} blocks, worst relative error {worst[1]:.2e} at {worst[0]}")


def _merge_file(checkpoint: disk.Checkpoint, text: str, args):
    path, expert, strength = parse_lora(text)
    config = disk.model_config(checkpoint)
    adapter, skipped = lora.fit(lora.route(lora.read(path), config.experts, expert), config)
    if skipped and args.strict:
        raise ValueError(f"--lora {text}: {skipped}; pass --no-strict to merge the rest")
    print(f"--lora {text}: {lora.summary(adapter, strength)}{'; ' + skipped if skipped else ''}")
    dtype = None if args.dtype in (None, "fp8_scaled") else jnp.dtype(args.dtype)
    tensors, roundings = dict(checkpoint.tensors), []
    for expert in [e for e in lora.EXPERTS if e in adapter.experts]:
        component = disk.EXPERTS[expert]
        tensors[component], rounding = merge(
            tensors[component], adapter, expert, strength, dtype, component
        )
        roundings.append(rounding)
    return replace(checkpoint, tensors=tensors), roundings
