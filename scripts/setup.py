"""Everything the project needs, from a bare machine: `python3 scripts/setup.py`, called by make.

Python 3.11 to 3.13 with venv is all it wants. A finished set-up is recognised by the hash of what it was made from and
reused at once; an interrupted one goes on. Environment: EI_WITHOUT_ENGINE=1 leaves SGLang out (the timed engine needs
none of it); EI_TORCH_INDEX names an extra package index with CPU builds of torch.
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".ei-setup"
LOG = ROOT / ".cache" / "setup.log"
INPUTS = ("pyproject.toml", "scripts/setup.py", "requirements/engine-cpu.txt", "requirements/engine-cpu-nodeps.txt")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
LIBRARIES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
"""Shared libraries that Mooncake's wheel expects on the machine, and the Debian packages that hold them."""


class SetupError(Exception):
    """Set-up cannot go on; the text says what to do."""


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def with_engine() -> bool:
    return os.environ.get("EI_WITHOUT_ENGINE", "") in ("", "0")


def fingerprint() -> str:
    """The hash of everything set-up depends on."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} engine={with_engine()} {ROOT}".encode())
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def run(command: Sequence[str], *, environ: dict[str, str] | None = None) -> None:
    """Run a command with its output in the log; SetupError shows the end of it."""
    with LOG.open("ab") as log:
        log.write(f"\n$ {' '.join(command)}\n".encode())
        log.flush()
        code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, env=environ, check=False).returncode
    if code:
        tail = b"\n".join(LOG.read_bytes().splitlines()[-15:]).decode(errors="replace")
        raise SetupError(f"`{' '.join(command)}` ended with {code}; the end of {LOG}:\n{tail}")


def pip(*arguments: str) -> None:
    run([str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *arguments])


def make_venv() -> None:
    if not PYTHON.exists():
        try:
            run([sys.executable, "-m", "venv", str(VENV)])
        except SetupError as error:
            shutil.rmtree(VENV, ignore_errors=True)
            hint = "on Debian and Ubuntu: apt-get install python3-venv"
            raise SetupError(f"no virtual environment could be made ({hint})\n{error}") from error
    STAMP.unlink(missing_ok=True)


def install_project() -> None:
    """The project itself (editable) with its command line, and what tests and checks need."""
    dev = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["dev"]
    pip("-e", f"{ROOT}[cli]", *dev)


def install_torch() -> None:
    """The CPU build where an index offers it: a tenth of the CUDA one, which works as well."""
    index = os.environ.get("EI_TORCH_INDEX") or (TORCH_INDEX if _reachable(f"{TORCH_INDEX}/torch/") else "")
    pip("torch==2.13.0", *(("--extra-index-url", index) if index else ()))


def _reachable(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, OSError):
        return False


def install_libraries() -> None:
    """Shared libraries of the system; with root and apt they are installed, else named."""
    packages = _missing_packages()
    if not packages:
        return
    command = f"apt-get install -y --no-install-recommends {' '.join(packages)}"
    if os.geteuid() == 0 and shutil.which("apt-get"):
        environ = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
        run(["apt-get", "update"], environ=environ)
        run(command.split(), environ=environ)
    if packages := _missing_packages():
        who = "root on Debian or Ubuntu" if os.geteuid() else "a system with apt"
        raise SetupError(
            f"the KV transfer (Mooncake) needs system libraries that are missing: {', '.join(packages)}.\n"
            f"Installing them takes {who}: {command}\n"
            "Or go on without the SGLang engine: EI_WITHOUT_ENGINE=1 make run (timed engine, no model)."
        )


def _missing_packages() -> list[str]:
    missing = []
    for library, package in LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(package)
    return missing


def prepare_model() -> None:
    """The bundled model as the folder that engine and router read."""
    run([str(PYTHON), "-c", "from services.engine.sglang.model import prepare; print(prepare())"])


def stages() -> Iterator[tuple[str, object]]:
    yield "virtual environment in .venv", make_venv
    yield "the project and its tools", install_project
    if with_engine():
        yield "torch 2.13.0 for CPU", install_torch
        yield "libraries of the SGLang engine", lambda: pip("-r", str(ROOT / "requirements/engine-cpu.txt"))
        yield (
            "SGLang 0.5.23, Mooncake and the bundled model",
            lambda: pip("--no-deps", "-r", str(ROOT / "requirements/engine-cpu-nodeps.txt")),
        )
        yield "shared libraries of the system", install_libraries
        yield "the model's folder", prepare_model


@contextmanager
def lock() -> Iterator[None]:
    """One set-up at a time in this checkout."""
    with (ROOT / ".cache" / "setup.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        say(f"Python {sys.version.split()[0]} runs this; 3.11, 3.12 or 3.13 is needed (PYTHON=python3.12 make ...)")
        return 1
    LOG.parent.mkdir(exist_ok=True)
    with lock():
        wanted = fingerprint()
        if STAMP.exists() and STAMP.read_text() == wanted:
            return 0
        LOG.write_bytes(b"")
        steps = list(stages())
        say(f"Setting up in {ROOT} (details in {LOG.relative_to(ROOT)})")
        for number, (what, step) in enumerate(steps, 1):
            begun = time.monotonic()
            say(f"  [{number}/{len(steps)}] {what} ...")
            try:
                step()
            except SetupError as error:
                say(f"Set-up stopped at: {what}\n{error}")
                return 1
            say(f"        {time.monotonic() - begun:.0f} s")
        STAMP.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
