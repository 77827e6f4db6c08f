"""Who may import whom, enforced on the sources."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {
    "dependency": {"dependency"},
    "schedules": {"schedules", "dependency"},
    "workers": {"workers", "dependency"},
}
#: links inside rpc_pipe are not followed
SOURCES = [path for room in (*ROOMS, "rpc_pipe") for path in sorted((ROOT / room).rglob("*.py"))]


def imported(path: Path) -> list[tuple[int, str]]:
    """Return (level, module) of every import; level 0 is absolute."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found += [(node.level, name) for name in names]
        elif isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_rooms_import_only_what_they_may(path):
    room, *folders = path.relative_to(ROOT).parent.parts
    for level, module in imported(path):
        top = module.split(".")[0]
        assert not (level == 0 and top in {*ROOMS, "rpc_pipe"}), f"{path}: {module} must be imported relatively"
        if room in ROOMS and level == 2 + len(folders):
            assert top in ROOMS[room], f"{room} must not import {module}"
        if room in ROOMS:
            assert level <= 2 + len(folders)
        if room in ("dependency", "schedules") and level == 0:
            assert top in {*sys.stdlib_module_names, "typing_extensions"}, f"{path} must use the standard library only"


def test_one_file_imports_torch_rpc():
    users = [
        path.name
        for path in SOURCES
        if "distributed.rpc" in path.read_text() and any("distributed" in module for _, module in imported(path))
    ]
    assert users == ["rpc.py"]


def test_planning_loads_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import rpc_pipe, rpc_pipe.dependency, rpc_pipe.schedules, rpc_pipe.planning.simulator\n"
        "import rpc_pipe.drawing.timeline, rpc_pipe.workers.state, rpc_pipe.commands.main"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_no_file_is_over_400_lines():
    for path in SOURCES:
        assert len(path.read_text().splitlines()) <= 400, path
