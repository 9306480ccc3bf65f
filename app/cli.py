"""The command `pagedeck`: serve, bench offline, bench online, bench schedule, version.

Knows the flags (from `app.settings`) and nothing else; each command imports what it runs only when it runs, so that
`--help`, `version` and a refused flag answer at once.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import NoReturn

from app.settings import (
    ENV_PREFIX,
    SETTING_ROWS,
    SETTINGS,
    Setting,
    Settings,
    SettingsError,
    load_settings,
    tell_libraries,
)
from app.version import VERSION

# A bench starts its server where nobody else sees it; keys travel in the environment.
_NOT_FOR_BENCHES = ("api_key", "host", "port", "root_path", "allowed_hosts", "data_dir")
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
DRY_RUN_BLOCKS, DRY_RUN_MAX_MODEL_LEN = 100_000, 16_384
DRY_RUN_SETTINGS = ("block_size", "num_kv_blocks", "num_usable_blocks", "enable_prefix_caching", "max_model_len")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        """Print `message` to stderr, with the nearest known flag for an unknown one, and exit with status 2."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            flag = unknown.split()[0].split("=")[0]
            near = difflib.get_close_matches(flag, [s.flag for s in SETTINGS], n=1)
            hint = f"did you mean {near[0]}?" if near else "see --help"
            message = f"unknown argument {flag}; {hint}"
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the exit status."""
    args = build_parser().parse_args(argv)
    if args.command == "version":
        return print_version()
    try:
        settings = load_settings({name: value for name, value in vars(args).items() if name in SETTING_ROWS})
    except SettingsError as error:
        print(f"pagedeck: {error}", file=sys.stderr)
        return EXIT_USAGE
    try:
        return _run(args, settings)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(args: argparse.Namespace, settings: Settings) -> int:
    tell_libraries()
    if args.command == "serve":
        from app.server import serve

        return serve(settings)
    if args.bench == "schedule":
        return _run_schedule(args, settings)
    from engine.bench.workloads import WorkloadError, load_workload

    try:
        workload = load_workload(args.workload_file, args.workload)
    except WorkloadError as error:
        print(f"pagedeck: {error}", file=sys.stderr)
        return EXIT_USAGE
    if args.bench == "offline":
        from engine.bench.offline import run_offline
        from engine.errors import StartupError

        try:
            return run_offline(settings.engine_config(), workload, reps=args.reps, warmup=args.warmup)
        except StartupError as error:
            print(f"pagedeck: {error}", file=sys.stderr)
            return EXIT_FAILED
    from app.bench.online import run_online

    return run_online(
        settings, workload, reps=args.reps, warmup=args.warmup, base_url=args.base_url, flags=given_flags(settings)
    )


def _run_schedule(args: argparse.Namespace, settings: Settings) -> int:
    from engine.bench.schedule import bench_schedule
    from engine.bench.workloads import WorkloadError

    config = settings.engine_config()
    try:
        return bench_schedule(
            args.trace,
            config.limits,
            num_blocks=config.num_kv_blocks or DRY_RUN_BLOCKS,
            block_size=config.block_size,
            max_model_len=config.max_model_len or DRY_RUN_MAX_MODEL_LEN,
            enable_prefix_caching=config.enable_prefix_caching,
            step_cost_s=args.step_cost_ms / 1e3,
            token_cost_s=args.token_cost_us / 1e6,
        )
    except WorkloadError as error:
        print(f"pagedeck: {error}", file=sys.stderr)
        return EXIT_USAGE


def given_flags(settings: Settings) -> list[str]:
    """The settings that were not left at their default, as flags for a server that only a bench talks to."""
    flags = []
    for setting in SETTINGS:
        if settings.source(setting.name) == "default" or setting.name in _NOT_FOR_BENCHES:
            continue
        value = getattr(settings, setting.name)
        if setting.kind == "bool":
            if value != setting.default or setting.default:
                flags.append(setting.flag if value else "--no-" + setting.flag[2:])
        else:
            flags.append(f"{setting.flag}={','.join(value) if isinstance(value, tuple) else value}")
    return flags


def print_version() -> int:
    """The versions that matter in a report of a fault, from the packages' metadata."""
    print(f"pagedeck {VERSION}")
    print(f"python {sys.version.split()[0]}")
    for package in ("torch", "transformers", "starlette"):
        try:
            print(f"{package} {installed_version(package)}")
        except PackageNotFoundError:
            print(f"{package} is not installed")
    return 0


