// The view of cost: what tokens cost, who pays, and what was bought for nothing.
import {Chart, over_window, with_breaks} from "./chart.js";
import {Awaited, CountedTime, Figures, Reasons, Table, html, named} from "./elements.js";
import {period} from "./period.js";
import {query} from "./query.js";
import {dollars, number, share, whole_percent} from "./words.js";

// The cost of tenants is summed from every row of the window, so the rest does not wait for it.
async function load(parameters) {
  const {asked, step, step_name, step_s, name} = await period(parameters);
  const tenants = query("breakdown", {by: "tenant", cost: true, ...asked});
  tenants.catch(() => {});
  const [summary, series] = await Promise.all([query("summary", asked), query("efficiency", {...asked, step})]);
  return {summary, tenants, steps: series.items, step: step_name, step_s, over: name(summary)};
}

// The price of a thing, and why it is unknown.
const price = (name, usd, why, more = "") => [name, dollars(usd), usd === null ? `unknown: ${why}` : more];

const prices = ({cost, output_tokens_per_s: rate}) => [
  price("Per 1M output tokens", cost.usd_per_million_output_tokens, "no output token is priced", "time in decode"),
  price("Bill per 1M output tokens", cost.allocated_usd_per_million_output_tokens,
    "no engine counted output tokens", "the whole bill over all that engines counted"),
  price("Per 1M input tokens", cost.usd_per_million_input_tokens, "no input token is priced", "time in prefill"),
  price("Per 1M cached input tokens", cost.usd_per_million_cached_input_tokens,
    "no token came from the prefix cache, or the engine does not count them", "found in the prefix cache"),
  price("Per 1M output tokens in time", cost.usd_per_million_tokens_within_objective,
    "no request met its objective", "the whole bill over tokens of requests that met"),
  price("Per request", cost.usd_per_request, "no request is priced", "its busy time"),
  price("Per hour", cost.usd_per_hour, "no engine has a price", rate === null ? "of all engines together"
    : `of all engines together; an hour bought ${number(3600 * rate, 0)} output tokens`),
];

// Dollars of a bill by what they paid for. Aborted requests are in prefill and decode, too.
const PARTS = {
  decode: ["decode", "--one", (cost) => cost.decode_usd - (cost.aborted_usd - cost.aborted_prefill_usd)],
  prefill: ["prefill", "--four", (cost) => cost.prefill_usd - cost.aborted_prefill_usd],
  aborted: ["aborted requests", "--bad", (cost) => cost.aborted_usd],
  unseen: ["work of unseen requests", "--two", (cost) => cost.unseen_usd],
  idle: ["idle", "--quiet", (cost) => cost.idle_usd],
  unread: ["engine not read", "--line", (cost) => cost.unknown_usd],
};

const part_of = (cost, usd) => (cost.bill_usd && usd !== null ? usd / cost.bill_usd : null);

const bill = ({cost, ledger}) => [
  ...Object.values(PARTS).map(([name, , usd]) => [name, usd(cost)]), ["the bill", cost.bill_usd],
  ["of it unaccounted work", ledger?.unaccounted_usd ?? null],
].map(([name, usd]) => [name, dollars(usd), share(part_of(cost, usd))]);

// A step may have stored only some of its minutes, so its dollars would go up and down; those of an hour do not.
const per_hour = ([, , usd]) => ({cost}) => (cost?.bill_usd ? cost.usd_per_hour * usd(cost) / cost.bill_usd : null);

// The most important first.
function Sentence({of: {cost}}) {
  const [busy, idle] = [cost.prefill_usd + cost.decode_usd - cost.aborted_usd, cost.idle_usd];
  return html`<p class="sentence"><strong>${dollars(cost.bill_usd)}</strong>, ${dollars(cost.usd_per_hour)} an hour:
    ${" "}${whole_percent(part_of(cost, busy))} for requests that ended well, ${whole_percent(part_of(cost, cost.wasted_usd))} for aborted
    and unseen ones, ${whole_percent(part_of(cost, idle))} idle${cost.unknown_usd > 0 && `, ${whole_percent(part_of(cost, cost.unknown_usd))}
    while no engine was read`}.</p>`;
}

