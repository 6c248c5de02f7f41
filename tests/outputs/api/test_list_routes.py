"""Events, engines, GPUs and agents over HTTP."""

from typing import Any
from urllib.parse import quote

import pytest

from agent.records.event import Confidence, Event, EventKind
from agent.records.gpu import GpuSample
from agent.records.objective import Match
from agent.store.store_queries import shown_gpu
from tests.outputs.api.serving import Api
from tests.outputs.api.traffic import unix
from tests.records.making import MIG_INSTANCE, MIG_INSTANCE_ROW, NOON, objective, record
from tests.records.minutes import minute

EMPTY: dict[str, Any] = {"items": [], "next": None}


def test_an_event_is_listed_with_its_evidence(api: Api) -> None:
    evidence: dict[str, str | float | None] = {"reason": "timeout", "running": 3.0, "model": None}
    api.store_events(
        Event(
            at=NOON + 0.5,
            engine="chat-0",
            kind=EventKind.RESTART,
            gpu="GPU-1",
            confidence=Confidence.SUSPECTED,
            evidence=evidence,
        )
    )
    (item,) = api.query("events")["items"]
    assert unix(item.pop("at")) == NOON + 0.5
    assert item == {
        "agent": "agent-0",
        "engine": "chat-0",
        "gpu": "GPU-1",
        "kind": "RESTART",
        "confidence": "suspected",
        "evidence": evidence,
    }


@pytest.mark.parametrize(
    ("filters", "numbers"),
    [
        ({"limit": "1"}, [5, 4, 3, 2, 1, 0]),
        ({"engine": "", "kind": "", "gpu": "", "window": ""}, [5, 4, 3, 2, 1, 0]),
        ({"engine": "chat-1"}, [5, 3, 1]),
        ({"engine": "chat"}, []),
        ({"kind": "UNREACHABLE"}, [5, 3, 0]),
        ({"kind": "unreachable"}, []),
        ({"gpu": "GPU-1"}, [4, 2]),
        ({"confidence": "certain", "limit": "2"}, [5, 4, 1]),
        ({"window": "1h"}, [5, 4, 3, 2]),
        ({"from": "now-3620s", "until": "now-3598s"}, [3, 2, 1, 0]),
    ],
    ids=str,
)
def test_events_are_found_by_each_filter_in_pages(
    api: Api, filters: dict[str, str], numbers: list[int]
) -> None:
    api.agent.now = NOON + 3602.5
    api.store_events(
        *(
            Event(
                at=NOON + number + 1.0,
                engine=f"chat-{number % 2}",
                gpu="GPU-1" if number in (2, 4) else None,
                kind=EventKind.UNREACHABLE if number in (0, 3, 5) else EventKind.RESTART,
                confidence=Confidence.CERTAIN if number in (1, 4, 5) else Confidence.PROBABLE,
                evidence={"number": float(number)},
            )
            for number in range(6)
        )
    )
    found = [item["evidence"]["number"] for page in api.pages("events", **filters) for item in page]
    assert found == numbers


def test_an_objective_is_listed_as_it_is_judged_now(api: Api) -> None:
    chat = objective("chat", ttft_s=0.2, match=Match(tenant="acme", max_input_tokens=9))
    api.set_objectives([chat, objective("other")])
    api.agent.now += 60
    api.set_objectives([chat, objective("other", ttft_s=0.5)])
    items = {item["name"]: item for item in api.query("objectives")["items"]}
    in_force_from = {name: unix(item["in_force_from"]) for name, item in items.items()}
    assert in_force_from == {"chat": api.agent.now - 60, "other": api.agent.now}
    definition = items["chat"]["definition"]
    for name in ("ttft_s", "tpot_s", "e2e_s", "target", "window_s", "max_error_ratio"):
        assert definition[name] == getattr(chat, name)
    assert (definition["match"]["tenant"], definition["match"]["max_input_tokens"]) == ("acme", 9)
    assert items["other"]["definition"]["ttft_s"] == 0.5
    api.set_objectives([])
    assert api.query("objectives") == EMPTY


