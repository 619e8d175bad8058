"""State of one forward pass that its modules and hooks share; every thread has its own."""

import threading
from typing import Any


class CallState(threading.local):
    """The base of the state that modules pass to each other during a forward pass.

    The signatures of the modules are those of a library, so such state is stored beside them, and removed at the end of
    the pass. A thread that calls the same model at the same time has other images, hence other state. A copy or a
    pickle of a model, even one made during a pass, has no state.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()
