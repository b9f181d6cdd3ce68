"""The claim of a run folder: one config per run, and which of its keys may change on resuming."""

import json
import pathlib
from typing import Any

from wanjax import trees
from wanjax.run import disk

# Config keys (dotted; a key covers everything below it) that may differ when a run continues: how
# long it runs, what it writes and how often, where its folder is, and what it runs on.
VARIABLE_KEYS = ("steps", "save_every", "sample_every", "eval_every", "keep_last", "keep_every")
VARIABLE_KEYS += ("alarms", "resume", "wandb", "project", "tensorboard", "name", "workdir", "mesh")


def claim(run_dir, config: dict[str, Any], resume: bool, defaults: Any = None) -> bool:
    """Claim `run_dir` for a run of `config`, write config.json; return True if a run continues.

    Only the keys in VARIABLE_KEYS may differ from those the run was started with; a key that did
    not exist then had its value in `defaults`. Raises ValueError for a folder that holds another
    run or anything else, and, when `resume` is False, any run.
    """
    run_dir = pathlib.Path(run_dir)
    return bool(disk.on_first_process(lambda: _claim(run_dir, config, resume, defaults or {})))


def _claim(run_dir, config, resume, defaults):
    file = run_dir / "config.json"
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(f"run folder {run_dir} is a file; choose another name for the run")
    if not file.exists():
        if run_dir.is_dir() and (others := sorted(p.name for p in run_dir.iterdir())):
            raise ValueError(
                f"run folder {run_dir} has no config.json but holds {', '.join(others[:3])}"
                f"{', …' if len(others) > 3 else ''}; choose another name for the run"
            )
        disk.write_json(file, config)
        return False
    if not resume:
        raise ValueError(
            f"run folder {run_dir} already holds a run; "
            "choose another name, let it resume, or move it away"
        )
    try:
        old = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{file} is not JSON ({error}); repair it or move {run_dir} away"
        ) from None
    new = json.loads(disk.dump_json(config, "config"))
    defaults = json.loads(disk.dump_json(defaults, "defaults"))
    changes = _differences(old, new, defaults)
    free = tuple(f"{name}." for name in VARIABLE_KEYS)
    fixed = {key: pair for key, pair in changes.items() if not f"{key}.".startswith(free)}
    if fixed:
        listed = ", ".join(f"{key}: {a} -> {b}" for key, (a, b) in fixed.items())
        raise ValueError(
            f"run folder {run_dir} was started with a different config ({listed}); "
            "set these keys back, choose another name for the run, or move the folder away"
        )
    for key, (a, b) in changes.items():
        print(f"checkpoint: {run_dir.name} continues with {key} {a} -> {b}", flush=True)
    if changes:
        disk.write_json(file, new)
    return True


def _differences(old, new, defaults):
    old, new = trees.dotted(old), trees.dotted(new)
    old |= {k: v for k, v in trees.dotted(defaults).items() if k in new and k not in old}
    old, new = ({k: json.dumps(v, ensure_ascii=False) for k, v in c.items()} for c in (old, new))
    pairs = {key: (old.get(key, "(absent)"), new.get(key, "(absent)")) for key in old | new}
    return {key: (a, b) for key, (a, b) in pairs.items() if a != b}
