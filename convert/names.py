"""Names and layouts of Wan tensors: parameter paths, diffusers names, original names.

Three spellings of one tensor:
  path       blocks/attn1/to_q/kernel [L,I,O]   parameter trees; stacks have a leading layer axis
  diffusers  blocks.0.attn1.to_q.weight [O,I]   the hub: every layout is read into these names
  original   blocks.0.self_attn.q.weight [O,I]  the original release and ComfyUI single files
A path follows its diffusers name; only the last component says what kind of leaf it is (kernel,
scale, embedding) and hence which axes move. Rules between diffusers and original names are whole
patterns, one table for both directions.

Dimension legend: L layers, O outputs, I inputs.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache

# Stacked roots: the path keeps the root, the torch name inserts ".{layer}" after it.
STACKS = ("blocks/", "vace_blocks/", "encoder/block/", "encoder/layers/")
_LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}


def stack_root(path: str) -> str | None:
    """Return the stacked root that owns a path ("blocks/"), None for a leaf without layer axis."""
    return next((root for root in STACKS if path.startswith(root)), None)


def torch_name(path: str, layer: int | None = None) -> str:
    """Return the state-dict name of a parameter path (of one layer if stacked)."""
    root = stack_root(path)
    if (root is None) != (layer is None):
        raise ValueError(f"path {path!r} is {'' if root else 'not '}stacked, got layer {layer}")
    if root:
        path = f"{root}{layer}/{path[len(root) :]}"
    head, _, last = path.rpartition("/")
    return f"{head}/{_LEAVES.get(last, last)}".lstrip("/").replace("/", ".")


def torch_names(path: str, shape: tuple) -> list[tuple[str, tuple]]:
    """Return [(torch name, torch shape)] of a path: one entry per layer if stacked, else one."""
    if stack_root(path) is None:
        return [(torch_name(path), torch_shape(path, shape))]
    inner = torch_shape(path, shape[1:])
    return [(torch_name(path, layer), inner) for layer in range(shape[0])]


def permutation(path: str, ndim: int) -> tuple[int, ...]:
    """Return axes such that torch_array.transpose(axes) has the layout used here (one layer).

    kernel: Linear [O,I] -> [I,O], ConvNd [O,I,spatial...] -> [spatial...,I,O]; others stay.
    """
    kernel = path.rpartition("/")[2] == "kernel"
    return (*range(2, ndim), 1, 0) if kernel else tuple(range(ndim))


def torch_shape(path: str, shape: tuple) -> tuple:
    """Return the torch shape of a leaf with this shape (one layer).

    The VAE's gamma [C] is [C,1,1,1] in torch, in its attention (per frame) [C,1,1].
    """
    if path.endswith("/gamma"):
        return (*shape, 1, 1) if "attentions" in path else (*shape, 1, 1, 1)
    axes = permutation(path, len(shape))
    return tuple(shape[axes.index(i)] for i in range(len(shape)))


ALTERNATIVES = {
    "i": r"\d+",
    "j": r"\d+",  # i + 1
    "p": "weight|bias",
    "B": "blocks|vace_blocks",
    "h": "q|k|v",
    "n": "norm_q|norm_k",
    "c": "conv1_local|conv2|conv3",
    "E": "encoder|decoder",
    "X": "ref_conv|control_adapter|patch_embedding_global|head_global|img_emb_refimage"
    "|img_emb_refface|music_projection|music_encoder|music_injector|cond_encoder|casual_audio_encoder|audio_injector"
    "|frame_packer|trainable_cond_mask",
    "rest": ".+",
}


@dataclass(frozen=True)
class Rule:
    """One row: `diffusers` holds several patterns when the original tensor is split along axis 0.

    drop: original axes of size one that the diffusers tensor lacks ([1,C,1,1] -> [C] is (0, 2, 3)).
    """

    diffusers: tuple[str, ...]
    original: str
    drop: tuple[int, ...] = ()


def _table(text: str) -> tuple[Rule, ...]:
    """Parse rows "diffusers [+ diffusers ...] = original [drop axis axis ...]"."""
    out = []
    for line in text.strip().splitlines():
        left, right = line.split(" = ")
        original, _, drop = right.strip().partition(" drop ")
        out.append(Rule(tuple(left.split(" + ")), original, tuple(map(int, drop.split()))))
    return tuple(out)


# norm2 = norm3: the one affine norm of a block, before cross-attention, is third in the original.
# The last rows are Animate's, and the modules of Fun, S2V and Wan-Dancer that keep their names.
_TRANSFORMER = _table(
    """
{B}.{i}.attn1.to_{h}.{p} = {B}.{i}.self_attn.{h}.{p}
{B}.{i}.attn1.to_out.0.{p} = {B}.{i}.self_attn.o.{p}
{B}.{i}.attn1.{n}.weight = {B}.{i}.self_attn.{n}.weight
{B}.{i}.attn2.to_{h}.{p} = {B}.{i}.cross_attn.{h}.{p}
{B}.{i}.attn2.to_out.0.{p} = {B}.{i}.cross_attn.o.{p}
{B}.{i}.attn2.{n}.weight = {B}.{i}.cross_attn.{n}.weight
blocks.{i}.attn2.add_k_proj.{p} = blocks.{i}.cross_attn.k_img.{p}
blocks.{i}.attn2.add_v_proj.{p} = blocks.{i}.cross_attn.v_img.{p}
blocks.{i}.attn2.norm_added_k.weight = blocks.{i}.cross_attn.norm_k_img.weight
{B}.{i}.ffn.net.0.proj.{p} = {B}.{i}.ffn.0.{p}
{B}.{i}.ffn.net.2.{p} = {B}.{i}.ffn.2.{p}
{B}.{i}.norm2.{p} = {B}.{i}.norm3.{p}
{B}.{i}.scale_shift_table = {B}.{i}.modulation
vace_blocks.{i}.proj_in.{p} = vace_blocks.{i}.before_proj.{p}
vace_blocks.{i}.proj_out.{p} = vace_blocks.{i}.after_proj.{p}
vace_patch_embedding.{p} = vace_patch_embedding.{p}
patch_embedding.{p} = patch_embedding.{p}
condition_embedder.time_embedder.linear_1.{p} = time_embedding.0.{p}
condition_embedder.time_embedder.linear_2.{p} = time_embedding.2.{p}
condition_embedder.time_proj.{p} = time_projection.1.{p}
condition_embedder.text_embedder.linear_1.{p} = text_embedding.0.{p}
condition_embedder.text_embedder.linear_2.{p} = text_embedding.2.{p}
condition_embedder.image_embedder.norm1.{p} = img_emb.proj.0.{p}
condition_embedder.image_embedder.ff.net.0.proj.{p} = img_emb.proj.1.{p}
condition_embedder.image_embedder.ff.net.2.{p} = img_emb.proj.3.{p}
condition_embedder.image_embedder.norm2.{p} = img_emb.proj.4.{p}
condition_embedder.image_embedder.pos_embed = img_emb.emb_pos
proj_out.{p} = head.head.{p}
scale_shift_table = head.modulation
pose_patch_embedding.{p} = pose_patch_embedding.{p}
motion_encoder.conv_in.weight = {M}.convs.0.0.weight
motion_encoder.conv_in.act_fn.bias = {M}.convs.0.1.bias drop 0 2 3
motion_encoder.res_blocks.{i}.conv1.weight = {M}.convs.{j}.conv1.0.weight
motion_encoder.res_blocks.{i}.conv1.act_fn.bias = {M}.convs.{j}.conv1.1.bias drop 0 2 3
motion_encoder.res_blocks.{i}.conv2.weight = {M}.convs.{j}.conv2.1.weight
motion_encoder.res_blocks.{i}.conv2.act_fn.bias = {M}.convs.{j}.conv2.2.bias drop 0 2 3
motion_encoder.res_blocks.{i}.conv_skip.weight = {M}.convs.{j}.skip.1.weight
motion_encoder.conv_out.weight = {M}.convs.8.weight
motion_encoder.motion_network.{i}.{p} = motion_encoder.enc.fc.{i}.{p}
motion_encoder.motion_synthesis_weight = motion_encoder.dec.direction.weight
face_encoder.{c}.{p} = face_encoder.{c}.conv.{p}
face_encoder.out_proj.{p} = face_encoder.out_proj.{p}
face_encoder.padding_tokens = face_encoder.padding_tokens
face_adapter.{i}.to_q.{p} = face_adapter.fuser_blocks.{i}.linear1_q.{p}
face_adapter.{i}.to_k.{p} + face_adapter.{i}.to_v.{p} = face_adapter.fuser_blocks.{i}.linear1_kv.{p}
face_adapter.{i}.to_out.{p} = face_adapter.fuser_blocks.{i}.linear2.{p}
face_adapter.{i}.norm_{h}.weight = face_adapter.fuser_blocks.{i}.{h}_norm.weight
{X}.{rest} = {X}.{rest}
""".replace("{M}", "motion_encoder.enc.net_app")
)
_TEXT = _table(
    """
