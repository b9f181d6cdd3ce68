"""What XLA says of a compiled program: memory, collectives, its own FLOPs.

Loops are counted as often as they run in collectives, once in the compiler's own FLOP count.
"""

import collections
import math
import os
import re
import sys
import tempfile
import time

import jax

_SIZES = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2,
          "s16": 2, "u16": 2, "s8": 1, "u8": 1, "pred": 1, "f8e4m3fn": 1, "f8e5m2": 1}  # fmt: skip
_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def collectives(hlo: str) -> dict[str, dict[str, int]]:
    """{kind: {count, bytes}} per device of optimised HLO; a loop's body counts as often as it
    runs, bytes are those of the results."""
    bodies, entry = _computations(hlo)
    total: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"count": 0, "bytes": 0})

    def visit(name: str, times: int):
        for line in bodies.get(name, ()):
            found = re.search(
                rf"= (.*?) ({'|'.join(_KINDS)})(-start)?\(", line
            )  # a -done moves nothing
            if found:
                shapes = [_bytes(*shape) for shape in re.findall(r"(\w+)\[([\d,]*)\]", found[1])]
                # an asynchronous start also names its operand, and u32 contexts
                moved = max(shapes) if found[3] else sum(shapes)
                total[found[2]]["count"] += times
                total[found[2]]["bytes"] += times * moved
            for kind, callee in re.findall(r"(body|calls|to_apply)=%?([\w.\-]+)", line):
                visit(callee, times * (_trips(line, bodies) if kind == "body" else 1))
            branches = re.search(r"branch_computations=\{([^}]*)\}", line)
            for callee in re.findall(r"[\w.\-]+", branches[1]) if branches else ():
                visit(callee, times)

    visit(entry, 1)
    return dict(total)


def _trips(line: str, bodies: dict[str, list[str]]) -> int:
    """How often a while loop runs: as XLA notes it, else (TPU) the limit in its condition, which a
    scan counts to from zero; 1 where neither is there."""
    noted = re.search(r'known_trip_count":?\{"n":"(\d+)"', line)
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    if noted or not condition:
        return int(noted[1]) if noted else 1
    rows = "\n".join(bodies.get(condition[1], ()))
    found = [int(n) for n in re.findall(r"= s32\[\]\S* constant\((\d+)\)", rows)]
    return found[0] if len(found) == 1 else 1


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head and " = " not in line.split("->")[0]:
            name = head[2]
            bodies[name] = []
            entry = name if head[1] else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _bytes(dtype: str, dims: str) -> int:
    return _SIZES.get(dtype, 0) * math.prod(int(d) for d in dims.split(",") if d)


def measure(lowered, flops: int, calls: int) -> tuple[dict, jax.stages.Compiled | None]:
    """Compile, and read memory, collectives and the compiler's own FLOPs per device and call.

    Of a program that XLA:TPU refuses for its memory, the memory it asks for and no executable.
    """
    started = time.time()
    with _Stderr() as printed:
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            compiled, needed = None, _needed(str(error))
    seconds = time.time() - started
    print(f"compiled in {seconds:.0f} s", file=sys.stderr, flush=True)
    if compiled is None:
        keys = ("arguments", "output", "alias", "flops_compiler_loops_once", "rematerializations")
        facts = dict.fromkeys(keys, 0) | {"temporaries": needed, "flops": flops, "calls": calls}
        facts |= {"collectives": {}, "compile_seconds": round(seconds, 1), "refused": True}
        return facts, None
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}
    text = compiled.as_text() or ""
    facts = {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "output": memory.output_size_in_bytes,
        "alias": memory.alias_size_in_bytes,
        "flops": flops,
        "flops_compiler_loops_once": cost.get("flops", 0.0),
        "calls": calls,
        "collectives": collectives(text),
        "compile_seconds": round(seconds, 1),
        "rematerializations": printed.text.count("Involuntary full rematerialization"),
        "refused": False,
    }
    return facts, compiled


def _needed(error: str) -> int:
    """Bytes of device memory that a refused program asks for; raises RuntimeError for other
    errors, such as a kernel that does not fit VMEM."""
    if "RESOURCE_EXHAUSTED" not in error or "vmem" in error.lower():
        raise RuntimeError(error)
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    sizes = re.findall(r"([\d.]+)([KMGT])i?B?\b", error)
    return max((int(float(number) * units[unit]) for number, unit in sizes), default=0)


class _Stderr:
    """What C++ code writes to stderr meanwhile, in `text`; passed on afterwards when it fails."""

    def __enter__(self):
        self.text, self._file = "", tempfile.TemporaryFile()
        sys.stderr.flush()
        self._kept = os.dup(2)
        os.dup2(self._file.fileno(), 2)
        return self

    def __exit__(self, kind, *_):
        os.dup2(self._kept, 2)
        os.close(self._kept)
        self._file.seek(0)
        self.text = self._file.read().decode(errors="replace")
        self._file.close()
