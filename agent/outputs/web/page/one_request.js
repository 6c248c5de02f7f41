// One request: its phases in every view that saw it, and why it missed.
import {Beside, read_beside} from "./beside.js";
import {Table, coded, html, link, only} from "./elements.js";
import {query} from "./query.js";
import {UNKNOWN, dollars, number, seconds, share, time, words} from "./words.js";

async function load({id, span}) {
  const request = await query(`requests/${encodeURIComponent(id)}`, {span_id: span});
  return {request, beside: await read_beside(request)};
}

const PHASES = {
  front: "frontend", queue: "queue", prefill: "prefill", decode: "decode",
  first: "before the first token", stream: "after the first token", whole: "whole request, its first token was not seen",
  router: "router", kv_wait: "KV wait",
};

// Seconds of each phase, in order; a phase whose length is unknown is left out.
function engine_phases({vantage, views, queue_s, prefill_s, decode_s, e2e_s}) {
  const whole = vantage === "engine" ? e2e_s : views.engine?.e2e_s;
  if (whole == null) return [];
  const inside = [["queue", queue_s], ["prefill", prefill_s], ["decode", decode_s]].filter(([, s]) => s != null);
  const front = whole - inside.reduce((sum, [, s]) => sum + s, 0);
  return [["front", Math.max(front, 0)], ...inside];
}

function user_phases({views}) {
  const {ttft_s: ttft, e2e_s: whole} = views.proxy ?? {};
  if (whole == null) return [];
  return ttft == null ? [["whole", whole]] : [["first", ttft], ["stream", whole - ttft]];
}

const Bar = ({name, phases, longest}) => phases.length ? html`
  <span>${name}</span>
  <div class="bar" role="img" aria-label=${`${name}: ${phases.map(([phase, s]) =>
    `${PHASES[phase]} ${seconds(s)}`).join(", ")}`}>
    ${phases.map(([phase, s]) => html`<span class=${phase} title=${`${PHASES[phase]}: ${seconds(s)}`}
      style=${{width: `${100 * s / longest}%`}}></span>`)}
  </div>` : null;

const NOT_SEEN = {
  user: "No view of the user: neither the proxy nor the plugin in the engine's front measured it.",
  engine: "No view of the engine: neither a span nor figures of its plugin came.",
};

const OF_PARTS = {
  router: "outside of both engines", prefill: "at the prefill engine, its queue included",
  kv_wait: "the decode engine's queue: for the KV values and for a place in the batch", decode: "the rest at the decode engine",
};

// Of a request that one engine prefilled and another decodes.
function FirstToken({request, address}) {
  const {engine, prefill_engine: prefill, prefill_queue_s: queue, first_token: first} = request;
  if (!(first?.whole_s > 0)) return null;
  const parts = Object.keys(OF_PARTS).map((part) => [part, first[`${part}_s`]]).filter(([, s]) => s !== null);
  const [most, longest] = parts.reduce((one, other) => (other[1] > one[1] ? other : one));
  return html`
    <h2>Where the time to its first token went</h2>
    <p>${only(address, "now", "engine", prefill)} computed its prompt${queue === null ? "" : `, after ${seconds(queue)} in its queue`};
      ${" "}${only(address, "now", "engine", engine)} decoded it. Most of ${seconds(first.whole_s)} is
      ${" "}<strong>${PHASES[most]}</strong>: ${share(longest / first.whole_s)}.</p>
    <div class="bars"><${Bar} name="first token" phases=${parts} longest=${first.whole_s} /></div>
    <${Table} label="Parts of the time to its first token" head=${["part", "time", "what it is"]} words=${["what it is"]}
      rows=${parts.map(([part, s]) => [html`<span class="key ${part}"></span>${PHASES[part]}`, seconds(s), {text: OF_PARTS[part], kind: "text"}])} />`;
}

function Waterfall({request}) {
  const {max_gap_s: gap} = request;
  const bars = {user: user_phases(request), engine: engine_phases(request)};
  const longest = Math.max(...Object.values(bars).map((phases) => phases.reduce((sum, [, s]) => sum + s, 0)));
  if (!(longest > 0)) return html`<p>No waterfall: no view tells how long the request took.</p>`;
  return html`
    <div class="bars">${Object.entries(bars).map(([name, phases]) =>
      html`<${Bar} name=${name} phases=${phases} longest=${longest} />`)}</div>
    <${Table} label="Phases, as the user and the engine saw them, each from the request's arrival" head=${["phase", "seen by", "time"]} words=${["seen by"]} pairs
      rows=${Object.entries(bars).flatMap(([name, phases]) => phases.map(([phase, s]) => [
        html`<span class="key ${phase}"></span>${PHASES[phase]}`, name, seconds(s)]))
        .concat(gap === null ? [] : [["the longest gap of its stream", "user", seconds(gap)]])} />
    ${Object.entries(NOT_SEEN).map(([name, why]) => !bars[name].length && html`<p class="quiet">${why}</p>`)}`;
}

