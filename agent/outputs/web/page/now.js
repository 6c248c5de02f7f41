// The view of now: is the objective met, and what stands in the way.
import {Chart, finished, over_steps, times} from "./chart.js";
import {Figures, Note, Reasons, Table, coded, html} from "./elements.js";
import {period} from "./period.js";
import {query} from "./query.js";
import {Setup} from "./setup.js";
import {
  UNKNOWN, between, bytes, dollars, last, milliseconds, number, percent, perSecond, plural, seconds, share, span, time,
  whole_percent, words,
} from "./words.js";

// The last two come from histograms alone.
const LATENCIES = {ttft: "TTFT", tpot: "TPOT", e2e: "End to end", queue: "Queue", prefill: "Prefill", decode: "Decode"};

async function read_now(asked) {
  const [summary, ...lists] = await Promise.all([query("summary", asked), query("objectives", asked),
    query("engines"), query("gpus"), query("agents")]);
  const [objectives, engines, gpus, agents] = lists.map((list) => list.items);
  return {summary, objectives, engines, gpus, agents, heardAt: Date.now()};
}

// What is live is not read twice.
async function load(parameters, pushed) {
  const {asked, step, step_name, name, is_range} = await period(parameters, "5m");
  const of_chart = is_range ? {...asked, step} : {window: "1h", step: "1m"};
  const [live, series, setups] = await Promise.all([pushed ?? read_now(asked), query("timeseries", of_chart), query("setup")]);
  return {live, setups: setups.items, steps: finished(series.items), over_hour: over_steps(series.items), is_range,
    chart: is_range ? `by ${step_name}, ${name(live.summary)}` : "by minute, last hour", over: is_range ? name(live.summary) : null};
}

const attained = ({objective, attainment, met, missed, undetermined}, target) => [
  `Attainment: ${objective}`, percent(attainment),
  (attainment === null ? "unknown: no request was judged; " : "")
    + `${number(met)} met, ${number(missed)} missed, ${number(undetermined)} unknown; `
    + `the target is ${percent(target ?? null).replace(" ", "\u00a0")}`,
  attainment === null || target == null ? "" : attainment >= target ? "good" : "bad",
];

// A budget of a window that is older than the stored data says of how much it is.
const stored = ({window_s: window, covered_s: covered}) =>
  (covered < 0.98 * window ? `, of which ${span(covered)} are stored` : "");

const budget = ({name, violations_per_min: violations, budget: {left, ...of}}) => [
  `Error budget left: ${name}`, share(left),
  left === null ? `unknown: no request of the ${last(of.window_s)} was judged`
    : `of the ${last(of.window_s)}${stored(of)}; now ${number(violations, 2)} misses a minute`,
  left === null ? "" : left > 0 ? "good" : "bad",
];

// An objective of several agents has one budget, of the requests of all of them.
const is_first = ({name}, index, all) => all.findIndex((each) => each.name === name) === index;

const BY_ENGINE = "by the engines' own counters";
const BY_BUCKETS = "by the engines' histograms";

const rate = (name, value, counted, of) => [name, perSecond(value ?? counted, "tok"),
  value !== null ? `${of} of all requests` : counted != null ? `${of}, ${BY_ENGINE}` : `unknown: nothing counted the ${of}`];

// Whether engines work on requests of which the agent sees none: their rates are unknown, not 0.
const unseen_work = ({requests}, engines) => requests === 0 && engines.some(({running}) => running > 0);

const NO_RATES = {goodput_rps: null, throughput_rps: null, input_tokens_per_s: null, output_tokens_per_s: null};
const SEEN_BY = "unknown: engines run requests, but neither plugin, spans nor proxy show them";

// Attainment by histograms, of objectives that judged no request with a row.
const attained_between = ({objective, lower, upper}, target) => [
  `Attainment: ${objective}`, between({lower, upper}, whole_percent),
  `${BY_BUCKETS}; the target is ${percent(target ?? null).replace(" ", "\u00a0")}`,
  target == null ? "" : lower >= target ? "good" : upper < target ? "bad" : "",
];

// Of all streams with the median time per token, which lies in a bucket.
const stream_between = ({tpot}) => tpot && between({
  lower: tpot.p50.upper === null ? 0 : 1000 / tpot.p50.upper,
  upper: tpot.p50.lower === 0 ? null : 1000 / tpot.p50.lower,
}, (value) => perSecond(value, "tok"));