def test_engines_are_listed_as_they_were_read(api: Api) -> None:
    load = {"running": 3.0, "waiting": 1.0, "kv_cache_usage": 0.25}
    read = {"name": "a", "agent": "agent-0", "up": True, "model": "llama", "dialect": "vllm"}
    unknown = dict.fromkeys(("model", "dialect", *load))
    away = {"name": "b", "agent": "agent-1", "up": False, **unknown}
    at = NOON + 0.25
    state = {"state": "dead", "state_why": "CUDA_OOM", "state_since": at}
    api.agent.engines += [
        {**read, **load, "read_at": at, "stale_after_s": 15.0},
        {**away, **state, "read_at": None},
    ]
    one, other = api.query("engines")["items"]
    assert unix(one.pop("read_at")) == at
    none = dict.fromkeys(("problem", "ejected", "role", "rank_skew"))
    stateless = dict.fromkeys(("state", "state_detail", "state_why", "state_since"))
    aged = {"age_s": api.agent.now - at, "stale_after_s": 15.0}
    assert one == {**read, **load, **none, **stateless, **aged}
    other["state_since"] = unix(other["state_since"])
    assert other.pop("state_detail") == "it died, or has not answered for minutes"
    assert other == {**away, **none, **state, **dict.fromkeys(("read_at", *aged))}
    assert [item["name"] for item in api.query("engines", agent="agent-1")["items"]] == ["b"]


def test_engines_are_chosen_by_name_and_model(api: Api) -> None:
    unread = {**dict.fromkeys(("up", "dialect", "read_at")), "agent": "agent-0"}
    api.agent.engines += [
        unread | {"name": name, "model": model}
        for name, model in (("chat-0", "llama"), ("chat-1", "qwen"))
    ]
    for chosen in ({"engine": "chat-1"}, {"model": "qwen"}):
        assert [one["name"] for one in api.query("engines", **chosen)["items"]] == ["chat-1"]
    assert len(api.query("engines", engine="", model="")["items"]) == 2


def test_names_are_those_of_requests_engines_agents_and_objectives(api_of_each: Api) -> None:
    """Rollups have some, changes that are not folded others."""
    api = api_of_each
    api.set_objectives([objective("chat"), objective("batch")])
    before, after = api.agent.now - 20, api.agent.now - 1
    api.store([record(1, tenant="acme", model="llama", ended_at=before)], [objective()])
    api.fold_and_expire()
    api.store([record(2, tenant="bell", model=None, ended_at=after)], [objective()])
    api.agent.engines.append(
        {**dict.fromkeys(("up", "dialect", "read_at")), "agent": "x", "name": "idle", "model": "m"}
    )
    api.beat("agent-of-the-test")
    names = api.query("names")
    assert names["tenant"] == ["acme", "bell"]
    assert names["model"] == ["llama", "m"]
    assert {"chat-0", "idle"} <= set(names["engine"])
    assert "agent-of-the-test" in names["agent"]
    assert names["objective"] == ["batch", "chat"]


def test_an_objective_has_the_counts_of_the_chosen_requests(api: Api) -> None:
    ended_at = api.agent.now - 1
    promised = [objective("chat"), objective("other")]
    api.set_objectives(promised)
    of_acme = [record(n, tenant="acme", ended_at=ended_at) for n in (1, 2)]
    api.store([*of_acme, record(3, tenant="bell", ttft_s=9.0, ended_at=ended_at)], promised)
    (chat,) = api.query("objectives", tenant="bell", objective="chat")["items"]
    assert (chat["name"], chat["met"], chat["missed"]) == ("chat", 0, 1)
    assert chat["budget"]["missed"] == 1
    both = api.query("objectives", tenant="acme")["items"]
    assert [(each["met"], each["missed"]) for each in both] == [(2, 0), (2, 0)]


def test_an_objective_is_listed_with_its_counts_in_the_window(api: Api) -> None:
    chat = objective("chat", ttft_s=0.2, max_error_ratio=0.001, min_output_tokens_per_s=1e6)
    api.set_objectives([chat])
    (item,) = api.query("objectives", window="1m")["items"]
    assert item["covered_s"] == 0
    assert [(limit["seen"], limit["holds"]) for limit in item["traffic"]] == [(None, None)] * 2
    now = api.agent.now
    records = [record(1, ended_at=now - 9), record(2, ended_at=now - 9, ttft_s=0.3)]
    api.store(records, [chat])
    (item,) = api.query("objectives", window="1m")["items"]
    assert (item["requests"], item["met"], item["missed"], item["attainment"]) == (2, 1, 1, 0.5)
    errors, tokens = item["traffic"]
    assert errors == {"name": "max_error_ratio", "limit": 0.001, "seen": None, "holds": None}
    assert (tokens["limit"], tokens["holds"]) == (1e6, False)


