"""The settings of prices: GPUs, electricity and the budget of tokens."""

from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, time
from math import inf
from typing import Annotated, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from agent.catalog.hardware import find_gpu, gpu_models
from agent.records.prices import Electricity, Price, PriceList
from agent.settings.values import Number, Section, did_you_mean, shown


def unix_time(value: object) -> float:
    """Unix seconds of a date's start in UTC, or of a date with a time."""
    found = _parsed(value) if isinstance(value, str) else value
    if isinstance(found, date) and not isinstance(found, datetime):
        found = datetime.combine(found, time())
    if not isinstance(found, datetime):
        raise ValueError(f"{shown(value)} is not a date; write one as in 2026-01-01")
    try:
        return found.replace(tzinfo=found.tzinfo or UTC).astimezone(UTC).timestamp()
    except OverflowError as error:
        raise ValueError(f"{shown(value)} is outside of the calendar in UTC") from error


def date_text(at: float) -> str:
    """Unix seconds as a date or date with time, as in the settings file."""
    date_time = datetime.fromtimestamp(at, UTC)
    on_the_day = date_time.time() == time()
    return date_time.date().isoformat() if on_the_day else date_time.isoformat()


def _parsed(text: str) -> object:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return text


UnixTime = Annotated[
    float, BeforeValidator(unix_time), PlainSerializer(date_text, when_used="json-unless-none")
]


def _product(name: str) -> str:
    """A name of the table or of NVML; not one that several names of the table begin with."""
    names = [model.name for model in gpu_models()]
    begun = [each for each in names if each.casefold().startswith(f"{name.casefold()}-")]
    if find_gpu(name) is None and begun:
        raise ValueError(f"{shown(name)} is no product{did_you_mean(name, begun)}")
    return name


class PriceSettings(Section):
    """The hourly price of one GPU: of one engine, or of one product."""

    gpu: Annotated[str, AfterValidator(_product)] | None = Field(
        default=None, min_length=1, max_length=100
    )
    """The product, by its name in NVML or in the agent's table."""
    engine: str | None = Field(default=None, min_length=1, max_length=100)
    """The engine, in place of a product."""
    gpu_hour_usd: Number = Field(ge=0)
    """Price of one GPU in dollars per hour."""
    from_at: UnixTime | None = Field(default=None, alias="from")
    """Date in UTC from whose start the price applies; null: always."""
    until: UnixTime | None = None
    """Date in UTC at whose start the price ends; null: never."""

    @model_validator(mode="after")
    def _has_one_key(self) -> Self:
        if (self.gpu is None) == (self.engine is None):
            raise ValueError("set either gpu or engine, whichever this is the price of")
        if self.from_at is not None and self.until is not None and self.until <= self.from_at:
            raise ValueError(
                f"it ends on {date_text(self.until)}, which is not after "
                f"{date_text(self.from_at)}, where it begins: it never holds"
            )
        return self

    def price(self, setting: str) -> Price:
        """The price, with its path in the settings."""
        return Price(
            setting=setting,
            gpu_hour_usd=self.gpu_hour_usd,
            engine=self.engine,
            gpu=self.gpu,
            from_at=-inf if self.from_at is None else self.from_at,
            until=inf if self.until is None else self.until,
        )


class ElectricitySettings(Section):
    """The price of energy."""

    usd_per_kwh: Number = Field(ge=0)
    """Price of a kilowatt-hour in dollars."""
    pue: Number = Field(default=1.0, ge=1)
    """Watts that the building draws for each watt of its GPUs."""

    def electricity(self) -> Electricity:
        """The price of energy."""
        return Electricity(usd_per_kwh=self.usd_per_kwh, pue=self.pue)


class TokenBudgetSettings(Section):
    """What tokens may cost with all overhead before an alert fires."""

    usd_per_million_output_tokens: Number = Field(ge=0)
    """Dollars for a million output tokens, idle time included."""


def price_list(
    prices: Sequence[PriceSettings],
    electricity: ElectricitySettings | None = None,
    engines: Iterable[tuple[str, float | None]] = (),
) -> PriceList:
    """All prices. `engines` are (name, its own `gpu_hour_usd`) in order.

    Raises ValueError with both places where two prices of one engine or GPU apply at once.
    """
    own = [
        Price(setting=f"engines[{index}].gpu_hour_usd", gpu_hour_usd=usd, engine=name)
        for index, (name, usd) in enumerate(engines)
        if usd is not None
    ]
    rows = [row.price(f"prices[{index}]") for index, row in enumerate(prices)]
    return PriceList(
        prices=(*rows, *own),
        electricity=None if electricity is None else electricity.electricity(),
    )
