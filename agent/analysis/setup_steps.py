"""What an agent sees of one engine, and the lines that let it see more."""

import json
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import ip_address
from typing import Literal

from agent.analysis.audit.checks import is_older
from agent.catalog.engines import DIALECTS, PLUGIN_HOSTS


class StepName(StrEnum):
    """A source of figures of an engine, in the order in which they are added."""

    METRICS = "metrics"
    PLUGIN = "plugin"
    SPANS = "spans"
    PROXY = "proxy"
    GPU = "GPU"
    PRICE = "price"
    MODEL_CONFIG = "model config"
    LOG = "log"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpansTarget:
    """Where an engine sends its spans. `url` is None while the agent receives none of it.

    Over gRPC the URL has no path. `settings` are lines without which the engine does not reach it.
    """

    url: str | None
    over_http: bool = False
    needs_token: bool = False
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupFacts:
    """What is known of one engine and of the agent's settings for it.

    `program` is the engine's dialect, None if it is unknown. `seen` are the sources that give
    figures now, `impossible` those that it cannot have here. `measured_in_front` is whether the
    plugin measures requests in the engine's front, as their users see them, None if that is not
    known yet. `failure` is why its metrics cannot be
    read. A `remote` engine is on another machine. `proxy_url` is the proxy's own address. `gpus`
    are the indexes of the GPUs that the agent reads, None if its settings have no source of GPUs.
    `model_problem` is why `model_config` gives not all that it could. An engine can be `priced`
    without a cost: while the number of its GPUs is unknown.
    """

    engine: str
    url: str
    program: str | None = None
    version: str | None = None
    model: str | None = None
    seen: frozenset[StepName] = frozenset()
    impossible: frozenset[StepName] = frozenset()
    measured_in_front: bool | None = None
    failure: str | None = None
    statistics_off: bool = False
    rust_frontend: bool = False
    remote: bool = False
    spans: SpansTarget
    plugin_socket: str | None = None
    proxy_url: str | None = None
    gpus: tuple[int, ...] | None = ()
    log: str | None = None
    model_config: str | None = None
    model_problem: str | None = None
    priced: bool = False


@dataclass(frozen=True, slots=True)
class SetupAction:
    """Lines to paste; `where` says into what. Without lines, `where` is all there is to say."""

    where: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupStep:
    """One source of figures: whether it is there, what it shows, and what adds it."""

    name: StepName
    state: Literal["done", "missing"]
    shows: str
    actions: tuple[SetupAction, ...] = field(default=())


_VLLM = "vllm"
# V1, the engine of newer versions, sends spans again since this one.
_HAS_SPANS = "0.10.0"
_SOCKET = "/run/goodput-agent/vllm.sock"
_PROXY = "127.0.0.1:8080"
_SETTINGS = "in the agent's settings"
_RESTART = "restart vLLM with"
_SHARED = "its socket is a file: engine and agent must share a machine, or a volume of a pod"
_UNKNOWN_PROGRAM = SetupAction("first let the agent read the engine's metrics")

Actions = tuple[SetupAction, ...]

# How the metrics of an engine are switched on, by dialect; vLLM and TGI publish them by default.
_METRICS_ON: Mapping[str, SetupAction] = {
    "sglang": SetupAction("restart SGLang with the flag", ("--enable-metrics",)),
    "trtllm": SetupAction("in the options of trtllm-serve", ("return_perf_metrics: true",)),
    "llamacpp": SetupAction("restart llama-server with the flag", ("--metrics",)),
}


def _metrics(facts: SetupFacts) -> Actions:
    if facts.statistics_off:
        return (SetupAction("restart vLLM without the flag", ("--disable-log-stats",)),)
    why = "" if facts.failure is None else f" (now: {facts.failure})"
    dialect = DIALECTS.get(facts.program or "", DIALECTS[_VLLM])
    page = shlex.quote(facts.url.rstrip("/") + dialect.metrics_path)
    look = SetupAction(f"find out why the agent cannot read them{why}", (f"curl {page}",))
    switch = _METRICS_ON.get(dialect.engine if facts.program else "")
    return (look,) if switch is None else (switch, look)


