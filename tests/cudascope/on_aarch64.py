"""Run the tests of cudascope for aarch64 on an x86-64 machine: a cross compiler and an emulated Python.

    python tests/cudascope/on_aarch64.py FOLDER                      # all tests, which takes more than an hour
    python tests/cudascope/on_aarch64.py FOLDER tests/cudascope/test_machine.py tests/cudascope/test_gallery_of_bugs.py

FOLDER receives 1 GB of packages for aarch64, and the cache of kernels: Python and C libraries of Debian 12, numpy and
torch. The script needs Debian or Ubuntu for x86-64 with `apt-get` and `dpkg`, and installs nothing on the machine. The
emulator (qemu) runs aarch64 instructions in user mode, on the kernel of this machine: pages have 4 KB.
"""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CROSS = ("g++-aarch64-linux-gnu", "binutils-aarch64-linux-gnu")
EMULATED = ("python3.11:arm64", "libstdc++6:arm64", "libgfortran5:arm64")
# Of torch, the newest version whose wheel for aarch64 needs no libraries of CUDA. pip would read the requirements of
# the wheels for this machine, so all packages are named here.
WHEELS = (
    *("numpy==2.4.6", "torch==2.9.1", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock", "fsspec"),
    *("typing-extensions", "pytest>=8", "pluggy", "iniconfig", "packaging", "pygments"),
    *("nvidia-cuda-runtime>=13", "nvidia-cuda-nvrtc>=13", "nvidia-cuda-crt>=13", "nvidia-cuda-cccl>=13"),
)
OF_THE_COMPILER = ("libbfd", "libopcodes", "libctf", "libisl", "libmpc", "libmpfr", "libgmp", "libzstd", "libjansson")
APT = """
APT::Architecture "amd64";
APT::Architectures {{ "amd64"; "arm64"; }};
Dir::State "{folder}/apt";
Dir::State::status "{folder}/apt/status";
Dir::Cache "{folder}/apt";
Dir::Etc::sourcelist "{folder}/apt/sources.list";
Dir::Etc::sourceparts "/nonexistent";
"""
# The emulator is that of Debian 13: older ones need long for the 128 GB of empty space that surround each tensor.
SOURCES = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian {suite} main\n"


def run(*command: str | Path, **options: object) -> None:
    subprocess.run([*map(str, command)], check=True, **options)


def unpack(folder: Path, suite: str, packages: tuple[str, ...], to: Path, *, alone: bool = False) -> None:
    """Download `packages` of a Debian release, with all packages that they need unless `alone`, and unpack them."""
    apt = folder / "apt"
    for name in ("lists/partial", "archives/partial"):
        (apt / name).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text(SOURCES.format(suite=suite))
    configuration = apt / "apt.conf"
    configuration.write_text(APT.format(folder=folder))
    environment = os.environ | {"APT_CONFIG": str(configuration)}
    run("apt-get", "update", "-q", env=environment)
    if alone:
        run("apt-get", "download", *packages, env=environment, cwd=apt / "archives")
    else:
        options = ("--no-install-recommends", "--download-only")
        run("apt-get", "install", "-q", "-y", *options, *packages, env=environment)
    for package in (apt / "archives").glob("*.deb"):
        run("dpkg", "-x", package, to)
        package.unlink()


def script(path: Path, command: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)


def add_compiler(folder: Path) -> None:
    tools = folder / "tools"
    unpack(folder, "bookworm", CROSS, tools)
    cross = tools / "usr/aarch64-linux-gnu/lib"
    for text in (cross / "libc.so", cross / "libm.so"):
        if text.is_file() and text.stat().st_size < 10_000:
            text.write_text(text.read_text().replace("/usr/aarch64-linux-gnu/lib", str(cross)))
    script(folder / "bin/g++", f"{tools}/usr/bin/aarch64-linux-gnu-g++")
    (folder / "libraries").mkdir()
    for name in OF_THE_COMPILER:
        for library in (tools / "usr/lib/x86_64-linux-gnu").glob(f"{name}*.so*"):
            (folder / "libraries" / library.name).symlink_to(library)


def add_python(folder: Path) -> None:
    tools, root, python = folder / "tools", folder / "root", folder / "python"
    unpack(folder, "bookworm", EMULATED, root)
    unpack(folder, "trixie", ("qemu-user:amd64",), tools, alone=True)
    # Python finds its virtual environment beside this script. A test that starts another Python starts the script.
    emulator = f"{tools}/usr/bin/qemu-aarch64 -L {root} -0 {python}/bin/python {root}/usr/bin/python3.11"
    script(python / "bin/python", emulator)
    (python / "pyvenv.cfg").write_text(f"home = {root}/usr/bin\nversion = 3.11\n")
    packages = python / "lib/python3.11/site-packages"
    platforms = [f"--platform=manylinux{version}_aarch64" for version in ("2014", "_2_27", "_2_28")]
    only = ("--no-deps", "--only-binary=:all:", "--python-version=3.11", *platforms, f"--target={packages}")
    run(sys.executable, "-m", "pip", "install", "-q", *only, *WHEELS)


def main(folder: Path, *tests: str) -> int:
    if not (folder / "complete").exists():
        add_compiler(folder)
        add_python(folder)
        (folder / "complete").touch()
    environment = os.environ | {
        "CXX": str(folder / "bin/g++"),
        "LD_LIBRARY_PATH": str(folder / "libraries"),
        "CUDASCOPE_CACHE": str(folder / "cache"),
        "PYTHONPATH": str(REPOSITORY / "src"),
        "PYTHONPYCACHEPREFIX": str(folder / "compiled"),
        "OMP_NUM_THREADS": "1",
    }
    options = ("-v", "-p", "no:cacheprovider", "--noconftest")
    command = [folder / "python/bin/python", "-m", "pytest", *options, *(tests or ("tests/cudascope",))]
    return subprocess.run(command, env=environment, cwd=REPOSITORY).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    raise SystemExit(main(Path(sys.argv[1]).resolve(), *sys.argv[2:]))