const without = (groups) => [
  [groups.some(({cost}) => (cost?.cost_usd ?? null) === null), "cost of a tenant", "none of its requests is priced yet"],
  [groups.some(({attainment}) => attainment === null), "attainment", "no request was judged"],
  [groups.some((group) => group.stream_tokens_per_s.p50 === null), "tok/s of one stream", "no stream was seen token by token"],
].filter(([missing]) => missing).map(([, name, why]) => [name, why]);

const MONTH_S = 30 * 86400;
// Dollars of 30 days at the rate of the window.
const forecast = ({cost, covered_s: covered}) => (cost?.cost_usd != null && covered > 0 ? cost.cost_usd / covered * MONTH_S : null);

const over_budget = ({used_ratio: used}) => (used > 1 ? {text: `${share(used)}, over budget`, kind: "missed"} : share(used));

const TENANTS = ["tenant", "requests", "cost", "GPU hours", "30 days at this rate", "attainment", "tok/s of one stream"];
const WITH_BUDGETS = [...TENANTS.slice(0, 5), "budget of 30 days", "of the budget", ...TENANTS.slice(5)];

const tenant = (with_budgets) => (group) => [
  named(group.group ?? "unknown"), number(group.requests), dollars(group.cost?.cost_usd),
  number(group.cost?.gpu_hours, 4), dollars(forecast(group)),
  ...(with_budgets ? (group.budget ? [dollars(group.budget.usd_per_month), over_budget(group.budget)] : ["none", ""]) : []),
  share(group.attainment), number(group.stream_tokens_per_s.p50),
];

function Tenants({groups, over}) {
  const with_budgets = groups.some(({budget}) => budget);
  return html`<${Table} label="By tenant, ${over}" head=${with_budgets ? WITH_BUDGETS : TENANTS} pairs
    rows=${groups.map(tenant(with_budgets))} empty="No request of this window." />
    <${Reasons} of=${without(groups)} />`;
}

function Show({data: {summary, tenants, steps, step, step_s, over}}) {
  const {cost} = summary;
  if (!cost) return html`<h2>Cost, ${over}</h2><p>Unknown: no minute of this window has both a price and
    a known number of GPUs. Set <code>gpu_hour_usd</code> of the engine, and <code>parallelism</code> if none of its GPUs is
    read; then wait until a minute is over.</p>`;
  return html`
    <h2>Cost, ${over}</h2>
    <${Sentence} of=${summary} />
    <${Chart} label="Where the money goes by ${step}, ${over}, in dollars per hour" unit=${dollars} over=${over_window(summary)} stacked
      data=${with_breaks(steps, step_s, ...Object.values(PARTS).map(per_hour))}
      series=${Object.values(PARTS).map(([label, colour]) => ({label, colour}))} />
    <${Awaited} of=${tenants} waiting="Reading the cost of tenants." failed="No cost of tenants"
      show=${({groups}) => html`<${Tenants} groups=${groups} over=${over} />`} />
    <div class="two">
      <${Table} label="The bill, ${over}" head=${["", "cost", "share"]} pairs rows=${bill(summary)} />
      <div><p class="quiet">Prices, ${over}</p><${Figures} label="Prices" of=${prices(summary)} /></div>
    </div>
    ${(summary.ledger?.unaccounted_usd ?? null) === null && html`<${Reasons} of=${[["unaccounted work", "the engine's counters are not complete in this window"]]} />`}
    <${CountedTime} of=${cost}>Tenants pay for busy time alone; idle time is nobody's. Their cost is of requests that ended in this time.<//>`;
}

export const cost = {title: "Cost", window: "1h", load, Show,
  ignores: ["tenant", "objective"], why: "the bill is of all requests; each tenant's part is below"};
