// The view of cost: what tokens cost, who pays, and what was bought for nothing.
import {Chart, over_window, with_breaks} from "./chart.js";
import {CountedTime, Figures, Reasons, Table, html} from "./elements.js";
import {period} from "./period.js";
import {query} from "./query.js";
import {dollars, number, share} from "./words.js";

async function load(parameters) {
  const {asked, step, step_name, step_s, name} = await period(parameters);
  const [summary, tenants, series] = await Promise.all([
    query("summary", asked), query("breakdown", {by: "tenant", cost: true, ...asked}), query("efficiency", {...asked, step})]);
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

const bill = ({cost, ledger}) => [
  ["Prefill", cost.prefill_usd], ["Decode", cost.decode_usd], ["Work of unseen requests", cost.unseen_usd],
  ["Idle", cost.idle_usd], ["While the engine was not read", cost.unknown_usd], ["The bill", cost.bill_usd],
  ["Of it: aborted requests", cost.aborted_usd], ["Of it: unaccounted work", ledger?.unaccounted_usd ?? null],
].map(([name, usd]) => [name, dollars(usd), share(cost.bill_usd && usd !== null ? usd / cost.bill_usd : null)]);

const without = ({ledger}, groups) => [
  [(ledger?.unaccounted_usd ?? null) === null, "unaccounted work", "the engine's counters are not complete in this window"],
  [groups.some(({cost}) => (cost?.cost_usd ?? null) === null), "cost of a tenant", "none of its requests is priced yet"],
  [groups.some(({attainment}) => attainment === null), "attainment", "no request was judged"],
  [groups.some((group) => group.stream_tokens_per_s.p50 === null), "tokens/s of a stream", "no stream was seen token by token"],
].filter(([missing]) => missing).map(([, name, why]) => [name, why]);

const tenant = (group) => [
  group.group ?? "unknown", number(group.requests), dollars(group.cost?.cost_usd),
  number(group.cost?.gpu_hours, 4), share(group.attainment), number(group.stream_tokens_per_s.p50),
];

// A step may have stored only some of its minutes, so its dollars would go up and down; those of an hour do not.
const idle = ({cost}) => (cost?.bill_usd ? cost.usd_per_hour * cost.idle_usd / cost.bill_usd : null);

function Show({data: {summary, tenants, steps, step, step_s, over}}) {
  const {cost} = summary;
  if (!cost) return html`<h2>Cost, ${over}</h2><p>Unknown: no minute of this window has both a price and
    a known number of GPUs. Set <code>gpu_hour_usd</code> of the engine, and <code>parallelism</code> if none of its GPUs is
    read; then wait until a minute is over.</p>`;
  return html`
    <h2>Cost, ${over}</h2>
    <${Figures} label="Prices" of=${prices(summary)} />
    <${Chart} label="Cost by ${step}, ${over}, in dollars per hour" unit=${dollars} over=${over_window(summary)}
      data=${with_breaks(steps, step_s, ({cost: one}) => one?.usd_per_hour ?? null, idle)}
      series=${[{label: "bill", colour: "--one"}, {label: "idle", colour: "--two"}]} />
    <div class="two">
      <${Table} label="The bill, ${over}" head=${["", "cost", "share"]} pairs rows=${bill(summary)} />
      <${Table} label="By tenant, ${over}" head=${["tenant", "requests", "cost", "GPU hours", "attainment", "tok/s of a stream"]} pairs
        rows=${tenants.groups.map(tenant)} empty="No request of this window." />
    </div>
    <${Reasons} of=${without(summary, tenants.groups)} />
    <${CountedTime} of=${cost}>Tenants pay for busy time alone; idle time is nobody's.<//>`;
}

export const cost = {title: "Cost", window: "1h", load, Show,
  ignores: ["tenant", "objective"], why: "the bill is of all requests; each tenant's part is below"};