const of_proxied = ({requests}, proxied) => (proxied.requests < requests
  ? `of the ${number(proxied.requests)} of ${number(requests)} requests that were seen as users got them` : "of all requests, as users got them");

function headline(summary, objectives) {
  const of = (name) => objectives.find((each) => each.name === name);
  const target = ({objective}) => of(objective)?.definition.target;
  const stream = summary.stream_tokens_per_s;
  const counted = summary.engine_counts ?? {latencies_ms: {}, attainment: []};
  const judged = new Set(summary.by_objective.map(({objective}) => objective));
  const failed = counted.requests > 0 && counted.failed !== null ? counted.failed / counted.requests : null;
  const {proxy: proxied} = summary.failures;
  return [
    ...summary.by_objective.map((one) => attained(one, target(one))),
    ...counted.attainment.filter(({objective}) => !judged.has(objective)).map((one) => attained_between(one, target(one))),
    ...objectives.filter(is_first).map(budget),
    summary.goodput_rps === null && counted.goodput_rps
      ? ["Goodput", between(counted.goodput_rps, (value) => perSecond(value, "req")), BY_BUCKETS]
      : ["Goodput", perSecond(summary.goodput_rps, "req"),
        summary.goodput_rps === null ? SEEN_BY : "requests that met their objectives"],
    ["Throughput", perSecond(summary.throughput_rps ?? counted.throughput_rps, "req"),
      summary.throughput_rps !== null ? "requests without an error"
        : counted.throughput_rps != null ? `completed requests, ${BY_ENGINE}` : SEEN_BY],
    rate("Input", summary.input_tokens_per_s, counted.input_tokens_per_s, "prompt tokens"),
    rate("Output", summary.output_tokens_per_s, counted.output_tokens_per_s, "output tokens"),
    ["Output speed of one stream", stream.p50 === null ? stream_between(counted.latencies_ms) ?? UNKNOWN : perSecond(stream.p50, "tok"),
      stream.p50 !== null ? `the median; 95 % have ${perSecond(stream.p5, "tok")} or more`
        : counted.latencies_ms.tpot ? `the median, ${BY_BUCKETS}` : "unknown: no stream was seen token by token"],
    ["Errors", share(summary.error_ratio ?? proxied.error_ratio ?? failed),
      (summary.error_ratio ?? proxied.error_ratio) !== null ? of_proxied(summary, proxied)
        : failed !== null ? `at least, ${BY_ENGINE}` : "unknown: only vLLM's plugin and the proxy see every request"],
    ["MFU / MBU", `${share(summary.mfu)} / ${share(summary.mbu)}`, why_no_use(summary)],
    ["Cost per hour", dollars(summary.cost?.usd_per_hour),
      summary.cost ? "of all engines together" : "unknown: no minute has a price and a number of GPUs"],
  ];
}

function why_no_use({mfu, efficiency}) {
  if (mfu !== null) return efficiency.sources.requests.mfu !== null ? "estimated from the requests" : `estimated, ${BY_ENGINE}`;
  return efficiency ? "unknown: the model or the GPU's peak is unknown" : "unknown: no minute is stored yet";
}

// The limits of the objectives on one latency, such as "200 ms (chat)".
const limits = (objectives, name) => objectives
  .map(({name: objective, definition}) => [objective, definition[`${name}_s`]])
  .filter(([, limit]) => limit != null)
  .map(([objective, limit]) => `${seconds(limit)} (${objective})`)
  .filter((text, index, all) => all.indexOf(text) === index).join(", ") || "none";

// Requests with a row have exact percentiles; else a histogram says in which bucket each lies.
const quantiles = ({engine_counts: counted, ...summary}, key) => ["p50", "p95", "p99"].map((q) => {
  const exact = summary[`${key}_ms`]?.[q] ?? null;
  return exact === null ? between(counted?.latencies_ms[key]?.[q], milliseconds) : milliseconds(exact);
});

const latencies = ({summary, objectives}) => Object.entries(LATENCIES)
  .filter(([key]) => summary[`${key}_ms`] || summary.engine_counts?.latencies_ms[key])
  .map(([key, name]) => [name, ...quantiles(summary, key), limits(objectives, key)]);

