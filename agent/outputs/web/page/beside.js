// What the engine did while a request ran: the requests beside it as lanes, and samples of the engine.
import {Chart} from "./chart.js";
import {Note, html} from "./elements.js";
import {query} from "./query.js";
import {UNKNOWN, number, seconds, whole_percent, words} from "./words.js";

const LANES = 60;
const LEAST_PAD_S = 15;

const unix = (text) => Date.parse(text) / 1000;

// The engine's requests and samples around a request; null if that is not known.
export async function read_beside({engine, agent, started_at: start, ended_at: end}) {
  if (!engine) return null;
  const [from, until] = [unix(start), unix(end)];
  const pad = Math.max(LEAST_PAD_S, (until - from) / 4);
  const [first, last] = [from - pad, until + pad].map((at) => new Date(1000 * at).toISOString());
  return query("beside", {engine, agent, from: first, until: last, limit: LANES}).catch(() => null);
}

// Begin and length in seconds of each known phase, in order.
function phases_of(lane) {
  const [start, end] = [unix(lane.started_at), unix(lane.ended_at)];
  if (lane.queue_s == null || lane.prefill_s == null) return [["whole", start, end - start]];
  let at = start + Math.max(0, lane.front_s ?? 0);
  const rest = Math.max(0, end - at - lane.queue_s - lane.prefill_s);
  return [["front", start, at - start], ["queue", at, lane.queue_s], ["prefill", at += lane.queue_s, lane.prefill_s],
    ["decode", at + lane.prefill_s, Math.min(lane.decode_s ?? rest, rest)]];
}

const tokens = (count, what) => (count == null ? "" : `, ${number(count)} tokens ${what}`);

const described = (lane) => `${lane.request_id ?? lane.trace_id}: ${lane.verdict}${lane.cause ? `, ${words(lane.cause)}` : ""}${
  tokens(lane.input_tokens, "in")}${tokens(lane.output_tokens, "out")}; ${
  phases_of(lane).map(([name, , length]) => `${PHASES[name]} ${seconds(length)}`).join(", ")}${
  lane.preemptions ? `; preempted ${lane.preemptions} times` : ""}`;

const PHASES = {front: "frontend", queue: "queue", prefill: "prefill", decode: "decode", whole: "whole, its phases are unknown"};

function Lane({lane, is_own, from, length, address}) {
  const percent = (at) => Math.min(100, Math.max(0, 100 * (at - from) / length));
  const kind = `lane ${is_own ? "own" : ""} ${lane.verdict === "missed" ? "is-missed" : ""} ${lane.preemptions ? "preempted" : ""}`;
  return html`<li><a class=${kind} title=${described(lane)} aria-label=${`${is_own ? "this request, " : ""}${described(lane)}`}
    href=${address("request", {id: lane.request_id ?? lane.trace_id, span: lane.span_id})}>
    ${phases_of(lane).map(([name, at, s]) => html`<span class=${name}
      style=${{left: `${percent(at)}%`, width: `${percent(at + s) - percent(at)}%`}}></span>`)}</a></li>`;
}

// Prefills of others that ran while this request waited for its first token: they share its steps.
function while_it_waited(request, lanes) {
  if (request.ttft_s == null) return null;
  const [start, first] = [unix(request.started_at), unix(request.started_at) + request.ttft_s];
  const others = lanes.filter(({span_id: span, trace_id: trace}) => span !== request.span_id || trace !== request.trace_id);
  const prefilled = others.filter((lane) => phases_of(lane).some(([name, at, s]) => name === "prefill" && at < first && at + s > start));
  const computed = prefilled.reduce((sum, lane) => sum + Math.max(0, (lane.input_tokens ?? 0) - (lane.cached_tokens ?? 0)), 0);
  return {count: prefilled.length, computed};
}

function Lanes({request, beside, address}) {
  const {lanes, requests} = beside;
  const [from, until] = [unix(beside.window_from), unix(beside.window_until)];
  const of = {from, length: until - from, address};
  const waited = while_it_waited(request, lanes);
  const is_own = ({span_id: span, trace_id: trace}) => span === request.span_id && trace === request.trace_id;
  const clock = (at) => new Date(1000 * at).toLocaleTimeString();
  return html`
    <p>${number(requests)} ${requests === 1 ? "request" : "requests"} of ${request.engine} from ${clock(from)} to ${clock(until)}${
      lanes.length < requests ? `, of which the ${lanes.length} that ran the longest are shown` : ""}.
      ${waited && ` While this one waited for its first token, ${waited.count} ${waited.count === 1 ? "other was" : "others were"} in prefill${
        waited.count ? `, ${number(waited.computed)} tokens to compute` : ""}.`}</p>
    <p class="lane-keys">${["front", "queue", "prefill", "decode"].map((name) => html`<span><span class="key ${name}"></span>${PHASES[name]}</span>`)}</p>
    <ol class="lanes" aria-label=${`Requests of ${request.engine} side by side, the oldest first`}>
      ${lanes.map((lane) => html`<${Lane} lane=${lane} is_own=${is_own(lane)} ...${of} />`)}</ol>
    <p class="lane-ends"><span>${clock(from)}</span><span>${clock(until)}</span></p>`;
}

const CHARTS = [
  ["KV cache in use", [["kv_cache_usage", "KV cache", "--one"]], (value) => whole_percent(value)],
  ["Requests", [["running", "running", "--one"], ["waiting", "waiting", "--two"]]],
  ["Steps per second", [["steps_per_s", "steps/s", "--three"]]],
  ["Tokens in a step", [["tokens_per_step", "tokens", "--four"]]],
];

function Samples({request, beside}) {
  const {moments} = beside;
  if (!moments.length) return html`<${Note}>No sample of the engine from this time is stored, so its KV cache and steps are unknown.<//>`;
  const over = [unix(beside.window_from), unix(beside.window_until)];
  const at = moments.map((moment) => unix(moment.at));
  const marks = [unix(request.started_at), unix(request.ended_at)];
  const known = moments.map(({preemptions: count}) => count).filter((count) => count != null);
  const preempted = known.length ? known.reduce((sum, count) => sum + count, 0) : null;
  return html`
    <div class="moments">${CHARTS.map(([label, series, unit]) => html`
      <${Chart} label=${label} unit=${unit} over=${over} marks=${marks} why="the engine does not tell it"
        data=${[at, ...series.map(([name]) => moments.map((moment) => moment[name]))]}
        series=${series.map(([, name, colour]) => ({label: name, colour, points: {show: true}}))} />`)}</div>
    <${Note}>Dashed lines are the begin and the end of this request; dots are samples of the engine. Preemptions by its
      count: ${preempted === null ? UNKNOWN : number(preempted)}.<//>`;
}

export const Beside = ({request, beside, address}) => (beside === null ? null : html`
  <h2>The engine at that time</h2>
  <${Lanes} request=${request} beside=${beside} address=${address} />
  <${Samples} request=${request} beside=${beside} />`);
