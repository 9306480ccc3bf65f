"""Compiles every specialisation of the Triton kernels for devices that needn't be there.

    python -m kernels.gpu.compile [--arch 80 90] [--jobs 2] [--json]

prints a table of what the assembler says of each: registers per thread, bytes spilled, shared memory. A process of its
own, because kernels that were defined under TRITON_INTERPRET=1 can't be compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.gpu.precision import INTERPRETED
from kernels.gpu.specialisations import Specialisation, all_specialisations

MAX_REGISTERS = 255
# Shared memory that one program may have, bytes, by compute capability.
MAX_SHARED = {80: 163 * 1024, 90: 227 * 1024}


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel takes."""

    case: str
    kernel: str  # `Specialisation.name`
    arch: int  # compute capability: 80, 90
    threads: int
    registers: int  # per thread
    spilled: int  # bytes stored and loaded because registers didn't suffice
    shared: int  # bytes per program
    cubin: int  # bytes

    def excess(self) -> str | None:
        """Which limit it breaks, or None."""
        if self.spilled:
            return f"spills {self.spilled} bytes"
        if self.registers > MAX_REGISTERS:
            return f"{self.registers} registers are more than {MAX_REGISTERS}"
        if self.registers * self.threads > 65536:
            return f"{self.threads} threads of {self.registers} registers don't fit a multiprocessor"
        if self.shared > MAX_SHARED[self.arch]:
            return f"{self.shared} bytes of shared memory are more than {MAX_SHARED[self.arch]}"
        return None


def compiled(specialisation: Specialisation, arch: int) -> Resources:
    """Compiles one; raises what the compiler raises."""
    kernel = specialisation.kernel
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, parameter in enumerate(kernel.params)
        if parameter.name in specialisation.aligned
    }
    source = ASTSource(kernel, specialisation.signature, specialisation.constexprs, attributes)
    options = {"num_warps": specialisation.num_warps, "num_stages": specialisation.num_stages}
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers = re.search(r"Used (\d+) registers", log.getvalue())
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", log.getvalue())
    if registers is None or not spilled:
        raise RuntimeError(f"the assembler says nothing of registers and spills: {log.getvalue()!r}")
    return Resources(
        specialisation.case, specialisation.name, arch, 32 * specialisation.num_warps, int(registers[1]),
        sum(map(int, spilled)), int(binary.metadata.shared), len(binary.asm["cubin"]),
    )  # fmt: skip


def _prepare(cache: str) -> None:
    triton.knobs.cache.dir = cache
    triton.knobs.nvidia.dump_ptxas_log = True  # it runs with -v; the log is where registers and spills are said


def _compile_one(index: int, arch: int) -> Resources:
    return compiled(all_specialisations(arch)[index], arch)


def compile_all(archs: list[int], jobs: int) -> Iterator[Resources]:
    """Compiles all for each of `archs` in `jobs` processes, with an empty cache."""
    pairs = [(index, arch) for arch in archs for index in range(len(all_specialisations(arch)))]
    with (
        tempfile.TemporaryDirectory() as cache,
        ProcessPoolExecutor(jobs, get_context("spawn"), _prepare, (cache,)) as pool,
    ):
        yield from pool.map(_compile_one, *zip(*pairs, strict=True))


def as_table(found: list[Resources]) -> str:
    """Markdown: a line per specialisation, the architectures beside each other."""
    archs = sorted({entry.arch for entry in found})
    by_line: dict[tuple[str, str], dict[int, Resources]] = {}
    for entry in found:
        by_line.setdefault((entry.case, entry.kernel), {})[entry.arch] = entry
    columns = "".join(f" sm_{arch}: registers | spilled | shared, KiB |" for arch in archs)
    lines = [f"| first used by | kernel | threads |{columns}", "| --- | --- |" + " ---: |" * (1 + 3 * len(archs))]
    for (case, kernel), entries in by_line.items():
        threads = next(iter(entries.values())).threads
        cells = "".join(f" {e.registers} | {e.spilled} | {e.shared / 1024:.1f} |" for _, e in sorted(entries.items()))
        lines.append(f"| {case} | {kernel} | {threads} |{cells}")
    return "\n".join(lines)


def main() -> int:
    """Prints the table, or with --json a line per binary; fails where a limit is broken."""
    parser = argparse.ArgumentParser(prog="python -m kernels.gpu.compile", description="Compile the Triton kernels.")
    parser.add_argument("--arch", type=int, nargs="+", choices=sorted(MAX_SHARED), default=sorted(MAX_SHARED))
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", action="store_true", help="one line per binary instead of a table")
    args = parser.parse_args()
    if INTERPRETED.value:
        parser.error("unset TRITON_INTERPRET: kernels that are interpreted can't be compiled")
    found = []
    for entry in compile_all(args.arch, args.jobs):
        found.append(entry)
        if args.json:
            sys.stdout.write(json.dumps(asdict(entry)) + "\n")
    if not args.json:
        sys.stdout.write(as_table(found) + "\n")
    broken = [f"{entry.case}, {entry.kernel}, sm_{entry.arch}: {entry.excess()}" for entry in found if entry.excess()]
    sys.stderr.write("".join(f"{line}\n" for line in broken))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
