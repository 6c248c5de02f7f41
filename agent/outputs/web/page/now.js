// The view of now: is the objective met, since when not, and what stands in the way.
import {finished, over_steps} from "./chart.js";
import {Figures, Note, Reasons, Table, coded, flagged, html} from "./elements.js";
import {NO_RATES, headline, latencies, source, unseen, unseen_work} from "./figures.js";
import {Fleet} from "./fleet.js";
import {before, period} from "./period.js";
import {FILTERS, query} from "./query.js";
import {sentence} from "./sentence.js";
import {Setup} from "./setup.js";
import {Tiles} from "./tiles.js";
import {Timeline} from "./timeline.js";
import {number, percent, plural, share, words} from "./words.js";

const MOST_MARKS = 20;
const MOST_STARTS = 5;

async function read_fleet() {
  const lists = await Promise.all([query("engines"), query("gpus"), query("agents")]);
  const [engines, gpus, agents] = lists.map((list) => list.items);
  return {engines, gpus, agents, heardAt: Date.now()};
}

// What is live is not read twice.
async function load(parameters, pushed) {
  const {asked, told, length_s, step, step_s, step_name, name, is_range} = await period(parameters);
  const [live, summary, earlier, objectives, series, priced, events, setups, starts] = await Promise.all([
    pushed ?? read_fleet(), told ?? query("summary", asked), query("summary", before(asked, length_s)), query("objectives", asked),
    query("timeseries", {...asked, step}), query("efficiency", {...asked, step}),
    query("events", {...asked, limit: MOST_MARKS}), query("setup"),
    query("starts", {limit: MOST_STARTS})]);
  return {live, summary, earlier: earlier.covered_s > 0.5 * earlier.window_s ? earlier : null, objectives: objectives.items,
    steps: finished(series.items), priced: priced.items, events: events.items, setups: setups.items, starts: starts.items, is_range, asked, step, step_s, step_name,
    over: name(summary), over_chart: over_steps(series.items), filters: FILTERS.map((kind) => [kind, parameters[kind]]).filter(([, value]) => value)};
}

// Failed requests have a cause, and no seconds beyond a limit.
const cause = (address) => ({cause: name, seconds: excess_s, share: part, requests, advice}) => [
  html`<a href=${address("requests", {cause: name, verdict: "missed", worst: "e2e"})}>${words(name)}</a>`, excess_s > 0 ? share(part) : "none: they failed", plural(requests, "request"),
  {text: advice?.meaning ?? "", kind: "text"}, {text: coded(advice?.text ?? ""), kind: "text"},
];

// Misses that are not explained yet have no share.
const explained = ({explained: known, missed}) => (known < missed ? `, of ${number(known)} explained requests of ${number(missed)} that missed` : "");

const no_cause = ({missed, requests}) => (missed > 0 ? "No missed request of this window is explained yet."
  : requests > 0 ? "No request of this window missed." : "No single request is seen: causes need the plugin, spans or the proxy.");

const FIRST_CAUSES = 5;
const CAUSE_HEAD = ["cause", "share of excess", "missed requests", "meaning", "what to change"];

function Causes({summary, address}) {
  const rows = summary.cause_details.map(cause(address));
  const more = rows.slice(FIRST_CAUSES);
  const table = (label, some) => html`<${Table} label=${label} head=${CAUSE_HEAD} words=${["meaning", "what to change"]}
    rows=${some} empty=${no_cause(summary)} />`;
  return html`
    ${table(`Causes of misses by their share of the excess seconds${explained(summary)}`, rows.slice(0, FIRST_CAUSES))}
    ${more.length > 0 && html`<details><summary>${plural(more.length, "more cause")}</summary>${table("The other causes", more)}</details>`}`;
}

// The last minutes, of the figures that are pushed: an hour hides what began just now.
function Lately({live: {lately}}) {
  if (!lately || !(lately.met + lately.missed)) return null;
  const {met, missed, window_s: length} = lately;
  return html`<p class="quiet">Last ${number(length / 60, 0)} minutes: ${percent(met / (met + missed))} of ${plural(met + missed, "request")} met,
    ${" "}${number(missed)} missed.</p>`;
}

function Show({data, live: pushed, address}) {
  const live = pushed ?? data.live;
  const {objectives, over, steps, is_range} = data;
  const summary = unseen_work(data.summary, live.engines) ? {...data.summary, ...NO_RATES} : data.summary;
  const when = is_range ? `from ${over}` : `in the ${over}`;
  const state = sentence({summary, objectives, engines: live.engines, steps, over: when, filters: data.filters});
  const setup = html`<${Setup} of=${data.setups} />`;
  return html`
    <p class="sentence ${state.kind}">${flagged(state.text)}</p>
    ${!is_range && html`<${Lately} live=${live} />`}
    ${summary.requests === 0 && setup}
    <${Tiles} data=${data} summary=${summary} address=${address} />
    <${Timeline} data=${data} address=${address} />
    ${summary.requests > 0 && setup}
    <h2>Why requests missed, ${over}</h2>
    <${Causes} summary=${summary} address=${address} />
    ${summary.missed > 0 && html`<p><a href=${address("requests", {verdict: "missed", worst: "e2e"})}>
      The worst missed requests</a></p>`}
    <h2>All figures, ${over}</h2>
    <${Figures} label="Figures, ${over}" of=${headline(summary, objectives)} />
    ${source(summary) && html`<${Note}>${source(summary)}<//>`}
    <${Table} label="Latency, ${over}" head=${["", "p50", "p95", "p99", "limits"]} words=${["limits"]} pairs
      rows=${latencies({summary, objectives})} />
    <${Reasons} of=${unseen(summary)} />
    <${Fleet} live=${live} starts=${data.starts} is_range=${is_range} address=${address} />
    ${summary.requests > 0 && html`<${Note}>Percentiles are within ${percent(summary.relative_error)} of a real request's value.<//>`}`;
}

export const now = {title: "Now", window: "1h", load, Show};
