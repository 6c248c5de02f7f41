// The view of cost: what tokens cost, who pays, and what was bought for nothing.
import {Chart, times} from "./chart.js";
import {Figures, Note, Table, html} from "./elements.js";
import {query} from "./query.js";
import {dollars, number, share, span} from "./words.js";

const STEPS = {"5m": "1m", "1h": "1m", "6h": "10m", "24h": "1h", "7d": "6h"};

async function load({window = "1h"}) {
  const [summary, tenants, series] = await Promise.all([
    query("summary", {window}), query("breakdown", {by: "tenant", cost: true, window}),
    query("efficiency", {window, step: STEPS[window]})]);
  return {summary, tenants, steps: series.items};
}

const prices = (cost) => [
  ["Per 1M output tokens", dollars(cost.usd_per_million_output_tokens)],
  ["Per 1M input tokens", dollars(cost.usd_per_million_input_tokens)],
  ["Per 1M cached input tokens", dollars(cost.usd_per_million_cached_input_tokens)],
  ["Per 1M output tokens in time", dollars(cost.usd_per_million_tokens_within_objective), "the whole bill over tokens of requests that met"],
  ["Per request", dollars(cost.usd_per_request)],
  ["Per hour", dollars(cost.usd_per_hour), "of all engines together"],
];

const bill = ({cost, ledger}) => [
  ["Prefill", cost.prefill_usd], ["Decode", cost.decode_usd], ["Work without a row", cost.unseen_usd],
  ["Idle", cost.idle_usd], ["Engine not read", cost.unknown_usd], ["The bill", cost.bill_usd],
  ["Of it, aborted", cost.aborted_usd], ["Of it, unaccounted", ledger?.unaccounted_usd ?? null],
].map(([name, usd]) => [name, dollars(usd), share(cost.bill_usd && usd !== null ? usd / cost.bill_usd : null)]);

const tenant = (group) => [
  group.group ?? "unknown", number(group.requests), dollars(group.cost?.cost_usd),
  number(group.cost?.gpu_hours, 4), share(group.attainment),
];

function Show({data: {summary, tenants, steps}}) {
  const {cost} = summary;
  const over = `last ${span(summary.window_s)}`;
  if (!cost) return html`<h2>Cost, ${over}</h2><p>Unknown: no booked minute of this window has a price.
    Set <code>prices</code> in the settings, or wait until the first minute is over.</p>`;
  return html`
    <h2>Cost, ${over}</h2>
    <${Figures} label="Prices" of=${prices(cost)} />
    <${Chart} label="Dollars by step, ${over}" data=${[times(steps), steps.map((s) => s.cost?.bill_usd ?? null),
      steps.map((s) => s.cost?.idle_usd ?? null)]}
      series=${[{label: "bill", colour: "--one"}, {label: "idle", colour: "--two"}]} />
    <div class="two">
      <${Table} label="The bill, ${over}" head=${["", "cost", "share"]} rows=${bill(summary)} />
      <${Table} label="By tenant, ${over}" head=${["tenant", "requests", "cost", "GPU hours", "attainment"]}
        rows=${tenants.groups.map(tenant)} />
    </div>
    <${Note}>Booked from ${new Date(cost.counted_from).toLocaleString()} to ${new Date(cost.counted_until).toLocaleString()}.
      Tenants pay for busy time alone; idle time is nobody's.<//>`;
}

export const cost = {title: "Cost", window: "1h", load, Show};