def _serve(facts: SetupFacts, added: StepName) -> str:
    """The command of vLLM with what a step adds, and with what earlier steps added."""
    wanted = {added, *facts.seen}
    model = shlex.quote(facts.model or "MODEL")
    parts = [f"vllm serve {model}"]
    if StepName.SPANS in wanted and facts.spans.url is not None:
        parts = [*_span_variables(facts), *parts, f"--otlp-traces-endpoint {facts.spans.url}"]
    if StepName.PLUGIN in wanted and (path := _plugin_socket(facts)):
        parts.insert(0, f"GOODPUT_AGENT_SOCKET={shlex.quote(path)}")
    if added is StepName.LOG:
        parts.append(f"2>&1 | tee -a {shlex.quote(_log_path(facts))}")
    return " ".join(parts)


def _plugin_socket(facts: SetupFacts) -> str | None:
    """The socket that engine and agent must be told; None if they find each other."""
    return facts.plugin_socket or (_SOCKET if facts.remote else None)


def _span_variables(facts: SetupFacts) -> Iterator[str]:
    yield f"OTEL_SERVICE_NAME={shlex.quote(facts.engine)}"
    yield "OTEL_TRACES_SAMPLER=always_on"
    if facts.spans.over_http:
        yield "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf"
    if facts.spans.needs_token:
        yield "OTEL_EXPORTER_OTLP_HEADERS=authorization=Bearer%20TOKEN"


def _log_path(facts: SetupFacts) -> str:
    return f"/var/log/{facts.engine}.log"


def _spans(facts: SetupFacts) -> Actions:
    if facts.program is None:
        return (_UNKNOWN_PROGRAM,)
    if facts.rust_frontend:
        return (
            SetupAction(
                "vLLM's Rust frontend refuses --otlp-traces-endpoint: "
                "start vLLM without VLLM_USE_RUST_FRONTEND, or use the proxy"
            ),
        )
    if is_older(facts.version, _HAS_SPANS):
        return (SetupAction(f"vLLM {facts.version} may send none: use 0.10 or newer"),)
    first = (SetupAction(_SETTINGS, facts.spans.settings),) if facts.spans.settings else ()
    if facts.spans.url is None:
        return first
    return (*first, SetupAction(_restart(facts), (_serve(facts, StepName.SPANS),)))


def _restart(facts: SetupFacts) -> str:
    """How to restart vLLM for a source that its statistics feed."""
    if facts.statistics_off:
        return "restart vLLM without --disable-log-stats, with"
    return _RESTART


def _plugin(facts: SetupFacts) -> Actions:
    if facts.program is None:
        return (_UNKNOWN_PROGRAM,)
    if facts.rust_frontend:
        return (
            SetupAction(
                "vLLM's Rust frontend loads no plugins: "
                "start vLLM without VLLM_USE_RUST_FRONTEND, or use the proxy"
            ),
        )
    shared = (SetupAction(_SHARED), _setting(facts, "plugin_socket", _SOCKET))
    return (
        *(shared if facts.remote and not facts.plugin_socket else ()),
        SetupAction(
            f"in {PLUGIN_HOSTS[facts.program]}'s environment, from a clone of goodput-agent",
            ("pip install ./plugins/vllm",),
        ),
        _restart_with_plugin(facts),
    )


def _restart_with_plugin(facts: SetupFacts) -> SetupAction:
    if facts.program == _VLLM:
        return SetupAction(_restart(facts), (_serve(facts, StepName.PLUGIN),))
    restart, path = "restart SGLang with --enable-metrics", _plugin_socket(facts)
    if path is None:
        return SetupAction(restart)
    return SetupAction(
        f"{restart} and in its environment", (f"GOODPUT_AGENT_SOCKET={shlex.quote(path)}",)
    )


