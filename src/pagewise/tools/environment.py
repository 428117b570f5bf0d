"""Makes the environment that `make` runs in. A plain script: it runs before anything is installed.

    python environment.py            prepare it; print nothing if it is ready already
    python environment.py --which    print the interpreter that `make` shall use

The environment is `.venv` beside pyproject.toml, made with the interpreter that runs this script. With `--named` (the
interpreter was named in PYTHON=…) an interpreter that belongs to an environment already, a virtual or conda
environment or one with this checkout installed, is used itself.
"""

import importlib.util
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
VENV = os.path.join(ROOT, ".venv")
EXTRAS = "all,pinned"


def installed_here():
    """Whether this interpreter finds pagewise, and finds it in this checkout."""
    spec = importlib.util.find_spec("pagewise")
    return spec is not None and os.path.realpath(spec.origin or "").startswith(os.path.realpath(ROOT) + os.sep)


def is_environment():
    """Whether this interpreter belongs to a virtual or conda environment (conda's base is none)."""
    conda = os.path.isdir(os.path.join(sys.prefix, "conda-meta"))
    conda_base = os.path.isdir(os.path.join(sys.prefix, "condabin"))
    return sys.prefix != sys.base_prefix or (conda and not conda_base)


def uses_itself():
    """Whether the interpreter that runs this script is the one `make` shall use."""
    return "--named" in sys.argv and (is_environment() or installed_here())


def target():
    """The interpreter that `make` shall use."""
    return sys.executable if uses_itself() else os.path.join(VENV, "bin", "python")


def prerequisites():
    """What is missing, as sentences that say the remedy."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        yield (
            f"pagewise needs Python 3.11, 3.12 or 3.13, and {sys.executable} is {version}: "
            "name another with make PYTHON=/path/to/python3.11"
        )
    elif not uses_itself() and not all(map(importlib.util.find_spec, ("venv", "ensurepip"))):
        yield (
            f"{sys.executable} has no venv module: install it "
            f"(Debian and Ubuntu: apt install python{version}-venv) and run make again"
        )
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++")), None)
    if compiler is None or not shutil.which(compiler.split()[0]):
        yield (
            "pagewise needs a C++ compiler to run CUDA kernels on the CPU, and there is no "
            f"{compiler or 'g++ or clang++'}: install one (Debian and Ubuntu: apt install g++), or name one with CXX="
        )


def is_ready(python, stamp):
    """Whether the environment was made from this checkout, after pyproject.toml last changed."""
    if not (os.path.exists(python) and os.path.exists(stamp)):
        return False
    with open(stamp) as f:
        return f.read() == ROOT and os.path.getmtime(stamp) >= os.path.getmtime(os.path.join(ROOT, "pyproject.toml"))


def install(python):
    """Install the project with everything it needs; show pip's messages only if it fails."""
    project = f"{ROOT}[{EXTRAS}]"
    print(f"installing pagewise[{EXTRAS}] into {os.path.dirname(os.path.dirname(python))}: minutes, once …", flush=True)
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-e", project]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\npip could not install pagewise[{EXTRAS}]: its message stands above")


def main():
    """Say which interpreter to use, or make its environment ready; exit with a sentence if something is missing."""
    if "--which" in sys.argv:
        print(target())
        return
    missing = list(prerequisites())
    if missing:
        sys.exit("\n".join(missing))
    python = target()
    stamp = os.path.join(os.path.dirname(os.path.dirname(python)), ".pagewise")
    if is_ready(python, stamp) or (uses_itself() and installed_here()):
        return
    if not uses_itself() and subprocess.run([sys.executable, "-m", "venv", "--clear", VENV]).returncode:
        sys.exit(f"{sys.executable} -m venv failed: its message stands above")
    install(python)
    # matplotlib writes to stderr while it builds its font cache: no lesson may be the first to import it
    subprocess.run([python, "-c", "import matplotlib.font_manager"], stderr=subprocess.DEVNULL)
    with open(stamp, "w") as f:
        f.write(ROOT)


if __name__ == "__main__":
    main()
