"""Packaging of rpc-pipe."""

from pathlib import Path

from setuptools import setup

setup(
    name="rpc-pipe",
    version="0.1.0",
    description="Decentralised pipeline-parallel training on torch.distributed.rpc",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="the rpc-pipe authors",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
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
        *("rpc_pipe." + room for room in ("workers", "workers.compute", "workers.transport")),
        *("rpc_pipe.model" + room for room in ("", ".observe", ".assign", ".replay", ".batches")),
        *("rpc_pipe." + room for room in ("planning", "drawing", "tracing", "launching", "checkpoints", "commands")),
        *("rpc_pipe." + room for room in ("planning.measuring", "dispatch", "data", "demo", "elastic", "verifying")),
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
