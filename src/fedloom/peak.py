# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a piece of work, measured in a process of its own.

A process's peak never falls, and a child that was forked starts with its parent's: so each
measurement gets a fresh interpreter, and Linux's own count for the program that runs in it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_CHILD = """
import importlib.util, json, sys
from fedloom.peak import peak_of_this_process
path, name, arguments = sys.argv[1:]
spec = importlib.util.spec_from_file_location("measured", path)
module = importlib.util.module_from_spec(spec)
sys.modules["measured"] = module
spec.loader.exec_module(module)
before, _ = peak_of_this_process()
getattr(module, name)(*json.loads(arguments))
sys.stdout.write("\\n" + json.dumps([before, *peak_of_this_process()]))
"""


@dataclass(frozen=True)
class Peak:
    """Bytes at the highest point of a process."""

    before: int
    """Resident, once the script was imported and before the function ran."""
    resident: int
    """Resident at the highest point."""
    cuda: int
    """Allocated by torch on the first GPU at the highest point; 0 without one."""

    @property
    def grown(self) -> int:
        """How far the function pushed the peak."""
        return self.resident - self.before


def measure_peak(script: Path, function: str, *arguments: int | float | str) -> Peak:
    """Import ``script`` in a new interpreter, call one of its functions there, return the peak.

    Parameters
    ----------
    script
        A Python file that does nothing on import but define (``if __name__ == "__main__":``).
    function
        Its name; what it returns is ignored.
    arguments
        Numbers and texts for it, such as a length T.

    Raises
    ------
    RuntimeError
        If the function fails; with the last line of its complaint.
    """
    command = [sys.executable, "-c", _CHILD, str(script), function, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(f"{script.name}: {function} failed: {lines[-1]}")
    return Peak(*json.loads(done.stdout.splitlines()[-1]))


def peak_of_this_process() -> tuple[int, int]:
    """Return the highest resident size so far, and torch's peak on the GPU, in bytes."""
    torch = sys.modules.get("torch")  # a process that never imported it has used no GPU
    on_gpu = torch is not None and torch.cuda.is_available()
    return _resident(), int(torch.cuda.max_memory_allocated()) if on_gpu and torch else 0


def _resident() -> int:
    status = Path("/proc/self/status")
    if status.exists():  # VmHWM begins anew with a program; getrusage's figure is inherited
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource  # POSIX only

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, which lacks /proc
