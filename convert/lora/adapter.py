"""The content of adapter files, what of it fits a model, and adapter trees.

Dimension legend: R rank, I inputs, O outputs, L layers.
"""

import collections
import dataclasses
import math
import re
import zlib
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from convert import files, names
from wanjax import trees
from wanjax.models import presets, wan
from wanjax.parallel import sharding

EXPERTS = ("high", "low")


@dataclass(frozen=True)
class LowRank:
    """One pair in torch layout, as stored: W + scale · b a, scale = alpha / rank."""

    a: np.ndarray  # [R,I]
    b: np.ndarray  # [O,R]
    scale: float
    kernel: tuple[int, ...] = ()  # of a convolution, whose I are channels times kernel

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


def move(adapter: Adapter, source: str | None, sides) -> Adapter:
    """Give the part of one expert to the experts `sides`."""

    def pick(part):
        return {e: part[source] for e in sides} if source in part else {}

    return dataclasses.replace(adapter, modules=pick(adapter.modules), dense=pick(adapter.dense))


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
            return move(adapter, said[0], EXPERTS)
        if set(said) - set(experts):
            raise ValueError(f"adapter has a {said[-1]}-noise part, the model has {experts} only")
        return adapter
    if expert is None and len(experts) == 2:
        raise ValueError(
            "the adapter does not say its expert; pass high, low or both (FILE:high), or name it "
            "*_high_noise / *_low_noise"
        )
    sides = EXPERTS if expert == "both" else (expert or "high",)
    return move(adapter, None, sides)


_IMAGE = re.compile(
    r"blocks\.\d+\.attn2\.(add_k_proj|add_v_proj|norm_added_k)\..*"
    r"|condition_embedder\.image_embedder\..*"
)


def _shapes(config: presets.ModelConfig) -> dict[str, tuple[str, int | None, tuple]]:
    """{diffusers name: (path, layer, torch shape)} of the transformer."""
    tree = jax.eval_shape(lambda: wan.init(jax.random.key(0), config.wan))
    out = {}
    for path, leaf in trees.flatten(tree).items():
        for layer, (name, shape) in enumerate(names.torch_names(path, leaf.shape)):
            out[name] = (path, layer if names.stack_root(path) else None, shape)
    return out


def fit(adapter: Adapter, config: presets.ModelConfig) -> tuple[Adapter, str]:
    """Return the adapter without what the model cannot have, and one line saying what that was.

    Left out: image-attention modules of an I2V adapter on a model without them, and changes of the
    patch embedding when the channel count differs. Anything else that does not fit is a ValueError.
    """
    shapes = _shapes(config)
    skipped, wrong = collections.Counter(), []

    def fits(name: str, got: tuple, pair: bool) -> bool:
        want = shapes[name][2] if name in shapes else None
        if want and pair:
            want = (want[0], math.prod(want[1:]))
        if want == got or (want and math.prod(want) == math.prod(got) and not pair):
            return True
        if want is None and _IMAGE.fullmatch(name):
            skipped["image attention, which the model does not have"] += 1
        elif want and name.startswith("patch_embedding."):
            skipped[f"patch embedding of {got}, the model has {want}"] += 1
        else:
            wrong.append(f"{name} {got}, the model has {want or 'no such module'}")
        return False

    modules, dense = {}, {}
    for e, part in adapter.modules.items():
        shape = {m: (len(p.b), p.a.shape[1]) for m, p in part.items()}
        modules[e] = {m: p for m, p in part.items() if fits(f"{m}.weight", shape[m], True)}
    for e, part in adapter.dense.items():
        dense[e] = {n: d for n, d in part.items() if fits(n, d.shape, False)}
    if wrong:
        raise ValueError(
            f"adapter does not fit {config.name}: {len(wrong)} mismatches: {files.some(wrong)}"
        )
    if not (kept := sum(map(len, [*modules.values(), *dense.values()]))):
        raise ValueError(f"adapter and {config.name} have no module in common")
    text = "; ".join(f"{count} left out: {reason}" for reason, count in skipped.items())
    dense = {e: d for e, d in dense.items() if d}
    fitted = dataclasses.replace(adapter, modules=modules, dense=dense)
    return fitted, text and f"{kept} applied; {text}"


def to_trees(adapter: Adapter, config: presets.ModelConfig):
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
                raise ValueError(
                    f"{module} is not a matrix; merge this adapter into the checkpoint"
                )
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
                scale[i] = pair.scale
            for leaf, array in (("a", a), ("b", b), ("scale", scale)):
                flat[f"{path}/{leaf}"] = jnp.asarray(array[0] if None in layers else array)
        out[expert] = trees.unflatten(flat)
    return out