def test_an_objective_has_its_error_budget_over_its_own_window(api: Api) -> None:
    """Two hours ago 90 of 100 requests met; of the last minute's ten requests none did."""
    chat = objective("chat", ttft_s=0.2, target=0.8, window_s=86400.0)
    earlier = [
        record(n, ended_at=api.agent.now - 7200, ttft_s=0.1 if n < 90 else 0.3) for n in range(100)
    ]
    now = [record(200 + n, ended_at=api.agent.now - 30, ttft_s=0.3) for n in range(10)]
    api.store([*earlier, *now], [chat])
    api.set_objectives([chat])
    (item,) = api.query("objectives", window="1m")["items"]
    assert (item["met"], item["missed"]) == (0, 10)
    assert item["violations_per_min"] == pytest.approx(600 / item["covered_s"])
    budget = item["budget"]
    assert (budget["met"], budget["missed"], budget["allowed"]) == (90, 20, pytest.approx(22))
    assert budget["left"] == pytest.approx(1 - 20 / 22)
    assert budget["covered_s"] < budget["window_s"] == pytest.approx(86400, abs=60)


def sample(at: float, gpu: str = "GPU-1", **given: Any) -> GpuSample:
    values: dict[str, Any] = {"index": 0, "name": "NVIDIA H200", "facts": {("gpu_up", ()): 1.0}}
    return GpuSample(gpu=gpu, at=at, **(values | given))


def test_a_response_has_everything_of_a_sample(api: Api) -> None:
    facts = {
        ("gpu_power_watts", ()): 312.5,
        ("gpu_clock_hertz", ("sm",)): float("nan"),
        ("gpu_ecc_errors", ("corrected", "lifetime")): 0.0,
    }
    parts: dict[str, Any] = {
        "processes": {17: 5_000_000_000, 18: None},
        "mig_instances": (MIG_INSTANCE,),
    }
    api.store_gpus(sample(api.agent.now - 2.5, index=3, facts=facts, **parts))
    (item,) = api.query("gpus")["items"]
    (in_history,) = api.query("gpus/GPU-1")["items"]
    assert in_history == {**item, "age_s": None, "stale_after_s": None}
    assert unix(item.pop("at")) == api.agent.now - 2.5
    known = ("gpu", "index", "name", "agent", "problem", "age_s", "stale_after_s")
    values = ("GPU-1", 3, "NVIDIA H200", "agent-0", None, 2.5, 180.0)
    assert tuple(item.pop(name) for name in known) == values
    assert item == {
        "facts": {
            "gpu_power_watts": 312.5,
            "gpu_clock_hertz{sm}": None,
            "gpu_ecc_errors{corrected,lifetime}": 0.0,
        },
        "processes": [
            {"pid": 17, "memory_bytes": 5_000_000_000},
            {"pid": 18, "memory_bytes": None},
        ],
        "mig_instances": [MIG_INSTANCE_ROW],
    }


def test_gpus_of_this_agent_are_those_of_its_last_poll(api: Api) -> None:
    now = api.agent.now
    api.store_gpus(sample(now - 50, "GPU-1"), others=[sample(now - 50, "GPU-2")])
    polled = shown_gpu("agent-0", sample(now - 1, "GPU-1"))
    api.agent.gpus = [{**polled, "stale_after_s": 3.0}]
    found = {
        item["gpu"]: (item["age_s"], item["stale_after_s"]) for item in api.query("gpus")["items"]
    }
    assert found == {"GPU-1": (1.0, 3.0), "GPU-2": (50.0, 180.0)}


def test_gpus_of_an_agent_that_has_ended_are_stale_at_once(api: Api) -> None:
    api.beat("agent-0")
    api.store_gpus(sample(api.agent.now - 50, "GPU-1"))
    assert [item["stale_after_s"] for item in api.query("gpus")["items"]] == [180.0]
    api.execute("UPDATE agents SET stopped_at = seen_at")
    assert [item["stale_after_s"] for item in api.query("gpus")["items"]] == [0.0]


def test_samples_of_a_gpu_are_listed_newest_first_in_pages(api: Api) -> None:
    now = api.agent.now
    ages_s = [0.0, 10.0, 60.0, 60.5, 3600.0, 3600.5, 86400.0]
    api.store_gpus(*[sample(now - age_s) for age_s in ages_s], others=[sample(now - 5, "GPU-2")])

    def listed(**asked: str) -> list[float]:
        pages = api.pages("gpus/GPU-1", **asked)
        return [now - unix(item["at"]) for page in pages for item in page]

    assert listed(limit="2") == ages_s[:5]
    assert listed(window="1m") == ages_s[:3]
    assert listed(window="7d") == ages_s
    assert listed(window="55s", until="now-6s") == [10.0, 60.0, 60.5]
    api.agent.now += 7200
    assert api.query("gpus/GPU-1") == EMPTY