// The cause with the most excess seconds, before any detail.
function Mostly({request: {cause, explanation}}) {
  if (!explanation || !cause) return null;
  const total = (shares) => shares.reduce((sum, one) => sum + (one.excess_s ?? 0), 0);
  const all = total(explanation.shares);
  const part = all > 0 ? total(explanation.shares.filter((one) => one.cause === cause)) / all : null;
  const much = part !== null && `: ${share(part)} of the excess seconds`;
  if (cause === "unexplained") return html`<p>It missed, and the evidence leaves most of it <strong>unexplained</strong>${much}.</p>`;
  return html`<p>It missed, mostly because of <strong>${words(cause)}</strong>${much}.</p>`;
}

const by_excess = (one, other) => (other.excess_s ?? 0) - (one.excess_s ?? 0);

const Why = ({explanation}) => explanation === null ? null : html`
  <h2>Why it missed</h2>
  <${Table} label="Excess seconds by cause" head=${["cause", "objective", "limit", "excess", "evidence", "what to change"]}
    words=${["objective", "limit", "evidence", "what to change"]}
    rows=${[...explanation.shares].sort(by_excess).map((one) => [
      words(one.cause), one.objective, LIMITS[one.limit] ?? one.limit, seconds(one.excess_s),
      {text: one.evidence.join("; "), kind: "text"}, {text: coded(one.advice?.text ?? ""), kind: "text"}])} />
  <p class="quiet">Seen by: ${explanation.sources.join(", ") || "nothing"}.</p>`;

const LIMITS = {ttft: "TTFT", tpot: "TPOT", e2e: "end to end"};

const NO_PARTS = "only the engine's view has queue, prefill and decode";

// A known value as it is shown, otherwise why it is unknown.
const or = (value, why, show = (known) => known) =>
  (value === null || value === "" ? html`${UNKNOWN} <span class="quiet">${why}</span>` : show(value));

function facts(request) {
  const {gaps} = request;
  return [
    ["Trace", request.trace_id], ["Started", time(request.started_at)], 
    ["Engine", or(request.engine, "no view of it names it")],
    ["Model", or(request.model, "neither the request nor the engine names it")],
    ["Tenant", or(request.tenant, "the request named none")], ["Status", request.status],
    ["Verdict", Object.entries(request.verdicts).map(([name, verdict]) => `${name}: ${verdict}`).join(", ") || request.verdict],
    ["TTFT", or(request.ttft_s, "no first token was seen", seconds)],
    ["TPOT", or(request.tpot_s, "fewer than two tokens were seen", seconds)],
    ["End to end", or(request.e2e_s, "the request's end was not seen", seconds)],
    ["Front", or(request.front_s, NO_PARTS, (s) => `${seconds(s)} before the first token, in neither queue nor prefill`)],
    ["Left over", or(request.rest_s, NO_PARTS, (s) => `${seconds(s)} beside queue, prefill, decode and front`)],
    ["Input tokens", or(request.input_tokens, "neither the engine nor the response counts them", number)],
    ["Cached of them", or(request.cached_tokens, "not given by the engine", number)],
    ["Output tokens", or(request.output_tokens, "neither the engine nor the response counts them", number)],
    ["Gaps between chunks", or(gaps, "only of a stream, by the plugin or the proxy", gaps_text)],
    ["Finish reason", or(request.finish_reason, "no view has it")],
    ["Cost", or(request.cost_usd, "the engine has no price, or its minutes are not stored yet", dollars)],
  ];
}

const gaps_text = (gaps) => `p50 ${seconds(gaps.p50_s)}, p99 ${seconds(gaps.p99_s)}, longest ${seconds(gaps.max_s)}`;

const Others = ({others, address}) => others.length ? html`
  <h2>Others with this id</h2>
  <${Table} label="Clients repeat ids, and each of several choices has a span" pairs
    head=${["started", "engine", "TTFT", "e2e", "status", "verdict"]} words=${["engine", "status", "verdict"]}
    rows=${others.map((one) => [link(address, one), one.engine ?? UNKNOWN, seconds(one.ttft_s), seconds(one.e2e_s),
      one.status, {text: one.verdict, kind: one.verdict}])} />` : null;

const AROUND_MS = 300000;

// The same time on Now, and the trace where traces are kept.
function Elsewhere({request, address}) {
  const [from, until] = [Date.parse(request.started_at) - AROUND_MS, Date.parse(request.ended_at) + AROUND_MS]
    .map((at) => new Date(at).toISOString());
  return html`<p class="elsewhere">
    <a href=${address("now", {window: "", from, until})}>The same time on Now</a>
    <a href=${address("requests", {window: "", from, until, engine: request.engine ?? ""})}>Requests around it</a>
    ${request.trace_url && html`<a href=${request.trace_url} rel="noreferrer">Its trace</a>`}</p>`;
}

const Show = ({data: {request, beside}, address}) => html`
  <h2>Request ${request.request_id ?? request.span_id}</h2>
  <${Elsewhere} request=${request} address=${address} />
  ${request.hop && html`<p>This is the prefill of a request that another engine decodes, so no figure counts it.</p>`}
  <${Mostly} request=${request} />
  <${Waterfall} request=${request} />
  <${FirstToken} request=${request} address=${address} />
  <${Why} explanation=${request.explanation} />
  <${Beside} request=${request} beside=${beside} address=${address} />
  <h2>Facts</h2>
  <dl class="plain">${facts(request).map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>
  <${Others} others=${request.others} address=${address} />`;

export const oneRequest = {title: "Request", load, Show};
