"""What libraries keep for a whole process, and how tests get rid of it."""

import sys


def forget_accelerate() -> None:
    """Lets the next training be the first thing that this process does with accelerate."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        # accelerate has no public way; its own tests call these.
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
