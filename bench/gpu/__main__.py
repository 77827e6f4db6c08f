"""scripts/gpu [--device cuda:0|cpu] [--minutes N] [--only PART,..] [--quick] [--output FOLDER]

Prints a report, and writes it with `results.json` and a log to `--output`, `$OUT` or a new folder. Ends with 1 if
something is wrong, and names the parts. Works from a checkout: of the wheels in `.whl`, an ignored folder, packages are
installed to a folder of its own, for machines without network. `--wheels` fetches these for another machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from bench.gpu.parts import PARTS, QUICK, USUAL
from bench.gpu.runner import ROOT, Runner

_WHEELS = """pyzmq rich markdown-it-py mdurl pygments safetensors numpy psutil pytest pytest-timeout pluggy iniconfig
packaging transformers huggingface_hub tokenizers regex pyyaml tqdm filelock fsspec typer shellingham click httpx
httpcore httpx2 httpcore2 truststore h11 anyio idna certifi hf-xet annotated-doc typing-inspection torchpippy"""
_PLATFORMS = "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any"


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser("scripts/gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", help=f"of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--wheels", metavar="PYTHON", help="fetch wheels for this version of Python, such as 3.12")
    parser.add_argument("--plant", metavar="PART:hang|wrong|missing", help="show that an error is found", default=":")
    given = parser.parse_args()
    if given.wheels:
        return _fetch(given.wheels)
    part, _, error = given.plant.partition(":")
    if part and error not in ("hang", *PARTS[part][2]):
        parser.error(f"--plant {given.plant}: {part} can have {', '.join(['hang', *PARTS[part][2]])}")
    folder = given.output or Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="rpc-pipe-gpu-"))
    until = time.monotonic() + 60 * given.minutes * (2 if given.device == "cpu" else 1)
    run = Runner(given.device, until, folder, given.quick, (part, error))
    run.site = _installed(run)
    try:
        usual = QUICK if given.quick else USUAL
        return 1 if run.run(PARTS, given.only.split(",") if given.only else usual) else 0
    finally:
        run.say(f"report, results.json and log.txt are in {folder}")
        run.close()


def _installed(run: Runner) -> str:
    """Return a folder with the packages of the wheels in `.whl`; empty: there are none."""
    wheels = sorted(map(str, (ROOT / ".whl").glob("*.whl")))
    if not wheels or not run.on_gpu:
        return ""
    site, begin = tempfile.mkdtemp(prefix="site-"), time.monotonic()
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target", site]
    try:
        done = subprocess.run([*pip, *wheels], capture_output=True, text=True, timeout=90, check=False)
        failed = done.stderr[-300:] if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        failed = str(error)
    if failed:  # a wheel for another Python, or no pip: a wheel is an archive of what is to be installed
        run.say(f"pip: {failed}")
        for wheel in wheels:
            zipfile.ZipFile(wheel).extractall(site)
    run.say(f"{len(wheels)} wheels installed in {time.monotonic() - begin:.0f} s")
    return site


def _fetch(python: str) -> int:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--only-binary=:all:",
        "--no-deps",
        "-d",
        str(ROOT / ".whl"),
    ]
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    return subprocess.call([*command, "--python-version", python, *platforms, *_WHEELS.split()])


if __name__ == "__main__":
    sys.exit(main())