def of_trees(adapters, metadata: dict[str, str] | None = None) -> Adapter:
    """Turn adapter trees by expert into an Adapter, without the layers that are zero in both
    factors."""
    out = Adapter(metadata=dict(metadata or {}))
    for expert, tree in adapters.items():
        flat = {path: sharding.fetch(leaf) for path, leaf in trees.flatten(tree).items()}
        pairs = out.modules.setdefault(expert, {})
        for path in (p.removesuffix("/a") for p in flat if p.endswith("/a")):
            a, b, scale = (flat[f"{path}/{leaf}"] for leaf in ("a", "b", "scale"))
            if not (stacked := names.stack_root(path + "/kernel")):
                a, b, scale = a[None], b[None], scale[None]
            for layer in range(len(a)):
                if a[layer].any() or b[layer].any():
                    name = names.torch_name(f"{path}/kernel", layer if stacked else None)
                    pair = LowRank(a[layer].T, b[layer].T, float(scale[layer]))
                    pairs[name.removesuffix(".weight")] = pair
    return out


def summary(adapter: Adapter, strength: float = 1.0, config=None) -> str:
    """One line: modules, of all that the model of `config` has, effective scale, and the relative
    size of the change on a probe input."""
    pairs = [p for part in adapter.modules.values() for p in part.values()]
    dense = sum(map(len, adapter.dense.values()))
    scales = np.asarray([p.scale * strength for p in pairs] or [strength])
    size = probe(adapter) * abs(strength)
    if size == 0:
        raise ValueError("the adapter changes nothing: all its updates are zero")
    whole = ""
    if config:
        weights = sum(len(shape) > 1 for name, (*_, shape) in _shapes(config).items()
                      if name.endswith(".weight"))  # fmt: skip
        whole = f" of {weights * len(adapter.modules)} modules" if pairs else ""
    text = f"{len(pairs)}{whole} low-rank and {dense} dense changes, scale min {scales.min():g} "
    text += f"median {np.median(scales):g} max {scales.max():g}, probe change {size:.2e}"
    return "; ".join([text, *adapter.notes])


def probe(adapter: Adapter) -> float:
    """Largest root-mean-square response of any update to a standard normal input of its own."""
    worst = 0.0
    for part in adapter.modules.values():
        for name, pair in part.items():
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            x = rng.standard_normal(pair.a.shape[1]).astype(np.float32)
            y = pair.b.astype(np.float32) @ (pair.a.astype(np.float32) @ x) * pair.scale
            worst = max(worst, float(np.sqrt(np.mean(np.square(y)))))
    sizes = (np.abs(d.astype(np.float32)).max() for p in adapter.dense.values() for d in p.values())
    return max([worst, *map(float, sizes)])


def cast(adapter: Adapter, dtype) -> tuple[Adapter, str]:
    """Return the adapter with its factors and changes in `dtype`, and a line on what that lost.

    Raises ValueError for values beyond the range of `dtype`.
    """
    nonzero = lost = 0

    def one(name: str, array: np.ndarray) -> np.ndarray:
        nonlocal nonzero, lost
        exact = np.asarray(array, np.float32)
        with np.errstate(over="ignore"):
            made = exact.astype(dtype)
        over = np.size(exact) - np.count_nonzero(np.isfinite(made.astype(np.float32)))
        if over:
            raise ValueError(
                f"{name}: {over} of {exact.size} values, up to {np.abs(exact).max():.3g}, are "
                f"beyond the range of {np.dtype(dtype).name}; pass --dtype bfloat16 or float32"
            )
        nonzero += np.count_nonzero(exact)
        lost += np.count_nonzero(exact) - np.count_nonzero(made)
        return made

    pairs = {
        expert: {
            name: dataclasses.replace(pair, a=one(name, pair.a), b=one(name, pair.b))
            for name, pair in part.items()
        }
        for expert, part in adapter.modules.items()
    }
    dense = {e: {n: one(n, d) for n, d in part.items()} for e, part in adapter.dense.items()}
    made = dataclasses.replace(adapter, modules=pairs, dense=dense)
    share = lost / max(nonzero, 1)
    kind = np.dtype(dtype).name
    return made, f"{lost} of {nonzero} values ({share:.2%}) became zero in {kind}" if lost else ""
