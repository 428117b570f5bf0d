"""`pytest --nbval -p forked_kernels`: the kernels of all notebooks fork from one process, which has imported torch.

A kernel that begins with nothing imports torch, matplotlib and its own code in four seconds of CPU time, and there are
twenty-one. The process imports nothing of this repository, so a lesson must still import what it uses.
"""

import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys

IMPORTED = ("torch", "matplotlib.pyplot", "ipykernel.kernelapp", "ipykernel.ipkernel")

# With this package jsonschema, which nbval imports after this file, would build 38 grammars of addresses in a second.
sys.modules["rfc3987_syntax"] = None


class Kernel:
    """A process that was forked elsewhere, with what jupyter_client uses of a Popen."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        """Return None while the process runs. The status with which it ends is not known here."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return 0
        return None

    wait = poll  # jupyter_client calls it after poll has told that the process ended

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def pytest_configure(config) -> None:
    from jupyter_client.provisioning import local_provisioner

    @functools.cache
    def server() -> subprocess.Popen:
        """Start the process when the first kernel is asked for: xdist's controller asks for none."""
        # as a kernel does: matplotlib reads the name of its backend when it is imported
        env = os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
        command, pipe = [sys.executable, "-P", __file__, *IMPORTED], subprocess.PIPE
        process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)
        config.add_cleanup(process.communicate)
        return process

    def launch_kernel(command: list[str], *, env: dict[str, str], cwd: str, **_: object) -> Kernel:
        server().stdin.write(json.dumps([command, env, str(cwd)]) + "\n")
        server().stdin.flush()
        return Kernel(int(server().stdout.readline()))

    local_provisioner.launch_kernel = launch_kernel


def serve() -> None:
    """Fork a kernel for each line of standard input, and print the number of its process."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, lambda *_: os.waitpid(-1, os.WNOHANG))  # a kernel that has ended is gone
    for line in sys.stdin:
        if pid := os.fork():
            os.setpgid(pid, pid)  # jupyter_client sends signals to the whole group
            print(pid, flush=True)
        else:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run(*json.loads(line))
            break


def run(command: list[str], env: dict[str, str], cwd: str) -> None:
    """Become the kernel that `command` would start: python -m ipykernel_launcher and its arguments."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    _, _, module, *arguments = command
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve()
