"""Real harness programs from npm, on loopback with dummy keys: where they are, and how each is run.

Installed once into `.cache/harness`; their own traffic elsewhere is switched off, and a proxy that is not there stands
in the way of what is left.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "harness"
MODEL = "timed"
PATIENCE_S = 150.0
PACKAGES = {
    "claude": ("@anthropic-ai/claude-code-linux-x64", "2.1.332", "claude"),
    "codex": (
        "@openai/codex",
        "0.171.0",
        "../codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex",
    ),
    "opencode": ("opencode-linux-x64", "1.18.33", "bin/opencode"),
}
HOOK = f"{sys.executable} -m services.harness.hook"


def program(name: str) -> Path:
    """The program's executable; skips the test where npm cannot bring it here."""
    package, version, path = PACKAGES[name]
    executable = FOLDER / "node_modules" / package / path
    if not executable.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip(f"{package}@{version} is not installed and there is no npm to install it")
        FOLDER.mkdir(parents=True, exist_ok=True)
        command = [npm, "i", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(FOLDER)]
        done = subprocess.run(
            [*command, f"{package}@{version}"], capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode or not executable.exists():
            pytest.skip(f"npm cannot install {package}@{version}: {done.stderr.strip()[-300:]}")
    return executable.resolve()


@dataclass
class Place:
    """An empty home and working folder of one program, and the variables it is given."""

    executable: Path
    folder: Path
    environ: Mapping[str, str]

    def __post_init__(self) -> None:
        for name in ("home", "work"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    async def run(self, *arguments: str, given: bytes = b"") -> str:
        """Its standard output, for `given` on its standard input; the test fails with all it said when it does."""
        environ = {
            "HOME": str(self.folder / "home"),
            "PATH": "/usr/bin:/bin",
            "HTTPS_PROXY": "http://127.0.0.1:9",
            "NO_PROXY": "127.0.0.1,localhost",
            **self.environ,
        }
        child = await asyncio.create_subprocess_exec(
            str(self.executable),
            *arguments,
            cwd=self.folder / "work",
            env=environ,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            output, errors = await asyncio.wait_for(child.communicate(given), PATIENCE_S)
        except TimeoutError:
            child.kill()
            output, errors = await child.communicate()
            pytest.fail(f"{self.executable.name} did not end in {PATIENCE_S:g} s: {output[-800:]!r} {errors[-800:]!r}")
        assert child.returncode == 0, (child.returncode, output[-800:], errors[-800:])
        return output.decode()


def hook_environ(nats_url: str) -> dict[str, str]:
    """What `ei-hook` needs: the broker's address; the path only because it is not installed in the program's home."""
    return {"EI_NATS_URL": nats_url, "EI_HOOK_TIMEOUT_S": "20", "PYTHONPATH": os.pathsep.join([str(ROOT)])}


def write_script(path: Path, rules: list[dict[str, Any]]) -> Path:
    """A script of replies for `ei up --engine timed --script`."""
    path.write_text(json.dumps({"reply": rules}))
    return path


def only(text: str, without: str = "") -> str:
    """A pattern for prompts that contain `text`, and not `without`."""
    return rf"(?s)\A(?!.*{without}).*{text}" if without else text
