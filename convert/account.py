"""Check that a component has exactly the tensors its config describes, before any is read."""

import functools

import jax

from convert import disk, files, names
from wanjax import trees
from wanjax.models import clip, umt5, vae, wan

_INIT = {
    "transformer": wan.init,
    "transformer_2": wan.init,
    "vae": vae.init,
    "text_encoder": umt5.init,
    "image_encoder": clip.init,
}


def plan(checkpoint: disk.Checkpoint, component: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Return {path: shape} of a component's tree after checking every tensor name and shape."""
    tensors, where = checkpoint.tensors[component], f"{checkpoint.where}: {component}"
    if component in ("transformer", "transformer_2") and (kind := names.special_variant(tensors)):
        raise ValueError(
            f"{where} is a {kind} checkpoint, which the model code does not run; convert.weights "
            "can still change its layout"
        )
    tree = shapes(checkpoint, component)
    deep = max((x.shape[0] for p, x in tree.items() if names.stack_root(p)), default=0)
    if deep > len(tensors):
        raise ValueError(
            f"{where}: the config says {deep} layers, but the files hold {len(tensors)} tensors"
        )
    expected = dict(n for path, leaf in tree.items() for n in names.torch_names(path, leaf.shape))
    _compare(where, expected, {n: t.shape for n, t in tensors.items()})
    return tree


def shapes(checkpoint: disk.Checkpoint, component: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Return {path: shape} of the tree that a component's config describes."""
    config = disk.component_config(checkpoint, component)
    try:
        return dict(_shapes(component, config))
    except (TypeError, ValueError, ArithmeticError) as error:
        text = str(error).partition("\n")[0]
        raise ValueError(
            f"{checkpoint.where}: no model can be built from the config of {component}: {text}"
        ) from None


@functools.lru_cache(16)
def _shapes(component: str, config) -> tuple:
    tree = jax.eval_shape(lambda: _INIT[component](jax.random.key(0), config))
    return tuple(trees.flatten(tree).items())


def _compare(where: str, expected: dict[str, tuple], got: dict[str, tuple]) -> None:
    """Raise a one-line ValueError if names or shapes differ."""
    missing = [f"{n} {s}" for n, s in expected.items() if n not in got]
    unexpected = [f"{n} {s}" for n, s in got.items() if n not in expected]
    wrong = [
        f"{n} is {got[n]}, expected {s}" for n, s in expected.items() if n in got and got[n] != s
    ]
    parts = (("missing", missing), ("unexpected", unexpected), ("of wrong shape", wrong))
    if any(items for _, items in parts):
        text = "; ".join(
            f"{len(items)} {what}: {files.some(items)}" for what, items in parts if items
        )
        raise ValueError(
            f"{where} has {len(got)} tensors, expected {len(expected)}; {text}; "
            "the files do not match the config.json beside them"
        )