def _setting(facts: SetupFacts, key: str, value: object) -> SetupAction:
    """A key to add to the engine's other settings, which may hold secrets. YAML includes JSON."""
    lines = f"  - name: {json.dumps(facts.engine)}", f"    {key}: {json.dumps(value)}"
    return SetupAction(f"{_SETTINGS}, add to this engine", ("engines:", *lines))


def _proxy(facts: SetupFacts) -> Actions:
    if facts.proxy_url is not None:
        return (_clients(facts.proxy_url),)
    listen = SetupAction(_SETTINGS, (f'proxy: {{listen: "{_PROXY}"}}',))
    return listen, _clients(f"http://{_PROXY}")


def _clients(url: str) -> SetupAction:
    return SetupAction("send requests to the proxy", (f"OPENAI_BASE_URL={url}/v1",))


def _gpu(facts: SetupFacts) -> Actions:
    if facts.gpus is None:
        return (SetupAction(_SETTINGS, ("nvml: {enabled: true}",)),)
    if facts.gpus:
        return (_setting(facts, "gpus", list(facts.gpus)),)
    exporter = f"http://{_host_of(facts.url)}:9400/metrics"
    return (
        SetupAction(
            "run dcgm-exporter, or AMD's device-metrics-exporter, on the engine's machine, and "
            f"{_SETTINGS}",
            ("dcgm: {url: " + json.dumps(exporter) + "}",),
        ),
    )


def _host_of(url: str) -> str:
    authority = url.partition("://")[2].partition("/")[0]
    host, colon, port = authority.rpartition(":")
    return host if colon and port.isdecimal() else authority


def _price(facts: SetupFacts) -> Actions:
    if facts.priced:
        count = _setting(facts, "parallelism", {"tensor": 1})
        return (SetupAction(f"{count.where}, as the number of its GPUs is unknown", count.lines),)
    price = _setting(facts, "gpu_hour_usd", 2.5)
    return (SetupAction(f"{price.where}, with your price of one GPU for an hour", price.lines),)


def _model_config(facts: SetupFacts) -> Actions:
    if facts.model_config is not None:
        unread = f"{facts.model_config} cannot be read: see the agent's log"
        return (SetupAction(facts.model_problem or unread),)
    model = facts.model
    if model is not None and model.startswith("/"):
        return (_setting(facts, "model_config", f"{model.rstrip('/')}/config.json"),)
    path = _setting(facts, "model_config", "/path/of/config.json")
    if model is None or "/" not in model:
        return (path,)
    fetch = f"hf download {shlex.quote(model)} config.json"
    return SetupAction("fetch the file; its path is printed", (fetch,)), path


def _log(facts: SetupFacts) -> Actions:
    if facts.log is not None:
        return (SetupAction(f"{facts.log} cannot be read: see the agent's log"),)
    setting = _setting(facts, "log", _log_path(facts))
    if facts.program != _VLLM:
        return (setting,)
    return SetupAction(_RESTART, (_serve(facts, StepName.LOG),)), setting


@dataclass(frozen=True, slots=True)
class _Source:
    name: StepName
    shows: str
    actions: Callable[[SetupFacts], Actions]


_SOURCES = (
    _Source(StepName.METRICS, "load, queue, KV cache, rates, and latency by histograms", _metrics),
    _Source(
        StepName.PLUGIN,
        "what users got, and why: a row for each request, also refused ones and those whose client "
        "left; tenants, gaps between tokens, queue, prefill and decode, each step",
        _plugin,
    ),
    _Source(
        StepName.SPANS,
        "a row for each finished request: its latency, its phases, why it missed an objective",
        _spans,
    ),
    _Source(
        StepName.PROXY,
        "what users got: a row for each request, also refused ones, tenants, gaps between tokens",
        _proxy,
    ),
    _Source(StepName.GPU, "use, memory, power and faults of the engine's GPUs", _gpu),
    _Source(StepName.PRICE, "cost by request and by million tokens", _price),
    _Source(StepName.MODEL_CONFIG, "MFU, MBU and the roofline", _model_config),
    _Source(StepName.LOG, "why an engine died, such as a lack of memory", _log),
)
# They report single requests by themselves.
_ROWS = frozenset({StepName.SPANS, StepName.PLUGIN})


