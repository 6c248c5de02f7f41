"""The statement of a window: what each group of requests cost, and what else makes up the bill."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import fsum

# Lines are rounded to this, so that they add up as they are printed.
_CENT_PARTS = Decimal("0.000001")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpending:
    """A tenant, user and so on with its requests. Unknown figures are None."""

    group: str | None
    requests: int
    input_tokens: float | None
    output_tokens: float | None
    gpu_hours: float | None
    cost_usd: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BillParts:
    """A bill, and its parts: requests with a row, work without one, idle and unread time."""

    bill_usd: float
    rows_usd: float
    unaccounted_usd: float
    idle_usd: float
    unread_usd: float
    gpu_hours: float | None
    unaccounted_requests: float | None
    unaccounted_input_tokens: float | None
    unaccounted_output_tokens: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatementLine:
    """One line; `group` is None on all lines but those of groups, and for requests without one."""

    line: str
    group: str | None = None
    requests: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    gpu_hours: float | None = None
    cost_usd: Decimal | None = None


def statement(
    by: str, groups: Sequence[GroupSpending], bill: BillParts | None
) -> tuple[StatementLine, ...]:
    """The lines of the groups, then those that make up the bill, and the bill as the last one.

    `other requests` is the rest: requests beyond the listed groups, whose rows have expired, or
    that ran in the window and ended after it, less what listed ones had before it. It may be
    negative. Without a bill there are only the groups.
    """
    lines = [_group_line(by, group) for group in groups]
    if bill is None:
        return tuple(lines)
    rest_usd = bill.rows_usd - fsum(group.cost_usd or 0.0 for group in groups)
    lines += [
        StatementLine(
            line="unaccounted",
            requests=bill.unaccounted_requests,
            input_tokens=bill.unaccounted_input_tokens,
            output_tokens=bill.unaccounted_output_tokens,
            cost_usd=_rounded(bill.unaccounted_usd),
        ),
        StatementLine(line="idle", cost_usd=_rounded(bill.idle_usd)),
        StatementLine(line="not read", cost_usd=_rounded(bill.unread_usd)),
        StatementLine(line="other requests", cost_usd=_rounded(rest_usd)),
    ]
    whole = _rounded(bill.bill_usd)
    # At most a millionth of a dollar for each line.
    rounding = whole - sum((each.cost_usd or Decimal(0) for each in lines), Decimal(0))
    lines.append(StatementLine(line="rounding", cost_usd=rounding))
    return (*lines, StatementLine(line="bill", gpu_hours=bill.gpu_hours, cost_usd=whole))


def _group_line(by: str, group: GroupSpending) -> StatementLine:
    return StatementLine(
        line=by,
        group=group.group,
        requests=group.requests,
        input_tokens=group.input_tokens,
        output_tokens=group.output_tokens,
        gpu_hours=group.gpu_hours,
        cost_usd=None if group.cost_usd is None else _rounded(group.cost_usd),
    )


def _rounded(usd: float) -> Decimal:
    return Decimal(str(usd)).quantize(_CENT_PARTS)