def build_parser() -> Parser:
    """The parser of the whole command; every flag's help ends with its default in words."""
    parser = Parser(
        prog="pagedeck",
        description="A web playground and admin console whose own process hosts a paged-attention LLM engine.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = _add_command(
        commands, "serve", "Start the server: pages, admin console and the OpenAI-compatible API in one process."
    )
    _add_settings(serve, SETTINGS)

    bench = _add_command(
        commands, "bench", "Measure: offline (the engine alone), online (over HTTP), schedule (dry run)."
    )
    benches = bench.add_subparsers(dest="bench", required=True, metavar="offline|online|schedule")
    offline = _add_command(
        benches, "offline", "All requests at once, in this process, without HTTP; greedy, exactly max_tokens each."
    )
    _add_bench_options(offline)
    _add_settings(offline, [s for s in SETTINGS if s.group != "Server"])
    online = _add_command(
        benches, "online", "Send each request at its arrival time, streaming, to a server that is started for it."
    )
    _add_bench_options(online)
    online.add_argument(
        "--base-url", metavar="URL", help="Send to this server instead of starting one. Default: start one."
    )
    _add_settings(online, [s for s in SETTINGS if s.name == "api_key" or s.name not in _NOT_FOR_BENCHES])

    schedule = _add_command(
        benches, "schedule", "Dry run: the real scheduler over a recorded trace, with a model that only takes time."
    )
    _add_schedule_options(schedule)
    _add_settings(schedule, [s for s in SETTINGS if s.group == "Scheduler" or s.name in DRY_RUN_SETTINGS])

    _add_command(commands, "version", "Print the versions of pagedeck and of what it is built on.")
    return parser


def _add_command(commands: argparse._SubParsersAction[Parser], name: str, text: str) -> Parser:
    epilog = None if name in ("version", "bench") else f"Each setting can also come from {ENV_PREFIX}<NAME>."
    return commands.add_parser(name, help=text, description=text, epilog=epilog, allow_abbrev=False)


def _add_bench_options(parser: Parser) -> None:
    group = parser.add_argument_group("Bench")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--workload-file",
        metavar="FILE",
        help="JSON lines, one request each: prompt_token_ids, max_tokens, arrival_s. No default.",
    )
    source.add_argument(
        "--workload",
        metavar="KIND[:N]",
        help="Or a made one: mixed:32, shared-prefix:64, interference or nano-vllm (N = requests). No default.",
    )
    group.add_argument("--reps", type=_at_least(1), default=1, metavar="N", help="Measured repetitions. Default: 1.")
    group.add_argument(
        "--warmup",
        type=_at_least(0),
        default=4,
        metavar="N",
        help="Short requests before the first repetition. Default: 4.",
    )


def _add_schedule_options(parser: Parser) -> None:
    group = parser.add_argument_group("Dry run")
    group.add_argument(
        "--trace",
        required=True,
        metavar="FILE",
        help="An Azure LLM trace (CSV), a Mooncake trace or a workload file (JSON lines), gzipped or not. No default.",
    )
    group.add_argument(
        "--step-cost-ms", type=_positive, default=15.0, metavar="X", help="Simulated time of any step. Default: 15 ms."
    )
    group.add_argument(
        "--token-cost-us",
        type=_positive,
        default=30.0,
        metavar="X",
        help=f"And of each token in it. Default: 30 µs. Without --num-kv-blocks the pool has {DRY_RUN_BLOCKS:,} "
        f"blocks, without --max-model-len sequences have at most {DRY_RUN_MAX_MODEL_LEN:,} tokens.",
    )


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text!r}")
    return value


def _at_least(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"must be an integer >= {low}, got {text!r}")
        return int(text)

    return parse


def _add_settings(parser: Parser, settings: Iterable[Setting]) -> None:
    """Add flags that collect texts only: values are parsed in one place, for flags and environment alike."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for setting in settings:
        group = groups.setdefault(setting.group, parser.add_argument_group(setting.group))
        _add_setting(group, setting)


def _add_setting(group: argparse._ArgumentGroup, setting: Setting) -> None:
    text = f"{setting.help} Default: {setting.default_text()}.".replace("%", "%%")
    if setting.kind == "bool" and setting.default:
        group.add_argument(
            setting.flag,
            dest=setting.name,
            action=argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
            help=text,
        )
    elif setting.kind == "bool":
        group.add_argument(setting.flag, dest=setting.name, action="store_true", default=argparse.SUPPRESS, help=text)
    else:
        choices = "|".join(setting.choices)
        group.add_argument(
            setting.flag,
            *setting.aliases,
            dest=setting.name,
            action="append" if setting.kind in ("keys", "list") else "store",
            default=argparse.SUPPRESS,
            metavar=setting.metavar or choices or _METAVARS.get(setting.kind, "VALUE"),
            help=text,
        )


_METAVARS = {"int": "N", "float": "X", "seconds": "SECONDS", "str": "NAME"}

if __name__ == "__main__":
    sys.exit(main())
