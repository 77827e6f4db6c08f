"""The architecture, enforced on the sources: who may import whom, what loads without torch, how long things may be."""

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import wording

ROOT = Path(__file__).parent.parent

#: every folder, and what it may import. Each names only folders above it, so there is no circle. Imports for type
#: checkers and inside functions count too
MAY_IMPORT = {
    "dependency": "",
    "schedules": "dependency",
    # what a user's files, the end of a process, its allocator and the collection of garbage ask for
    "system": "dependency",
    "workers/transport": "dependency",
    # what modules hold and draw; devices; slices of sequences; parts of weights; and a stage, which is made of these
    "workers/compute/modules": "workers/transport dependency",
    "workers/compute/devices": "workers/compute/modules workers/transport dependency",
    "workers/compute/sequences": "workers/compute/modules workers/transport dependency",
    "workers/compute/parts": "workers/compute/sequences workers/compute/modules workers/transport dependency",
    "workers/compute": "workers/compute/parts workers/compute/sequences workers/compute/devices "
    "workers/compute/modules workers/transport dependency",
    "workers": "system workers/compute workers/transport dependency",
    # a model that is no list of layers: one run on shapes is observed, its events are assigned to stages, and each
    # stage replays its part; batches are split into microbatches
    "model/observe": "system workers/compute dependency",
    "model/assign": "model/observe dependency",
    "model/replay": "model/assign model/observe workers/compute workers/transport dependency",
    "model/batches": "model/replay model/observe workers workers/compute workers/transport dependency",
    "model": "system model/replay model/assign model/observe workers/compute workers/transport dependency",
    "planning": "system model schedules dependency",
    # workers' boards, and what can be read on them without a price: nothing that plans or draws
    "boards": "system workers workers/transport schedules dependency",
    "launching": "system boards workers/transport dependency",
    "drawing": "system planning dependency",
    "tracing": "system boards drawing planning workers schedules dependency",
    # the watching node; nobody knows it but the command line
    "dispatch": "system tracing boards drawing planning workers dependency",
    "checkpoints": "system model workers workers/compute workers/transport dependency",
    "pipeline": "system checkpoints tracing launching boards model model/batches planning workers workers/compute "
    "workers/transport schedules dependency",
    # batches of data larger than memory; training does not need it, who makes batches may
    "data": "system model/batches planning workers/compute workers/transport dependency",
    # times of this model on this machine, for the planner
    "planning/measuring": "system pipeline launching boards planning model model/batches workers workers/compute "
    "workers/transport dependency",
    "demo": "system data pipeline launching dependency",
    "verifying": "system demo pipeline launching planning model model/batches model/observe workers workers/compute "
    "workers/transport dependency",
    "commands": "system verifying demo data pipeline checkpoints dispatch tracing launching boards drawing planning "
    "planning/measuring schedules workers/compute dependency",
    "rpc_pipe": "commands pipeline planning workers schedules dependency",
}
MOST_LINES, MOST_FUNCTION_LINES = 400, 60
#: limits that only fall: pronouns per 1,000 words of comments, class names and file names that occur twice
MOST_PRONOUNS, MOST_CLASSES_TWICE, MOST_FILES_TWICE = 2, 0, 3
#: as well: tests that expect an error by its sentence
MOST_SENTENCES = 35


def sources():
    """Return the files by name as imported; links inside rpc_pipe are not followed."""
    for room in ("dependency", "schedules", "workers", "rpc_pipe"):
        for path in sorted((ROOT / room).rglob("*.py")):
            if room == "rpc_pipe" and (ROOT / path.relative_to(ROOT / "rpc_pipe").parts[0]).is_dir():
                continue
            parts = path.relative_to(ROOT).with_suffix("").parts
            named = parts if room == "rpc_pipe" else ("rpc_pipe", *parts)
            yield ".".join(named).removesuffix(".__init__"), path


FILES = dict(sources())


@cache
def tree(name):
    return ast.parse(FILES[name].read_text())


@cache
def nodes(name):
    return tuple(ast.walk(tree(name)))


@cache
def absolute(name):
    """Return what a file imports by absolute names."""
    found = []
    for node in nodes(name):
        if isinstance(node, ast.ImportFrom) and not node.level:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


@cache
def imported(name):
    """Return the files of ours that a file imports anywhere."""
    is_package = FILES[name].name == "__init__.py"
    found = set()
    for node in nodes(name):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = name.split(".")
            base = parts[: len(parts) - node.level + is_package]
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inside = f"{module}.{alias.name}"
                found.add(inside if inside in FILES else module)
    return found - {name}


def folder(name):
    """Return the folder of a file as the table names it; the face has a line of its own."""
    if name in ("rpc_pipe", "rpc_pipe.__main__"):
        return "rpc_pipe"
    if name.startswith("rpc_pipe.elastic") or name.removeprefix("rpc_pipe.") in (
        "pipeline",
        "session",
        "own_workers",
        "own_members",
        "step_report",
        "inspected",
        "evaluating",
        "decoded_text",
        "generation",
        "held_out",
        "modifying",
        "arguments",
    ):
        return "pipeline"
    path = FILES[name].parent.relative_to(ROOT).as_posix()
    return path.removeprefix("rpc_pipe/")


def test_one_file_alone_knows_one_kind_of_device():
    """Intel's GPUs and NPUs go by the same code; `accelerator.py` says what CUDA has beside."""
    kinds = {name for name, path in FILES.items() for kind in ("cuda", "xpu") if f"torch.{kind}" in path.read_text()}
    assert kinds == {"rpc_pipe.workers.compute.devices.accelerator"}


