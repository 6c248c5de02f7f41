"""Events, engines, GPUs and agents over HTTP."""

from typing import Any
from urllib.parse import quote

import pytest

from agent.analysis.setup_steps import SetupAction, SetupStep, StepName
from agent.records.event import Confidence, Event, EventKind
from agent.records.gpu import GpuSample
from agent.records.objective import Match
from agent.store.store_queries import shown_gpu
from tests.outputs.api.serving import Api
from tests.outputs.api.traffic import unix
from tests.records.making import MIG_INSTANCE, MIG_INSTANCE_ROW, NOON, objective, record
from tests.records.minutes import minute

EMPTY: dict[str, Any] = {"items": [], "next": None}


def event(number: int, **given: Any) -> Event:
    values: dict[str, Any] = {
        "at": NOON + number // 2,
        "engine": f"chat-{number % 2}",
        "kind": EventKind.RESTART if number % 3 else EventKind.UNREACHABLE,
        "confidence": Confidence.PROBABLE,
        "evidence": {"number": float(number)},
    }
    return Event(**(values | given))


def numbers(api: Api, **filters: Any) -> list[int]:
    """Return the numbers of the listed events."""
    return [
        int(item["evidence"]["number"]) for page in api.pages("events", **filters) for item in page
    ]


def test_an_event_is_listed_with_its_evidence(api: Api) -> None:
    evidence: dict[str, str | float | None] = {"reason": "timeout", "running": 3.0, "model": None}
    api.store_events(Event(at=NOON + 0.5, engine="chat-0", kind=EventKind.RESTART, gpu="GPU-1",
                   confidence=Confidence.SUSPECTED, evidence=evidence))  # fmt: skip
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


def test_events_are_listed_newest_first_in_pages(api: Api) -> None:
    api.store_events(*[event(number) for number in range(11)])
    for limit in (1, 3, 11, 100):
        assert numbers(api, limit=limit) == list(range(10, -1, -1))


def test_events_are_found_by_engine_and_kind(api: Api) -> None:
    api.store_events(*[event(number) for number in range(12)], event(99, engine=None))
    assert numbers(api, engine="chat-1") == [11, 9, 7, 5, 3, 1]
    assert numbers(api, kind="UNREACHABLE") == [99, 9, 6, 3, 0]
    assert numbers(api, engine="chat-1", kind="UNREACHABLE", limit=1) == [9, 3]
    assert numbers(api, engine="", kind="") == [99, *range(11, -1, -1)]
    assert numbers(api, kind="unreachable") == numbers(api, engine="chat") == []


def test_events_are_found_by_gpu_and_confidence(api: Api) -> None:
    certain = Confidence.CERTAIN
    api.store_events(
        event(0), event(1, gpu="GPU-1"), event(2, gpu="GPU-2"), event(3, gpu="GPU-1", engine=None)
    )
    api.store_events(event(4, gpu="GPU-1", confidence=certain), event(5, confidence=certain))
    assert numbers(api, gpu="GPU-1") == [4, 3, 1]
    assert numbers(api, confidence="certain") == [5, 4]
    assert numbers(api, gpu="GPU-1", confidence="probable", limit=1) == [3, 1]
    assert numbers(api, gpu="GPU-1", engine="chat-0", kind="RESTART") == [4]
    assert numbers(api, gpu="GPU-") == numbers(api, confidence="suspected") == []
    assert numbers(api, gpu="") == [5, 4, 3, 2, 1, 0]


def test_events_are_found_by_their_window(api: Api) -> None:
    api.store_events(*[event(number) for number in range(3)])
    api.agent.now = NOON + 3600.5
    assert numbers(api, window="1h", limit=1) == [2]
    assert numbers(api, window="10s") == []
    assert numbers(api, window="") == numbers(api) == [2, 1, 0]
    assert "window" in str(api.refusal("events", window="1 hour"))


