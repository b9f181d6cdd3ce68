"""What is on disk: a checkpoint of any published Wan layout as lazy tensors and configs.

Layout, component, naming and expert are recognised by tensor names, shapes and file names. Tensors
come out under diffusers names, dequantised, and none is dropped silently.
"""

import dataclasses
import hashlib
import importlib.resources
import json
import pathlib
import re
import typing
import warnings
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from convert import files, infer, names
from wanjax import paths
from wanjax.models import clip, presets, umt5, vae, wan

EXPERTS = {"high": "transformer", "low": "transformer_2"}
MODELS = {  # (config class, init) of each component
    "transformer": (wan.WanConfig, wan.init),
    "transformer_2": (wan.WanConfig, wan.init),
    "vae": (vae.VAEConfig, vae.init),
    "text_encoder": (umt5.UMT5Config, umt5.init),
    "image_encoder": (clip.CLIPVisionConfig, clip.init),
}
COMPONENTS = tuple(MODELS)
RUN_FIELDS = wan.RUN_FIELDS  # not in config.json
FP8 = tuple(np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
_MAX_SIZE = 1 << 20  # of any integer in a config


@dataclass
class Checkpoint:
    """A checkpoint on disk: lazy tensors under diffusers names and config dicts, per component."""

    where: str
    tensors: dict[str, files.Tensors]
    configs: dict[str, dict]
    index: dict = field(default_factory=dict)  # model_index.json
    scheduler: dict = field(default_factory=dict)
    extra: dict = field(default_factory=dict)  # wanjax.json: name, sampling, text_len
    tokenizer: paths.Path | None = None
    spiece: files.Tensor | None = None  # sentencepiece model that ComfyUI stores as a tensor
    expert_named: bool = False  # a file name says which expert it holds
    arrays: paths.Path | None = None  # of the Orbax form, which has no lazy tensors
    skipped: dict[str, list[str]] = field(default_factory=dict)  # names not needed, by component


def read(path) -> Checkpoint:
    """Open a checkpoint of any layout without reading its tensors.

    path: diffusers folder, original folder, folder or list of single files (safetensors, .pth,
    GGUF), one such file, "tinywan22", or the name org/name of a Hugging Face model; folders and
    safetensors may be gs:// or s3://. Layout, component and expert are recognised by names, shapes
    and file names.
    """
    if isinstance(path, str) and path == "tinywan22":
        path = str(importlib.resources.files("wanjax") / "assets" / "tinywan22")
    if isinstance(path, list | tuple):
        checkpoint = Checkpoint(", ".join(map(str, path)), {}, {})
        for part in path:
            _add_file(checkpoint, paths.resolve(part))
        return _complete(checkpoint)
    checkpoint = Checkpoint(str(path), {}, {})
    path = paths.model(path)
    if (path / "arrays").is_dir():
        _add_orbax(checkpoint, path)
    elif path.is_file():
        _add_file(checkpoint, path)
    elif not path.is_dir():
        raise ValueError(
            f"{path}: no such file or folder; set model.path to one, or to the name org/name of a "
            "Hugging Face model"
        )
    elif (path / "model_index.json").is_file():
        _add_diffusers(checkpoint, path)
    else:
        _add_folder(checkpoint, path)
    return _complete(checkpoint)


def _add_orbax(checkpoint: Checkpoint, path: paths.Path) -> None:
    """A folder that convert.weights wrote with --to orbax: its configs, and no lazy tensors."""
    if str(path).startswith("s3://"):
        raise ValueError(
            f"{path}: Orbax reads its arrays from local disks and gs:// only; copy the folder to a "
            "local disk, or store the model with --to diffusers"
        )
    checkpoint.extra = read_json(path / "wanjax.json")
    checkpoint.configs = checkpoint.extra.pop("configs", {})
    checkpoint.tensors = dict.fromkeys(checkpoint.configs, {})
    checkpoint.arrays = path / "arrays"
    if isinstance(path, pathlib.Path):  # Orbax takes absolute ones only
        checkpoint.arrays = checkpoint.arrays.absolute()
    checkpoint.tokenizer = _folder(path / "google/umt5-xxl")


def _folder(path: paths.Path) -> paths.Path | None:
    return path if path.is_dir() else None


def _complete(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, its only expert in first place. ValueError if it has no tensors."""
    if "transformer" not in checkpoint.tensors and "transformer_2" in checkpoint.tensors:
        checkpoint.tensors["transformer"] = checkpoint.tensors.pop("transformer_2")
        checkpoint.configs["transformer"] = checkpoint.configs.pop("transformer_2")
    if not checkpoint.tensors:
        raise ValueError(
            f"{checkpoint.where}: no Wan tensors; expected a diffusers folder, an original "
            "folder, or .safetensors, .pth or .gguf files"
        )
    return checkpoint


def _add_diffusers(checkpoint: Checkpoint, path: paths.Path) -> None:
    checkpoint.index = read_json(path / "model_index.json")
    for component in COMPONENTS:
        if (path / component).is_dir():
            tensors, _ = files.open_folder(path / component)
            _store(checkpoint, tensors, component, "diffusers", f"{path}/{component}")
            checkpoint.configs[component] = read_json(path / component / "config.json")
    for name, at in (("scheduler", "scheduler/scheduler_config.json"), ("extra", "wanjax.json")):
        if (path / at).is_file():
            setattr(checkpoint, name, read_json(path / at))
    checkpoint.tokenizer = _folder(path / "tokenizer")
    if "transformer" not in checkpoint.tensors:
        raise ValueError(f"{path}: no transformer/ folder; download the checkpoint again")


def _add_folder(checkpoint: Checkpoint, path: paths.Path) -> None:
    """Original release (high_noise_model/, low_noise_model/ or shards at the root), or files."""
    if (path / "wanjax.json").is_file():
        checkpoint.extra = read_json(path / "wanjax.json")
    for expert in EXPERTS:
        if (at := path / f"{expert}_noise_model").is_dir():
            _add(checkpoint, *files.open_folder(at), at, expert)
    loose = sorted(path.glob("*.safetensors"))
    shard = r"-\d{5}-of-\d{5}|^diffusion_pytorch_model|^model\."
    if any(re.search(shard, file.name) for file in loose):
        tensors, metadata = files.open_folder(path)
        used = {t.where for t in tensors.values()}
        _add(checkpoint, tensors, metadata, path, None)
        loose = [f for f in loose if str(f) not in used]
    for kind in ("diffusion_models", "vae", "text_encoders", "clip_vision"):  # of ComfyUI
        loose += sorted((path / kind).glob("*.safetensors"))
    for file in [*loose, *sorted(path.glob("*.pth")), *sorted(path.glob("*.gguf"))]:
        _add_file(checkpoint, file)
    checkpoint.tokenizer = _folder(path / "google/umt5-xxl")


def _add_file(checkpoint: Checkpoint, path: paths.Path) -> None:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; set model.path")
    _add(checkpoint, *files.open_any(path), path, expert_in_name(path.stem))


# "high" is a word in many names (high_quality); followed by one of these it names the expert.
_AFTER = r"[-_. ]*(?:$|fp\d|bf\d|lora|rank|model|expert|step|epoch|r\d|v\d|e\d|s\d|\d)"


def expert_in_name(text: str) -> str | None:
    """Return "high" or "low" if a name says one of them, None if neither; ValueError if both."""
    words = {s for s in EXPERTS if re.search(rf"(?i)(?<![a-z]){s}(?![a-z])|{s}[-_]?noise", text)}
    if len(words) == 2:
        raise ValueError(f"{text}: the name says both high and low noise; rename the file")
    side = words.pop() if words else None
    clear = side and re.search(rf"(?i){side}[-_ ]?noise|(?<![a-z]){side}{_AFTER}", text)
    return side if clear else None


def _add(checkpoint: Checkpoint, tensors, metadata, where, expert: str | None) -> None:
    """Sort a file's tensors into components under diffusers names."""
    tensors = _unwrapped(tensors, where)
    if not (found := names.detect(tensors)):
        raise ValueError(
            f"{where}: no Wan component among its {len(tensors)} tensors ({files.some(tensors)}); "
            "expected a transformer, VAE, UMT5 or CLIP checkpoint"
        )
    prefixes = sorted({p for _, _, p in found}, key=len, reverse=True)
    owner = {n: next((p for p in prefixes if n.startswith(p)), None) for n in tensors}
    for component, naming, prefix in found:
        part = {n[len(prefix) :]: t for n, t in tensors.items() if owner[n] == prefix}
        if component == "transformer" and expert:
            component, checkpoint.expert_named = EXPERTS[expert], True
        if component in checkpoint.tensors:
            raise ValueError(f"{checkpoint.where}: {component} is in more than one file ({where})")
        if (spiece := part.pop("spiece_model", None)) is not None:
            checkpoint.spiece = spiece
        _store(checkpoint, part, component, naming, f"{where}: {component}")
        hints, hub = _hints(checkpoint, component, metadata, where), checkpoint.tensors[component]
        checkpoint.configs[component] = infer.config(component, hub, hints, str(where))
    if leftover := [n for n, prefix in owner.items() if prefix is None]:
        raise ValueError(
            f"{where}: {len(leftover)} tensors belong to no component: {files.some(leftover)}"
        )


def _hints(checkpoint: Checkpoint, component: str, metadata, where: paths.Path) -> dict:
    """What a header, wanjax.json or config.json beside the file says of a component's config."""
    if raw := metadata.get(f"wanjax.{component.removesuffix('_2')}"):
        try:
            return dict(json.loads(raw))
        except (ValueError, TypeError, RecursionError):
            raise ValueError(f"{where}: header entry wanjax.{component} is not JSON") from None
    if component in checkpoint.extra.get("configs", {}):
        return checkpoint.extra["configs"][component]
    beside = where / "config.json" if where.is_dir() else where.parent / "config.json"
    if component.startswith("transformer") and beside.is_file():
        return read_json(beside)
    return {}


def _unwrapped(tensors: files.Tensors, where) -> files.Tensors:
    out = {names.unwrap(n): t for n, t in tensors.items()}
    if len(out) != len(tensors):
        raise ValueError(f"{where}: two names differ only in wrapper prefixes")
    return out


_IGNORED = re.compile(
    r".*\.norm_added_q\..*|(.*\.)?freqs|scaled_fp8|.*\.(scale_input|input_scale)|textual\..*"
    r"|visual\.head|log_scale|(vision_model\.)?embeddings\.position_ids|visual_projection\.weight"
    r"|motion_encoder\.enc\.net_app\.convs\..*\.kernel|logit_scale"
)


def _store(checkpoint: Checkpoint, tensors, component: str, naming: str, where: str) -> None:
    """Add a component under diffusers names, with quantisation undone, and the names left out.

    Left out is what carries no information of its own: tied copies, tables, scales already applied.
    """
    tensors = _unwrapped(tensors, where)
    skipped = [n for n in tensors if _IGNORED.fullmatch(n)]
    tensors = {n: t for n, t in tensors.items() if n not in skipped}
    for suffix in (".scale_weight", ".weight_scale"):
        for name in [n for n in tensors if n.endswith(suffix)]:
            scale, weight = tensors.pop(name), name.removesuffix(suffix) + ".weight"
            if weight not in tensors or tensors[weight].dtype not in FP8:
                raise ValueError(f"{where}: {name} scales a weight that is missing or not fp8")
            tensors[weight] = files.dequantise(tensors[weight], scale)
            skipped.append(name)
    if component == "text_encoder" and "encoder.embed_tokens.weight" in tensors:
        tied = tensors.pop("encoder.embed_tokens.weight")  # always the same as shared.weight
        tensors.setdefault("shared.weight", tied)
        skipped.append("encoder.embed_tokens.weight")
    if component == "image_encoder" and naming == "diffusers":
        tensors = {n.removeprefix("vision_model."): t for n, t in tensors.items()}
    if naming == "original":
        tensors = _renamed(tensors, component, where)
    checkpoint.tensors[component], checkpoint.skipped[component] = tensors, skipped


def _renamed(tensors: files.Tensors, component: str, where: str) -> files.Tensors:
    """Original names to diffusers names, with the split and squeeze that go with them."""
    table, out, unknown = names.rules(component, tensors), {}, []
    for name, tensor in tensors.items():
        if (hit := names.to_diffusers(name, table)) is None:
            unknown.append(f"{name} {tensor.shape}")
            continue
        new, rule = hit
        tensor = files.squeeze(tensor, rule.drop)
        if len(new) > 1 and (not tensor.shape or tensor.shape[0] % len(new)):
            raise ValueError(
                f"{where}: {name} of shape {tensor.shape} does not split into {len(new)}"
            )
        size = tensor.shape[0] // len(new) if len(new) > 1 else 0
        for k, n in enumerate(new):
            out[n] = files.rows(tensor, k * size, (k + 1) * size) if size else tensor
    if unknown:
        raise ValueError(f"{where}: {len(unknown)} unexpected tensors: {files.some(unknown)}")
    return out


def read_json(path: paths.Path) -> dict:
    """Read a JSON object; ValueError naming the file if it is not one."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: holds {type(data).__name__}, expected a JSON object")
    return data


def component_config(checkpoint: Checkpoint, component: str):
    """Return the config dataclass of one component from its config.json."""
    cls, data = MODELS[component][0], checkpoint.configs[component]
    where = f"{checkpoint.where}/{component}/config.json"
    fields = [f.name for f in dataclasses.fields(cls)]
    unknown = sorted(k for k in data if k not in fields and not k.startswith("_"))
    if unknown and component in ("transformer", "transformer_2", "vae"):
        warnings.warn(f"{where}: ignored unknown {files.some(unknown)}", stacklevel=2)
    kept = {k: v for k, v in data.items() if k in fields and k not in RUN_FIELDS}
    if cls is wan.WanConfig and "text_len" in checkpoint.extra:
        kept["text_len"] = checkpoint.extra["text_len"]
    if component == "text_encoder" and data.get("feed_forward_proj", "gated-gelu") != "gated-gelu":
        raise ValueError(f"{where}: feed_forward_proj is not gated-gelu; Wan uses UMT5")
    return _build(cls, kept, where)


def _build(cls, data: dict, where: str):
    """Make a config dataclass from JSON values of the right types."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if not isinstance(data, dict) or set(data) - set(fields):
        raise ValueError(f"{where}: expected an object with {files.some(fields, 99)}")
    data = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    for key, value in data.items():
        if not _fits(kind := fields[key].type, value):
            raise ValueError(f"{where}: {key} is {str(value)[:80]!r}, expected {kind}")
    required = (f.name for f in fields.values() if f.default is dataclasses.MISSING)
    if absent := [n for n in required if n not in data]:
        raise ValueError(f"{where}: {files.some(absent)} missing; copy the published file")
    try:
        return cls(**data)
    except (TypeError, IndexError, ArithmeticError) as error:
        raise ValueError(f"{where}: {error}") from None


def _fits(kind, value) -> bool:
    """Whether a JSON value has the type of a config field, and a size that a model can have."""
    if isinstance(value, int) and abs(value) > _MAX_SIZE:
        return False
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(isinstance(x, int | float) for x in value)
    return isinstance(value, int | float if kind is float else kind)


def model_config(checkpoint: Checkpoint) -> presets.ModelConfig:
    """Return the ModelConfig: architecture from the files, sampling from the preset it matches.

    Schedulers in released folders are not trusted for a known model (A14B says shift 3, was
    released with 12 and 5); a folder's own wanjax.json comes first, the scheduler last.
    """
    where = checkpoint.where
    if "transformer" not in checkpoint.tensors:
        has = ", ".join(checkpoint.tensors)
        raise ValueError(f"{where}: has {has} but no transformer; add its file")
    configs: dict = {c: component_config(checkpoint, c) for c in checkpoint.tensors}
    experts = tuple(e for e, c in EXPERTS.items() if c in configs)
    base = configs["transformer"]
    if len(experts) == 2 and configs["transformer_2"] != base:
        raise ValueError(
            f"{where}: transformer and transformer_2 have different configs; both experts must "
            "share one architecture"
        )
    preset = _preset(checkpoint, base, experts)
    optional = {"vae": "vae", "text": "text_encoder", "image": "image_encoder"}
    parts: dict = {k: configs[c] for k, c in optional.items() if c in configs}
    parts |= {"wan": base, "experts": experts}
    parts["boundary"] = _boundary(checkpoint, experts, preset)
    parts["tokenizer"] = checkpoint.tokenizer and str(checkpoint.tokenizer)
    if preset and not checkpoint.extra:
        return dataclasses.replace(preset, **parts)
    name = str(checkpoint.extra.get("name", pathlib.Path(where).name))
    return presets.ModelConfig(name=name, sampling=_sampling(checkpoint), **parts)


def _preset(checkpoint: Checkpoint, base: wan.WanConfig, experts: tuple):
    """The published model with this architecture, if any; of several, the one with as many experts
    (a single file named high or low counts as half of a pair)."""

    def same(model: presets.ModelConfig) -> bool:
        run = {f: getattr(base, f) for f in RUN_FIELDS}
        return dataclasses.replace(model.wan, **run) == base

    found = list(filter(same, presets.MODELS.values()))
    paired = len(experts) == 2 or checkpoint.expert_named
    return next((m for m in found if (len(m.experts) == 2) == paired), next(iter(found), None))


def _boundary(checkpoint: Checkpoint, experts: tuple, preset) -> float | None:
    """Where the experts meet: what the folder says, else the preset; None for one expert."""
    where = checkpoint.where
    boundary = checkpoint.index.get("boundary_ratio", checkpoint.extra.get("boundary"))
    if not isinstance(boundary, float | None):
        raise ValueError(f"{where}: boundary_ratio is {str(boundary)[:80]!r}, not a number")
    if boundary is not None and len(experts) == 1:
        raise ValueError(
            f"{where}: boundary_ratio {boundary} in model_index.json but no transformer_2/; "
            "download the low-noise expert or set boundary_ratio to null"
        )
    if boundary is None and len(experts) == 2:
        if (boundary := preset and preset.boundary) is None:
            raise ValueError(f"{where}: two experts need boundary_ratio in model_index.json")
    return boundary


def _sampling(checkpoint: Checkpoint) -> presets.Sampling:
    """Sampling defaults from wanjax.json, or general ones with the shift of the scheduler."""
    where = f"{checkpoint.where}/wanjax.json"
    shift = checkpoint.scheduler.get("flow_shift", checkpoint.scheduler.get("shift", 5.0))
    given = checkpoint.extra.get("sampling", {"guidance": {"high": 5.0, "low": 5.0}, "steps": 50})
    given = {"shift": shift, **given} if isinstance(given, dict) else {}
    given["guidance"] = _build(presets.Guidance, given.get("guidance", {}), where)
    return _build(presets.Sampling, given, where)


def fingerprint(checkpoint: Checkpoint) -> str:
    """Short hash of the transformers: every name and shape, and a few small tensors' values."""
    digest = hashlib.sha256()
    for component in EXPERTS.values():
        tensors = checkpoint.tensors.get(component, {})
        for name in sorted(tensors):
            digest.update(f"{component}.{name} {tensors[name].shape}".encode())
        for name in ("proj_out.weight", "scale_shift_table", "blocks.0.attn1.to_q.bias"):
            if name in tensors:
                digest.update(tensors[name].all().astype(np.float32).tobytes())
    return digest.hexdigest()[:16]
