"""Where a call spends its time on a GPU: seconds by kind of kernel, from jax's profiler."""

import pathlib
import re
import tempfile

import jax

# the first match counts; unmatched kernels are elementwise work, norms and reductions
KINDS = {
    "copies": r"memcpy|memset",
    "collectives": r"nccl",
    "attention backward": r"(flash|fmha|sdpa).*(bprop|bwd)|cudnn::fusion",
    "attention forward": r"flash|fmha|sdpa",
    "convolutions": r"implicit_gemm|convolve|conv[23]d",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|splitk",
}
REST = "rest"


def by_kind(call) -> dict:
    """Run `call` under the profiler: {kind: seconds}, "idle" for gaps on the first GPU between its
    first and last kernel, and the longest kernels of the rest."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        gpu = next(plane for plane in planes if plane.name == "/device:GPU:0")
        events = [
            (e.start_ns, e.duration_ns, e.name)
            for line in gpu.lines
            if line.name.startswith("Stream")
            for e in line.events
        ]
    return summary(events)


def summary(events: list[tuple[float, float, str]]) -> dict:
    """`by_kind` for (start ns, duration ns, kernel name) events of all streams."""
    total, rest = dict.fromkeys([*KINDS, REST], 0.0), {}
    busy, end = 0.0, min(start for start, _, _ in events)
    begin = end
    for start, length, name in sorted(events):
        kind = next((k for k, p in KINDS.items() if re.search(p, name.lower())), REST)
        total[kind] += length
        if kind == REST:
            rest[name] = rest.get(name, 0.0) + length
        busy += max(start + length - max(start, end), 0)
        end = max(end, start + length)
    seconds = {kind: round(ns / 1e9, 4) for kind, ns in total.items() if ns}
    longest = sorted(rest.items(), key=lambda item: -item[1])[:8]
    return {
        **seconds,
        "idle": round((end - begin - busy) / 1e9, 4),
        "longest of the rest": {name[:60]: round(ns / 1e9, 4) for name, ns in longest},
    }