def test_an_objective_is_listed_as_it_is_judged(api: Api) -> None:
    chat = objective(
        "chat", ttft_s=0.2, tpot_s=0.12, match=Match(tenant="acme", max_input_tokens=9)
    )
    api.set_objectives([chat])
    (item,) = api.query("objectives")["items"]
    assert unix(item.pop("in_force_from")) == api.agent.now
    assert (item["name"], item["agent"]) == ("chat", "agent-0")
    definition = item["definition"]
    limits = ("ttft_s", "tpot_s", "e2e_s", "target", "window_s", "max_error_ratio")
    assert {name: definition[name] for name in limits} == {
        name: getattr(chat, name) for name in limits
    }
    assert definition["match"]["tenant"] == "acme"
    assert definition["match"]["max_input_tokens"] == 9
    assert definition["definition"]["name"] == "goodput"


def test_a_changed_objective_is_listed_as_it_is_now(api: Api) -> None:
    api.set_objectives([objective("a"), objective("b")])
    api.agent.now += 60
    api.set_objectives([objective("a"), objective("b", ttft_s=0.5), objective("c")])
    items = {item["name"]: item for item in api.query("objectives")["items"]}
    assert list(items) == ["a", "b", "c"]
    in_force_from = {name: unix(item["in_force_from"]) for name, item in items.items()}
    assert in_force_from == {"a": api.agent.now - 60, "b": api.agent.now, "c": api.agent.now}
    assert items["b"]["definition"]["ttft_s"] == 0.5
    api.set_objectives([])
    assert api.query("objectives") == EMPTY


LOAD: dict[str, float | None] = {"running": 3.0, "waiting": 1.0, "kv_cache_usage": 0.25}
UNLOADED = dict.fromkeys(LOAD)


def test_engines_are_listed_as_they_were_read(api: Api) -> None:
    unknown = dict.fromkeys(("model", "dialect", "read_at"))
    unknown |= {"name": "b", "agent": "agent-1", "up": False}
    api.agent.engines += [
        {
            "name": "a",
            "agent": "agent-0",
            "up": True,
            "model": "llama",
            "dialect": "vllm",
            "read_at": NOON + 0.25,
        }
        | LOAD,
        unknown | UNLOADED,
    ]
    one, other = api.query("engines")["items"]
    assert unix(one.pop("read_at")) == NOON + 0.25
    named = {"name": "a", "agent": "agent-0", "problem": None, "ejected": None}
    assert one.pop("age_s") == api.agent.now - NOON - 0.25
    assert one.pop("stale_after_s") is other.pop("stale_after_s") is other.pop("age_s") is None
    assert one == {**named, "up": True, "model": "llama", "dialect": "vllm"} | LOAD
    assert other == {**unknown, "problem": None, "ejected": None} | UNLOADED
    assert [item["name"] for item in api.query("engines", agent="agent-1")["items"]] == ["b"]


def test_without_any_data_no_limit_on_the_traffic_is_known_to_be_broken(api: Api) -> None:
    api.set_objectives([objective("chat", ttft_s=0.2, min_output_tokens_per_s=1e6)])
    (item,) = api.query("objectives", window="1m")["items"]
    assert item["covered_s"] == 0
    assert [(limit["seen"], limit["holds"]) for limit in item["traffic"]] == [(None, None)]


def test_an_objective_is_listed_with_its_counts_in_the_window(api: Api) -> None:
    chat = objective("chat", ttft_s=0.2, max_error_ratio=0.001, min_output_tokens_per_s=1e6)
    api.set_objectives([chat])
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


def ages_s(api: Api, gpu: str = "GPU-1", **parameters: Any) -> list[float]:
    """Return the ages of the listed samples."""
    return [
        api.agent.now - unix(item["at"])
        for page in api.pages(f"gpus/{gpu}", **parameters)
        for item in page
    ]


