"""Make the environment that `make` runs in. This is a plain script, because it runs before anything is installed.

    python environment.py            make the environment; print nothing if it is ready already
    python environment.py --which    print the interpreter that `make` uses

The environment is `.venv` beside pyproject.toml, made with the interpreter that runs this script. With `--named`, the
interpreter was named in PYTHON=…. If it belongs to a virtual or conda environment, or has this checkout installed,
`make` uses it directly.
"""

import ast
import glob
import importlib.util
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
VENV = os.path.join(ROOT, ".venv")
BEGUN = f"begun for {ROOT} with {sys.version}"  # what the stamp says until everything is installed
# Both distributions of this checkout, and their extras.
PROJECTS = (f"{os.path.join(ROOT, 'src', 'cudascope')}[cuda]", f"{ROOT}[all,pinned]")
LINUX_ONLY = (
    "Triton and NVIDIA's compilers exist for Linux only. Here, lessons 1, 2, 4, 9 and 10 run, and the others show "
    "their stored outputs. All lessons run in the container, on Colab, in Codespaces and under WSL: README.md says how."
)
CPU_TORCH = "https://download.pytorch.org/whl/cpu"  # 0.2 GB. The default index has torch with CUDA's libraries, 3 GB.
DRIVERS = ("/proc/driver/nvidia/version", "/usr/lib/wsl/lib/nvidia-smi")
UV_VARIABLES = {  # by pip's name of the option
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
}


def installed_here():
    """Return whether this interpreter finds both packages in this checkout."""
    specs = map(importlib.util.find_spec, ("cudascope", "pagewise"))
    origins = [spec.origin or "" if spec else "" for spec in specs]
    return all(os.path.realpath(origin).startswith(os.path.realpath(ROOT) + os.sep) for origin in origins)


def uses_itself():
    """Return whether `make` uses the interpreter that runs this script. Conda's base is not an environment."""
    conda = os.path.isdir(os.path.join(sys.prefix, "conda-meta"))
    conda_base = os.path.isdir(os.path.join(sys.prefix, "condabin"))
    is_environment = sys.prefix != sys.base_prefix or (conda and not conda_base)
    return "--named" in sys.argv and (is_environment or installed_here())


def prerequisites():
    """Yield a sentence with the remedy for everything that is missing."""
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
    if sys.platform != "linux":  # where no CUDA kernel runs on the CPU
        return
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++")), None)
    if compiler is None or not shutil.which(compiler.split()[0]):
        yield (
            "pagewise needs a C++ compiler to run CUDA kernels on the CPU, and there is no "
            f"{compiler or 'g++ or clang++'}: install one (Debian and Ubuntu: apt install g++), or name one with CXX="
        )


def is_ready(python, stamp):
    """Return whether the environment was made from this checkout, after a pyproject.toml last changed."""
    if not (os.path.exists(python) and os.path.exists(stamp)):
        return False
    files = [os.path.join(project.partition("[")[0], "pyproject.toml") for project in PROJECTS]
    with open(stamp, encoding="utf-8") as f:
        return f.read() == ROOT and os.path.getmtime(stamp) >= max(map(os.path.getmtime, files))


def is_begun(stamp):
    """Return whether this interpreter began the environment for this checkout, and each package in it is whole.

    pip and uv write RECORD last. They install what is missing, so an interruption costs only the package that it broke.
    """
    if not os.path.exists(stamp):
        return False
    packages = glob.glob(os.path.join(glob.escape(VENV), "lib", "python*", "site-packages", "*.dist-info"))
    with open(stamp, encoding="utf-8") as f:
        return f.read() == BEGUN and all(os.path.exists(os.path.join(package, "RECORD")) for package in packages)


def options_of_pip(python):
    """Return pip's settings by their names, as in {"global.index-url": "'https://…'"}."""
    listed = subprocess.run([python, "-m", "pip", "config", "list"], stdout=subprocess.PIPE, text=True).stdout
    return dict(line.split("=", 1) for line in listed.splitlines() if "=" in line)


def prefer_cpu_torch(python):
    """Let pip and uv prefer torch for CPUs on Linux without an NVIDIA GPU, unless pip has indexes of its own."""
    has_gpu = shutil.which("nvidia-smi") or any(map(os.path.exists, DRIVERS))
    indexes = {name.rpartition(".")[2] for name in options_of_pip(python)} & set(UV_VARIABLES)
    if sys.platform == "linux" and not has_gpu and not indexes:
        os.environ["PIP_EXTRA_INDEX_URL"] = CPU_TORCH


def settings_of_pip(python):
    """Return the variables that make uv use the indexes of pip, because uv does not read pip's settings."""
    options = options_of_pip(python)
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as in pip, the best version wins, whichever index has it
    for section in ("global", "install", ":env:"):  # a later section wins
        for option, variable in UV_VARIABLES.items():
            if value := options.get(f"{section}.{option}"):
                comma_or_space = "," if option == "find-links" else " "
                variables[variable] = comma_or_space.join(ast.literal_eval(value).split())
    # uv asks Python where the environment is, in UTF-8
    return variables | os.environ | {"LC_ALL": "C.UTF-8"}


def install(python):
    """Install both projects with everything that they need, with uv if it is there.

    A terminal shows how far the installation is. Elsewhere messages are shown only if pip fails.
    """
    prefer_cpu_torch(python)
    projects = [word for project in PROJECTS for word in ("-e", project)]
    uv = shutil.which("uv")
    quiet, messages = [], {}
    if not sys.stdout.isatty():
        quiet, messages = ["--quiet"], {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [uv, "pip", "install", *quiet, "--python", python, *projects]
    if uv and subprocess.run(command, env=settings_of_pip(python), **messages).returncode == 0:
        return
    command = [python, "-m", "pip", "install", *quiet, "--disable-pip-version-check", *projects]
    done = subprocess.run(command, **messages)
    if done.returncode:
        sys.exit(f"{done.stdout or ''}\npip could not install {' and '.join(PROJECTS)}: see its message above")


def main():
    """Print the interpreter, or make its environment ready. Exit with a sentence if something is missing."""
    python = sys.executable if uses_itself() else os.path.join(VENV, "bin", "python")
    if "--which" in sys.argv:
        print(python)
        return
    if sys.platform != "linux":
        print(LINUX_ONLY, file=sys.stderr, flush=True)
    missing = list(prerequisites())
    if missing:
        sys.exit("\n".join(missing))
    folder = os.path.dirname(os.path.dirname(python))
    stamp = os.path.join(folder, ".pagewise")
    if is_ready(python, stamp) or (uses_itself() and installed_here()):
        return
    if is_begun(stamp):
        print(f"going on with the installation into {folder}, which was interrupted …", flush=True)
    else:
        print(f"installing pagewise and cudascope into {folder}: 2.6 GB, several minutes, once …", flush=True)
        if not uses_itself() and subprocess.run([sys.executable, "-m", "venv", "--clear", VENV]).returncode:
            sys.exit(f"{sys.executable} -m venv failed: see its message above")
        with open(stamp, "w", encoding="utf-8") as f:
            f.write(BEGUN)
    install(python)
    # matplotlib writes to stderr while it builds its font cache, so no lesson may be the first to import it
    subprocess.run([python, "-c", "import matplotlib.font_manager"], stderr=subprocess.DEVNULL)
    with open(stamp, "w", encoding="utf-8") as f:
        f.write(ROOT)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: run make again, and the installation goes on")