def circles(arrows):
    """Return the sets of nodes that reach each other."""
    reached = {}
    for start in arrows:
        seen, stack = set(), [start]
        while stack:
            for target in arrows[stack.pop()]:
                if target not in seen:
                    seen.add(target)
                    stack.append(target)
        reached[start] = seen
    return {frozenset(n for n in reached[start] if start in reached[n]) for start in arrows if start in reached[start]}


def test_the_table_names_every_folder_and_only_what_stands_above():
    assert set(MAY_IMPORT) == {folder(name) for name in FILES}
    above = set()
    for name, allowed in MAY_IMPORT.items():
        assert set(allowed.split()) <= above, name
        above.add(name)


@pytest.mark.parametrize("own", MAY_IMPORT)
def test_files_import_only_what_their_folder_may(own):
    for name in of(own):
        check_imports(name, own)


def may_import(own):
    """Return the folders that the files of a folder may import; who may import `workers/compute` may what is in it."""
    listed = MAY_IMPORT[own].split()
    inside = [name for name in MAY_IMPORT if name.startswith("workers/compute/")]
    return [*listed, *(inside if "workers/compute" in listed else [])]


def check_imports(name, own):
    for target in imported(name):
        if folder(target) != own:
            assert folder(target) in may_import(own), f"{name} must not import {target}"
    for module in absolute(name):
        top = module.split(".")[0]
        assert top not in {"dependency", "schedules", "workers", "rpc_pipe"}, f"{name}: import {module} relatively"
        if own in ("dependency", "schedules"):
            arrays = {"numpy"} if own == "schedules" else set()  # of large timetables
            assert top in {*sys.stdlib_module_names, "typing_extensions", *arrays}, (
                f"{name} must use the standard library only, not {module}"
            )


def test_no_files_import_each_other_in_a_circle():
    assert circles({name: imported(name) for name in FILES}) == set()


def test_one_file_imports_torch_rpc():
    users = [
        name
        for name in FILES
        if any("distributed.rpc" in module or "distributed_rpc" in module for module in absolute(name))
    ]
    assert users == ["rpc_pipe.workers.transport.rpc"]


def loads(modules, without):
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in without)
    code = f"import sys; {blocked}import {', '.join(modules)}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def of(*folders):
    return [name for name in FILES if folder(name) in folders]


def test_schedules_and_planning_load_without_torch_and_rich():
    loads(of("dependency", "schedules", "planning"), without=["torch", "rich"])


def test_what_plans_draws_starts_and_watches_loads_without_torch():
    others = ("dispatch.web", "launching.meeting_place", "launching.hosts_meeting")
    names = of("boards", "launching", "drawing", "tracing", "dispatch")
    names = [name for name in names if name.removeprefix("rpc_pipe.") not in others]
    loads([*names, "rpc_pipe", "rpc_pipe.workers.state", "rpc_pipe.commands.main"], without=["torch"])


def test_no_file_is_too_long():
    assert [name for name, path in FILES.items() if len(path.read_text().splitlines()) > MOST_LINES] == []


def test_no_function_is_too_long():
    lengths = {
        f"{name}.{node.name}": node.end_lineno - node.lineno + 1
        for name in FILES
        for node in nodes(name)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert [function for function, length in lengths.items() if length > MOST_FUNCTION_LINES] == []


def test_comments_name_their_subjects():
    """A stranger understood files sentence by sentence only: 34 pronouns per 1,000 words, where trio has 3.6."""
    assert wording.pronouns(path.read_text() for path in FILES.values()) <= MOST_PRONOUNS


def test_names_of_classes_and_files_are_unique():
    named = [(each, name) for name, path in FILES.items() for each in wording.classes(path.read_text())]
    assert len(wording.twice(named)) <= MOST_CLASSES_TWICE, wording.twice(named)
    files = wording.twice((path.name, path) for path in FILES.values() if path.name != "__init__.py")
    assert len(files) <= MOST_FILES_TWICE, files


def test_few_tests_match_the_sentence_of_an_error():
    """An improved word broke tests far away: 302 of them matched sentences. `refusals.py` matches subjects."""
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    assert sum(source.count(", match=") for source in sources) <= MOST_SENTENCES


#: what may use functions of torch that are not public, each for one concern
TORCH_INTERNALS = (
    "rpc_pipe.workers.compute.modules.torch_internals", "rpc_pipe.workers.transport.rpc",
    "rpc_pipe.model.observe.placeholder", "rpc_pipe.workers.transport.payload", "rpc_pipe.workers.compute.parts.fsdp",
)  # fmt: skip


def dotted(node):
    """Return the name that an attribute is written as, `torch._C` such as; "" for those of other values."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return before and f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def private_functions_of_torch(name):
    used = absolute(name) + [dotted(node) for node in nodes(name) if isinstance(node, ast.Attribute)]
    parts = [each.split(".") for each in used if each.startswith("torch.")]
    return [each for each in parts if any(part[0] == "_" and part[:2] != "__" for part in each)]


def test_private_functions_of_torch_are_used_in_few_places():
    used = {name: private_functions_of_torch(name) for name in FILES if name not in TORCH_INTERNALS}
    assert {name: functions for name, functions in used.items() if functions} == {}


#: rooms that do not train, and the options of parallelism that they may read fewer and fewer times
READERS = ("planning", "boards", "tracing", "drawing", "dispatch", "commands", "verifying")
PARALLEL = {"parallelism", "slices", "members", "num_routes", "synchronous"}
MOST_READS = 34


def test_readers_ask_the_relation_and_not_for_options_of_parallelism():
    """A new kind of parallelism had to be told to planner, watcher, comparison, verifier and command line."""
    reads = Counter()
    for room in READERS:
        for path in (ROOT / "rpc_pipe" / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in PARALLEL:
                    reads[f"{path.relative_to(ROOT)} {node.attr}"] += 1
    assert reads.total() <= MOST_READS, reads.most_common()
