"""What clients write becomes no label: the real directory of engines, and places for tenants."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from agent.analysis.joined_record import joined
from agent.catalog.time_units import DAY_S
from agent.pipeline.request_pipeline import OTHER_TENANT, ClientLabels, TenantPlaces
from agent.records.request import ProxyView, RequestRecord, Status, Vantage
from agent.sources.engines.directory import EngineDirectory
from tests.records.making import NOON, record

ENGINES = (("chat-0", "http://a:8000"), ("chat-1", "http://b:8000"))


def proxied(model: str | None = "llama", tenant: str | None = None, **given: Any) -> RequestRecord:
    """A request that the proxy saw."""
    view: dict[str, Any] = {"vantage": Vantage.PROXY, "proxied": ProxyView()}
    return record(1, model=model, tenant=tenant, **(view | given))


@dataclass
class Labelling:
    """Labels over a directory of two engines, with the fields that were replaced."""

    known: Iterable[str] = ()
    places: int = 3
    replaced: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.directory = EngineDirectory(ENGINES)
        self.labels = ClientLabels(
            answered=self.directory.learn_answered,
            is_served=self.directory.is_served,
            tenants=TenantPlaces(self.known, self.places),
            on_replaced=self._count,
        )

    def _count(self, label: str) -> None:
        self.replaced[label] += 1

    def model(self, name: str, **given: Any) -> str | None:
        """The model of a request for this one."""
        return self.labels.labelled(proxied(name, **given)).model

    def tenant(self, name: str, **given: Any) -> str | None:
        """The tenant of a request of this one."""
        return self.labels.labelled(proxied("llama", name, **given)).tenant


@pytest.fixture
def listing() -> Labelling:
    """Two engines that list what they serve."""
    labelling = Labelling()
    labelling.directory.learn_served("chat-0", frozenset({"llama", "sql-adapter"}))
    labelling.directory.learn_served("chat-1", frozenset({"qwen"}))
    return labelling


# Models


def test_models_and_adapters_that_an_engine_lists_are_labels(listing: Labelling) -> None:
    sent = [proxied(name) for name in ("llama", "sql-adapter", "qwen", None)]
    assert [listing.labels.labelled(item) for item in sent] == sent
    assert listing.replaced == {}


@pytest.mark.parametrize("status", Status)
def test_any_other_name_is_unknown_and_stays_in_the_row(listing: Labelling, status: Status) -> None:
    labelled = listing.labels.labelled(proxied("lama", "acme", status=status))
    assert labelled.model is None
    assert labelled.proxied == ProxyView(
        requested_model="lama", requested_tenant="acme" if labelled.tenant != "acme" else None
    )
    assert listing.replaced["model"] == 1


def test_a_model_that_is_loaded_after_a_thousand_inventions_is_a_label(listing: Labelling) -> None:
    assert {listing.model(f"made-up-{number}") for number in range(1500)} == {None}
    assert listing.model("loaded-later") is None
    listing.directory.learn_served("chat-1", frozenset({"qwen", "loaded-later"}))
    assert listing.model("loaded-later") == "loaded-later"
    assert listing.replaced == {"model": 1501}


def test_the_model_of_an_engines_exposition_is_a_label_without_a_list() -> None:
    labelling = Labelling()
    assert labelling.model("llama", status=Status.ERROR) is None
    labelling.directory.learn_model("chat-0", "llama")
    assert labelling.model("llama", status=Status.ERROR) == "llama"


def test_an_engine_that_keeps_its_list_to_itself_shows_its_models_by_answering() -> None:
    labelling = Labelling()
    labelling.directory.learn_served("chat-1", frozenset({"qwen"}))
    typo = {"engine": "chat-0", "status": Status.INVALID}
    assert labelling.model("lama", **typo) is None
    assert labelling.model("llama", engine="chat-0") == "llama"
    assert labelling.model("llama", **typo) == "llama"
    # An engine that answers to every name cannot make labels without limit.
    names = {labelling.model(f"made-up-{number}", engine="chat-0") for number in range(1500)}
    assert len(names - {None}) == 99
    # One that lists its models is not believed more than its list.
    assert labelling.model("gpt-4", engine="chat-1") is None
    assert labelling.model("x", engine=None) is None


def test_an_engines_span_has_the_model_that_served_a_wrong_name(listing: Labelling) -> None:
    """Some engines answer to every name."""
    labelled = listing.labels.labelled(proxied("gpt-4"))
    row = joined(labelled, record(2, model="llama"))
    assert row.model == "llama"
    assert row.proxied == ProxyView(requested_model="gpt-4")


def test_a_span_is_left_as_it_is(listing: Labelling) -> None:
    span = record(1, model="anything", tenant="anyone")
    assert listing.labels.labelled(span) is span


# Tenants


def test_invented_tenants_share_one_label_and_known_ones_never_lose_theirs() -> None:
    labelling = Labelling(known=("acme", "late"), places=10)
    labelling.directory.learn_model("chat-0", "llama")
    assert labelling.tenant("acme") == "acme"
    seen = Counter(labelling.tenant(f"made-up-{number}") for number in range(1500))
    assert len(seen) == 11
    assert seen[OTHER_TENANT] == labelling.replaced["tenant"] == 1490
    assert (labelling.tenant("acme"), labelling.tenant("late")) == ("acme", "late")
    row = labelling.labels.labelled(proxied("llama", "one-more"))
    assert row.proxied == ProxyView(requested_tenant="one-more")


def test_an_invented_key_that_the_engine_refuses_takes_no_place() -> None:
    labelling = Labelling(places=1)
    refused = {"status": Status.INVALID, "http_status": 401}
    assert {labelling.tenant(f"key-{number}", **refused) for number in range(50)} == {OTHER_TENANT}
    assert labelling.tenant("key-real", status=Status.ERROR) == "key-real"
    assert labelling.tenant("key-real", **refused) == "key-real"


def test_a_tenant_that_was_not_seen_for_a_day_gives_up_its_place() -> None:
    places = TenantPlaces((), 2)
    assert places.has_place("a", NOON, may_take=True)
    assert places.has_place("b", NOON, may_take=True)
    assert places.has_place("a", NOON + DAY_S - 1, may_take=True)
    assert not places.has_place("c", NOON + DAY_S - 1, may_take=True)
    assert places.has_place("c", NOON + DAY_S, may_take=True)
    assert not places.has_place("b", NOON + DAY_S, may_take=True)
    assert places.has_place("a", NOON + DAY_S, may_take=False)


def test_without_places_only_known_tenants_are_labels() -> None:
    places = TenantPlaces(("acme",), 0)
    assert places.has_place("acme", NOON, may_take=True)
    assert not places.has_place("other-inc", NOON, may_take=True)
