// Every figure of the window of Now, with its reason if it is unknown.
import {
  UNKNOWN, between, dollars, last, milliseconds, number, percent, perSecond, seconds, share, span, whole_percent,
} from "./words.js";

// The last two come from histograms alone.
const LATENCIES = {ttft: "TTFT", tpot: "TPOT", e2e: "End to end", queue: "Queue", prefill: "Prefill", decode: "Decode"};

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
export const unseen_work = ({requests}, engines) => requests === 0 && engines.some(({running}) => running > 0);

export const NO_RATES = {goodput_rps: null, throughput_rps: null, input_tokens_per_s: null, output_tokens_per_s: null};
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

export function headline(summary, objectives) {
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

export const latencies = ({summary, objectives}) => Object.entries(LATENCIES)
  .filter(([key]) => summary[`${key}_ms`] || summary.engine_counts?.latencies_ms[key])
  .map(([key, name]) => [name, ...quantiles(summary, key), limits(objectives, key)]);

// What the figures are made of: rows, or what engines counted of all requests.
export function source({requests, engine_counts: counted}) {
  if (!counted || counted.requests === null || counted.requests === 0) return null;
  if (requests === 0) return `By the engines' own counters and histograms, of ${number(counted.requests, 0)} requests: `
    + "percentiles lie in a bucket, and no single request can be shown.";
  return counted.rows_ratio < 0.995
    ? `Rows of ${whole_percent(counted.rows_ratio)} of the ${number(counted.requests, 0)} requests that the engines counted.` : null;
}

const WHY_NOT = {
  ttft: "no first token was seen",
  tpot: "no stream was seen token by token",
  e2e: "no request ended",
  queue: "only the engine's plugin and spans have it",
};

export const unseen = (summary) => Object.entries(LATENCIES)
  .filter(([key]) => summary[`${key}_ms`]?.p50 === null && !summary.engine_counts?.latencies_ms[key])
  .map(([key, name]) => [name, WHY_NOT[key]]);
