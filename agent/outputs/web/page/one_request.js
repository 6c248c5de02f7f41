// One request: its phases in every view that saw it, and why it missed.
import {Table, html} from "./elements.js";
import {query} from "./query.js";
import {dollars, number, seconds, share, time, words} from "./words.js";

const load = ({id}) => query(`requests/${encodeURIComponent(id)}`);

const PHASES = {
  front: "before the queue", queue: "queue", prefill: "prefill", decode: "decode", after: "after the engine",
};

// Seconds of each phase, in order; a phase whose length is unknown is left out.
function engine_phases({vantage, views, queue_s, prefill_s, decode_s, e2e_s}) {
  const whole = vantage === "engine" ? e2e_s : views.engine?.e2e_s;
  if (whole == null) return [];
  const inside = [["queue", queue_s], ["prefill", prefill_s], ["decode", decode_s]].filter(([, s]) => s != null);
  const front = whole - inside.reduce((sum, [, s]) => sum + s, 0);
  return [["front", Math.max(front, 0)], ...inside];
}

function proxy_phases({views}) {
  const {ttft_s: ttft, e2e_s: whole} = views.proxy ?? {};
  if (whole == null) return [];
  return ttft == null ? [["after", whole]] : [["front", ttft], ["decode", whole - ttft]];
}

const Bar = ({name, phases, longest}) => phases.length ? html`
  <span>${name}</span>
  <div class="bar" role="img" aria-label=${`${name}: ${phases.map(([phase, s]) =>
    `${PHASES[phase]} ${seconds(s)}`).join(", ")}`}>
    ${phases.map(([phase, s]) => html`<span class=${phase} title=${`${PHASES[phase]}: ${seconds(s)}`}
      style=${{width: `${100 * s / longest}%`}}></span>`)}
  </div>` : null;

function Waterfall({request}) {
  const bars = {proxy: proxy_phases(request), engine: engine_phases(request)};
  const longest = Math.max(...Object.values(bars).map((phases) => phases.reduce((sum, [, s]) => sum + s, 0)));
  if (!(longest > 0)) return html`<p class="quiet">No view knows how long it took.</p>`;
  return html`
    <div class="bars">${Object.entries(bars).map(([name, phases]) =>
      html`<${Bar} name=${name} phases=${phases} longest=${longest} />`)}</div>
    <p class="key quiet">Colours:${Object.entries(PHASES).map(([phase, name]) =>
      html`<span class=${phase}></span>${name}`)}. In the view of the proxy, all before the first token
      is one phase.</p>`;
}

// The cause with the most excess seconds, before any detail.
function Mostly({request: {cause, explanation}}) {
  if (!explanation || !cause) return null;
  const total = (shares) => shares.reduce((sum, one) => sum + (one.excess_s ?? 0), 0);
  const all = total(explanation.shares);
  const part = all > 0 ? total(explanation.shares.filter((one) => one.cause === cause)) / all : null;
  return html`<p>It missed, mostly because of <strong>${words(cause)}</strong>${part !== null
    && `: ${share(part)} of the excess seconds`}.</p>`;
}

const Why = ({explanation}) => explanation === null ? null : html`
  <h2>Why it missed</h2>
  <${Table} label="Excess seconds by cause" head=${["cause", "objective", "limit", "excess", "evidence", "what to turn"]}
    words=${["objective", "limit", "evidence", "what to turn"]}
    rows=${explanation.shares.map((one) => [
      words(one.cause), one.objective, one.limit, seconds(one.excess_s),
      {text: one.evidence.join("; "), kind: "text"}, {text: one.advice?.knob ?? "", kind: "text"}])} />
  <p class="quiet">Seen by: ${explanation.sources.join(", ") || "nothing"}.</p>`;

function facts(request) {
  const {gaps} = request;
  return [
    ["Trace", request.trace_id], ["Started", time(request.started_at)], ["Engine", request.engine ?? "–"],
    ["Model", request.model ?? "–"], ["Tenant", request.tenant || "–"], ["Status", request.status],
    ["Verdict", Object.entries(request.verdicts).map(([name, verdict]) => `${name}: ${verdict}`).join(", ") || request.verdict],
    ["TTFT", seconds(request.ttft_s)], ["TPOT", seconds(request.tpot_s)], ["End to end", seconds(request.e2e_s)],
    ["Input tokens", `${number(request.input_tokens)}, of them cached ${number(request.cached_tokens)}`],
    ["Output tokens", number(request.output_tokens)],
    ["Gaps between chunks", gaps ? `p50 ${seconds(gaps.p50_s)}, p99 ${seconds(gaps.p99_s)}, longest ${seconds(gaps.max_s)}` : "–"],
    ["Finish reason", request.finish_reason ?? "–"], ["Cost", dollars(request.cost_usd)],
  ];
}

const Show = ({data: request}) => html`
  <h2>Request ${request.request_id ?? request.span_id}</h2>
  <${Mostly} request=${request} />
  <${Waterfall} request=${request} />
  <${Why} explanation=${request.explanation} />
  <h2>Facts</h2>
  <dl class="plain">${facts(request).map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>`;

export const oneRequest = {title: "Request", load, Show};
