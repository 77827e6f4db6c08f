"""What is handed out: a source distribution, and a wheel made of it, which work where there is no checkout."""

import email
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from processes import ROOT, environment

import rpc_pipe

#: of the core tests those that take a moment
CORE = "tests/dependency/test_rules.py", "tests/rpc_pipe/test_face.py"
#: of setuptools, which is not imported: its distutils warn
MAJOR = max(
    (int(each.version.split(".")[0]) for each in importlib.metadata.distributions(name="setuptools")), default=0
)


def run(*command, cwd, PYTHONPATH=""):
    """Run a command to its end; return what it printed."""
    env = environment(OMP_NUM_THREADS="1", PYTHONPATH=PYTHONPATH)
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="there is no pip")
@pytest.mark.skipif(MAJOR < 71, reason="setuptools make no wheels before 70.1")
def test_a_wheel_of_the_source_distribution_passes_core_tests_in_a_fresh_environment(tmp_path):
    """Nothing is fetched: torch and pytest are those of this environment."""
    checkout, fresh, apart = tmp_path / "checkout", tmp_path / "fresh", tmp_path / "apart"
    unneeded = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "*.egg-info")
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=unneeded)
    run("git", "init", "-q", cwd=checkout)
    run("git", "remote", "add", "origin", "https://me:secret@example.org/some/pipe.git", cwd=checkout)
    run(sys.executable, "setup.py", "-q", "sdist", "-d", tmp_path, cwd=checkout)
    (source,) = tmp_path.glob("*.tar.gz")
    assert source.name.replace("-", "_") == f"rpc_pipe_{rpc_pipe.__version__}.tar.gz"  # setuptools differ
    shutil.unpack_archive(source, tmp_path)
    unpacked = tmp_path / source.name.removesuffix(".tar.gz")
    told = email.message_from_string((unpacked / "PKG-INFO").read_text())
    assert "Source, https://example.org/some/pipe" in told.get_all("Project-URL") and "secret" not in str(told)
    run(sys.executable, "setup.py", "-q", "bdist_wheel", "-d", tmp_path, cwd=unpacked)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(fresh, with_pip=False)
    python = fresh / "bin" / "python"
    (packages,) = fresh.glob("lib/python*/site-packages")
    pip = python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--ignore-installed"
    path = Path(importlib.util.find_spec("pip").origin).parents[1]
    run(*pip, wheel, cwd=tmp_path, PYTHONPATH=str(path))
    (packages / "of_this_environment.pth").write_text(str(Path(torch.__file__).parents[1]))
    shutil.move(unpacked / "tests", apart / "tests")  # beside these there is no rpc_pipe
    shutil.copy(unpacked / "pyproject.toml", apart)
    assert run(fresh / "bin" / "rpc-pipe", "--version", cwd=apart).split() == ["rpc-pipe", rpc_pipe.__version__]
    script = "import sys, pytest, rpc_pipe; print(rpc_pipe.__file__); sys.exit(pytest.main(sys.argv[1:]))"
    tests = run(python, "-c", script, "-q", "-n", "0", *CORE, cwd=apart)
    assert os.fspath(packages) in tests and "100%" in tests
