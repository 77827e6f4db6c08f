"""Every private name of torch that the product uses stands in one table, and the installed torch has it."""

import ast
from importlib import import_module

import pytest
import torch
from test_layers import FILES, nodes
from torch_names import NAMES, OTHERS

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


def there(name, owner):
    if owner is None:
        module, _, attribute = name.rpartition(".")
        return hasattr(import_module(module), attribute)
    found = owner()
    return name in found if isinstance(found, str) else hasattr(found, name)


@pytest.mark.parametrize("name", NAMES)
def test_the_installed_torch_has_the_private_names_that_are_used(name):
    """`fsdp` ended in the first forward on torch 2.11, whose groups have another name."""
    owner, first, last = NAMES[name]
    expected = all(
        limit is None or (VERSION >= at if number == 0 else VERSION <= at)
        for number, limit in enumerate((first, last))
        for at in [tuple(map(int, (limit or "0").split(".")))]
    )
    assert there(name, owner) == expected


def defined():
    """Return the names that classes, functions and assignments of the product define."""
    found = set()
    for file in FILES:
        for node in nodes(file):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                found.add(node.attr)
    return found


def is_own(node):
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def used():
    """Return the private names that the product reads of other objects, and imports from torch."""
    for file in FILES:
        for node in nodes(file):
            if isinstance(node, ast.Attribute) and node.attr[0] == "_" != node.attr[1:2] and not is_own(node):
                yield node.attr
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [f"{node.module}.{each.name}" for each in node.names]
                yield from (name for name in names if "._" in name)


def test_the_table_has_every_private_name_of_torch():
    short = {name.rpartition(".")[2] for name in NAMES}
    missing = {name for name in set(used()) - defined() - OTHERS if name.rpartition(".")[2] not in short}
    assert not missing