// What the figures are made of: rows, or what engines counted of all requests.
function source({requests, engine_counts: counted}) {
  if (!counted || counted.requests === null || counted.requests === 0) return null;
  if (requests === 0) return `By the engines' own counters and histograms, of ${number(counted.requests, 0)} requests: `
    + "percentiles lie in a bucket, and no single request can be shown.";
  return counted.rows_ratio < 0.995
    ? `Rows of ${whole_percent(counted.rows_ratio)} of the ${number(counted.requests, 0)} requests that the engines counted.` : null;
}

const reached = ({up, problem, ejected}) => (up === null ? {text: `unknown: ${problem}`, kind: "quiet"}
  : !up ? {text: problem ? `down: ${problem}` : "down", kind: "down"}
    : ejected ? {text: `up, gets no new requests: ${ejected}`, kind: "down"} : {text: "up", kind: "up"});

const WHY_NOT = {
  ttft: "no first token was seen",
  tpot: "no stream was seen token by token",
  e2e: "no request ended",
  queue: "only the engine's plugin and spans have it",
};

const unseen = (summary) => Object.entries(LATENCIES)
  .filter(([key]) => summary[`${key}_ms`]?.p50 === null && !summary.engine_counts?.latencies_ms[key])
  .map(([key, name]) => [name, WHY_NOT[key]]);

const ENGINE_FIELDS = {model: "model", running: "running", waiting: "waiting", kv_cache_usage: "KV cache"};
const unreported = (engines) => Object.entries(ENGINE_FIELDS)
  .filter(([key]) => engines.some((each) => each[key] == null))
  .map(([, name]) => [name, "an engine cannot be reached, or does not report it"]);

const GPU_FIELDS = {
  gpu_utilization_ratio: "busy", gpu_memory_used_bytes: "memory used", gpu_memory_total_bytes: "memory",
  gpu_power_watts: "power",
};
const unmeasured = (gpus) => Object.entries(GPU_FIELDS)
  .filter(([key]) => gpus.some(({facts}) => facts[key] == null))
  .map(([, name]) => [name, "the GPU's driver does not report it"]);

const unpublished = (agents) => (agents.some(({waiting_rows: waiting}) => waiting === null)
  ? [["waiting and lag", "an agent without storage.publish_to keeps its rows in its file alone"]] : []);

const ago = (length) => (length === null ? UNKNOWN : `${span(length)} ago`);

// How old a sample is now, in seconds; null if that is unknown.
const age_of = (live, {age_s: age}) => (age === null ? null : age + (Date.now() - live.heardAt) / 1000);

const is_known = (each) => each.age_s !== null && each.stale_after_s !== null;

export const is_fresh = (live, each) => is_known(each) && age_of(live, each) <= each.stale_after_s;

// A row of the past is grey, and says how old it is in place of a state of now.
const dated = (live, each, state, cells) => {
  if (!is_known(each) || is_fresh(live, each)) return cells(state);
  return cells(`old: read ${ago(age_of(live, each))}`).map((cell) => ({text: cell?.text ?? cell, kind: "old"}));
};

// Agents may give their engines the same name.
const engine = (live) => {
  const several = new Set(live.engines.map(({agent: name}) => name)).size > 1;
  return ({running, waiting, kv_cache_usage: usage, ...of}) => dated(live, of, reached(of), (state) => [
    several ? `${of.name} (${of.agent})` : of.name, state, of.model ?? UNKNOWN,
    number(running), number(waiting), share(usage), time(of.read_at),
  ]);
};

const gpu = (live) => ({gpu: uuid, index, name, problem, facts, at, ...of}) => dated(live, of, problem ?? "ok", (state) => [
  `${index}: ${name}`, state, share(facts.gpu_utilization_ratio ?? null),
  bytes(facts.gpu_memory_used_bytes), bytes(facts.gpu_memory_total_bytes),
  facts.gpu_power_watts == null ? "–" : `${number(facts.gpu_power_watts, 0)} W`, time(at), uuid,
]);

const lives = ({overdue, stopped_at: stopped}) => (stopped ? {text: "stopped", kind: "quiet"}
  : overdue === null ? {text: "unknown", kind: "quiet"}
    : overdue ? {text: "overdue", kind: "down"} : {text: "running", kind: "up"});

