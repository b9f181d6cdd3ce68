"""Measure how a full-size two-expert checkpoint loads: seconds, GB/s, peak host memory.

    python scripts/bench/load_weights.py --folder /tmp/a14b --make          # writes 57 GB once
    python scripts/bench/load_weights.py --folder /tmp/a14b [--mesh fsdp=4]

Both reads start cold (the files are dropped from the page cache first): a plain sequential read
of the same files, then convert.weights.load onto the mesh. Prints one JSON line.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import resource
import time

import jax
import ml_dtypes
import numpy as np

from convert import disk, files, names, save, weights
from wanjax import trees
from wanjax.models import presets, wan
from wanjax.parallel import sharding


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--model", default="wan2.2_t2v_a14b", choices=presets.MODELS)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--make", action="store_true", help="write the checkpoint first")
    parser.add_argument("--mesh", default="", help="axis=size,... (default: one device)")
    args = parser.parse_args()
    if args.make:
        make(args.folder, presets.MODELS[args.model], args.layers)
        return
    axes = {k: int(v) for k, v in (p.split("=") for p in args.mesh.split(",") if p)}
    mesh = sharding.make_mesh(axes) if axes else None
    jax.block_until_ready([jax.device_put(np.ones(1), d) + 1 for d in jax.devices()])  # contexts
    shards = sorted(args.folder.glob("transformer*/*.safetensors"))
    size = sum(p.stat().st_size for p in shards)
    drop(shards)
    start = time.perf_counter()
    buffer = bytearray(64 << 20)
    for path in shards:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    plain = time.perf_counter() - start
    drop(shards)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    params, config = weights.load(args.folder, mesh=mesh)
    jax.block_until_ready(params)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base
    print(
        json.dumps(
            {
                "device": f"{jax.device_count()}x {jax.devices()[0].device_kind}",
                "model": config.name,
                "GB": round(size / 1e9, 2),
                "plain_read_s": round(plain, 2),
                "plain_read_GBps": round(size / plain / 1e9, 2),
                "load_s": round(seconds, 2),
                "load_GBps": round(size / seconds / 1e9, 2),
                "share_of_plain_read": round(plain / seconds, 2),
                "peak_host_GiB_above_baseline": round(peak / 2**20, 2),
            }
        )
    )


def make(folder: pathlib.Path, model: presets.ModelConfig, layers: int | None) -> None:
    """Write a diffusers folder with only the transformers, in bfloat16, from one block of noise."""
    config = dataclasses.replace(model.wan, num_layers=layers or model.wan.num_layers)
    shapes = trees.flatten(jax.eval_shape(lambda: wan.init(jax.random.key(0), config)))
    noise = np.random.default_rng(0).standard_normal(1 << 24, np.float32) * 0.02
    noise = noise.astype(ml_dtypes.bfloat16)

    def read(index):
        shape = tuple(s.stop - s.start for s in index)
        return np.resize(noise, shape)

    tensors = {
        name: files.Tensor(shape, noise.dtype, read, "noise")
        for path, leaf in shapes.items()
        for name, shape in names.torch_names(path, leaf.shape)
    }
    model = dataclasses.replace(model, wan=config)
    parts = {disk.EXPERTS[e]: tensors for e in model.experts}
    with save.fresh_folder(folder) as out:
        for component, part in parts.items():
            save.write_component(out, component, part, save.component_json(config, component))
        save.write_pipeline(model, parts, out)


def drop(paths) -> None:
    """Drop files from the page cache."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
