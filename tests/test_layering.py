"""The layering of the code: who may import whom, no circles, docstrings everywhere, no machine
paths."""

import ast
import os
import pathlib
import re

import pytest

from wanjax import setup

ROOT = pathlib.Path(__file__).parents[1]
LEVELS = {
    0: ("wanjax.trees", "wanjax.paths", "wanjax.parallel", "wanjax.console"),
    1: ("wanjax.models",),
    2: ("wanjax.schedule", "wanjax.sampler", "wanjax.advantages", "wanjax.losses"),
    3: ("wanjax.settings", "wanjax.state", "wanjax.optim", "wanjax.rewards"),
    4: ("wanjax.data", "wanjax.run", "wanjax.sampling"),
    5: ("wanjax.algorithms",),
    6: ("wanjax.setup", "wanjax.evaluate", "wanjax.command"),
    7: (
        "wanjax.train", "wanjax.sample", "wanjax.export", "wanjax.report", "wanjax.doctor",
        "wanjax.plan", "wanjax.data.__main__",
    ),
}  # fmt: skip
ENTRY_POINTS = (*LEVELS[6], *LEVELS[7], "configs", "scripts.bench")  # see ml_collections
DIGESTS = ("wanjax.data.cache", "wanjax.data.latents")  # know encoders by convert.digest
PURE = LEVELS[2]  # arrays and functions in, arrays out: no models
ALGORITHMS = tuple(f"wanjax.algorithms.{name}" for name in setup.ALGORITHMS)
SKIPPED = {"__pycache__", "runs", "build", "dist", "wandb"}


def within(name, packages):
    """Whether a dotted name is one of the packages or inside one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def level(module):
    """The level of a module of wanjax; the package itself is below all."""
    if module == "wanjax":
        return -1
    found = [n for n, packages in LEVELS.items() if within(module, packages)]
    assert found, f"{module} has no level; add it to LEVELS and to the design"
    return found[-1]


def test_the_trainer_asks_for_no_algorithm_by_name():
    for name in ("train", "setup", "evaluate", "plan/compile", "plan/advice"):
        source = (ROOT / f"wanjax/{name}.py").read_text(encoding="utf-8")
        assert not re.search(r"algorithm\s*(==|!=|in|not in)\s*[\"'(]", source)


def imports(module, source, known):
    """Dotted names that a source imports; `from package import module` gives the module."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                foreign = not within(full, ("wanjax", "convert", "configs"))
                names.add(full if foreign or full in known else node.module)
    return names - {module}


def faults(module, name):
    """Say why `module` must not import `name`; empty if it may."""
    inside = module.partition(".")[0]
    found = []
    if within(name, ("flax.linen",)) and not within(module, ("wanjax.models",)):
        found.append("only wanjax.models imports flax.linen")
    torch = ("torch", "diffusers", "safetensors.torch")
    if within(name, torch) and inside != "convert" and module != "scripts.bench.peer":
        found.append("only convert, and the benchmarks' peer, import torch")
    if within(name, ("ml_collections",)) and not within(module, ENTRY_POINTS):
        found.append("only entry points and configs see ml_collections")
    if within(name, ("configs",)) and not within(module, ENTRY_POINTS):
        found.append("only entry points see configs")
    if within(name, ("tests", "scripts")):
        found.append("nothing imports tests or scripts")
    if inside == "convert" and within(name, ("wanjax",)) and level(name) > 1:
        found.append("convert imports levels 0 and 1 only")
    digests = module in DIGESTS and name == "convert.digest"
    if inside == "wanjax" and within(name, ("convert",)) and level(module) < 6 and not digests:
        found.append("only entry points import convert")
    if inside == "wanjax" and within(name, ("wanjax",)):
        folder = module.rpartition(".")[0]
        sibling = name == folder or folder == name.rpartition(".")[0]
        # trees are below all; losses use the map of the schedule
        sibling |= name == "wanjax.trees"
        sibling |= name == "wanjax.schedule" and within(module, ("wanjax.losses",))
        if level(name) > level(module) or level(name) == level(module) and not sibling:
            found.append(f"level {level(module)} imports level {level(name)}")
        if within(module, PURE) and within(name, ("wanjax.models",)):
            found.append("losses, schedule, sampler and advantages never import models")
        if within(module, LEVELS[5]) and name in ALGORITHMS:
            found.append("algorithms do not import each other")
    return [f"{module} imports {name}: {text}" for text in found]


def circles(graph):
    """Groups of modules that import each other in a circle, of {module: names it imports}."""
    reached = {}

    def reach(module):
        seen, queue = set(), list(graph[module])
        while queue:
            name = queue.pop()
            if name in graph and name not in seen:
                seen.add(name)
                queue += graph[name]
        return seen

    reached = {module: reach(module) for module in graph}
    found = {frozenset(m for m in reached[a] if a in reached[m]) for a in graph if a in reached[a]}
    return sorted(map(sorted, found))


