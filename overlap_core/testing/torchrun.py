"""Running a script under torchrun, as the examples of a README are run."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from overlap_core.testing.processes import RankFailure

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["run_torchrun"]


def run_torchrun(
    script: Path,
    ranks: int = 2,
    *,
    timeout_s: float = 200,
    env: Mapping[str, str] | None = None,
) -> tuple[int, str, str]:
    """Run a script on ranks of this machine, each with one thread for compute.

    Asked to end, torchrun ends its ranks; killed it would leave them.

    Args:
        script: what to run.
        ranks: how many.
        timeout_s: seconds after which torchrun is asked to end.
        env: environment variables beside those of this process.

    Returns:
        Exit status, output and errors of all ranks together.

    Raises:
        RankFailure: it did not end in time.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    process = subprocess.Popen(
        [sys.executable, *launcher, f"--nproc-per-node={ranks}", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {}), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, errors = process.communicate(timeout=60)
        raise RankFailure(f"torchrun did not end in time\n{output}\n{errors}") from None
    return process.returncode, output, errors
