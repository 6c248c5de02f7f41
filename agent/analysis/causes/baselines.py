"""The usual times and tokens of an engine's requests, learned from requests that it served."""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import msgspec

from agent.analysis.causes.rolling import RollingQuantile
from agent.records.request import RequestRecord, Status, Vantage

# With fewer requests, nothing counts as usual.
ENOUGH = 8
# Prompt lengths of one model lie in some 20 classes.
MAX_CLASSES = 512
_MEDIAN, _NEARLY_ALL = 0.5, 0.9
# The quantile of times with little to disturb them. A fault that lasts would move the median.
QUIET = 0.2
# The newest prompts, of this time or this many requests, do not count as usual yet.
_UNUSUAL_S, _NEWEST_PROMPTS = 20.0, 4096
# A cache that usually has less than this share of a prompt is worth little.
USUAL_HITS = 0.2
# From this share on, the cache lost tokens: of the tokens that it usually has of a prompt, or of
# all computed tokens. A smaller loss is chance.
MISSED_SHARE = 0.3

_Key = TypeVar("_Key")
_Known = TypeVar("_Known")


class Usual(msgspec.Struct, frozen=True):
    """The usual times (seconds) and tokens of a kind of request; None if too few were seen.

    `tpot_s` is a low quantile, of requests with little to disturb them; the others are medians.
    `cached_share` is the share of the prompt that the prefix cache had. Nine of ten prompts were
    no longer than `prompt_tokens`. Of these, only prompts whose cached tokens are unknown count,
    and not those of the last seconds.
    """

    front_s: float | None = None
    tpot_s: float | None = None
    median_tpot_s: float | None = None
    outside_s: float | None = None
    hold_back_s: float | None = None
    cached_share: float | None = None
    output_tokens: float | None = None
    prompt_tokens: float | None = None
    requests: int = 0


class _Length:
    """The baselines of prompts of one class of lengths."""

    def __init__(self) -> None:
        self.prefill_token_s = RollingQuantile(QUIET)
        self.cached_share = RollingQuantile(_MEDIAN)


class _Model:
    """The baselines of one model that do not depend on the length of prompts."""

    def __init__(self) -> None:
        self.front_token_s: dict[int, RollingQuantile] = {}
        self.tpot_s = RollingQuantile(QUIET)
        self.median_tpot_s = RollingQuantile(_MEDIAN)
        self.output_tokens = RollingQuantile(_MEDIAN)
        self.prompt_tokens = RollingQuantile(_NEARLY_ALL)
        self._newest_prompts: deque[tuple[float, int]] = deque(maxlen=_NEWEST_PROMPTS)
        self.outside_s = RollingQuantile(_MEDIAN)
        self.hold_back_s = RollingQuantile(_MEDIAN)

    def learn_tokens(self, record: RequestRecord) -> None:
        """Learn how many tokens a response has, and what each takes."""
        tokens, at = record.output_tokens, record.ended_at
        if not tokens:
            return
        self.output_tokens.add(at, tokens)
        if record.tpot_s and record.decode_s is not None and tokens > 1:
            self.tpot_s.add(at, record.decode_s / (tokens - 1))
            self.median_tpot_s.add(at, record.decode_s / (tokens - 1))

    def learn_length(self, at: float, tokens: int) -> None:
        """Learn how long prompts are; the newest wait, because they may be the unusual ones."""
        newest = self._newest_prompts
        if newest and (newest[0][0] < at - _UNUSUAL_S or len(newest) == newest.maxlen):
            self.prompt_tokens.add(*newest.popleft())
        newest.append((at, tokens))


class _LongPrompts(NamedTuple):
    """Prompts of the longest class that is known: all are shorter than `tokens`."""

    tokens: int
    token_s: float | None


