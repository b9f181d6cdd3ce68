"""What to change when a plan does not fit: changes of the config, each compiled as well."""

import functools
import math
import sys

from wanjax import setup
from wanjax.models import quant
from wanjax.plan import compile


def advise(config, topology: str, model: str = "", most: int = 3) -> list[dict]:
    """Up to `most` sets of config changes with which the plan fits, each compiled: first single
    changes, then those that help, together. [{"changes": {key: value}, "peak": bytes}]."""
    tried, found = [], []
    for changes in _candidates(config):
        needed, fits = _try(config, topology, model, changes)
        tried.append((needed, changes))
        found += [{"changes": changes, "peak": needed}] * fits
        if len(found) == most:
            return found
    together: dict = {}
    for alone, changes in sorted(tried, key=lambda pair: pair[0]):
        if found or math.isinf(alone):
            break
        together = {**changes, **together}
        if len(together) > 1:
            needed, fits = _try(config, topology, model, together)
            found += [{"changes": dict(together), "peak": needed}] * fits
    return found


def _candidates(config) -> list[dict]:
    """Changes that save memory, cheapest in time first."""
    found, algorithm = [], setup.ALGORITHMS[config.algorithm]
    if config.model.remat in ("none", "save_matmuls"):
        found.append({"model.remat": "full"})
    if algorithm.DATA != "latents" and config.guidance.mode == "batch":
        found.append({"guidance.mode": "sequential"})
    halves = [k for k in ("micro_samples", "sampling.batch") if _read(config, k) % 2 == 0]
    found += [{key: _read(config, key) // 2 for key in halves}] if halves else []
    if config.lora.rank and not algorithm.ROLES and not config.model.offload:
        found.append({"model.offload": True})
    if config.lora.rank and config.model.param_dtype not in quant.DTYPES:
        found.append({"model.param_dtype": "float8"})
    if config.mesh.context == 1:
        found.append({"mesh.data": 1, "mesh.fsdp": -1})
        found.append({"mesh.data": 1, "mesh.fsdp": -1, "mesh.context": 4})
    return found + [{"model.remat": "offload"}] * (config.model.remat != "offload")


def _read(config, key: str):
    return functools.reduce(lambda node, name: node[name], key.split("."), config)


def _try(config, topology: str, model: str, changes: dict) -> tuple[float, bool]:
    """(highest peak of a phase, whether all fit) of the config with changes; inf where the changed
    config is not legal."""
    print(f"trying   {in_words(changes)}", file=sys.stderr, flush=True)
    changed = config.copy_and_resolve_references()
    changed.update_from_flattened_dict(changes)
    try:
        result = compile.make_plan(changed, topology, model)
    except ValueError:
        return math.inf, False
    if result["note"]:
        return math.inf, False
    return result["total"], result["fits"]


def in_words(changes: dict) -> str:
    """Changes {key: value} as a sentence says them."""
    return " and ".join(f"config.{key} = {value}" for key, value in changes.items())