@pytest.mark.parametrize("gpu", ["GPU-9", "GPU-", "a/b", "%25", "x" * 5000])
def test_an_unknown_gpu_is_not_found(api: Api, gpu: str) -> None:
    api.store_gpus(sample(api.agent.now))
    status, sentence = api.refusal(f"gpus/{quote(gpu, safe='/%')}")
    assert status == 404
    assert sentence.endswith("is stored; see /api/v1/gpus")


def test_agents_are_listed_by_name_with_their_age_by_the_clock_of_the_database(
    api_of_each: Api,
) -> None:
    """The clock of the API stands at another time."""
    assert api_of_each.query("agents") == {"items": [], "next": None}
    api_of_each.beat("code", {"name": "code-0", "up": True})
    api_of_each.beat("chat")
    items = api_of_each.query("agents")["items"]
    assert [item["name"] for item in items] == ["chat", "code"]
    for item in items:
        assert 0 <= item["silent_s"] < 3600
        assert item["last_seen_at"] is not None
        # No value of these is made up.
        assert (item["stopped_at"], item["lag_s"], item["waiting_rows"]) == (None, None, None)


@pytest.fixture
def two(api_of_each: Api) -> Api:
    """Requests, a minute, an event and an objective of each of two agents, with the same names."""
    api, now = api_of_each, api_of_each.agent.now
    chat = objective(ttft_s=0.2)
    of_each = {"agent-0": (1, 2, 3), "agent-1": (4,)}
    for agent, numbers in of_each.items():
        # The data of agent-1 begins later.
        begun = now - 200 / numbers[0]
        ended = [record(n, agent=agent, ended_at=begun + n) for n in numbers[:-1]]
        api.store([*ended, record(numbers[-1], agent=agent, ttft_s=9.0, ended_at=begun)], [chat])
        api.store_minutes(minute(3), agent=agent)
        api.store_events(
            Event(at=now, engine="chat-0", kind=EventKind.RESTART, confidence=Confidence.CERTAIN),
            agent=agent,
        )
        api.set_objectives([chat], agent=agent)
    return api


def test_the_figures_of_two_agents_are_summed_and_told_apart(two: Api) -> None:
    requests = {"agent-0": 3, "agent-1": 1}
    both = two.query("summary")
    assert (both["requests"], both["met"], both["missed"]) == (4, 2, 2)
    for agent, count in requests.items():
        own = two.query("summary", agent=agent)
        assert (own["requests"], own["missed"]) == (count, 1)
        assert len(two.query("requests", agent=agent)["items"]) == count
        steps = two.query("timeseries", window="10m", agent=agent)["items"]
        assert sum(step["requests"] for step in steps) == count
        assert [e["agent"] for e in two.query("events", agent=agent)["items"]] == [agent]
        (only,) = two.query("objectives", agent=agent)["items"]
        assert (only["agent"], only["requests"]) == (agent, count)
    assert two.query("summary", agent="agent-9")["requests"] == 0
    groups = {each["group"]: each for each in two.query("breakdown", by="agent")["groups"]}
    assert {agent: group["requests"] for agent, group in groups.items()} == requests
    of_each = [two.query("summary", agent=agent) for agent in requests]
    assert of_each[1]["covered_s"] < of_each[0]["covered_s"] == both["covered_s"]
    for agent, own in zip(requests, of_each, strict=True):
        assert groups[agent]["throughput_rps"] == own["throughput_rps"] > 0
    bills = [own["cost"]["bill_usd"] for own in of_each]
    assert both["cost"]["bill_usd"] == pytest.approx(sum(bills))
    assert min(bills) > 0


def test_objectives_of_many_agents_cost_no_more_queries_than_those_of_two(two: Api) -> None:
    with two.counted_statements() as of_two:
        two.query("objectives")
    for number in range(2, 30):
        two.set_objectives([objective(ttft_s=0.2)], agent=f"agent-{number}")
    with two.counted_statements() as of_thirty:
        found = two.query("objectives")["items"]
    assert [item["requests"] for item in found] == [4] * 30
    assert len(of_thirty) == len(of_two)