class RequestBaselines:
    """The usual phases of one engine's requests, by model and length of prompt."""

    def __init__(self) -> None:
        self._models: OrderedDict[str | None, _Model] = OrderedDict()
        self._lengths: OrderedDict[tuple[str | None, str | None, int], _Length] = OrderedDict()
        # Caches: many requests are explained between two that are learned from.
        self._usual: dict[tuple[str | None, str | None, int, bool], Usual] = {}
        self._long_prompts: dict[str | None, _LongPrompts] = {}

    def learn(self, record: RequestRecord) -> None:
        """Learn from a request that succeeded, met or missed."""
        if record.status is not Status.OK:
            return
        self._usual.clear()
        self._long_prompts.clear()
        at = record.ended_at
        model = self._model(record.model)
        model.learn_tokens(record)
        front_s = front_of(record)
        if front_s is not None:
            _front(model, record).add(at, front_s)
        if (outside_s := outside_of(record)) is not None:
            model.outside_s.add(at, outside_s)
        if (hold_back_s := hold_back_of(record)) is not None:
            model.hold_back_s.add(at, hold_back_s)
        computed = computed_tokens(record)
        if record.prefill_s and computed:
            self._length(record, computed).prefill_token_s.add(at, record.prefill_s / computed)
        if not (tokens := record.input_tokens):
            return
        if record.cached_tokens is None:
            model.learn_length(at, tokens)
        else:
            self._hits(record).add(at, record.cached_tokens / tokens)

    def usual(self, record: RequestRecord) -> Usual:
        """The usual times of requests like this one; `usual_prefill_s` gives the prefill's."""
        tokens = record.input_tokens or 0
        has_hits = tokens > 0 and record.cached_tokens is not None
        key = record.model, record.tenant, tokens.bit_length(), has_hits
        usual = self._usual.get(key)
        if usual is None:
            usual = self._usual[key] = self._usual_of_class(record, has_hits=has_hits)
        return usual

    def usual_prefill_s(self, record: RequestRecord, cached_share: float | None) -> float | None:
        """The seconds of a prefill like this one with little to disturb it; None if too few seen.

        `cached_share` is the share of such a prompt that the prefix cache usually has.
        """
        computed = computed_tokens(record)
        if not computed:
            return None
        if cached_share is not None:
            # The tokens that the cache usually has need no computing.
            usually_computed = round((record.input_tokens or 0) * (1 - cached_share))
            computed = min(computed, max(1, usually_computed))
        rate = self._length(record, computed).prefill_token_s.value(ENOUGH)
        if rate is None and computed > (known := self._longest_known(record.model)).tokens:
            # A token of a longer prompt takes at least as long.
            rate = known.token_s
        return None if rate is None else rate * computed

    def _usual_of_class(self, record: RequestRecord, *, has_hits: bool) -> Usual:
        model = self._model(record.model)
        cached = None
        if has_hits:
            cached = self._hits(record).value(ENOUGH)
        return Usual(
            front_s=_front(model, record).value(ENOUGH),
            tpot_s=model.tpot_s.value(ENOUGH),
            median_tpot_s=model.median_tpot_s.value(ENOUGH),
            outside_s=model.outside_s.value(ENOUGH),
            hold_back_s=model.hold_back_s.value(ENOUGH),
            cached_share=cached,
            output_tokens=model.output_tokens.value(ENOUGH),
            prompt_tokens=model.prompt_tokens.value(ENOUGH),
            requests=model.tpot_s.count,
        )

    def missing_tokens(self, record: RequestRecord) -> int | None:
        """The tokens of a prompt that the prefix cache usually has, and did not have.

        None if the record has no cached tokens. 0 if too few prompts of this length were
        seen: the cache has no prompts that are new.
        """
        if record.input_tokens is None or record.cached_tokens is None:
            return None
        share = self._hits(record).value(ENOUGH) or 0.0
        return missing_tokens(record.input_tokens, record.cached_tokens, share)

    def long_prompt_rate(self, model: str | None) -> float | None:
        """Seconds of a prompt token in the longest prompts, where little else counts."""
        return self._longest_known(model).token_s

    def _longest_known(self, model: str | None) -> _LongPrompts:
        if model not in self._long_prompts:
            self._long_prompts[model] = self._long_prompts_of(model)
        return self._long_prompts[model]

    def _long_prompts_of(self, model: str | None) -> _LongPrompts:
        for size in range(20, 6, -1):
            known = self._lengths.get((model, None, size))
            if known is not None and (rate := known.prefill_token_s.value(ENOUGH)) is not None:
                return _LongPrompts(1 << size, rate)
        return _LongPrompts(0, None)

    def _model(self, name: str | None) -> _Model:
        return _kept(self._models, name, _Model)

    def _length(self, record: RequestRecord, tokens: int) -> _Length:
        return _kept(self._lengths, (record.model, None, tokens.bit_length()), _Length)

    def _hits(self, record: RequestRecord) -> RollingQuantile:
        """The cached shares of such prompts of the same tenant: no cache has those of a new one."""
        key = record.model, record.tenant, (record.input_tokens or 0).bit_length()
        return _kept(self._lengths, key, _Length).cached_share


