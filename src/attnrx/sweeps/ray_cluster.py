"""The engine for several machines: tasks run where Ray places them, and what they give comes back to this process."""

from collections.abc import Sequence
from typing import Any

from attnrx.errors import NotSupported
from attnrx.results import Ended
from attnrx.sweeps.engine import Engine, Task, Work, attempt


class RayCluster(Engine):
    """Every task as a Ray task, each with its CPU threads and `gpus` reserved.

    It joins the cluster that RAY_ADDRESS names, or starts one on this machine. attnrx and the data must be on every
    machine under the same paths, and so must the folder of the store, where jobs leave their files; the store itself is
    written by this process alone. Ray does not try a task again: that is for whoever reads why it failed.
    """

    def __init__(self, work: Work, workers: int, threads: int = 1, gpus: float = 0.0):
        super().__init__(work, workers)
        try:
            import ray
        except ImportError as error:
            raise NotSupported(
                "the engine ray was asked for and is not installed; install attnrx with its extra: attnrx[ray], or "
                "take the engine processes."
            ) from error
        self._ray: Any = ray
        self._ours = not ray.is_initialized()
        if self._ours:
            _join(ray, workers * threads)
        # A process serves one task only, so that nothing is left over from the one before.
        knobs = {"num_cpus": threads, "num_gpus": gpus, "max_retries": 0, "max_calls": 1}
        self._attempt = ray.remote(**knobs)(attempt)
        self._running: dict[Any, Task] = {}

    def start(self, task: Task) -> None:
        """Hands the task to Ray."""
        self._running[self._attempt.remote(self.work, task)] = task

    def wait(self, seconds: float) -> Sequence[tuple[str, Ended]]:
        """Waits for the first task to end."""
        done, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        return [(self._running.pop(each).id, self._ended(each)) for each in done]

    def stop(self) -> None:
        """Cancels what is running, and leaves the cluster if this engine joined it."""
        for each in self._running:
            self._ray.cancel(each, force=True)
        self._running.clear()
        if self._ours:
            self._ray.shutdown()

    def _ended(self, reference: Any) -> Ended:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            return Ended(0.0, error=f"Ray lost the job: {str(error).strip()}")


def _join(ray: Any, processors: int) -> None:
    try:
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError:  # no cluster is named or running: one of our own
        ray.init(num_cpus=processors, include_dashboard=False, log_to_driver=False)
