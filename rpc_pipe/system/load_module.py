"""Python files of the user's, loaded as modules: models and schedules."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from ..dependency import ConfigError, Spec


def load_module(path: Path, name: str, said: str, *, first: bool = False) -> ModuleType:
    """Run a Python file of the user's and return it as a module; files beside it can be imported, as by a script.

    Args:
        name: of the module; dataclasses and pickle find its classes by it.
        said: the option as typed, for errors.
        first: whether files beside it precede installed packages.

    Raises:
        ConfigError: there is no such file, or it raises.
    """
    if not path.is_file():
        raise ConfigError(f"{said}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0 if first else len(sys.path), folder)
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{said}: {path} raised {type(error).__name__}: {error}") from error
    return module


@cache
def _loaded(path: Path, changed_ns: int) -> ModuleType:
    """Run a schedule's file, once unless it has changed: two runs make two classes of one schedule."""
    return load_module(path, f"rpc_pipe_schedule_{path.stem}", f"schedule {str(path)!r}")


def load_schedule(schedule: str, path: str, name: str) -> type[Spec]:
    """Return the class `name` of the file at `path`.

    Args:
        schedule: the option as typed, for errors.

    Raises:
        ConfigError: it has no such class.
    """
    file = Path(path)
    module = _loaded(file, file.stat().st_mtime_ns if file.is_file() else 0)
    classes = {n: value for n, value in vars(module).items() if isinstance(value, type) and issubclass(value, Spec)}
    if name not in classes:
        here = ", ".join(n for n, cls in classes.items() if cls.__module__ == module.__name__) or "none"
        raise ConfigError(f"schedule {schedule!r}: must name a subclass of Spec, {path}:ClassName; it has {here}")
    return classes[name]