def test_a_response_has_everything_of_a_sample(api: Api) -> None:
    facts = {
        ("gpu_power_watts", ()): 312.5,
        ("gpu_clock_hertz", ("sm",)): float("nan"),
        ("gpu_ecc_errors", ("corrected", "lifetime")): 0.0,
    }
    read = sample(
        api.agent.now - 2.5,
        index=3,
        facts=facts,
        processes={17: 5_000_000_000, 18: None},
        mig_instances=(MIG_INSTANCE,),
    )
    api.store_gpus(read)
    response = api.query("gpus")
    assert response["next"] is None
    (item,) = response["items"]
    (in_history,) = api.query("gpus/GPU-1")["items"]
    assert in_history == {**item, "age_s": None, "stale_after_s": None}
    assert unix(item.pop("at")) == read.at
    assert item == {
        "gpu": "GPU-1",
        "index": 3,
        "name": "NVIDIA H200",
        "agent": "agent-0",
        "problem": None,
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
        "age_s": 2.5,
        "stale_after_s": 180.0,
    }


def test_gpus_of_this_agent_are_those_of_its_last_poll(api: Api) -> None:
    now = api.agent.now
    api.store_gpus(sample(now - 50, "GPU-1"), others=[sample(now - 50, "GPU-2")])
    polled = shown_gpu("agent-0", sample(now - 1, "GPU-1"))
    api.agent.gpus = [{**polled, "stale_after_s": 3.0}]
    found = {item["gpu"]: (item["age_s"], item["stale_after_s"]) for item in listed_gpus(api)}
    assert found == {"GPU-1": (1.0, 3.0), "GPU-2": (50.0, 180.0)}


def listed_gpus(api: Api) -> Any:
    return api.query("gpus")["items"]


def test_gpus_of_an_agent_that_has_ended_are_stale_at_once(api: Api) -> None:
    api.beat("agent-0")
    api.store_gpus(sample(api.agent.now - 50, "GPU-1"))
    assert [item["stale_after_s"] for item in listed_gpus(api)] == [180.0]
    api.execute("UPDATE agents SET stopped_at = seen_at")
    assert [item["stale_after_s"] for item in listed_gpus(api)] == [0.0]


def test_an_engine_has_the_age_of_its_sample(api: Api) -> None:
    known = {"name": "chat-0", "agent": "a", "up": True, "model": None, "dialect": "vllm"}
    api.agent.engines = [
        {**known, "read_at": api.agent.now - 20.5, "stale_after_s": 15.0},
        {**known, "read_at": None},
    ]
    found = [(each["age_s"], each["stale_after_s"]) for each in api.query("engines")["items"]]
    assert found == [(20.5, 15.0), (None, None)]


def test_the_steps_of_a_setup_are_those_of_the_agent(api: Api) -> None:
    row = {"agent": "agent-0", "dialect": "vllm", "version": "0.32.0", "model": "llama"}
    step = SetupStep(
        name=StepName.SPANS,
        state="missing",
        shows="rows",
        actions=(SetupAction("restart vLLM with", ("vllm serve llama",)),),
    )
    api.agent.setups = [
        {**row, "engine": "chat-0", "steps": (step,)},
        {**row, "engine": "chat-1", "steps": ()},
    ]
    items = api.query("setup")["items"]
    assert [item["engine"] for item in items] == ["chat-0", "chat-1"]
    assert items[0]["steps"] == [
        {
            "name": "spans",
            "state": "missing",
            "shows": "rows",
            "actions": [{"where": "restart vLLM with", "lines": ["vllm serve llama"]}],
        }
    ]
    assert api.query("setup", engine="chat-1")["items"] == items[1:]
    assert api.query("setup", agent="another")["items"] == []


def test_a_gpu_that_could_not_be_read_has_its_problem_and_nothing_else(api: Api) -> None:
    api.store_gpus(sample(api.agent.now, problem="gpu_lost", facts={("gpu_up", ()): 0.0}))
    (item,) = api.query("gpus")["items"]
    assert (item["problem"], item["facts"]) == ("gpu_lost", {"gpu_up": 0.0})
    assert (item["processes"], item["mig_instances"]) == (None, [])


