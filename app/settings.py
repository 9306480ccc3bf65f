"""Every setting in one table: the flags, `--help`, the environment, the console's info page and the README follow it.

A value comes from the flag, else from the environment (`PAGEDECK_<NAME>`), else from the default; which of the three
is remembered. This is the only module that reads the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from app.setting_texts import format_bytes, is_loopback, parse_bool, parse_bytes
from engine.config import EngineConfig
from engine.core.limits import LIMIT_ROWS, Limits, changed_limits
from engine.errors import LimitsError

Role = Literal["inference", "read-only", "admin"]
Source = Literal["default", "flag", "env"]
Kind = Literal["str", "int", "float", "seconds", "bytes", "bool", "choice", "list", "keys"]

ROLES: tuple[Role, ...] = ("inference", "read-only", "admin")
ENV_PREFIX = "PAGEDECK_"
# 0.0.0.0 reaches this machine too, and monitors write it. An address is safe here where a name would not be: no DNS.
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]", "0.0.0.0")

_ENGINE = EngineConfig()
_LIMITS = Limits()
_NO_POOL_YET = 2**31 - 1  # stands for the pool's size where only the start will tell it


class SettingsError(ValueError):
    """A setting that cannot be used; the message is one line that names the flag and what is allowed."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key and what it may do; its text never appears in a representation."""

    key: str = field(repr=False)
    role: Role


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one process. A field's default is the setting's default; `SETTINGS` says the rest."""

    # model
    model: str = _ENGINE.model
    served_model_name: str | None = _ENGINE.served_model_name
    tokenizer: str | None = _ENGINE.tokenizer
    dtype: str = _ENGINE.dtype
    max_model_len: int | None = _ENGINE.max_model_len
    device: str = _ENGINE.device
    attention_backend: str = _ENGINE.attention_backend
    enforce_eager: bool = _ENGINE.enforce_eager
    threads: int | None = _ENGINE.threads
    seed: int = _ENGINE.seed
    deterministic: bool = _ENGINE.deterministic
    generation_config: str = _ENGINE.generation_config
    # KV cache
    block_size: int = _ENGINE.block_size
    kv_cache_memory_bytes: int = _ENGINE.kv_cache_memory_bytes
    gpu_memory_utilization: float = _ENGINE.gpu_memory_utilization
    num_kv_blocks: int | None = _ENGINE.num_kv_blocks
    num_usable_blocks: int = _LIMITS.num_usable_blocks
    kv_cache_dtype: str = _ENGINE.kv_cache_dtype
    enable_prefix_caching: bool = _ENGINE.enable_prefix_caching
    # scheduler
    max_num_seqs: int = _LIMITS.max_num_seqs
    max_num_batched_tokens: int = _LIMITS.max_num_batched_tokens
    long_prefill_token_threshold: int = _LIMITS.long_prefill_token_threshold
    max_prefill_tokens_while_decoding: int | None = _LIMITS.max_prefill_tokens_while_decoding
    watermark: float = _LIMITS.watermark
    max_num_queued_reqs: int = _LIMITS.max_num_queued_reqs
    queue_timeout_s: float | None = _LIMITS.queue_timeout_s
    request_timeout_s: float | None = _LIMITS.request_timeout_s
    scheduling_policy: str = _LIMITS.scheduling_policy
    # server
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[ApiKey, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    root_path: str = ""
    data_dir: str | None = None
    shutdown_timeout: float = 1.0
    log_level: str = "info"
    disable_log_requests: bool = False
    # where each value came from; a name that is absent has its default
    sources: Mapping[str, Source] = field(default_factory=dict, compare=False)

    def engine_config(self) -> EngineConfig:
        """What the engine is built from."""
        limits = Limits(**{f.name: getattr(self, f.name) for f in fields(Limits)})
        names = [f.name for f in fields(EngineConfig) if f.name in SETTING_ROWS]
        return EngineConfig(**{name: getattr(self, name) for name in names}, limits=limits)

    def host_allow_list(self) -> tuple[str, ...]:
        """Host names that a request may carry: those given, else the loopback names and the bind address."""
        if self.allowed_hosts:
            return self.allowed_hosts
        host = f"[{self.host}]" if ":" in self.host else self.host
        return LOOPBACK_HOSTS if host in LOOPBACK_HOSTS else (*LOOPBACK_HOSTS, host)

    def source(self, name: str) -> Source:
        """Where the value of a setting came from."""
        return self.sources.get(name, "default")

    def describe(self) -> list[SettingInfo]:
        """Every setting with its value in words, in the order of the table; keys are counted, never shown."""
        return [
            SettingInfo(s.name, s.flag, s.group, s.text(getattr(self, s.name)), s.default_text(), s.help,
                        self.source(s.name), s.is_limit)
            for s in SETTINGS
        ]  # fmt: skip

    def is_loopback(self) -> bool:
        """Whether only this machine can reach the bind address."""
        return is_loopback(self.host)


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """One setting as a person reads it."""

    name: str
    flag: str
    group: str
    value: str
    default: str
    help: str
    source: Source
    is_limit: bool  # it can be changed while the engine runs


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. `none` says in words what an unset or zero value means."""

    name: str
    kind: Kind
    group: str
    help: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    none: str = ""
    metavar: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The flag that sets it."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """The environment variable that is read when the flag is absent."""
        return ENV_PREFIX + self.name.upper()

    @property
    def is_limit(self) -> bool:
        """Whether it can be changed while the engine runs."""
        return self.name in LIMIT_ROWS

    @property
    def default(self) -> object:
        """The value without flag and environment."""
        return getattr(_DEFAULTS, self.name)

    def default_text(self) -> str:
        """The default in words."""
        return self.text(self.default)

    def text(self, value: object) -> str:
        """A value in words; the text of a key is left out."""
        if self.none and (value is None or (value in ((), "", 0) and value == self.default)):
            return self.none
        if self.kind == "keys" and isinstance(value, tuple):
            counts = [(role, sum(key.role == role for key in value)) for role in ROLES]
            return ", ".join(f"{n} {role}" for role, n in counts if n)
        if self.kind == "bytes" and isinstance(value, int):
            return format_bytes(value)
        if self.kind == "bool":
            return "on" if value else "off"
        if self.kind == "list" and isinstance(value, tuple):
            return ", ".join(value)
        if isinstance(value, float):
            return f"{value:g} s" if self.kind == "seconds" else f"{value:g}"
        return str(value)

    def parse(self, raw: str) -> object:
        """The value that a flag's or a variable's text stands for.

        Raises:
            SettingsError: not a value of this kind, or outside the range; says what is allowed.
        """
        raw = raw.strip()
        try:
            value = _PARSERS[self.kind](raw)
        except ValueError as error:
            raise self._refuse(raw, str(error) if self.kind in ("bytes", "keys", "bool") else "") from None
        if self.kind == "choice" and value not in self.choices:
            raise self._refuse(raw)
        if isinstance(value, int | float) and not isinstance(value, bool) and not self.is_limit:
            too_low = self.low is not None and value < self.low
            if too_low or (self.high is not None and value > self.high) or value != value:
                raise self._refuse(raw)
        return value

    def range_text(self) -> str:
        """The allowed values in words."""
        if self.is_limit:
            return LIMIT_ROWS[self.name].range_text(_NO_POOL_YET).replace(f" and <= {_NO_POOL_YET:g}", "")
        if self.kind == "choice":
            return "one of " + ", ".join(self.choices)
        noun = {"int": "an integer", "float": "a number", "seconds": "a number of seconds"}.get(self.kind, "a value")
        bounds = [f"{sign} {bound:g}" for sign, bound in ((">=", self.low), ("<=", self.high)) if bound is not None]
        return " ".join([noun, " and ".join(bounds)]).strip()

    def _refuse(self, raw: str, why: str = "") -> SettingsError:
        shown = "" if self.kind == "keys" else f", got {raw!r}"
        return SettingsError(f"{self.flag} must be {why or self.range_text()}{shown}")


_MODEL, _CACHE, _SCHEDULER, _SERVER = "Model", "KV cache", "Scheduler", "Server"
_DTYPES = ("auto", "float32", "bfloat16", "float16")

SETTINGS: tuple[Setting, ...] = (
    Setting("model", "str", _MODEL,
            "What to serve: smollm2 (the embedded SmolLM2-135M-Instruct), a .gguf file, a directory in Hugging Face's "
            "layout, or a hub id."),
    Setting("served_model_name", "str", _MODEL, "The name that /v1/models shows and requests use.",
            none="derived from the model"),
    Setting("tokenizer", "str", _MODEL, "Another place to take the tokenizer from: a file, a directory or a hub id.",
            none="the model's own"),
    Setting("dtype", "choice", _MODEL,
            "Number format of weights and activations. auto is bfloat16 where the processor has it in hardware, else "
            "float32, and on a GPU the checkpoint's 16-bit format; float32 dequantises exactly.", choices=_DTYPES),
    Setting("max_model_len", "int", _MODEL, "Longest sequence, prompt and answer together, in tokens.", low=1,
            none="the model's own, shortened to what the KV pool holds"),
    Setting("device", "choice", _MODEL, "Where the model runs. auto takes a GPU where PyTorch sees one.",
            choices=("auto", "cpu", "cuda")),
    Setting("attention_backend", "choice", _MODEL,
            "Which code computes the layers: native is C++ and the fastest on a CPU, cpu is PyTorch's, triton is for "
            "GPUs, reference is written to be read. auto takes the best that runs here.",
            choices=("auto", "native", "cpu", "triton", "reference")),
    Setting("enforce_eager", "bool", _MODEL, "On a GPU: launch every kernel by itself, without captured graphs."),
    Setting("threads", "int", _MODEL, "CPU threads for the model's arithmetic.", low=1, high=4096,
            none="all cores this process may use"),
    Setting("seed", "int", _MODEL, "Seeds the draw of a seed for each request that brings none.", low=0),
    Setting("deterministic", "bool", _MODEL,
            "A request's tokens and log-probabilities are the same bits whatever else runs, however its prompt is cut, "
            "cached or computed again. Only the native kernels promise it; few sequences of a 4-bit model get slower."),
    Setting("generation_config", "choice", _MODEL,
            "Where the defaults of sampling come from where a request is silent: auto takes those of the model's "
            "generation_config.json, vllm takes none of them.", choices=("auto", "vllm")),
    Setting("block_size", "int", _CACHE, "Tokens whose keys and values one block holds.", low=1, high=1024),
    Setting("kv_cache_memory_bytes", "bytes", _CACHE,
            "On a CPU: memory for keys and values, as bytes or like 512M, 2GiB; capped by what is free.", low=1,
            metavar="SIZE"),
    Setting("gpu_memory_utilization", "float", _CACHE,
            "On a GPU: fraction of its memory that may be used in all; what weights and the largest step leave of it "
            "holds keys and values.", low=0.01, high=1),
    Setting("num_kv_blocks", "int", _CACHE, "Number of blocks, instead of a size in memory.", low=1,
            none="as many as the memory holds", aliases=("--num-gpu-blocks-override",)),
    Setting("num_usable_blocks", "int", _CACHE, LIMIT_ROWS["num_usable_blocks"].help, none="all blocks"),
    Setting("kv_cache_dtype", "choice", _CACHE, "Number format of keys and values; auto follows --dtype.",
            choices=_DTYPES),
    Setting("enable_prefix_caching", "bool", _CACHE,
            "Keep the blocks of finished requests and reuse them where another prompt begins with the same tokens."),
    Setting("max_num_seqs", "int", _SCHEDULER, LIMIT_ROWS["max_num_seqs"].help),
    Setting("max_num_batched_tokens", "int", _SCHEDULER, LIMIT_ROWS["max_num_batched_tokens"].help),
    Setting("long_prefill_token_threshold", "int", _SCHEDULER, LIMIT_ROWS["long_prefill_token_threshold"].help,
            none="no cap"),
    Setting("max_prefill_tokens_while_decoding", "int", _SCHEDULER,
            LIMIT_ROWS["max_prefill_tokens_while_decoding"].help, none="160 on a CPU, no cap on a GPU"),
    Setting("watermark", "float", _SCHEDULER, LIMIT_ROWS["watermark"].help),
    Setting("max_num_queued_reqs", "int", _SCHEDULER, LIMIT_ROWS["max_num_queued_reqs"].help),
    Setting("queue_timeout_s", "seconds", _SCHEDULER, LIMIT_ROWS["queue_timeout_s"].help, none="no limit"),
    Setting("request_timeout_s", "seconds", _SCHEDULER, LIMIT_ROWS["request_timeout_s"].help, none="no limit"),
    Setting("scheduling_policy", "choice", _SCHEDULER, LIMIT_ROWS["scheduling_policy"].help,
            choices=LIMIT_ROWS["scheduling_policy"].choices),
    Setting("host", "str", _SERVER,
            "Address to listen on. One that other machines can reach needs an --api-key."),
    Setting("port", "int", _SERVER, "Port to listen on; 0 takes a free one and prints it.", low=0, high=65535),
    Setting("api_key", "keys", _SERVER,
            "A key that clients must send, as KEY or KEY:ROLE with the role inference, read-only or admin (admin if "
            "none is named). May be given several times.", metavar="KEY[:ROLE]",
            none="no key; every client on this machine is admin"),
    Setting("allowed_hosts", "list", _SERVER, "Host names that requests may carry, separated by commas.",
            metavar="HOSTS", none="the names of this machine's loopback address, and --host"),
    Setting("root_path", "str", _SERVER, "Path under which a proxy serves this, such as /pagedeck.", none="none",
            metavar="PATH"),
    Setting("data_dir", "str", _SERVER,
            "Directory for what outlives a restart: keys made on /admin, and the audit log.", none="nothing is kept",
            metavar="DIR"),
    Setting("shutdown_timeout", "seconds", _SERVER,
            "Seconds that running requests get to finish after a request to stop.", low=0, high=3600),
    Setting("log_level", "choice", _SERVER, "How much to log.", choices=("debug", "info", "warning", "error")),
    Setting("disable_log_requests", "bool", _SERVER, "Log no line for each request."),
)  # fmt: skip

SETTING_ROWS: dict[str, Setting] = {row.name: row for row in SETTINGS}
_DEFAULTS = Settings()


def load_settings(flags: Mapping[str, object], env: Mapping[str, str] | None = None) -> Settings:
    """Settings from parsed flags (`{name: text, list of texts or bool}`, absent = not given) and the environment.

    Raises:
        SettingsError: the first thing that is wrong, in one line.
    """
    env = os.environ if env is None else env
    values: dict[str, object] = {}
    sources: dict[str, Source] = {}
    for setting in SETTINGS:
        if setting.name in flags:
            given = flags[setting.name]
            sources[setting.name] = "flag"
            values[setting.name] = given if isinstance(given, bool) else _parse_all(setting, given)
        elif env.get(setting.env, "") != "":
            sources[setting.name] = "env"
            values[setting.name] = _parse_all(setting, env[setting.env])
    settings = Settings(**values, sources=sources)  # type: ignore[arg-type]
    _check(settings)
    return settings


def _parse_all(setting: Setting, given: object) -> object:
    """One text, or the texts of a flag that was repeated."""
    if isinstance(given, str):
        return setting.parse(given)
    assert isinstance(given, Sequence)
    parsed = [setting.parse(text) for text in given]
    return tuple(item for items in parsed for item in items) if setting.kind in ("keys", "list") else parsed[-1]  # type: ignore[attr-defined]


def _check(settings: Settings) -> None:
    """What one value alone cannot tell: the engine's own ranges, and a reachable address without a key."""
    changes = {name: getattr(settings, name) for name in LIMIT_ROWS}
    if settings.num_usable_blocks == 0:  # at start: all blocks
        del changes["num_usable_blocks"]
    if settings.max_prefill_tokens_while_decoding is None:  # at start: by device
        del changes["max_prefill_tokens_while_decoding"]
    try:
        changed_limits(Limits(), changes, settings.num_kv_blocks or _NO_POOL_YET)
    except LimitsError as error:
        allowed = error.allowed.replace(f" and <= {_NO_POOL_YET:g}", "").replace("null (off) or seconds", "seconds")
        flag = SETTING_ROWS[error.field].flag
        raise SettingsError(f"{flag} must be {allowed}, got {error.value!r}") from None
    if not settings.is_loopback() and not settings.api_key:
        raise SettingsError(
            f"--host {settings.host} can be reached from other machines: give an --api-key, or listen on 127.0.0.1"
        )
    if "allowed_hosts" in settings.sources and not settings.allowed_hosts:
        raise SettingsError("--allowed-hosts must name at least one host")
    if settings.root_path and not settings.root_path.startswith("/"):
        raise SettingsError(f"--root-path must begin with a slash, got {settings.root_path!r}")


