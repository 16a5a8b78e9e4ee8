"""Where cells run: in processes of this machine, or on a Ray cluster. Both are used alike."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection
from typing import Any, NamedTuple, Protocol

import torch

Task = tuple[Any, ...]
"""The arguments of one call."""


class Outcome(NamedTuple):
    """What became of one task."""

    key: str
    value: Any
    error: str | None
    """A traceback, or how the worker died; then there is no value."""


class Pool(Protocol):
    """Calls a function many times at once, each in one thread of one process."""

    def run(self, function: Callable[..., Any], tasks: Mapping[str, Task]) -> Iterator[Outcome]:
        """Yield outcomes as they come; a task that raises, or takes its worker with it, harms no other.

        The function is one that can be imported by name. Closing the iterator ends what still runs.
        """


def attempt(function: Callable[..., Any], task: Task) -> tuple[Any, str | None]:
    """Call a function; return what it returns, or else the traceback.

    >>> attempt(divmod, (7, 2))
    ((3, 1), None)
    >>> print(attempt(divmod, (7, 0))[1])
    Traceback (most recent call last):
    ...
    ZeroDivisionError: ...
    """
    torch.set_num_threads(1)
    try:
        return function(*task), None
    except Exception:
        return None, traceback.format_exc()


class Processes:
    """A pool of fresh processes of this machine."""

    def __init__(self, jobs: int) -> None:
        if jobs < 1:
            raise ValueError(f"the number of jobs must be at least 1, got {jobs}")
        self.jobs = jobs

    def run(self, function: Callable[..., Any], tasks: Mapping[str, Task]) -> Iterator[Outcome]:
        """Yield outcomes as they come."""
        waiting = list(tasks.items())[::-1]
        idle: list[Worker] = []
        busy: dict[Any, tuple[str, Worker]] = {}
        try:
            while waiting or busy:
                while waiting and len(busy) < self.jobs:
                    key, task = waiting.pop()
                    worker = idle.pop() if idle else Worker()
                    worker.send(function, task)
                    busy[worker.pipe] = (key, worker)
                for pipe in connection.wait(list(busy)):
                    key, worker = busy.pop(pipe)
                    if (answer := worker.receive()) is not None:
                        idle.append(worker)
                        yield Outcome(key, *answer)
                    else:
                        yield Outcome(key, None, worker.obituary())
        finally:
            for worker in [*idle, *(worker for _, worker in busy.values())]:
                worker.kill()


class Worker:
    """A process that serves one task after another, and dies with its parent."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by numpy's and scipy's libraries when they are loaded
        with interrupts_ignored():
            self.process.start()
        theirs.close()

    def send(self, function: Callable[..., Any], task: Task) -> None:
        with contextlib.suppress(OSError):  # it is dead; receive says so
            self.pipe.send((function, task))

    def receive(self) -> tuple[Any, str | None] | None:
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            return None

    def obituary(self) -> str:
        self.process.join()
        code = self.process.exitcode or 0
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"the worker died {how}" + (" (out of memory, perhaps)" if code == -signal.SIGKILL else "")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


@contextlib.contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Let a new process inherit that Ctrl-C is for its parent only."""
    if threading.current_thread() is not threading.main_thread():  # which alone may set signals
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def serve(pipe: Any) -> None:
    """Answer calls until the parent closes the pipe, or dies."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=follow, args=(parent.sentinel,), daemon=True).start()
    with contextlib.suppress(EOFError):
        while True:
            function, task = pipe.recv()
            pipe.send(attempt(function, task))


def follow(sentinel: Any) -> None:
    """Die with the parent, even in the middle of a task: whoever resumes the run needs the task's files."""
    connection.wait([sentinel])
    os._exit(1)


class Ray:
    """A pool on a Ray cluster, which must have this package, and the run's directory under the same path, on each node.

    Args:
        address: Of the cluster; "local" starts one on this machine.
        jobs: How many tasks a local one runs at once.
        variables: Of the environment, for the workers.
    """

    def __init__(self, address: str, jobs: int, variables: Mapping[str, str]) -> None:
        try:
            self.ray = importlib.import_module("ray")
        except ImportError as e:
            raise ValueError(f"a run on Ray needs the extra `ray` (pip install 'psgd[ray]'): {e}") from e
        self.options: dict[str, Any] = {"runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1", **variables}}}
        if address == "local":
            self.options |= {"address": "local", "num_cpus": jobs, "include_dashboard": False}
        else:
            self.options |= {"address": address}

    def run(self, function: Callable[..., Any], tasks: Mapping[str, Task]) -> Iterator[Outcome]:
        """Yield outcomes as they come."""
        ray = self.ray
        if not tasks:
            return
        ray.init(**self.options, logging_level="ERROR", log_to_driver=False)
        try:
            gpus = 1 if ray.cluster_resources().get("GPU", 0) else 0
            remote = ray.remote(attempt).options(num_cpus=1, num_gpus=gpus, max_retries=0)
            running = {remote.remote(function, task): key for key, task in tasks.items()}
            while running:
                [reference], _ = ray.wait(list(running), num_returns=1)
                key = running.pop(reference)
                try:
                    yield Outcome(key, *ray.get(reference))
                except ray.exceptions.RayError as e:
                    yield Outcome(key, None, f"the worker died: {e}")
        finally:
            ray.shutdown()
