"""Read the parameters of a torch module into the tree layout of wanjax (the tests' own converter).

A leaf keeps its state-dict name except for the last component, which the module type decides:
Linear and Conv `weight` -> `kernel` (input axis before output axis, spatial axes first),
Embedding `weight` -> `embedding`, any other (norm) `weight` -> `scale`; `gamma` becomes flat.
"""

import jax.numpy as jnp
import numpy as np
import torch

from wanjax import trees

_CONVS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)


def torch_to_jax(module: torch.nn.Module, stacks=(), like=None):
    """Return the parameters of `module` as a nested dict of jnp arrays of the same dtype.

    Args:
        module: any torch module; shared parameters appear once.
        stacks: roots of uniform stacks in torch names, e.g. ("blocks",) or ("encoder.block",);
            "blocks.{i}.x" becomes "blocks/x" with a leading layer axis.
        like: optional tree whose nesting is followed (Linen names may hold dots). Names and shapes
            must agree with it exactly, otherwise AssertionError.
    Without `like`, every dot of a torch name is one level of nesting.
    """
    flat = {}
    for prefix, sub in module.named_modules():
        for name, value in sub.named_parameters(recurse=False):
            leaf, array = _leaf(sub, name, value.detach())
            flat[f"{prefix}.{leaf}".lstrip(".")] = array
    for root in stacks:
        flat = _stack(flat, root)
    if like is None:
        return trees.unflatten({name.replace(".", "/"): value for name, value in flat.items()})
    paths = {path.replace("/", "."): path for path in trees.flatten(like)}
    assert set(paths) == set(flat), sorted(set(paths) ^ set(flat))
    shapes = {path: leaf.shape for path, leaf in trees.flatten(like).items()}
    wrong = {n: (v.shape, shapes[paths[n]]) for n, v in flat.items() if v.shape != shapes[paths[n]]}
    assert not wrong, wrong
    return trees.unflatten({path: flat[name] for name, path in paths.items()})


def _leaf(module, name, value):
    """Return the wanjax leaf name and array of one torch parameter."""
    dtype = str(value.dtype).removeprefix("torch.")
    array = jnp.asarray(value.float().cpu().numpy() if dtype == "bfloat16" else value.cpu().numpy())
    array = array.astype(dtype)
    if name == "gamma":
        return name, array.reshape(-1)
    if name != "weight":
        return name, array
    if isinstance(module, torch.nn.Linear):
        return "kernel", array.T
    if isinstance(module, _CONVS):
        return "kernel", jnp.moveaxis(array, (0, 1), (-1, -2))
    return ("embedding" if isinstance(module, torch.nn.Embedding) else "scale"), array


def _stack(flat, root):
    """Join "root.{i}.rest" over i into "root.rest" with a leading axis."""
    out, layers = {}, {}
    for name, value in flat.items():
        index, _, rest = name.removeprefix(root + ".").partition(".")
        if name.startswith(root + ".") and index.isdigit():
            layers.setdefault(f"{root}.{rest}", {})[int(index)] = value
        else:
            out[name] = value
    for name, values in layers.items():
        assert sorted(values) == list(range(len(values))), f"{name}: layers {sorted(values)}"
        out[name] = jnp.asarray(np.stack([values[i] for i in range(len(values))]))
    return out
