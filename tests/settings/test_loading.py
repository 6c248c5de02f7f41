"""Settings files that are read, and the problems reported for wrong ones."""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.errors import SettingsInvalid
from agent.settings import Settings, load
from tests.settings.nasty_documents import NASTY
from tests.settings.reading import problem, problems, read, write_settings

SAMPLE = """\
listen: {host: 127.0.0.1, port: 9470}
otlp:   {grpc: "127.0.0.1:4317", http: "127.0.0.1:4318", forward_to: null}
proxy:  {listen: null, engine: null}            # e.g. "127.0.0.1:8080"
storage: {file: goodput.db, keep_requests: 7d, keep_rollups: 400d}
engines:
  - name: chat-0                                # unique
    url: http://127.0.0.1:8000
    kind: auto                                  # auto | vllm | sglang | tgi | trtllm | llamacpp
    model_config: null                          # path of the model's Hugging Face config.json
    role: both                                  # both | prefill | decode
    gpus: []                                    # NVML indexes or UUIDs
    gpu_hour_usd: null                          # no price, no cost: never a guess
objectives:
  - name: chat
    match: {model: "*"}                         # model, tenant, route, min/max_input_tokens
    ttft_ms: 200
    tpot_ms: 120
    e2e_ms: null
    target: 0.95
    window: 30d
"""


@pytest.mark.parametrize(
    "page", ["README.md", "docs/settings.md", "docs/choosing-objectives.md", "docs/first-hour.md"]
)
def test_a_sample_of_the_documents_is_read(tmp_path: Path, page: str) -> None:
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    samples = re.findall(r"^ *```yaml\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    assert samples
    for sample in samples:
        loaded = read(tmp_path, sample)
        assert loaded.engines
        assert loaded.all_objectives()


@pytest.mark.parametrize(
    "text",
    ["", "# nothing yet\n", "{}", "---\n", "listen:\notlp:\nproxy:\nstorage:\nengines:\nname:\n"],
    ids=["empty", "comment", "empty mapping", "empty document", "empty sections"],
)
def test_an_empty_file_gives_the_defaults(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text) == load(None, {}) == Settings()


def test_the_defaults_are_those_of_the_sample_and_the_chat_preset(tmp_path: Path) -> None:
    defaults, sample = load(None, {}), read(tmp_path, SAMPLE)
    for section in ("listen", "otlp", "proxy", "storage"):
        assert getattr(defaults, section) == getattr(sample, section)
    assert defaults.engines == ()
    (preset,), (configured,) = defaults.all_objectives(), sample.all_objectives()
    assert (preset.is_preset, configured.is_preset) == (True, False)
    assert replace(preset, is_preset=False, max_error_ratio=None) == configured


EVERYTHING_WRONG = """\
colour: green
listen: {port: 70000, hots: 0.0.0.0}
otlp: {grpc: "4317", http: 4318, forward_to: ftp://h}
proxy: {listen: "8080"}
storage: {publish_to: "mysql://h/d", keep_requests: 7, keep_rollups: -1d}
engines:
  - {name: a, url: "http://h:1", kind: ollama}
  - {name: a, url: h, role: none, gpu_hour_usd: -1}
  - {url: "http://h:2", scrape_interval: 0s}
objectives:
  - {name: x, ttft_ms: fast}
  - {name: x, compat: locust, target: 95}
  - {name: "no spaces", preset: gold}
  - {name: y, ttft_ms: 1, match: {modle: a, min_input_tokens: 9, max_input_tokens: 8}}
"""


def test_every_problem_is_listed_at_once(tmp_path: Path) -> None:
    found = problems(tmp_path, EVERYTHING_WRONG)
    keys = [sentence.partition(": ")[0] for sentence in found]
    assert sorted(keys) == sorted(
        [
            *("colour", "listen.port", "listen.hots", "proxy.listen"),
            *("otlp.grpc", "otlp.http", "otlp.forward_to"),
            *("storage.publish_to", "storage.keep_requests", "storage.keep_rollups"),
            *("engines", "engines[0].kind", "engines[1].url", "engines[1].role"),
            *("engines[1].gpu_hour_usd", "engines[2].name", "engines[2].scrape_interval"),
            *("objectives", "objectives[0].ttft_ms"),
            *("objectives[1].compat", "objectives[1].target", "objectives[1].e2e_ms"),
            *("objectives[2].name", "objectives[2].preset"),
            *("objectives[3].match.modle", "objectives[3].match.max_input_tokens"),
        ]
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("colour: 1", "colour: is not a known key; remove it or correct its spelling"),
        ("lisen: {port: 1}", "lisen: is not a known key; did you mean listen?"),
        (
            "engines: [{name: a, url: 'http://h', kind: vlm}]",
            "engines[0].kind: Input should be 'auto', 'vllm', 'sglang', 'tgi', 'trtllm' or "
            "'llamacpp' (got 'vlm'); did you mean vllm?",
        ),
        (
            "objectives: [{name: a, preset: interactiv}]",
            "objectives[0].preset: 'interactiv' is not known; known are interactive, chat, 7b, "
            "13b, 70b; did you mean interactive?",
        ),
        ("listen: {port: '1'}", "listen.port: Input should be a valid integer (got '1')"),
        ("listen: 9470", "listen: must be a mapping of keys (got 9470)"),
        ("engines: {name: a}", "engines: must be a list (got a mapping)"),
        ("engines: [{name: a}]", "engines[0].url: is missing"),
        (
            "proxy: {listen: '127.0.0.1:8080'}",
            "engines: proxy.listen is set, and there is no engine for the proxy",
        ),
        (
            "proxy: {engine: chat-0}",
            "engines: proxy.engine 'chat-0' is not one of them (there are none)",
        ),
        ("proxy: {tenant_header: 'a b'}", "proxy.tenant_header"),
        (
            "objectives: [{name: a}]",
            "objectives[0].e2e_ms: no limit is set; set at least one of ttft_ms, tpot_ms and",
        ),
        ("objectives: [{name: a, preset: [x]}]", "objectives[0].preset: Input should be a valid"),
        ("objectives: [{name: 'a,b', ttft_ms: 1}]", "objectives[0].name: String should match"),
        ("objectives: [{name: a, ttft_ms: 0}]", "objectives[0].ttft_ms: Input should be greater"),
        ("objectives: [{name: a, ttft_ms: 1, target: 1}]", "objectives[0].target: Input should be"),
        (
            "objectives: [{name: a, ttft_ms: 1}, {name: b, ttft_ms: 1}, {name: a, ttft_ms: 2}]",
            "objectives: the name 'a' is used 2 times; names must be unique",
        ),
        (
            "routers: [{name: a, url: 'http://h:1'}, {name: a, url: 'http://h:2'}]",
            "routers: the name 'a' is used 2 times; names must be unique",
        ),
    ],
)
def test_a_problem_names_the_key_and_the_value(tmp_path: Path, text: str, sentence: str) -> None:
    assert problem(tmp_path, text).startswith(sentence)


