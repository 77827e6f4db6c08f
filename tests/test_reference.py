"""The reference that `scripts/docs` writes has no gap: each public name says what it is, takes and raises."""

import inspect

import pytest

import rpc_pipe

#: parameters that need no list
FEW = 3


def members(value):
    """Yield (name, function) of a public function, or of the public methods and properties of a class."""
    if inspect.isfunction(value):
        yield value.__name__, value
    for name, member in vars(value).items() if inspect.isclass(value) else ():
        if not name.startswith("_"):
            found = getattr(member, "fget", None) or getattr(member, "func", None) or inspect.unwrap(member)
            found = getattr(found, "__func__", found)
            if inspect.isfunction(found):
                yield name, found


@pytest.mark.parametrize("public", sorted(set(rpc_pipe.__all__) - {"Order"}))
def test_a_public_name_is_described(public):
    value = getattr(rpc_pipe, public)
    assert value.__doc__
    for name, function in members(value):
        text, code = inspect.getdoc(function), function.__code__
        assert text, name
        takes = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]) - {"self", "cls"}
        assert len(takes) <= FEW or "Args:" in text, name
        assert "raise " not in inspect.getsource(function) or "raise" in text.lower(), name
