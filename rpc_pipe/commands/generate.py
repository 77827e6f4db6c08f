"""`rpc-pipe generate`: text by a causal model in stages, from prompts."""

import json
from pathlib import Path
from typing import Any

from ..dependency import ConfigError
from ..launching.job import current_job
from ..system.files import read_file
from .options import MAKE, SCHEDULE, Parser, set_transport
from .readers import fraction, positive, whole
from .run import refuse_idle, start_script


def add(commands: Any) -> None:
    """Add `generate` to the command line."""
    parser: Parser = commands.add_parser("generate", help="text by a causal model of transformers, from prompts")
    parser.add_argument("model", metavar="FILE.py:make", help=f"{MAKE}; the file may have a `tokenizer`, too")
    kept = "folder of save_pretrained or of checkpoints, or a file of --save"
    parser.add_argument("--weights", metavar="PATH", help=kept)
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="text; without a tokenizer ids, as 5,17,3")
    parser.add_argument("--prompts", metavar="FILE", help="more prompts, one a line")
    of = "of transformers (beside the weights, or the `tokenizer` of the model's file, with encode and decode)"
    parser.add_argument("--tokenizer", metavar="FOLDER", help=of)
    parser.add_argument("--max-new-tokens", type=whole(1), metavar="N", help="most tokens behind a prompt (64)")
    parser.add_argument("--temperature", type=positive, help="draw tokens (the likeliest one is taken)")
    parser.add_argument("--top-k", type=whole(1), metavar="K", help="draw one of the K likeliest")
    parser.add_argument("--top-p", type=fraction, metavar="P", help="draw one of the likeliest that make up this share")
    parser.add_argument("--rows", type=whole(1), help="most prompts at once, which bounds keys and values (all)")
    parser.take(*SCHEDULE, "members", "shard")
    parser.take("json", "split", "device", "seed", "threads", "transport", "trust-network", "port")


def command(typed: dict[str, Any], argv: list[str]) -> int:
    """Generate and print; return the exit code."""
    if ".py:" not in typed["model"]:
        raise ConfigError(f"{typed['model']}: must be path/to/file.py:make, {MAKE}")
    file = typed.get("prompts", "")
    told = read_file(Path(file), f"--prompts {file}", "utf-8-sig", most=2**30) if "prompts" in typed else ""
    prompts = [*typed.get("prompt", []), *(line for line in told.split("\n") if line.strip())]  # U+2028 ends no line
    if not all(prompts) or not prompts:
        raise ConfigError("--prompt: one is empty, or there is none; type --prompt TEXT, or --prompts FILE")
    set_transport(typed)
    job = current_job()
    refuse_idle(typed, job)
    script, arguments = Path(__file__).with_name("own_generate.py"), json.dumps({**typed, "prompt": prompts})
    more = {"script": str(script), "arguments": [typed["model"], arguments]}
    return start_script({name: typed[name] for name in typed.keys() - {"json"}} | more, argv, job, "json" in typed)
