"""The command line of `step_time.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from .contenders import CONTENDERS, Contender, parse_contenders
from .workloads import MODELS, missing_plugin

__all__ = ["DTYPES", "lengths", "read_options"]

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def read_options(description: str) -> argparse.Namespace:
    """Read the arguments of this process; leaves with status 2 where they are wrong."""
    parser = argparse.ArgumentParser(
        description=description,
        epilog=f"models:\n{_listed(MODELS)}\n\ncontenders:\n{_listed(CONTENDERS)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--contenders", type=_contenders, default="unsharded,program,fsdp2,ours")
    add("--model", type=_models, default="video", help="one or more of: " + ", ".join(MODELS))
    add("--tokens", type=lengths, default="4096,8192", help="local lengths, one run each")
    add("--ranks", type=int, default=2, help="how many to start; not read under torchrun")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=sorted(DTYPES), help="default: bfloat16 on GPUs, else float32")
    _add_sizes(parser)
    add("--groups", type=int, choices=(1, 2), help="2: custom ops have a communicator of their own")
    add("--gather-ctas", type=int, help="most SMs that NCCL may take for a gather; default: NCCL's")
    add("--repeats", type=int, default=5, help="rounds, in alternation between contenders")
    add("--steps", type=int, default=20, help="steps of one round, each way")
    add("--cold", action="store_true", help="kernel caches of its own for each contender")
    add("--clocks", action="store_true", help="read clock and power of rank 0's GPU meanwhile")
    add("--profile", action="store_true", help="then profile 3 steps of each contender")
    add("--profile-host", action="store_true", help="also record the host's operators")
    add("--profile-synchronized", action="store_true", help="wait after each profiled step")
    add("--out", type=Path, help="folder for results.jsonl and traces")
    add("--dump", type=Path, help="folder for graphs and costs that overlap_core saw")
    add("--timeout", type=float, default=120, help="of process groups, in seconds")
    add("--deadline", type=float, default=460, help="seconds after which ranks show stacks and end")
    add("--phase-limit", type=float, default=180, help="the same for one contender's compile")
    options = parser.parse_args()
    if options.gather_ctas is not None and torch.device(options.device).type != "cuda":
        parser.error("--gather-ctas is about NCCL: it needs GPUs")
    for model in options.model:
        if folder := missing_plugin(model):
            parser.error(f"--model {model} needs a plugin: pip install --no-deps {folder}")
    return options


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sizes, where they aren't the model's own").add_argument
    add("--blocks", type=int)
    add("--dim", type=int)
    add("--heads", type=int)
    add("--ffn", type=int)
    add("--text-tokens", type=int, default=512, help="video, train")
    add("--wan-table", action="store_true", help="modulation table (1, 6, dim): uneven shards")
    add("--experts", type=int, default=32, help="moe: of all ranks together")
    add("--expert-dim", type=int, default=1024, help="moe: hidden size of an expert")
    add("--top-k", type=int, default=4, help="moe: experts for each token")
    add("--capacity-factor", type=float, default=1.25, help="moe; 0: nothing is dropped")


def _listed(choices: dict[str, str]) -> str:
    return "\n".join(f"  {name:19} {words}" for name, words in choices.items())


def _contenders(text: str) -> list[Contender]:
    try:
        return parse_contenders(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _models(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in MODELS:
            raise argparse.ArgumentTypeError(
                f"unknown model {name!r}; there are: {', '.join(MODELS)}"
            )
    return list(dict.fromkeys(names))


def lengths(text: str) -> list[int]:
    """Read a comma-separated list of numbers of tokens, for argparse."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit() and int(part) > 0):
            raise argparse.ArgumentTypeError(
                f"{part!r} is no number of tokens; expected for instance 4096,8192"
            )
    return [int(part) for part in parts]
