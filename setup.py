"""Packaging of rpc-pipe."""

import re
import subprocess
from pathlib import Path

from setuptools import setup


def links():
    """Return links of the repository that this checkout was cloned from; none without one."""
    asked = ["git", "-C", str(Path(__file__).parent), "config", "remote.origin.url"]
    try:
        origin = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git
        return {}
    if (found := re.fullmatch(r"(?:https://(?:[^/@]*@)?|git@)([^/:@]+)[/:](.+?)(?:\.git)?/?", origin)) is None:
        return {}
    home = f"https://{found[1]}/{found[2]}"
    pages = {
        "Source": "",
        "Documentation": "/tree/main/docs",
        "Changes": "/blob/main/CHANGELOG.md",
        "Issues": "/issues",
    }
    return {name: home + path for name, path in pages.items()}


setup(
    name="rpc-pipe",
    version="0.2.0",
    description="Decentralised pipeline-parallel training on torch.distributed.rpc",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="the rpc-pipe authors",
    project_urls=links(),
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: System :: Distributed Computing",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    keywords="pipeline parallelism, distributed training, torch, rpc, schedule",
    python_requires=">=3.10",
    # Exactly this mapping makes `pip install -e .` write a plain .pth, which type checkers read.
    package_dir={"": "."},
    # Listed, not found: where links were lost (zip archives) the build stops instead of
    # installing a package without its rooms.
    packages=[
        "rpc_pipe",
        *("rpc_pipe." + room for room in ("dependency", "schedules", "system")),
        *("rpc_pipe.workers" + room for room in ("", ".transport", ".compute")),
        *("rpc_pipe.workers.compute." + room for room in ("modules", "devices", "sequences", "parts")),
        *("rpc_pipe.model" + room for room in ("", ".observe", ".assign", ".replay", ".batches")),
        *("rpc_pipe." + room for room in ("planning", "drawing", "tracing", "launching", "checkpoints", "commands")),
        *("rpc_pipe." + room for room in ("planning.measuring", "dispatch", "data", "demo", "elastic", "verifying")),
        "rpc_pipe.boards",
    ],
    package_data={
        "rpc_pipe": ["py.typed"],
        "rpc_pipe.drawing": ["page.html"],
    },
    install_requires=[
        "torch>=2.11,<2.16",
        "rich>=13",
        "safetensors>=0.4",
        "numpy",
        "msgspec>=0.19",
    ],  # safetensors imports numpy
    extras_require={
        "test": ["pytest>=8", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil", "mypy", "ruff", "pyzmq>=26"],
        "data": ["pyarrow>=14", "datasets>=4"],
        "dispatch": ["aiohttp>=3.9", "prometheus_client>=0.20"],
        "tensorboard": ["tensorboard"],
        "zmq": ["pyzmq>=26"],
        "hf": ["transformers>=5", "peft>=0.18"],
        "docs": ["pdoc>=16"],
        "bench": ["torchpippy==0.1.1", "transformers"],
    },
    entry_points={"console_scripts": ["rpc-pipe = rpc_pipe.commands.main:main"]},
)
