"""Builds the native kernels with the C++ compiler that is there, once per source, compiler and PyTorch.

The library links against the OpenMP runtime that PyTorch has loaded, by its file: a second runtime would be a second
pool of threads, spinning on the same cores. Without a compiler, or if it fails, there is no library and a reason.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "native"
_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-w")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
# One compilation each of isa.cpp; the processor decides at run time which is used.
INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {
    "amx": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-DPAGEDECK_AMX"),
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
}
_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Built:
    """A library, or why there is none."""

    path: Path | None
    reason: str


def build() -> Built:
    """The library of these sources: found in a cache, or compiled now, which takes some seconds."""
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    runtime = _openmp_runtime()
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return Built(None, "native kernels are for Linux on x86-64")
    if runtime is None:
        return Built(None, "PyTorch has loaded no GNU OpenMP runtime to share")
    name = f"pagedeck-{_digest(compiler, runtime)}.so"
    folders = [SOURCES / "build", Path.home() / ".cache" / "pagedeck"]
    for folder in folders:
        if (folder / name).is_file():
            return Built(folder / name, "cached")
    if compiler is None:
        return Built(None, f"no C++ compiler ({', '.join(_COMPILERS)}) was found")
    failure = "no folder to build in"
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                begin = perf_counter()
                _compile(compiler, runtime, Path(scratch), name)
                # In one step, so that another process sees a whole library or none.
                (Path(scratch) / name).replace(folder / name)
        except subprocess.SubprocessError as error:
            return Built(None, f"{compiler} failed: {_last_line(error)}")
        except OSError as error:
            failure = str(error)
            continue
        for other in folder.glob("pagedeck-*.so"):  # of sources that have changed since
            if other.name != name and folder == folders[0]:
                other.unlink(missing_ok=True)
        logger.info("built the native kernels in %.1f s: %s", perf_counter() - begin, folder / name)
        return Built(folder / name, "built")
    return Built(None, failure)


def _openmp_runtime() -> Path | None:
    """The file of the GNU OpenMP runtime that this process has loaded with PyTorch."""
    assert torch.get_num_threads() > 0  # importing torch loads it
    for line in _mapped_files():
        if Path(line).name.startswith("libgomp"):
            return Path(line)
    return None


def _mapped_files() -> Iterator[str]:
    maps = Path("/proc/self/maps")
    if maps.is_file():
        for line in maps.read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6:
                yield fields[5]


def _digest(compiler: str | None, runtime: Path) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.glob("*.cpp")) + sorted(SOURCES.glob("*.h")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    stat = os.stat(compiler) if compiler else None  # of the file a link points to: its version, without running it
    identity = (compiler, stat and (stat.st_size, stat.st_mtime_ns), runtime.name, _FLAGS, INSTRUCTION_SETS)
    digest.update(repr(identity).encode())
    return digest.hexdigest()[:16]


def _compile(compiler: str, runtime: Path, scratch: Path, name: str) -> None:
    units: dict[Path, tuple[Path, tuple[str, ...]]] = {scratch / "interface.o": (SOURCES / "interface.cpp", ())}
    for isa, flags in INSTRUCTION_SETS.items():
        units[scratch / f"{isa}.o"] = (SOURCES / "isa.cpp", (*flags, f"-DPAGEDECK_ISA={isa}"))
    commands = [
        [compiler, *_FLAGS, *flags, "-c", str(source), "-o", str(target)] for target, (source, flags) in units.items()
    ]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    outcomes = [(process, process.communicate(timeout=_TIMEOUT_S)[1]) for process in running]
    for process, errors in outcomes:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args, stderr=errors)
    # Not with -fopenmp, which would link the compiler's own runtime.
    link = [compiler, "-shared", *map(str, units), str(runtime), "-o", str(scratch / name)]
    subprocess.run(link, check=True, stderr=subprocess.PIPE, text=True, timeout=_TIMEOUT_S)


def _last_line(error: subprocess.SubprocessError) -> str:
    text = str(getattr(error, "stderr", "") or error)
    errors = [line for line in text.splitlines() if "error" in line] or text.splitlines() or [""]
    return errors[0].strip()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    built = build()
    logger.info("native kernels: %s", built.path or f"none ({built.reason})")