def setup_steps(facts: SetupFacts) -> tuple[SetupStep, ...]:
    """The steps of one engine in order, without those that it cannot have or does not need."""
    left_out = (facts.impossible | _unknown_to(facts.program) | _needless(facts)) - facts.seen
    return tuple(_step(source, facts) for source in _SOURCES if source.name not in left_out)


def _unknown_to(program: str | None) -> frozenset[StepName]:
    """The steps that an engine cannot have."""
    if program in (None, _VLLM):
        return frozenset()
    return frozenset({StepName.SPANS}) if program in PLUGIN_HOSTS else _ROWS


def _needless(facts: SetupFacts) -> frozenset[StepName]:
    """The steps that show nothing more than the plugin, if that is there."""
    if StepName.PLUGIN not in facts.seen:
        return frozenset()
    in_front = facts.measured_in_front is not False
    return frozenset({StepName.SPANS, StepName.PROXY} if in_front else {StepName.SPANS})


def _step(source: _Source, facts: SetupFacts) -> SetupStep:
    if source.name in facts.seen:
        return SetupStep(name=source.name, state="done", shows=source.shows)
    return SetupStep(
        name=source.name, state="missing", shows=source.shows, actions=source.actions(facts)
    )


def next_step_text(engine: str, steps: Collection[SetupStep]) -> str:
    """One line: what is seen of an engine, and the lines of the next step."""
    done = ", ".join(step.name for step in steps if step.state == "done")
    text = f"engine {engine}: {done or 'nothing yet'}"
    following = next((step for step in steps if step.state == "missing"), None)
    if following is None:
        return text
    actions = "; ".join(
        action.where + (f": {_in_one(action.lines)}" if action.lines else "")
        for action in following.actions
    )
    shown = {step.name for step in steps if step.state == "done"}
    first_rows = following.name in _ROWS and not shown & _ROWS
    return f"{text}; for {'single requests' if first_rows else following.name} {actions}"


def _in_one(lines: Iterable[str]) -> str:
    return " ".join(line.strip() for line in lines)


def spans_target(
    *,
    grpc: str | None,
    http: str | None,
    encrypted: bool,
    needs_token: bool,
    host: str | None,
) -> SpansTarget:
    """Where an engine sends spans, by the agent's listening addresses.

    `host` is the agent's name for an engine on another machine; None on the same machine. vLLM's
    gRPC exporter sends plain text, so an `encrypted` agent gets its spans over HTTP.
    """
    over_http = encrypted or (grpc is None and http is not None)
    key, listens = ("http", http) if over_http else ("grpc", grpc)
    if listens is None:
        return SpansTarget(url=None, settings=(_listen(key, "127.0.0.1", _PORTS[key]),))
    address, _, port = listens.rpartition(":")
    settings: tuple[str, ...] = ()
    if host is not None and _is_loopback(address):
        tokens = () if needs_token else ("security: {ingest_tokens: /etc/goodput-agent/ingest}",)
        settings = (_listen(key, "0.0.0.0", port), *tokens)
        needs_token = True
    reached = host or ("127.0.0.1" if is_any_address(address) else address)
    url = f"{'https' if encrypted else 'http'}://{reached}:{port}"
    return SpansTarget(
        url=f"{url}/v1/traces" if over_http else url,
        over_http=over_http,
        needs_token=needs_token,
        settings=settings,
    )


_PORTS = {"grpc": "4317", "http": "4318"}


def _listen(key: str, host: str, port: str) -> str:
    return f'otlp: {{{key}: "{host}:{port}"}}'


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_any_address(host: str) -> bool:
    """Whether who listens at this host listens at every address of the machine."""
    return host.strip("[]") in ("0.0.0.0", "::", "")
