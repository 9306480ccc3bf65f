"""The command: what it refuses, what it explains, and that it does so at once."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

import app.cli
from app.cli import build_parser, main
from app.settings import SETTINGS, Settings
from app.version import VERSION


def help_of(*command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The help text of a command, with its line breaks taken out."""
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_serves_help_explains_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("serve", capsys=capsys).replace("- ", "-")
    for setting in SETTINGS:
        assert setting.flag in text
        words = f"{setting.help} Default: {setting.default_text()}.".replace("- ", "-")
        assert words in text


@pytest.mark.parametrize(
    "command", [("serve",), ("bench",), ("bench", "offline"), ("bench", "online"), ("bench", "schedule"), ("version",)]
)
def test_every_command_has_help(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert help_of(*command, capsys=capsys).startswith(f"usage: pagedeck {' '.join(command)}")


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("serve --max-num-seqs 0", "pagedeck: --max-num-seqs must be an integer >= 1 and <= 4096, got 0"),
        ("serve --max-num-seq 2", "pagedeck: unknown argument --max-num-seq; did you mean --max-num-seqs?"),
        (
            "serve --host 0.0.0.0",
            "pagedeck: --host 0.0.0.0 can be reached from other machines: give an --api-key, or listen on 127.0.0.1",
        ),
        (
            "bench offline --workload-file /none.jsonl",
            "pagedeck: the workload file /none.jsonl cannot be read: "
            "[Errno 2] No such file or directory: '/none.jsonl'",
        ),
        (
            "bench offline --workload mixd",
            "pagedeck: --workload must be one of mixed, shared-prefix, interference, nano-vllm (or KIND:N), got 'mixd'",
        ),
        (
            "bench offline --workload mixed --reps 0",
            "pagedeck bench offline: argument --reps: must be an integer >= 1, got '0'",
        ),
        (
            "bench online --workload mixed --warmup x",
            "pagedeck bench online: argument --warmup: must be an integer >= 0, got 'x'",
        ),
        ("bench offline", "pagedeck bench offline: one of the arguments --workload-file --workload is required"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(command: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(command.split())
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    output = capsys.readouterr()
    assert (status, output.out, output.err) == (2, "", line + "\n")


def test_serve_passes_the_settings_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    class FakeServer:
        @staticmethod
        def serve(settings: Settings) -> int:
            seen.append(settings)
            return 7

    monkeypatch.setitem(sys.modules, "app.server", FakeServer)
    flags = ["--port", "0", "--num-gpu-blocks-override=64", "--no-enable-prefix-caching", "--disable-log-requests"]
    assert main(["serve", *flags, "--api-key", "a", "--api-key", "b:read-only"]) == 7
    (settings,) = seen
    assert (settings.port, settings.num_kv_blocks) == (0, 64)
    assert (settings.enable_prefix_caching, settings.disable_log_requests) == (False, True)
    assert [(key.key, key.role) for key in settings.api_key] == [("a", "admin"), ("b", "read-only")]


def test_the_version_names_what_matters_in_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"pagedeck {VERSION}"
    assert [line.split()[0] for line in lines] == ["pagedeck", "python", "torch", "transformers", "starlette"]


def test_the_installed_command_is_this_one() -> None:
    command = Path(sys.executable).with_name("pagedeck")
    run = subprocess.run([command, "version"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith(f"pagedeck {VERSION}\n")


def test_flags_for_another_process_say_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = [
        "bench", "offline", "--workload", "mixed:2", "--num-kv-blocks", "64", "--no-enable-prefix-caching",
        "--kv-cache-memory-bytes", "1.5G", "--watermark", "0.25", "--queue-timeout-s", "2",
    ]  # fmt: skip
    first = settings_of(argv, monkeypatch)
    again = settings_of(["bench", "offline", "--workload", "mixed:2", *app.cli.given_flags(first)], monkeypatch)
    assert again == first
    assert "api-key" not in " ".join(app.cli.given_flags(first))


def settings_of(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The settings that a command line stands for."""
    seen: list[Settings] = []

    def record(_args: argparse.Namespace, settings: Settings) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr(app.cli, "_run", record)
    assert main(argv) == 0
    return seen[0]


def test_abbreviated_flags_are_not_guessed() -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--max-num-s", "2"])
