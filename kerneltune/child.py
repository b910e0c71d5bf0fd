"""A child process that answers requests one at a time, can be killed at any moment, and dies with its parent.

Everything that may crash, hang or poison a CUDA context runs in one: compiles (`compile.py`) and the GPU
(`measure/worker.py`). Why not `multiprocessing`: its spawn runs the parent's main module again, which breaks users'
scripts without a main guard, and it offers no deadline for one request.

How a child dies with its parent, even on kill -9 and even while C++ code holds the interpreter: it holds the read end
of a pipe whose only writer is the parent, with O_ASYNC set, so the kernel sends SIGIO (whose default is to terminate)
as soon as the writer is gone. PR_SET_PDEATHSIG would fire when the *thread* that started the child ends.
Linux only, as Triton is.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import IO, Any

START_TIMEOUT_S = 120.0  # importing torch and triton on a busy machine, and creating a CUDA context
KILL_WAIT_S = 30.0


class ChildDied(Exception):
    """The child is gone: "signal 6 (SIGABRT)", with the last line it printed."""


class ChildTimeout(Exception):
    """No reply in time."""


class ChildStartError(Exception):
    """The child's handler could not be made: an import error, say. One line."""


class Child:
    """One process that holds one handler object and calls it for each request."""

    def __init__(self, handler: str, *args: Any, env: Mapping[str, str | None] | None = None, nice: int = 0) -> None:
        """Start the process; it makes its handler (`"module:name"`, called with `args`) while the parent goes on.

        Args:
            env: changes to the environment; None removes a variable.
            nice: added to the scheduling niceness.
        """
        ours, theirs = socket.socketpair()
        life_read, self._life_write = os.pipe()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the child)
        code = f"from kerneltune.child import serve; serve({theirs.fileno()}, {life_read}, {nice})"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                env=_environment(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=(theirs.fileno(), life_read),
                start_new_session=True,  # Ctrl-C reaches the parent only, and killpg reaches ptxas too
            )
        os.close(life_read)
        self._connection = Connection(ours.detach())
        self._started = False
        self._send((handler, args))

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def wait_started(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Block until the handler exists.

        Raises:
            ChildStartError, ChildDied, ChildTimeout.
        """
        if self._started:
            return
        problem = self._receive(timeout_s)
        if problem is not None:
            raise ChildStartError(problem)
        self._started = True

    def request(self, message: Any, timeout_s: float) -> Any:
        """Send one request and return the handler's reply. After any exception the child is dead.

        Raises:
            ChildTimeout: no reply within `timeout_s` (counted once the handler exists).
            ChildDied: it exited or was killed.
            ChildStartError: its handler could not be made.
        """
        try:
            self.wait_started()
            self._send(message)
            return self._receive(timeout_s)
        except BaseException:  # Ctrl-C too: a reply that comes later must not answer the next request
            self.kill()
            raise

    def kill(self) -> None:
        """End the process and its own children at once. May be called from any thread, and twice."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may take its time to stop a kernel
            self._process.wait(timeout=KILL_WAIT_S)
        if self._life_write >= 0:
            write, self._life_write = self._life_write, -1
            os.close(write)

    def close(self) -> None:
        """Kill, and free what the parent held. The child must not be used afterwards."""
        self.kill()
        self._connection.close()
        self._output.close()

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except (BrokenPipeError, ConnectionResetError, OSError):
            raise ChildDied(self._epitaph()) from None

    def _receive(self, timeout_s: float) -> Any:
        try:
            if not self._connection.poll(timeout_s):
                raise ChildTimeout(f"no reply after {timeout_s:g} s")
            return self._connection.recv()
        except (EOFError, ConnectionResetError, BrokenPipeError):
            raise ChildDied(self._epitaph()) from None

    def _epitaph(self) -> str:
        """How it ended, and the last line it printed."""
        try:
            code = self._process.wait(timeout=5)  # its end of the socket closed: it is ending
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        how = f"exit code {code}"
        if code < 0:
            how = f"signal {-code}"
            with contextlib.suppress(ValueError):
                how += f" ({signal.Signals(-code).name})"
        last = self.last_output()
        return f"{how}: {last}" if last else how

    def last_output(self, limit: int = 200) -> str:
        """The last line that the child printed, cut to `limit` characters."""
        with contextlib.suppress(OSError, ValueError):
            size = os.fstat(self._output.fileno()).st_size
            data = os.pread(self._output.fileno(), 8192, max(0, size - 8192))
            lines = [line.strip() for line in data.decode(errors="replace").splitlines() if line.strip()]
            return lines[-1][:limit] if lines else ""
        return ""


def one_line(error: BaseException, limit: int = 300) -> str:
    """An exception as one line: its type and the line of its message that says most.

    That is ptxas's own complaint, the last line of Triton's compile errors (source comes before it), else the first.
    """
    name = type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^\t")]
    if not lines:
        return name
    ptxas = [line for line in lines if line.startswith(("ptxas error", "ptxas fatal"))]
    last = name in ("CompilationError", "CompileTimeAssertionFailure", "UnsupportedLanguageConstruct")
    text = ptxas[0] if ptxas else lines[-1 if last else 0]
    return f"{name}: {text}"[:limit]


def _environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    env["PYTHONSAFEPATH"] = "1"  # else `python -c` puts the working directory first
    for name, value in changes.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    return env


def serve(socket_fd: int, life_fd: int, nice: int) -> None:
    """The child's main loop: make the handler, then answer until the parent hangs up."""
    _die_with_parent(life_fd)
    os.nice(nice)
    connection = Connection(socket_fd)
    name, args = connection.recv()
    try:
        module, _, attribute = name.partition(":")
        handler = getattr(importlib.import_module(module), attribute)(*args)
    except Exception as error:
        traceback.print_exc()
        connection.send(one_line(error))
        return
    connection.send(None)
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        connection.send(handler(message))


def _die_with_parent(life_fd: int) -> None:
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(life_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life_fd, fcntl.F_SETFL, fcntl.fcntl(life_fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life_fd], [], [], 0)[0]:  # the parent was gone before the line above
        os._exit(1)