def _parse_keys(text: str) -> tuple[ApiKey, ...]:
    """One key, or several separated by commas. A colon always begins the role, so that a misspelt one is noticed."""
    keys = []
    for part in text.split(","):
        key, colon, role = part.strip().partition(":")
        if not key:
            raise ValueError("KEY or KEY:ROLE with a key that is not empty")
        if colon and role not in ROLES:
            raise ValueError(f"KEY or KEY:ROLE with one of the roles {', '.join(ROLES)}")
        keys.append(ApiKey(key, _ROLE_OF[role] if colon else "admin"))
    return tuple(keys)


_ROLE_OF: dict[str, Role] = {role: role for role in ROLES}
_PARSERS: dict[Kind, Callable[[str], object]] = {
    "str": str,
    "choice": str,
    "int": int,
    "float": float,
    "seconds": float,
    "bytes": parse_bytes,
    "bool": parse_bool,
    "list": lambda text: tuple(part.strip() for part in text.split(",") if part.strip()),
    "keys": _parse_keys,
}


def tell_libraries() -> None:
    """Defaults of libraries that read the environment once, when they are loaded; what is set already stays.

    GNU OpenMP spins some 10 ms for the next piece of work. Where the cores are also wanted by others, the spinning
    thread holds up the one it waits for, and a step takes seconds; 10,000 rounds bridge the gaps within a step.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def child_environment(keys: Sequence[ApiKey]) -> dict[str, str]:
    """The environment of a child that gets its settings as flags, and `keys` here: others can read command lines."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    if keys:
        environment[SETTING_ROWS["api_key"].env] = ",".join(f"{key.key}:{key.role}" for key in keys)
    return environment


def markdown_table() -> str:
    """The flags as the README's table shows them."""
    lines = ["| flag | default | what it does |", "| --- | --- | --- |"]
    lines += [f"| `{s.flag}` | {s.default_text()} | {s.help} |" for s in SETTINGS]
    return "\n".join(lines) + "\n"
