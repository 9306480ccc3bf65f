"""The table of settings: one truth for flags, environment, help, console and engine."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.setting_texts import format_bytes, parse_bytes
from app.settings import (
    LOOPBACK_HOSTS,
    SETTING_ROWS,
    SETTINGS,
    ApiKey,
    Settings,
    SettingsError,
    child_environment,
    load_settings,
)
from engine.config import EngineConfig
from engine.core.limits import LIMIT_ROWS, Limits


def test_the_table_has_a_row_for_every_field_and_no_other() -> None:
    assert [f.name for f in fields(Settings) if f.name != "sources"] == [setting.name for setting in SETTINGS]


def test_every_limit_and_every_default_of_the_engine_is_reachable_by_a_flag() -> None:
    assert set(LIMIT_ROWS) <= set(SETTING_ROWS)
    assert load_settings({}, {}).engine_config() == EngineConfig()


def test_every_row_explains_itself_in_whole_sentences() -> None:
    for setting in SETTINGS:
        assert setting.help.endswith("."), setting.name
        assert setting.default_text() not in ("", "None", "()"), setting.name


def test_a_flag_wins_over_the_environment_and_that_over_the_default() -> None:
    env = {"PAGEDECK_PORT": "9001", "PAGEDECK_MAX_NUM_SEQS": "8", "PORT": "1", "PAGEDECK_SEED": ""}
    settings = load_settings({"port": "9002"}, env)
    assert (settings.port, settings.max_num_seqs, settings.seed) == (9002, 8, 0)
    assert [settings.source(name) for name in ("port", "max_num_seqs", "seed")] == ["flag", "env", "default"]


def test_values_reach_the_engine() -> None:
    flags = {
        "num_kv_blocks": "64", "max_num_seqs": "2", "kv_cache_memory_bytes": "512M", "enable_prefix_caching": False,
        "scheduling_policy": "priority", "queue_timeout_s": "1.5", "num_usable_blocks": "32", "dtype": "float32",
    }  # fmt: skip
    config = load_settings(flags, {}).engine_config()
    assert (config.num_kv_blocks, config.kv_cache_memory_bytes) == (64, 512 * 1024**2)
    assert (config.enable_prefix_caching, config.dtype) == (False, "float32")
    assert config.limits == Limits(
        max_num_seqs=2, scheduling_policy="priority", queue_timeout_s=1.5, num_usable_blocks=32
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_num_seqs": "0"}, "--max-num-seqs must be an integer >= 1 and <= 4096, got 0"),
        ({"max_num_seqs": "many"}, "--max-num-seqs must be an integer >= 1 and <= 4096, got 'many'"),
        ({"port": "65536"}, "--port must be an integer >= 0 and <= 65535, got '65536'"),
        ({"watermark": "nan"}, "--watermark must be a number >= 0 and <= 0.5, got nan"),
        ({"shutdown_timeout": "nan"}, "--shutdown-timeout must be a number of seconds >= 0 and <= 3600, got 'nan'"),
        ({"queue_timeout_s": "0"}, "--queue-timeout-s must be seconds > 0 and <= 1e+09, got 0.0"),
        ({"num_usable_blocks": "-1"}, "--num-usable-blocks must be an integer >= 1, got -1"),
        (
            {"num_kv_blocks": "64", "num_usable_blocks": "65"},
            "--num-usable-blocks must be an integer >= 1 and <= 64, got 65",
        ),
        ({"dtype": "fp32"}, "--dtype must be one of auto, float32, bfloat16, float16, got 'fp32'"),
        (
            {"kv_cache_memory_bytes": "2Q"},
            "--kv-cache-memory-bytes must be a size such as 2147483648, 512M or 2GiB, got '2Q'",
        ),
        ({"root_path": "deck"}, "--root-path must begin with a slash, got 'deck'"),
        ({"allowed_hosts": [""]}, "--allowed-hosts must name at least one host"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_in_one_line_with_the_range(flags: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings(flags, {})
    assert str(error.value) == message


def test_a_variable_is_checked_like_its_flag() -> None:
    with pytest.raises(SettingsError, match="--max-num-seqs must be"):
        load_settings({}, {"PAGEDECK_MAX_NUM_SEQS": "5000"})
    with pytest.raises(SettingsError, match="--enable-prefix-caching must be true or false"):
        load_settings({}, {"PAGEDECK_ENABLE_PREFIX_CACHING": "maybe"})
    assert load_settings({}, {"PAGEDECK_ENABLE_PREFIX_CACHING": "off"}).enable_prefix_caching is False


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1"])
def test_a_loopback_address_needs_no_key(host: str) -> None:
    assert load_settings({"host": host}, {}).is_loopback()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_an_address_that_others_reach_needs_a_key(host: str) -> None:
    with pytest.raises(SettingsError, match="give an --api-key"):
        load_settings({"host": host}, {})
    assert load_settings({"host": host, "api_key": ["secret"]}, {}).host == host


def test_keys_carry_a_role_and_are_admin_without_one() -> None:
    settings = load_settings({"api_key": ["one", "two:read-only", "three:inference"]}, {})
    assert settings.api_key == (ApiKey("one", "admin"), ApiKey("two", "read-only"), ApiKey("three", "inference"))
    assert load_settings({}, {"PAGEDECK_API_KEY": "a:inference,b"}).api_key == (
        ApiKey("a", "inference"),
        ApiKey("b", "admin"),
    )


@pytest.mark.parametrize("text", ["secret:amdin", "secret:", ":admin", ""])
def test_a_misspelt_role_is_refused_without_printing_the_key(text: str) -> None:
    with pytest.raises(SettingsError, match="--api-key must be KEY or KEY:ROLE") as error:
        load_settings({"api_key": [text]}, {})
    assert "secret" not in str(error.value)


def test_no_representation_shows_a_key() -> None:
    settings = load_settings({"api_key": ["sesame", "open:read-only"]}, {})
    assert "sesame" not in repr(settings) + str(settings.describe())
    row = next(row for row in settings.describe() if row.name == "api_key")
    assert (row.value, row.source) == ("1 read-only, 1 admin", "flag")


def test_the_description_says_value_default_and_source_in_words() -> None:
    rows = {row.name: row for row in load_settings({"kv_cache_memory_bytes": "1GiB"}, {}).describe()}
    assert list(rows) == list(SETTING_ROWS)
    memory = rows["kv_cache_memory_bytes"]
    assert (memory.value, memory.default, memory.source) == ("1 GiB", "2 GiB", "flag")
    assert rows["max_model_len"].value == "the model's own, shortened to what the KV pool holds"
    assert (rows["max_num_seqs"].is_limit, memory.is_limit) == (True, False)


def test_hosts_are_the_loopback_names_and_the_bind_address_unless_named() -> None:
    assert load_settings({}, {}).host_allow_list() == LOOPBACK_HOSTS
    assert "0.0.0.0" in LOOPBACK_HOSTS, "vllm-top asks by this address unless told otherwise"
    bound = load_settings({"host": "10.0.0.7", "api_key": ["k"]}, {})
    assert bound.host_allow_list() == (*LOOPBACK_HOSTS, "10.0.0.7")
    assert load_settings({"allowed_hosts": ["a.example, b.example"]}, {}).host_allow_list() == (
        "a.example",
        "b.example",
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("17", 17), ("1k", 1024), ("512M", 512 * 1024**2), ("2GiB", 2 * 1024**3), ("2 gib", 2 * 1024**3),
        ("1.5G", 3 * 1024**3 // 2), ("2GB", 2 * 10**9), ("3B", 3), ("1TiB", 1024**4),
    ],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "1e9", "2 GiB more", "0x10"])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="a size such as"):
        parse_bytes(text)


@given(st.integers(min_value=1, max_value=2**43))
def test_a_size_in_words_is_right_to_four_digits(size: int) -> None:
    words = format_bytes(size).replace(" bytes", "")
    assert parse_bytes(words) == pytest.approx(size, rel=5e-4, abs=1)


def test_a_child_gets_keys_but_no_other_setting_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDECK_ROOT_PATH", "/elsewhere")
    monkeypatch.setenv("KEPT", "yes")
    keys = (ApiKey("a", "inference"), ApiKey("b", "admin"))
    environment = child_environment(keys)
    assert environment["KEPT"] == "yes"
    assert "PAGEDECK_ROOT_PATH" not in environment
    assert load_settings({}, environment).api_key == keys
    assert load_settings({}, child_environment(())).api_key == ()