export const has_ended = ({stopped_at: stopped, overdue}) => Boolean(stopped || overdue);

const agent = ({lag_s: lag, waiting_rows: waiting, ...of}) => [
  of.name, lives(of), of.version ?? UNKNOWN, time(of.started_at), ago(of.silent_s),
  number(waiting, 0), lag === null ? UNKNOWN : span(lag),
];

// Failed requests have a cause, and no seconds beyond a limit.
const cause = ({cause: name, seconds: excess_s, share: part, requests, advice}) => [
  words(name), excess_s > 0 ? share(part) : "none: they failed", plural(requests, "request"),
  {text: advice?.meaning ?? "", kind: "text"}, {text: coded(advice?.text ?? ""), kind: "text"},
];

// Misses that are not explained yet have no share.
const explained = ({explained: known, missed}) => (known < missed ? `, of ${number(known)} explained requests of ${number(missed)} that missed` : "");

const no_cause = ({missed, requests}) => (missed > 0 ? "No missed request of this window is explained yet."
  : requests > 0 ? "No request of this window missed." : "No single request is seen: causes need the plugin, spans or the proxy.");

function Show({data, live: pushed, address}) {
  const live = pushed ?? data.live;
  const {objectives, engines, gpus, agents, summary: counted} = live;
  const summary = unseen_work(counted, engines) ? {...counted, ...NO_RATES} : counted;
  const {steps, over_hour: over_chart, is_range} = data;
  const over = data.over ?? last(summary.window_s);
  return html`
    <${Setup} of=${data.setups} />
    <h2>Users, ${over}</h2>
    <${Figures} label="Figures, ${over}" of=${headline(summary, objectives)} />
    ${source(summary) && html`<${Note}>${source(summary)}<//>`}
    <${Chart} label="Goodput and throughput ${data.chart}, in requests per second" over=${over_chart}
      data=${[times(steps), steps.map((s) => s.goodput_rps), steps.map((s) => s.throughput_rps ?? s.engine_counts?.throughput_rps ?? null)]}
      series=${[{label: "goodput", colour: "--one"}, {label: "throughput", colour: "--two"}]} />
    <${Table} label="Latency, ${over}" head=${["", "p50", "p95", "p99", "limits"]} words=${["limits"]} pairs
      rows=${latencies({summary, objectives})} />
    <${Reasons} of=${unseen(summary)} />
    <h2>Why requests missed, ${over}</h2>
    <${Table} label=${`Causes of misses by their share of the excess seconds${explained(summary)}`}
      head=${["cause", "share of excess", "missed requests", "meaning", "what to change"]} words=${["meaning", "what to change"]}
      rows=${summary.cause_details.map(cause)}
      empty=${no_cause(summary)} />
    ${summary.missed > 0 && html`<p><a href=${address("requests", {verdict: "missed", worst: "e2e"})}>
      The worst missed requests</a></p>`}
    ${is_range ? html`<${Note}>Engines, GPUs and agents are shown live, not of the past.<//>` : html`
    <h2>Engines</h2>
    <${Table} label="Engines at their last sample"
      head=${["engine", "state", "model", "running", "waiting", "KV cache", "read at"]} words=${["state", "model"]} pairs
      rows=${engines.map(engine(live))}
      empty=${agents.length && agents.every(has_ended) ? "No agent runs, so no engine is watched." : "No engine is configured or was found."} />
    <${Reasons} of=${unreported(engines)} />
    <h2>GPUs</h2>
    <${Table} label="GPUs at their newest sample" rows=${gpus.map(gpu(live))}
      head=${["GPU", "state", "busy", "memory used", "memory", "power", "read at", "UUID"]} words=${["state", "UUID"]} pairs
      empty="No GPU was read: there is none here, or NVML is not available." />
    <${Reasons} of=${unmeasured(gpus)} />
    <h2>Agents</h2>
    <${Table} label="Agents that write to this database" rows=${agents.map(agent)}
      head=${["agent", "state", "version", "started", "last seen", "waiting to be published", "lag"]}
      words=${["state", "version"]} pairs empty="No agent has written to this database." />
    <${Reasons} of=${unpublished(agents)} />`}
    ${summary.requests > 0 && html`<${Note}>Percentiles are within ${percent(summary.relative_error)} of a real request's value.<//>`}`;
}

export const now = {title: "Now", load, Show};