def _front(model: _Model, record: RequestRecord) -> RollingQuantile:
    size = (record.input_tokens or 0).bit_length()
    known = model.front_token_s.get(size)
    if known is None:
        known = model.front_token_s[size] = RollingQuantile(_MEDIAN)
    return known


def _kept(known: OrderedDict[_Key, _Known], key: _Key, make: Callable[[], _Known]) -> _Known:
    """The entry of a key, made if there is none; beyond MAX_CLASSES the oldest is dropped."""
    found = known.get(key)
    if found is None:
        found = known[key] = make()
        if len(known) > MAX_CLASSES:
            known.popitem(last=False)
    return found


def missing_tokens(input_tokens: int, cached_tokens: int, usual_share: float) -> int:
    """The tokens of a prompt that the cache usually has, and did not have; 0 if it is chance."""
    usual = usual_share * input_tokens
    missing = usual - cached_tokens
    chance = usual_share < USUAL_HITS or missing < MISSED_SHARE * usual
    return 0 if chance else round(missing)


def computed_tokens(record: RequestRecord) -> int | None:
    """The computed prompt tokens; all prompt tokens if the cached ones are unknown."""
    if record.input_tokens is None:
        return None
    return max(1, record.input_tokens - (record.cached_tokens or 0))


def engine_ttft_of(record: RequestRecord) -> float | None:
    """The engine's own TTFT."""
    if record.vantage is Vantage.ENGINE:
        return record.ttft_s
    return record.engine_view and record.engine_view.ttft_s


def engine_e2e_of(record: RequestRecord) -> float | None:
    """The engine's own duration of the request."""
    if record.vantage is Vantage.ENGINE:
        return record.e2e_s
    return record.engine_view and record.engine_view.e2e_s


def front_of(record: RequestRecord) -> float | None:
    """The engine's time before the queue and after the first token's step: its front's."""
    ttft_s, queue_s, prefill_s = engine_ttft_of(record), record.queue_s, record.prefill_s
    if ttft_s is None or queue_s is None or prefill_s is None:
        return None
    return max(0.0, ttft_s - queue_s - prefill_s)


def outside_of(record: RequestRecord) -> float | None:
    """The time to the user's first token that passed outside the engine."""
    engine_s = engine_ttft_of(record)
    if record.proxied is None or record.ttft_s is None or engine_s is None:
        return None
    return max(0.0, record.ttft_s - engine_s)


def hold_back_of(record: RequestRecord) -> float | None:
    """The time from the first byte of the response to its first token.

    None if reasoning that is not streamed was generated in it.
    """
    proxied = record.proxied
    if proxied is None or proxied.first_byte_s is None or record.ttft_s is None:
        return None
    if record.reasoning_tokens and proxied.first_visible_s == record.ttft_s:
        return None
    return max(0.0, record.ttft_s - proxied.first_byte_s)
