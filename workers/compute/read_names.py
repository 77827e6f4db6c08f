"""Which attributes forwards take as they were before: those that their source reads before it writes them."""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

#: Python 3.11 counts the depth of what it parses for all threads together: SystemError where two parse
_PARSING = threading.Lock()


def read_by(modules: Sequence[nn.Module]) -> frozenset[str]:
    """Return the names of the attributes, of whatever, that forwards of modules read; torch's own modules are known."""
    kinds = {type(module) for module in modules if not type(module).__module__.startswith("torch.")}
    return frozenset(name for kind in kinds for name in _read_by(kind))


def _read_by(kind: type[nn.Module]) -> frozenset[str]:
    """Return the same for `forward` and the methods and properties that it uses; without source there are none."""
    found: set[str] = set()
    left, known = ["forward"], {"forward"}
    while left:
        function: Any = inspect.getattr_static(kind, left.pop(), None)
        function = function.fget if isinstance(function, property) else function
        reading = _Reading()
        for statement in _body(function):
            reading.visit(statement)
        found |= reading.read
        left += (reading.read | reading.called) - known
        known |= reading.read | reading.called
    return frozenset(found)


def _body(function: Callable[..., Any] | None) -> list[ast.stmt]:
    if not inspect.isfunction(function):
        return []
    try:
        source = textwrap.dedent(inspect.getsource(function))
        with _PARSING:
            (definition,) = ast.parse(source).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return []
    return definition.body if isinstance(definition, ast.FunctionDef) else []


class _Reading(ast.NodeVisitor):
    """Goes through statements in the order of their evaluation; functions inside are run by others, such as hooks.

    Attributes:
        read: names of attributes that are read before they are written. To add to one is not to read it.
        called: names of methods.
    """

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.called: set[str] = set()
        self._written: set[str] = set()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        if not isinstance(node.ctx, ast.Load):
            self._written.add(node.attr)
        elif node.attr not in self._written:
            self.read.add(node.attr)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):
            self.visit(node.func.value)
            self.called.add(node.func.attr)
        else:
            self.visit(node.func)
        for argument in (*node.args, *node.keywords):
            self.visit(argument)

    def visit_Assign(self, node: ast.Assign) -> None:
        for child in (node.value, *node.targets):
            self.visit(child)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        self.visit(node.target.value if isinstance(node.target, ast.Attribute) else node.target)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        written = set(self._written)
        for statement in (*node.body, None, *node.orelse):  # what one branch writes others may not have
            if statement is None:
                self._written = set(written)
            else:
                self.visit(statement)
        self._written = written

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        pass

    def visit_Lambda(self, node: ast.Lambda) -> None:
        pass
