"""Finds the configured engine and its model by the attributes of a sender of spans."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from agent.records.engine import EngineIdentity

_DEFAULT_PORTS = {"http": 80, "https": 443}
# Of an engine that does not list its models, such as one that asks for a key.
_MOST_ANSWERED = 100
_MODEL_ATTRIBUTES = ("gen_ai.request.model", "model_name")


class EngineDirectory:
    """The configured engines by name and address, with the models that they serve.

    Safe to use from several threads.
    """

    def __init__(self, engines: Iterable[tuple[str, str]], *, complete: bool = True) -> None:
        """`engines` are pairs of name and URL. If they are `complete`, an unknown sender of
        spans is the only engine; elsewhere it may be one that is not known yet."""
        addresses = {name: _address(url) for name, url in engines}
        engines_at = Counter(addresses.values())
        self._names = frozenset(addresses)
        self._only = next(iter(addresses)) if complete and len(addresses) == 1 else None
        # An address that two engines share, behind one gateway, identifies neither.
        self._at = {at: name for name, at in addresses.items() if engines_at[at] == 1}
        self._models: dict[str, str | None] = {}
        self._served: dict[str, frozenset[str]] = {}
        self._answered: dict[str, set[str]] = {}
        # Those of all engines, asked for with every request.
        self._served_names: frozenset[str] = frozenset()
        self._lock = threading.Lock()

    def learn_model(self, engine: str, model: str | None) -> None:
        """Keep the model that an engine serves now; None when it is unknown."""
        with self._lock:
            self._models[engine] = model
            self._gather_served()

    def model_of(self, engine: str) -> str | None:
        """The last known model of an engine."""
        with self._lock:
            return self._models.get(engine)

    def learn_served(self, engine: str, models: frozenset[str] | None) -> None:
        """Keep the names of an engine's models and adapters; None keeps the last known names."""
        if models is not None:
            with self._lock:
                self._served[engine] = models
                self._gather_served()

    def learn_answered(self, engine: str | None, model: str) -> None:
        """Keep a name that an engine without a list answered to, up to _MOST_ANSWERED of them."""
        with self._lock:
            if engine in self._names and not self._served.get(engine):
                names = self._answered.setdefault(engine, set())
                if len(names) < _MOST_ANSWERED and model not in names:
                    names.add(model)
                    self._gather_served()

    def served_by(self, engine: str) -> frozenset[str] | None:
        """The names of the models that an engine serves; None if none is known."""
        with self._lock:
            return self._served_by(engine) or None

    def is_served(self, model: str) -> bool:
        """Whether any engine serves a model of this name, or did when it last answered."""
        return model in self._served_names

    def _gather_served(self) -> None:
        self._served_names = frozenset().union(*map(self._served_by, self._names))

    def _served_by(self, engine: str) -> frozenset[str]:
        model = self._models.get(engine)
        listed = self._served.get(engine) or self._answered.get(engine) or ()
        return frozenset(listed) | ({model} if model else frozenset())

    def identify(self, attributes: Mapping[str, object]) -> EngineIdentity:
        """The sender of a span by the resource attributes of OTLP, each part None if unknown."""
        engine = self._engine(attributes)
        model = next(filter(None, (_text(attributes, key) for key in _MODEL_ATTRIBUTES)), None)
        if model is None and engine is not None:
            model = self.model_of(engine)
        return EngineIdentity(engine=engine, model=model)

    def _engine(self, attributes: Mapping[str, object]) -> str | None:
        service = _text(attributes, "service.name")
        instance = _text(attributes, "service.instance.id")
        for name in (service, instance):
            if name in self._names:
                return name
        if instance is not None and instance.lower() in self._at:
            return self._at[instance.lower()]
        return self._only


def _text(attributes: Mapping[str, object], key: str) -> str | None:
    value = attributes.get(key)
    return value if isinstance(value, str) and value else None


def _address(url: str) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)}"
