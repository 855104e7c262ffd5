"""State that libraries keep for a whole process, its removal, and the memory of a process."""

import sys
from pathlib import Path


def forget_accelerate() -> None:
    """Lets the next training be the first thing that this process does with accelerate."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        # accelerate has no public way; its own tests call these.
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def peak_memory(process: int | str = "self") -> int:
    """Largest resident size of a process so far, in bytes; 0 where the system does not say."""
    status = Path(f"/proc/{process}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), 0)