shared.weight = token_embedding.weight
encoder.block.{i}.layer.0.SelfAttention.{h}.weight = blocks.{i}.attn.{h}.weight
encoder.block.{i}.layer.0.SelfAttention.o.weight = blocks.{i}.attn.o.weight
encoder.block.{i}.layer.0.SelfAttention.{R}.weight = blocks.{i}.pos_embedding.embedding.weight
encoder.block.{i}.layer.0.layer_norm.weight = blocks.{i}.norm1.weight
encoder.block.{i}.layer.1.DenseReluDense.wi_0.weight = blocks.{i}.ffn.gate.0.weight
encoder.block.{i}.layer.1.DenseReluDense.wi_1.weight = blocks.{i}.ffn.fc1.weight
encoder.block.{i}.layer.1.DenseReluDense.wo.weight = blocks.{i}.ffn.fc2.weight
encoder.block.{i}.layer.1.layer_norm.weight = blocks.{i}.norm2.weight
encoder.final_layer_norm.weight = norm.weight
""".replace("{R}", "relative_attention_bias")
)
_IMAGE = _table(
    """
embeddings.class_embedding = visual.cls_embedding drop 0 1
embeddings.patch_embedding.weight = visual.patch_embedding.weight
embeddings.position_embedding.weight = visual.pos_embedding drop 0
pre_layrnorm.{p} = visual.pre_norm.{p}
post_layernorm.{p} = visual.post_norm.{p}
{L}.layer_norm1.{p} = visual.transformer.{i}.norm1.{p}
{L}.layer_norm2.{p} = visual.transformer.{i}.norm2.{p}
{A}.q_proj.{p} + {A}.k_proj.{p} + {A}.v_proj.{p} = visual.transformer.{i}.attn.to_qkv.{p}
{A}.out_proj.{p} = visual.transformer.{i}.attn.proj.{p}
{L}.mlp.fc1.{p} = visual.transformer.{i}.mlp.0.{p}
{L}.mlp.fc2.{p} = visual.transformer.{i}.mlp.2.{p}
""".replace("{A}", "{L}.self_attn").replace("{L}", "encoder.layers.{i}")
)


def _vae_rules(residual: bool, resnets: int) -> tuple[Rule, ...]:
    """Rules of the two VAEs; 2.1 (not residual) numbers the items of all levels in one flat list.

    resnets: residual blocks per decoder level (num_res_blocks + 1).
    """

    def block(d, o):
        norms = [f"{d}.norm{k + 1}.gamma = {o}.residual.{3 * k}.gamma" for k in (0, 1)]
        convs = [f"{d}.conv{k + 1}.{{p}} = {o}.residual.{2 + 4 * k}.{{p}}" for k in (0, 1)]
        return [*norms, *convs, f"{d}.conv_shortcut.{{p}} = {o}.shortcut.{{p}}"]

    def resample(d, o):
        return [f"{d}.{c}.{{p}} = {o}.{c}.{{p}}" for c in ("resample.1", "time_conv")]

    rows = [
        "quant_conv.{p} = conv1.{p}",
        "post_quant_conv.{p} = conv2.{p}",
        "{E}.conv_in.{p} = {E}.conv1.{p}",
        "{E}.norm_out.gamma = {E}.head.0.gamma",
        "{E}.conv_out.{p} = {E}.head.2.{p}",
        "{E}.mid_block.attentions.0.norm.gamma = {E}.middle.1.norm.gamma",
        "{E}.mid_block.attentions.0.to_qkv.{p} = {E}.middle.1.to_qkv.{p}",
        "{E}.mid_block.attentions.0.proj.{p} = {E}.middle.1.proj.{p}",
        *block("{E}.mid_block.resnets.0", "{E}.middle.0"),
        *block("{E}.mid_block.resnets.1", "{E}.middle.2"),
    ]
    down, up = "encoder.down_blocks.{i}", "decoder.up_blocks.{i}"
    if residual:
        old_down, old_up = "encoder.downsamples.{i}.downsamples", "decoder.upsamples.{i}.upsamples"
        for r in range(resnets):
            rows += block(f"{up}.resnets.{r}", f"{old_up}.{r}")
            rows += block(f"{down}.resnets.{r}", f"{old_down}.{r}") if r < resnets - 1 else []
        rows += resample(f"{down}.downsampler", f"{old_down}.{resnets - 1}")
        rows += resample(f"{up}.upsampler", f"{old_up}.{resnets}")
    else:
        rows += block(down, "encoder.downsamples.{i}") + resample(down, "encoder.downsamples.{i}")
        for level in range(8):
            new, first = f"decoder.up_blocks.{level}", level * (resnets + 1)
            for r in range(resnets):
                rows += block(f"{new}.resnets.{r}", f"decoder.upsamples.{first + r}")
            rows += resample(f"{new}.upsamplers.0", f"decoder.upsamples.{first + resnets}")
    return _table("\n".join(rows))


def rules(component: str, names: Collection[str]) -> tuple[Rule, ...]:
    """Return the table of a component folder; which of the two VAEs it is shows in the names."""
    fixed = {"transformer": _TRANSFORMER, "text_encoder": _TEXT, "image_encoder": _IMAGE}
    if table := fixed.get(component.removesuffix("_2")):
        return table
    nested = r"encoder\.(downsamples\.0\.downsamples\.|down_blocks\.0\.resnets\.0\.conv1)"
    residual = any(re.match(nested, name) for name in names)
    counts = [0]
    for name in names:
        if m := re.match(r"decoder\.up_blocks\.\d+\.resnets\.(\d+)\.", name):
            counts.append(int(m[1]) + 1)
        elif m := re.match(r"decoder\.upsamples\.0\.upsamples\.(\d+)\.resample\.", name):
            counts.append(int(m[1]))
    flat = [int(m[1]) for n in names if (m := re.match(r"decoder\.upsamples\.(\d+)\.resample", n))]
    return _vae_rules(residual, max(*counts, min(flat, default=0)) or 3)


@cache
def _compile(pattern: str) -> re.Pattern:
    text, *parts = re.split(r"\{(\w+)\}", pattern)
    out = re.escape(text)
    for key, text in zip(parts[::2], parts[1::2], strict=True):
        again = f"(?P<{key}>" in out
        out += f"(?P={key})" if again else f"(?P<{key}>{ALTERNATIVES[key]})"
        out += re.escape(text)
    return re.compile(out)


def _groups(pattern: str, name: str) -> dict[str, str] | None:
    if (match := _compile(pattern).fullmatch(name)) is None:
        return None
    groups = match.groupdict()
    if "j" in groups and "i" not in groups:
        if groups["j"] == "0":
            return None
        groups["i"] = str(int(groups["j"]) - 1)
    elif "i" in groups:
        groups["j"] = str(int(groups["i"]) + 1)
    return groups


def to_diffusers(name: str, table: tuple[Rule, ...]) -> tuple[tuple[str, ...], Rule] | None:
    """Return (diffusers names, rule) of an original name; several names split axis 0."""
    for rule in table:
        if (groups := _groups(rule.original, name)) is not None:
            return tuple(d.format(**groups) for d in rule.diffusers), rule
    return None


def to_original(name: str, table: tuple[Rule, ...]) -> tuple[str, int, Rule] | None:
    """Return (original name, part of its axis-0 split, rule) of a diffusers name."""
    for rule in table:
        for part, pattern in enumerate(rule.diffusers):
            if (groups := _groups(pattern, name)) is not None:
                return rule.original.format(**groups), part, rule
    return None


_SIGNS = {  # a tensor of each component: (original name, diffusers name)
    "transformer": ("head.modulation", "condition_embedder.time_proj.weight"),
    "vae": ("decoder.head.0.gamma", "decoder.norm_out.gamma"),
    "text_encoder": ("token_embedding.weight", "encoder.final_layer_norm.weight"),
    "image_encoder": ("visual.cls_embedding", "embeddings.class_embedding"),
}
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "text_encoders.umt5xxl.transformer.")
_PREFIXES += ("first_stage_model.", "vision_model.", "model.", "transformer.", "vae.", "")


def unwrap(name: str) -> str:
    """Drop name components added by DDP, FSDP, activation checkpointing and torch.compile."""
    return _WRAPPERS.sub("", name)


def detect(names: Iterable[str]) -> list[tuple[str, str, str]]:
    """Return [(component, "diffusers" or "original", prefix)] found in a set of names."""
    names = {unwrap(name) for name in names}
    found = []
    for component, (original, diffusers) in _SIGNS.items():
        signs = [("original", p, p + original) for p in _PREFIXES]
        signs += [("diffusers", p, p + diffusers) for p in _PREFIXES]
        found += [(component, naming, p) for naming, p, sign in signs if sign in names][:1]
    return found


# (sign, variant): modules beyond the ones the model code runs; the first hit names the checkpoint.
_EXTRAS = (
    ("music_projection.weight", "Wan-Dancer"),
    ("trainable_cond_mask.weight", "Wan2.2 S2V"),
    ("casual_audio_encoder.encoder.final_linear.weight", "Wan2.2 S2V"),
    ("face_adapter.0.norm_k.weight", "Wan2.2 Animate"),
    ("vace_patch_embedding.weight", "VACE"),
    ("control_adapter.conv.weight", "Fun camera control"),
    ("ref_conv.weight", "Fun control"),
)


def special_variant(names: Iterable[str]) -> str | None:
    """Name the variant with extra modules (S2V, Animate, ...) these diffusers names show."""
    names = set(names)
    return next((variant for sign, variant in _EXTRAS if sign in names), None)