def files():
    """{path in the repository: path} of its files, without build outputs, runs and caches."""
    found = {}
    for folder, folders, names in os.walk(ROOT):
        hidden = {name for name in folders if name.startswith(".") and name != ".ci"}
        built = {name for name in folders if name.endswith(".egg-info")}
        folders[:] = sorted(set(folders) - hidden - built - SKIPPED)
        for path in (pathlib.Path(folder, name) for name in sorted(names)):
            found[path.relative_to(ROOT).as_posix()] = path
    return found


def sources():
    """{dotted module: path} of everything that is imported or run."""
    return {
        name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path
        for name, path in files().items()
        if re.match(r"(wanjax|convert|configs|scripts)/.*\.py$", name)
    }


MODULES = sources()


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_what_its_level_may(module):
    source = MODULES[module].read_text(encoding="utf-8")
    assert [
        f for name in sorted(imports(module, source, MODULES)) for f in faults(module, name)
    ] == []


def test_no_modules_import_each_other_in_a_circle():
    read = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}
    graph = {name: imports(name, source, MODULES) for name, source in read.items()}
    assert len(graph) > 80 and circles(graph) == []
    planted = graph | {"convert.files": graph["convert.files"] | {"convert.weights"}}
    (found,) = circles(planted)
    assert {"convert.files", "convert.weights", "convert.disk"} <= set(found)


@pytest.mark.parametrize("module", MODULES)
def test_module_has_a_docstring(module):
    source = MODULES[module].read_text(encoding="utf-8")
    assert not source.strip() or ast.get_docstring(ast.parse(source)), f"{module} has no docstring"


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("wanjax.state", "from flax import linen as nn", "flax.linen"),
        ("wanjax.losses.grpo", "import flax.linen", "flax.linen"),
        ("wanjax.train", "import torch.nn as nn", "torch"),
        ("scripts.make", "from safetensors.torch import load_file", "torch"),
        ("wanjax.state", "from ml_collections import ConfigDict", "ml_collections"),
        ("wanjax.sampler", "from wanjax.models import wan", "never import models"),
        ("wanjax.trees", "from wanjax import sampler", "level 0 imports level 2"),
        ("wanjax.losses.grpo", "from wanjax import sampler", "level 2 imports level 2"),
        (
            "wanjax.run.checkpoint",
            "def f():\n    from wanjax.algorithms import grpo",
            "level 4 imports",
        ),
        ("wanjax.algorithms.grpo", "from wanjax.algorithms import nft", "each other"),
        ("wanjax.algorithms.groups", "from wanjax.algorithms import grpo", "each other"),
        ("wanjax.sampling", "from wanjax.data import text", "level 4 imports level 4"),
        ("wanjax.evaluate", "from wanjax import train", "level 6 imports level 7"),
        ("wanjax.models.wan", "from convert import weights", "entry points import convert"),
        ("convert.lora.read", "from wanjax import state", "levels 0 and 1"),
        ("wanjax.run.metrics", "import configs.quickstart", "see configs"),
        ("wanjax.doctor", "import tests.conftest", "nothing imports tests"),
    ],
)
def test_rules_find_a_breach(module, source, fault):
    known = {*MODULES, "wanjax.algorithms.nft", "wanjax.algorithms.grpo", "wanjax.sampler"}
    found = [f for name in imports(module, source, known) for f in faults(module, name)]
    assert any(fault in text for text in found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("wanjax.sampler", "from wanjax import schedule"),
        ("wanjax.models.wan", "import flax.linen as nn\nfrom wanjax.models.blocks import f"),
        ("wanjax.state", "from flax import struct\nfrom wanjax.models import lora"),
        ("convert.weights", "import torch\nfrom convert import names\nfrom wanjax import trees"),
        ("wanjax.train", "import ml_collections\nfrom wanjax.algorithms import grpo"),
        ("wanjax.algorithms.grpo", "from wanjax.algorithms import Tools, groups"),
        ("wanjax.data.latents", "from wanjax.data import Item"),
    ],
)
def test_rules_allow_what_the_design_does(module, source):
    found = [f for name in imports(module, source, MODULES) for f in faults(module, name)]
    assert found == []


# Names of folders that exist on somebody's machine only; spelled so that this file passes.
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:work|root|farm|home/\w+|Users/\w+)(?![\w-])")


def test_no_file_names_a_path_of_a_machine():
    found = []
    for name, path in files().items():
        data = path.read_bytes()
        binary = b"\0" in data[:4096]
        if not binary and (hit := MACHINE_PATH.search(data.decode("utf-8", "replace"))):
            found.append(f"{name}: {hit[0]}")
    assert found == []


def test_machine_paths_are_recognised():
    for folder in ("work", "root", "farm", "home/me"):
        assert MACHINE_PATH.search(f"see /{folder}/x") and MACHINE_PATH.search(f"'/{folder}'")
    for text in ("frame/work", "a/root", "https://x.org/work-items", "/" + "working"):
        assert not MACHINE_PATH.search(text)
