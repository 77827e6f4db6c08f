"""Packaging of rpc-pipe."""

from setuptools import setup

setup(
    name="rpc-pipe",
    version="0.1.0",
    description="Decentralised pipeline-parallel training on torch.distributed.rpc",
    python_requires=">=3.10",
    # Exactly this mapping makes `pip install -e .` write a plain .pth, which type checkers read.
    package_dir={"": "."},
    # Listed, not found: where links were lost (zip archives) the build stops instead of
    # installing a package without its rooms.
    packages=["rpc_pipe", "rpc_pipe.dependency", "rpc_pipe.schedules", "rpc_pipe.workers", "rpc_pipe.dispatch"],
    package_data={
        "rpc_pipe": ["py.typed", "page.html", "timeline.css", "timeline.js"],
        "rpc_pipe.dispatch": ["live.html"],
    },
    install_requires=["torch>=2.6", "rich>=13", "safetensors>=0.4", "numpy"],  # safetensors.torch imports numpy
    extras_require={
        "test": ["pytest>=8", "pytest-timeout", "hypothesis", "psutil", "mypy", "ruff"],
        "dispatch": ["aiohttp>=3.9", "prometheus_client>=0.20"],
        "tensorboard": ["tensorboard"],
        "bench": ["torchpippy==0.1.1", "transformers"],
    },
    entry_points={"console_scripts": ["rpc-pipe = rpc_pipe.cli:main"]},
)