def test_a_file_that_is_missing_has_a_name_like_one_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "agent.yml").touch()
    for name, what in (
        ("agnt.yml", "did you mean agent.yml?"),
        ("other", f"looked for in {tmp_path}"),
        ("gone/agent.yml", f"the folder {tmp_path}/gone is missing, too"),
    ):
        with pytest.raises(SettingsInvalid) as caught:
            load(tmp_path / name, {})
        begin, end = str(caught.value).split(": ", 1)
        assert begin == str(tmp_path / name)
        assert end == f"cannot be read: No such file or directory; {what}"


def test_a_folder_that_cannot_be_listed_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("os.listdir", refuse)
    with pytest.raises(SettingsInvalid) as caught:
        load(tmp_path / "agent.yml", {})
    assert str(caught.value).endswith(f"No such file or directory; looked for in {tmp_path}")


def test_problems_repeat_no_secret(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        "storage: 'postgresql://u:s3cret@h/d'\n"
        "otlp: {forward_to: 'ftp://u:s3cret@h'}\n"
        "engines: [{name: a, url: 'http://u:s3cret@h:99999'}]\n",
    )
    assert len(found) == 3
    assert not any("s3cret" in sentence for sentence in found)
    other_database = problem(tmp_path, "storage: {publish_to: 'mysql://u:s3cret@h/d'}")
    assert other_database.startswith("storage.publish_to: 'mysql://u:***@h/d' is not a supported")


@pytest.mark.parametrize(
    ("key", "value", "advice"),
    [
        (
            "url",
            "postgresql://u:s3cret@h/d",
            "is now storage.file for SQLite (a path), and storage.publish_to",
        ),
        ("journal.path", "/j.db", "is now storage.file"),
        ("journal.max_age", "2d", "is now storage.keep_in_file"),
        ("journal", "null", "is now storage.file, storage.keep_in_file and storage.max_bytes"),
        ("write_timeout", "30s", "remove it; an agent writes to storage.file alone"),
    ],
)
def test_a_replaced_key_names_the_new_one(
    tmp_path: Path, key: str, value: str, advice: str
) -> None:
    *outer, last = key.split(".")
    inner = "".join(f"{name}: {{" for name in outer)
    from_file = problem(tmp_path, f"storage: {{{inner}{last}: '{value}'{'}' * len(outer)}}}")
    variable = f"GOODPUT_STORAGE__{key.upper().replace('.', '__')}"
    with pytest.raises(SettingsInvalid) as refused:
        load(None, {variable: value})
    assert from_file.startswith(f"storage.{key}: {advice}")
    assert str(refused.value) == f"{variable}: {from_file}"
    assert "s3cret" not in from_file