def test_the_newest_sample_of_every_agents_gpus_is_listed(api: Api) -> None:
    now = api.agent.now
    old = [sample(now - 60, "GPU-1"), sample(now - 60, "GPU-2", index=1)]
    api.store_gpus(*old, sample(now - 10, "GPU-1"), others=[sample(now - 9 * 86400, "GPU-3")])
    found = api.query("gpus")["items"]
    assert api.query("gpus", agent="agent-0")["items"] == found[:2]
    listed = [(item["agent"], item["gpu"], now - unix(item["at"])) for item in found]
    assert listed == [
        ("agent-0", "GPU-1", 10.0),
        ("agent-0", "GPU-2", 60.0),
        ("agent-1", "GPU-3", 9 * 86400.0),
    ]


def test_the_samples_of_a_gpu_in_the_window_are_listed_newest_first_in_pages(api: Api) -> None:
    ages = [0.0, 10.0, 60.0, 60.5, 3600.0, 3600.5, 86400.0]
    others = [sample(api.agent.now - 5, "GPU-2")]
    api.store_gpus(*[sample(api.agent.now - age_s) for age_s in ages], others=others)
    for limit in (1, 2, 5, 1000):
        assert ages_s(api, limit=limit) == ages[:5]
    assert ages_s(api, window="1m") == ages[:3]
    assert ages_s(api, window="7d") == ages


def test_a_page_holds_a_hundred_items_by_default(api: Api) -> None:
    api.store_gpus(*[sample(api.agent.now - age_s) for age_s in range(101)])
    assert len(api.query("gpus/GPU-1")["items"]) == 100


def test_a_known_gpu_without_a_sample_in_the_window_has_an_empty_list(api: Api) -> None:
    api.store_gpus(sample(api.agent.now - 3601))
    assert api.query("gpus/GPU-1") == {"items": [], "next": None}


@pytest.mark.parametrize("gpu", ["GPU-9", "GPU-", "0", "a/b", "%25", "größe", "x" * 5000])
def test_an_unknown_gpu_is_not_found(api: Api, gpu: str) -> None:
    api.store_gpus(sample(api.agent.now))
    status, sentence = api.refusal(f"gpus/{quote(gpu, safe='/%')}")
    assert status == 404
    assert sentence.endswith("is stored; see /api/v1/gpus")


_AGENTS = ("agent-0", "agent-1")


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


def test_objectives_of_many_agents_cost_no_more_queries_than_those_of_two(two: Api) -> None:
    with two.counted_statements() as of_two:
        two.query("objectives")
    for number in range(2, 30):
        two.set_objectives([objective(ttft_s=0.2)], agent=f"agent-{number}")
    with two.counted_statements() as of_thirty:
        found = two.query("objectives")["items"]
    assert [item["requests"] for item in found] == [4] * 30
    assert len(of_thirty) == len(of_two)


def test_rates_of_an_agent_are_over_the_time_that_it_has_data_of(two: Api) -> None:
    covered = {agent: two.query("summary", agent=agent)["covered_s"] for agent in _AGENTS}
    assert covered["agent-1"] < covered["agent-0"] == two.query("summary")["covered_s"]
    groups = {each["group"]: each for each in two.query("breakdown", by="agent")["groups"]}
    for agent, seconds in covered.items():
        rate = groups[agent]["throughput_rps"]
        assert rate == pytest.approx(groups[agent]["requests"] / seconds)


def test_the_cost_of_two_agents_is_the_sum_of_theirs(two: Api) -> None:
    both = two.query("summary")["cost"]["bill_usd"]
    each = [two.query("summary", agent=agent)["cost"]["bill_usd"] for agent in _AGENTS]
    assert min(each) > 0
    assert both == pytest.approx(sum(each))
