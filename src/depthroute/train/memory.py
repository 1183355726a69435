"""The peak of a run's memory."""

import ctypes
import gc
import re
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Watch the memory of this process on one device, from now on.

    On CUDA what tensors take; on a CPU under Linux all that the process holds, libraries included.

    Args:
        device: Where the run is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.works = True
        else:
            self.works = _forget_resident_peak()

    def gib(self) -> float | None:
        """Return the peak so far, in GiB; None where the system cannot say."""
        if not self.works:
            return None
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**30
        found = re.search(r"^VmHWM:\s*(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
        return int(found.group(1)) / 2**20 if found else None


def _forget_resident_peak() -> bool:
    """Give free memory back and start the kernel's peak anew; False if that is not possible."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # else an earlier run's memory counts for this one
        _RESET.write_text("5")
    except (OSError, AttributeError, TypeError):  # another system, or not allowed
        return False
    return True