@pytest.mark.parametrize("what", NASTY)
def test_a_nasty_file_gives_a_sentence_with_its_line_key_and_value(
    tmp_path: Path, what: str
) -> None:
    text, begin = NASTY[what]
    file = tmp_path / "agent.yml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SettingsInvalid) as caught:
        load(file, {})
    first, *others = caught.value.problems
    assert first.startswith(f"{file}{begin}")
    assert "\n" not in first
    assert len(first) < 500
    assert len(others) <= 50
    assert "s3cret" not in str(caught.value)


def test_of_many_problems_the_first_ones_are_listed(tmp_path: Path) -> None:
    found = problems(tmp_path, f"engines: [{', '.join(['1'] * 2_000)}]")
    assert len(found) == 51
    assert found[-1] == "1,950 more problems"


def test_a_value_is_named_with_its_line_or_its_variable(tmp_path: Path) -> None:
    file = write_settings(tmp_path, "listen:\n  host: h\n\n  port:\n    many\nengines: [{name: a}]")
    with pytest.raises(SettingsInvalid) as caught:
        load(file, {"GOODPUT_ENGINES__0__URL": "h", "GOODPUT_NAME": "''"})
    assert [sentence.partition(" ")[0] for sentence in caught.value.problems] == [
        *("GOODPUT_NAME:", f"{file}:4:", "GOODPUT_ENGINES__0__URL:"),
    ]


def test_an_alias_is_a_copy_of_its_value(tmp_path: Path) -> None:
    text = (
        "engines: [&a {name: a, url: 'http://a', limits: &l {step_tokens: 9}}, {<<: *a, name: b}]"
    )
    settings = read(tmp_path, text, {"GOODPUT_ENGINES__0__LIMITS__STEP_TOKENS": "7"})
    assert [engine.limits.step_tokens for engine in settings.engines] == [7, 9]
    assert [engine.name for engine in settings.engines] == ["a", "b"]


@pytest.mark.parametrize("kind", ["named pipe", "device", "directory"])
def test_only_a_regular_file_is_read(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "agent.yml"
    if kind == "named pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero" if kind == "device" else tmp_path)
    with pytest.raises(
        SettingsInvalid, match=f"agent.yml: cannot be read: Is a {kind}; name a reg"
    ):
        load(file, {})


texts = st.text(max_size=8) | st.text("\"'*&!{}[],:?-#|>%@`<=~0x_1e.9\t\n\\uU", max_size=40)
yaml_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.dates() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
KEYS: tuple[str, ...] = (
    "listen",
    "otlp",
    "proxy",
    "storage",
    "engines",
    "objectives",
    "name",
    "port",
    "url",
)
KEYS += ("prices", "from", "gpu", "otlp_metrics", "headers", "security", "<<", "electricity")
contents = st.recursive(
    yaml_values,
    lambda inner: st.dictionaries(st.sampled_from(KEYS), inner | st.lists(inner, max_size=2)),
    max_leaves=8,
)


def loads(file: Path, environment: Mapping[str, str] | None = None) -> None:
    """Load it; anything but settings or sentences about them is a failure."""
    found: tuple[str, ...] = ("nothing",)
    try:
        load(file, environment or {}).shown()
    except SettingsInvalid as error:
        found = error.problems
    assert found
    assert all(sentence.strip() for sentence in found)


FUZZED = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FUZZED
@given(contents)
def test_any_content_gives_settings_or_problems(tmp_path: Path, content: object) -> None:
    loads(write_settings(tmp_path, yaml.safe_dump(content)))


@FUZZED
@given(st.data())
def test_any_change_of_a_file_gives_settings_or_problems(
    tmp_path: Path, data: st.DataObject
) -> None:
    nasty = [text for text, _ in NASTY.values() if isinstance(text, str) and len(text) < 500]
    text = data.draw(st.sampled_from([SAMPLE, *nasty]))
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 9)))
    changed = text[:start] + data.draw(texts | st.sampled_from(nasty)) + text[end:]
    file = tmp_path / "agent.yml"
    file.write_bytes(changed.encode("utf-8", "surrogatepass"))
    loads(file)


@FUZZED
@given(st.binary(max_size=60))
def test_any_bytes_give_settings_or_problems(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "agent.yml"
    file.write_bytes(content)
    loads(file)


NAMES = st.lists(st.sampled_from([*KEYS, "0", "1", "9" * 5000, "\u0663", ""]), max_size=12)


@FUZZED
@given(st.dictionaries(NAMES.map(lambda steps: "GOODPUT_" + "__".join(steps).upper()), texts))
def test_any_environment_gives_settings_or_problems(
    tmp_path: Path, environment: Mapping[str, str]
) -> None:
    loads(write_settings(tmp_path, SAMPLE), environment)
